"""Replies and errors of the Responses API and of the Messages API, whole and streamed. The model is
scripted, or a toy."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from typing import Any

import pytest

from cbatch.core.request.errors import too_long
from cbatch.server.http.errors import error_body
from cbatch.server.http.keys import KeyRing
from cbatch.server.protocol import translation
from cbatch.server.protocol.errors import OverloadedError, ServiceError
from cbatch.server.serving.agent_encoders import MessagesEncoder, ResponsesEncoder
from cbatch.server.serving.chat_encoder import ChatEncoder
from cbatch.server.serving.replies import Encoder, Replies
from cbatch.server.serving.request_record import RequestRecord, RequestTotals
from tests.server.agents import (
    CALL,
    MESSAGES,
    RESPONSES,
    Block,
    Scripted,
    ask,
    error_of,
    events_of,
    scripted_server,
)
from tests.server.http_client import (
    CHAT,
    COMPLETIONS,
    MODEL,
    Client,
    call,
    sample,
)
from tests.server.test_translation import USER, model, of_three, read

TOOL: Any = {"type": "function", "name": "f", "parameters": {"type": "object"}}


TOOLS: dict[str, Any] = {
    RESPONSES: {"tools": [TOOL]},
    MESSAGES: {"tools": [{"name": "f", "input_schema": TOOL["parameters"]}]},
}


BODIES: dict[str, Any] = {
    RESPONSES: {"input": "Rome?", "max_output_tokens": 99},
    MESSAGES: {"messages": [USER], "max_tokens": 99},
}


PATHS = pytest.mark.parametrize("path", BODIES)


STREAM = pytest.mark.parametrize("stream", [False, True])


EVERY = [COMPLETIONS, CHAT, RESPONSES, MESSAGES]


@pytest.fixture(scope="module")
def served() -> Iterator[Scripted]:
    with scripted_server() as scripted:
        yield scripted


@pytest.fixture(autouse=True)
def as_ever(served: Scripted) -> Iterator[None]:
    yield
    served.restore()


THOUGHT, ANSWER, CALLED = Block("thought", "Hm."), Block("text", "Yes."), Block("call", "", "f")


REPLIES: list[tuple[str, list[Block]]] = [
    ("Yes.", [ANSWER]),
    ("<think>\nHm.\n</think>\n\nYes.", [THOUGHT, ANSWER]),
    ("<think>Hm.", [THOUGHT]),
    (CALL, [CALLED]),
    (CALL + CALL, [CALLED, CALLED]),
    (f"Yes.{CALL}\n{CALL}", [ANSWER, CALLED, CALLED]),
    (f"<think>Hm.</think>Yes.{CALL}Yes.", [THOUGHT, ANSWER, CALLED, ANSWER]),
    ("", []),
]


@STREAM
@pytest.mark.parametrize("step_tokens", [1, 500])
@pytest.mark.parametrize("reply", REPLIES, ids=lambda reply: reply[0][:24])
@PATHS
def test_a_reply_is_read_as_blocks(
    served: Scripted, path: str, reply: Any, step_tokens: int, stream: bool
) -> None:
    text, blocks = reply
    served.service.text, served.service.step_tokens = text, step_tokens
    answer = ask(served.client, path, BODIES[path] | TOOLS[path], stream=stream)
    shown = [block._replace(text="") if block.kind == "call" else block for block in answer.blocks]
    assert shown == blocks
    assert {json.loads(b.text)["a"] for b in answer.blocks if b.kind == "call"} <= {1}
    calls = any(block.kind == "call" for block in blocks)
    ends = {RESPONSES: ("completed", "completed"), MESSAGES: ("tool_use", "end_turn")}[path]
    assert answer.reason == ends[not calls]


@STREAM
def test_calls_of_a_namespace_name_it(served: Scripted, stream: bool) -> None:
    served.service.text = CALL.replace('"f"', '"ns.f"') + CALL
    tools = [TOOL, {"type": "namespace", "name": "ns", "description": "", "tools": [TOOL]}]
    reply = ask(served.client, RESPONSES, BODIES[RESPONSES] | {"tools": tools}, stream=stream)
    names = [(item["name"], item.get("namespace")) for item in reply.body["output"]]
    assert names == [("f", "ns"), ("f", None)]


@STREAM
@PATHS
def test_tokens_are_counted_as_in_a_chat(served: Scripted, path: str, stream: bool) -> None:
    served.service.text = "<think>Hm.</think>Yes."
    _, chat, _ = served.client.post({"messages": [USER], "max_tokens": 99}, CHAT)
    usage = ask(served.client, path, BODIES[path], stream=stream).body["usage"]
    prompt, output = chat["usage"]["prompt_tokens"], chat["usage"]["completion_tokens"]
    thought = chat["usage"]["completion_tokens_details"]["reasoning_tokens"]
    assert thought > 0
    if path == RESPONSES:
        assert usage == {
            "input_tokens": prompt,
            "input_tokens_details": {"cached_tokens": 3, "cache_write_tokens": 0},
            "output_tokens": output,
            "output_tokens_details": {"reasoning_tokens": thought},
            "total_tokens": prompt + output,
        }
    else:
        assert usage == {
            "input_tokens": prompt - 3,
            "cache_creation_input_tokens": 0,
            "cache_read_input_tokens": 3,
            "output_tokens": output,
            "output_tokens_details": {"thinking_tokens": thought},
        }


def test_a_response_repeats_its_request(served: Scripted) -> None:
    fields = {
        "instructions": "Be brief.",
        "metadata": {"a": "b"},
        "temperature": 0.5,
        "tools": [TOOL],
        "tool_choice": "none",
        "parallel_tool_calls": False,
        "reasoning": {"effort": "low"},
        "text": {"format": {"type": "text"}},
        "store": False,
        "user": "me",
    }
    body = ask(served.client, RESPONSES, BODIES[RESPONSES] | fields, stream=False).body
    assert {name: body[name] for name in fields} == fields
    assert (
        body["object"] == "response" and body["model"] == MODEL and body["id"].startswith("resp_")
    )
    message = ask(served.client, MESSAGES, BODIES[MESSAGES], stream=False).body
    assert (message["type"], message["role"], message["model"]) == ("message", "assistant", MODEL)
    assert message["id"].startswith("msg_")


@PATHS
def test_unknown_fields_are_named_in_a_header(served: Scripted, path: str) -> None:
    _, _, headers = served.client.post(BODIES[path] | {"colour": 1}, path)
    assert headers["x-cbatch-ignored-fields"] == "colour"


@PATHS
def test_an_error_before_the_first_token(served: Scripted, path: str) -> None:
    """It is a status, or if the stream has begun, its last event."""
    served.service.error, served.service.at_once = OverloadedError("full", 7), True
    kind = "overloaded_error" if path == MESSAGES else "overloaded"
    status, body, headers = served.client.post(BODIES[path], path)
    assert (status, *error_of(path, body)) == (503, kind, "full")
    assert headers["retry-after"] == "7"
    last = events_of(served.client, path, BODIES[path])[-1]
    if path == MESSAGES:
        assert error_of(path, last) == (kind, "full")
    else:
        assert last["response"]["error"] == {"code": "server_error", "message": "full"}


@PATHS
def test_an_error_after_the_first_token_is_the_last_event(served: Scripted, path: str) -> None:
    served.service.text, served.service.error = "Yes, and more", ServiceError("it broke")
    events = events_of(served.client, path, BODIES[path])
    if path == MESSAGES:
        assert events[-1] == {
            "type": "error",
            "error": {"type": "api_error", "message": "it broke"},
        }
        assert events[0]["type"] == "message_start"
    else:
        assert events[-1]["type"] == "response.failed"
        response = events[-1]["response"]
        assert response["status"] == "failed" and response["id"] == events[0]["response"]["id"]
        assert response["error"] == {"code": "server_error", "message": "it broke"}
        assert served.client.get(f"{RESPONSES}/{response['id']}")[0] == 404, "it was stored"


def test_keys_come_in_either_header() -> None:
    keys = KeyRing(["first", "second"], max_requests_per_key=1)
    with scripted_server(keys=keys) as (service, client):
        service.text = "Yes."
        for headers, status in (
            ({"x-api-key": "first"}, 200),
            ({"Authorization": "Bearer first"}, 200),
            ({"Authorization": "Bearer wrong", "x-api-key": "second"}, 200),
            ({"x-api-key": "wrong"}, 401),
            ({"x-api-key": ""}, 401),
            ({}, 401),
        ):
            for path in BODIES:
                with client.open(BODIES[path], path, headers) as response:
                    body = json.loads(response.read())
                    assert response.status == status, (headers, path)
                if status == 401:
                    kind = error_of(path, body)[0]
                    want = "authentication_error" if path == MESSAGES else "invalid_request_error"
                    assert kind == want
        with client.open(None, "/v1/models", {"x-api-key": "first"}) as response:
            assert response.status == 200


@pytest.fixture
def client(wide_client: Client) -> Client:
    return wide_client


def body_of(path: str, text: str, max_tokens: int = 4) -> dict[str, Any]:
    turns = [{"role": "user", "content": text}]
    length = "max_output_tokens" if path == RESPONSES else "max_tokens"
    field = {COMPLETIONS: "prompt", RESPONSES: "input"}.get(path)
    return {length: max_tokens} | ({field: text} if field else {"messages": turns})


def test_counts_are_those_of_the_call(client: Client) -> None:
    more = {"messages": [{"role": "system", "content": "Be brief."}, USER]}
    _, answer, _ = client.post(more | {"max_tokens": 1}, CHAT)
    usage = answer["usage"]
    body = {"messages": [USER], "system": "Be brief."}
    status, answer, _ = client.post(body, f"{MESSAGES}/count_tokens")
    assert (status, answer) == (200, {"input_tokens": usage["prompt_tokens"]})
    body = {"input": [USER], "instructions": "Be brief."}
    status, answer, _ = client.post(body, f"{RESPONSES}/input_tokens")
    count = {"object": "response.input_tokens", "input_tokens": usage["prompt_tokens"]}
    assert (status, answer) == (200, count)


@pytest.mark.parametrize("path", [*BODIES, f"{MESSAGES}/count_tokens", f"{RESPONSES}/input_tokens"])
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


@STREAM
@pytest.mark.parametrize("path", EVERY)
def test_cached_tokens_are_those_of_the_metrics(client: Client, path: str, stream: bool) -> None:
    text = f"{stream} {path} a text that no other test sends, with some blocks of tokens. "

    def cached(more: dict[str, Any]) -> tuple[int, int]:
        """Return the cached tokens of a call, and all tokens of its prompt."""
        body = body_of(path, text * 2) | more
        if path in (RESPONSES, MESSAGES):
            usage = ask(client, path, body, stream=stream).body["usage"]
            if path == MESSAGES:
                num_cached = usage["cache_read_input_tokens"]
                return num_cached, num_cached + usage["input_tokens"]
            return usage["input_tokens_details"]["cached_tokens"], usage["input_tokens"]
        options = {"stream_options": {"include_usage": True}}
        if stream:
            usage = client.stream(body | options, path)[-1]["usage"]
        else:
            usage = client.post(body, path)[1]["usage"]
        return usage["prompt_tokens_details"]["cached_tokens"], usage["prompt_tokens"]

    first, _ = cached({})
    hits = sample(client, "vllm:prefix_cache_hits_total")
    num_cached, prompt_tokens = cached({})
    assert sample(client, "vllm:prefix_cache_hits_total") - hits == num_cached
    assert num_cached > prompt_tokens / 2 > first
    if path in (COMPLETIONS, CHAT):
        assert cached({"n": 3}) == (num_cached, prompt_tokens), "a prompt counts once"


def test_each_prompt_of_a_call_counts(client: Client) -> None:
    texts = [f"text {number} that only this test sends, of several blocks" for number in range(3)]
    usages = [client.post({"prompt": texts, "max_tokens": 1})[1]["usage"] for _ in range(2)]
    one = client.post({"prompt": texts[0], "max_tokens": 1})[1]["usage"]
    num_cached = usages[1]["prompt_tokens_details"]["cached_tokens"]
    assert num_cached >= 2 * one["prompt_tokens_details"]["cached_tokens"] > 0
    assert num_cached < usages[1]["prompt_tokens"] == usages[0]["prompt_tokens"]


WORDS = (
    r"This model's maximum context length is 256 tokens\. .* resulted in (at least )?(\d+) tokens"
)


ANTHROPIC_WORDS = r"prompt is too long: (\d+) tokens > 255 maximum"


@STREAM
@pytest.mark.parametrize("size", [300, 90_000])  # counted in tokens, or in characters
@pytest.mark.parametrize("path", EVERY)
def test_a_full_context_is_said_in_words_that_agents_know(
    client: Client, path: str, size: int, stream: bool
) -> None:
    body = body_of(path, " ~" * size) | {"stream": stream}
    status, answer, _ = client.post(body, path)
    assert status == 400
    kind, message = error_of(path, answer)
    assert kind == "invalid_request_error"
    words = re.search(ANTHROPIC_WORDS if path == MESSAGES else WORDS, message)
    assert words is not None and int(words[words.re.groups]) > 255, message
    if path != MESSAGES:
        assert answer["error"]["code"] == "context_length_exceeded"
        fields = {COMPLETIONS: ["prompt"], RESPONSES: ["input"]}
        assert answer["error"]["param"] in fields.get(path, ["messages", "prompt"])


@pytest.mark.parametrize("path", [RESPONSES, MESSAGES])
def test_too_many_parts_are_a_full_context(client: Client, path: str) -> None:
    field = "input" if path == RESPONSES else "messages"
    status, answer, _ = client.post(body_of(path, "x") | {field: [USER] * 300}, path)
    words = ANTHROPIC_WORDS if path == MESSAGES else WORDS
    assert status == 400 and re.search(words, error_of(path, answer)[1])


def test_too_many_ids_are_a_full_context(client: Client) -> None:
    for count in (256, 257):
        status, answer, _ = client.post({"prompt": [5] * count})
        assert (status, answer["error"]["code"]) == (400, "context_length_exceeded")
        assert re.search(WORDS, answer["error"]["message"])
    assert client.post({"prompt": [5] * 255, "max_tokens": 9})[0] == 200


@pytest.mark.parametrize(
    ("api", "kind"),
    [("responses", ResponsesEncoder), ("messages", MessagesEncoder), ("chat", ChatEncoder)],
)
def test_a_stream_that_has_begun_ends_with_the_same_words(api: str, kind: type[Encoder]) -> None:
    record = RequestRecord(RequestTotals(), "POST", "/", "1")
    encoder = kind(Replies(read(api, of_three("text")[api]), model(), record))
    error = too_long("messages", 300, 256)
    event = encoder.error_event(
        error_body(str(error), "invalid_request_error", "messages", "context_length_exceeded")
    )
    (data,) = re.findall(rb"^data: ({.*)$", event, re.MULTILINE)
    sent = json.loads(data)
    if api == "messages":
        assert sent["error"]["type"] == "invalid_request_error"
        assert re.search(ANTHROPIC_WORDS, sent["error"]["message"])
    else:
        assert (sent.get("response") or sent)["error"]["code"] == "context_length_exceeded"
        assert sent.get("type") in (None, "response.failed")


@pytest.mark.parametrize("path", EVERY)
def test_a_body_has_few_members(client: Client, path: str) -> None:
    names = {f"a{number}": 1 for number in range(50_000)}
    status, answer, _ = client.post(body_of(path, "x") | names, path)
    assert status == 400 and "members; send <= 10000" in error_of(path, answer)[1]


@pytest.mark.parametrize("api", ["chat", "responses", "messages"])
def test_few_names_of_unknown_members_are_kept(api: str, monkeypatch: Any) -> None:
    renamed = []
    rename = translation.rename
    monkeypatch.setattr(translation, "rename", lambda *args: renamed.append(args) or rename(*args))
    names = {f"a{number}": 1 for number in range(9_000)}
    part = of_three("text")[api]
    turns = [USER | names] * 3
    for body in (part | names, part | {"input" if api == "responses" else "messages": turns}):
        assert len(read(api, body).ignored) <= 128 and len(renamed) <= 128
