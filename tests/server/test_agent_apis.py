"""The Responses API and the Messages API with an engine: texts are those of chat completions."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import jsonschema_rs
import pytest

from cbatch.core.request.errors import FieldError
from cbatch.server.protocol.response_store import ResponseStore
from cbatch.server.serving.admission_queue import Limits
from cbatch.text import ChatTemplate
from tests.checking.clock import VirtualClock
from tests.server.agent_calls import MESSAGES, RESPONSES, ask, error_of
from tests.server.http_client import CHAT, Client, call, sample, serving, wait_until
from tests.toy_engine import make_engine

TEMPLATE = ChatTemplate(
    "{% for m in messages %}[{{ m.role }}]{{ m.content }}{% endfor %}[assistant]", {}, "the test"
)
USER: Any = {"role": "user", "content": "def add(a, b):"}
BODIES: dict[str, Any] = {
    CHAT: {"messages": [USER], "max_tokens": 24},
    RESPONSES: {"input": [USER], "max_output_tokens": 24},
    MESSAGES: {"messages": [USER], "max_tokens": 24},
}
NEW = [RESPONSES, MESSAGES]
STREAM = pytest.mark.parametrize("stream", [False, True])
PATHS = pytest.mark.parametrize("path", NEW)


@pytest.fixture(scope="module")
def client() -> Iterator[Client]:
    with serving(make_engine(max_model_len=256), chat_template=TEMPLATE) as client:
        yield client


def chat(client: Client, fields: dict[str, Any]) -> tuple[dict[str, Any], dict[str, Any]]:
    """Return message and usage of a chat completion; the message has its finish reason as well."""
    status, answer, _ = client.post(BODIES[CHAT] | fields, CHAT)
    assert status == 200, answer
    (choice,) = answer["choices"]
    return choice["message"] | {"reason": choice["finish_reason"]}, answer["usage"]


REASONS = {  # by the finish reason of a chat
    "stop": ("completed", "end_turn"),
    "tool_calls": ("completed", "tool_use"),
    "length": ("incomplete max_output_tokens", "max_tokens"),
}


@STREAM
@PATHS
@pytest.mark.parametrize(
    "fields",
    [{"temperature": 0, "seed": 2}, {"temperature": 0.8, "seed": 3}, {"seed": 4, "top_k": 20}],
    ids=str,
)
def test_texts_are_those_of_chat_completions(
    client: Client, demo_client: Client, path: str, fields: dict[str, Any], stream: bool
) -> None:
    for served in (client, demo_client):
        message, usage = chat(served, fields)
        reply = ask(served, path, BODIES[path] | fields, stream=stream)
        assert [block.text for block in reply.blocks] == [message["content"]]
        assert reply.body["usage"]["output_tokens"] == usage["completion_tokens"]


SCHEMA: Any = {
    "type": "object",
    "properties": {"city": {"enum": ["Rome", "Oslo"]}, "days": {"enum": [1, 2]}},
    "required": ["city", "days"],
    "additionalProperties": False,
}
SHAPES: dict[str, Any] = {
    CHAT: {"response_format": {"type": "json_schema", "json_schema": {"schema": SCHEMA}}},
    RESPONSES: {"text": {"format": {"type": "json_schema", "name": "x", "schema": SCHEMA}}},
    MESSAGES: {"output_config": {"format": {"type": "json_schema", "schema": SCHEMA}}},
}
FUNCTION: Any = {"name": "weather", "parameters": SCHEMA}
CHAT_TOOLS: Any = [{"type": "function", "function": FUNCTION}]
TOOLS: dict[str, Any] = {
    CHAT: {"tools": CHAT_TOOLS, "tool_choice": "required"},
    RESPONSES: {"tools": [{"type": "function", **FUNCTION}], "tool_choice": "required"},
    MESSAGES: {
        "tools": [{"name": "weather", "input_schema": SCHEMA}],
        "tool_choice": {"type": "any"},
    },
}


@STREAM
@PATHS
def test_schemas_hold(demo_client: Client, path: str, stream: bool) -> None:
    own = {"seed": 3, "temperature": 0.8}
    message, _ = chat(demo_client, SHAPES[CHAT] | own | {"max_tokens": 150})
    length = {"max_output_tokens" if path == RESPONSES else "max_tokens": 150}
    reply = ask(demo_client, path, BODIES[path] | SHAPES[path] | own | length, stream=stream)
    (block,) = reply.blocks
    jsonschema_rs.validate(SCHEMA, json.loads(block.text))
    assert block.text == message["content"] and reply.reason in REASONS[message["reason"]]


@STREAM
@PATHS
@pytest.mark.parametrize("seed", [3, 4])
def test_forced_calls_are_those_of_a_chat(
    demo_client: Client, path: str, seed: int, stream: bool
) -> None:
    own = {"seed": seed, "temperature": 0.8}
    message, _ = chat(demo_client, TOOLS[CHAT] | own | {"max_tokens": 200})
    want = [json.loads(each["function"]["arguments"]) for each in message["tool_calls"]]
    length = {"max_output_tokens" if path == RESPONSES else "max_tokens": 200}
    reply = ask(demo_client, path, BODIES[path] | TOOLS[path] | own | length, stream=stream)
    assert [json.loads(block.text) for block in reply.blocks] == want
    assert {(block.kind, block.name) for block in reply.blocks} == {("call", "weather")}
    assert reply.reason in REASONS[message["reason"]]


def test_cached_tokens_are_counted(client: Client) -> None:
    long = "a different text that no other test sends, with some blocks of tokens. " * 2
    for path in NEW:
        turn = {"role": "user", "content": f"{path} {long}"}
        body = BODIES[path] | ({"input": [turn]} if path == RESPONSES else {"messages": [turn]})
        usages = [ask(client, path, body, stream=stream).body["usage"] for stream in (False, True)]
        if path == RESPONSES:
            cached = [usage["input_tokens_details"]["cached_tokens"] for usage in usages]
            whole = [usage["input_tokens"] for usage in usages]
        else:
            cached = [usage["cache_read_input_tokens"] for usage in usages]
            whole = [usage["input_tokens"] + n for usage, n in zip(usages, cached, strict=True)]
        assert cached[0] < cached[1] < whole[1] == whole[0]


def test_counts_are_those_of_the_call(client: Client) -> None:
    more = {"messages": [{"role": "system", "content": "Be brief."}, USER]}
    _, usage = chat(client, more)
    body = {"messages": [USER], "system": "Be brief."}
    status, answer, _ = client.post(body, f"{MESSAGES}/count_tokens")
    assert (status, answer) == (200, {"input_tokens": usage["prompt_tokens"]})
    body = {"input": [USER], "instructions": "Be brief."}
    status, answer, _ = client.post(body, f"{RESPONSES}/input_tokens")
    count = {"object": "response.input_tokens", "input_tokens": usage["prompt_tokens"]}
    assert (status, answer) == (200, count)


@PATHS
def test_a_client_that_leaves_frees_its_slot(client: Client, path: str) -> None:
    length = {"max_output_tokens" if path == RESPONSES else "max_tokens": 240}
    body = BODIES[path] | length | {"stream": True, "ignore_eos": True}
    before = sample(client, "vllm:request_success_total", finished_reason="abort")
    for _ in range(3):
        with client.open(body, path) as response:
            assert response.readline().startswith(b"event: ")
    wait_until(lambda: not client.get("/health")[1]["requests"])
    aborted = sample(client, "vllm:request_success_total", finished_reason="abort")
    assert aborted >= before  # a short answer may have been complete
    for stream in (False, True):
        assert ask(client, path, BODIES[path], stream=stream).blocks


@pytest.mark.parametrize("path", [*NEW, f"{MESSAGES}/count_tokens", f"{RESPONSES}/input_tokens"])
def test_errors_have_the_format_of_their_api(client: Client, path: str) -> None:
    invalid = "invalid_request_error"
    missing = "not_found_error" if path.startswith(MESSAGES) else invalid
    right = BODIES[MESSAGES if path.startswith(MESSAGES) else RESPONSES]
    name = "messages" if "messages" in right else "input"
    for change, status, kind, words in (
        ({name: []}, 400, invalid, f"{name}: is "),
        ({name: 7}, 400, invalid, f"{name}: 7 is not allowed"),
        ({name: [USER | {"content": "x " * 2000}]}, 400, invalid, f"{name}: "),
        ({"temperature": -1}, 400, invalid, "temperature: "),
        ({"model": "other"}, 404, missing, "model: 'other' is not served"),
    ):
        got, body, _ = client.post(right | change, path)
        assert (got, *error_of(path, body)[:1]) == (status, kind), body
        assert error_of(path, body)[1].startswith(words), body
    for raw in (b"{", b"[]", b'{"a": ' * 100_000):
        got, body, _ = client.post(raw, path)
        assert (got, error_of(path, body)[0]) == (400, invalid)
    status, body, _ = call(client, "POST", path, b"{}", {"Content-Type": "text/plain"})
    assert (status, error_of(path, json.loads(body))[0]) == (415, invalid)
    status, body, _ = call(client, "PUT", path, b"{}")
    assert (status, error_of(path, json.loads(body))[0]) == (405, invalid)


# ---- stored responses -------------------------------------------------------------------------


@STREAM
def test_a_conversation_goes_on_from_a_stored_response(client: Client, stream: bool) -> None:
    """The text is that of the same conversation sent whole. Instructions are not carried on."""
    first = {"input": "def f(", "instructions": "Be brief.", "max_output_tokens": 8, "seed": 1}
    second = {"input": [{"role": "user", "content": "x"}], "max_output_tokens": 8, "seed": 2}
    third = {"input": "y", "max_output_tokens": 8, "seed": 3}
    one = ask(client, RESPONSES, first, stream=stream)
    two = ask(client, RESPONSES, second | {"previous_response_id": one.body["id"]}, stream=stream)
    three = ask(client, RESPONSES, third | {"previous_response_id": two.body["id"]}, stream=stream)
    turns = [
        *({"role": "user", "content": "def f("}, {"role": "assistant", "content": text(one)}),
        *({"role": "user", "content": "x"}, {"role": "assistant", "content": text(two)}),
        {"role": "user", "content": "y"},
    ]
    for reply, messages, seed in ((two, turns[:3], 2), (three, turns, 3)):
        message, usage = chat(client, {"messages": messages, "max_tokens": 8, "seed": seed})
        assert text(reply) == message["content"]
        assert reply.body["usage"]["input_tokens"] == usage["prompt_tokens"]
    assert three.body["previous_response_id"] == two.body["id"]
    counted = client.post(
        {"input": "y", "previous_response_id": two.body["id"]}, f"{RESPONSES}/input_tokens"
    )[1]
    assert counted["input_tokens"] == three.body["usage"]["input_tokens"]


def text(reply: Any) -> str:
    (block,) = reply.blocks
    return str(block.text)


@STREAM
def test_a_response_can_be_read_again_and_deleted(client: Client, stream: bool) -> None:
    body = ask(client, RESPONSES, BODIES[RESPONSES], stream=stream).body
    place = f"{RESPONSES}/{body['id']}"
    assert client.get(place) == (200, body)
    status, answer, _ = call(client, "DELETE", place)
    deleted = {"id": body["id"], "object": "response", "deleted": True}
    assert (status, json.loads(answer)) == (200, deleted)
    status, answer = client.get(place)
    assert status == 404 and answer["error"]["code"] == "previous_response_not_found"
    assert answer["error"]["param"] == "response_id"
    unkept = ask(client, RESPONSES, BODIES[RESPONSES] | {"store": False}, stream=stream).body
    assert client.get(f"{RESPONSES}/{unkept['id']}")[0] == 404
    for response_id in (body["id"], unkept["id"], "resp_other"):
        continued = BODIES[RESPONSES] | {"previous_response_id": response_id, "stream": stream}
        status, answer, _ = client.post(continued, RESPONSES)
        assert status == 404 and answer["error"]["param"] == "previous_response_id"
        assert f"{response_id!r} is unknown or has expired" in answer["error"]["message"]


def test_an_expired_response_is_not_found() -> None:
    limits = Limits(response_store_age_s=0.2)
    with serving(make_engine(), limits, chat_template=TEMPLATE) as client:
        body = ask(client, RESPONSES, BODIES[RESPONSES], stream=False).body
        place = f"{RESPONSES}/{body['id']}"
        wait_until(lambda: client.get(place)[0] == 404)
    limits = Limits(response_store_bytes=0)
    with serving(make_engine(), limits, chat_template=TEMPLATE) as client:
        body = ask(client, RESPONSES, BODIES[RESPONSES], stream=False).body
        assert client.get(f"{RESPONSES}/{body['id']}")[0] == 404


def test_responses_belong_to_their_key_and_leave_when_they_are_old() -> None:
    clock = VirtualClock()
    store = ResponseStore(10_000, 10, clock)
    mine, other = store.of("mine"), store.of("other")
    mine.keep("a", b"body", [b"1", b"2"], {})
    assert (mine.body("a"), mine.items("a")) == (b"body", [b"1", b"2"])
    assert store.of("mine") is mine
    with pytest.raises(FieldError, match="response_id: 'a' is unknown or has expired"):
        other.body("a")
    with pytest.raises(FieldError, match="response_id: 'a'"):
        other.delete("a")
    clock.advance(9)
    mine.keep("b", b"", [], {})
    assert mine.body("a")
    clock.advance(2)
    with pytest.raises(FieldError, match="previous_response_id: 'a' is unknown or has expired"):
        mine.items("a")
    mine.keep("c", b"", [], {})
    assert len(mine) == 2, "an expired response is still there"
    mine.delete("b")
    mine.delete("c")
    assert len(mine) == mine.num_bytes == 0


def test_the_store_is_bounded_and_drops_the_oldest() -> None:
    limit = 20_000
    store = ResponseStore(limit, 60).of(None)
    for number in range(100):
        store.keep(str(number), b"b" * 500, [b"i" * 400] * 2, {})
        assert store.num_bytes <= limit
        assert store.body(str(number))
    kept = [number for number in range(100) if _has(store, number)]
    assert kept == list(range(100 - len(store), 100)) and 5 < len(kept) < 15
    store.keep("huge", b"b" * limit, [], {})
    assert not _has(store, "huge") and len(store) == len(kept), "it displaced others"


def _has(store: Any, response_id: object) -> bool:
    try:
        return bool(store.body(str(response_id)))
    except FieldError:
        return False
