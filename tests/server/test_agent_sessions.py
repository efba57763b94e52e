"""Servers in the sessions of agents: stored items, counts of cached tokens, a context that is full,
and bodies with many unknown members."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from typing import Any

import pytest

from cbatch.core.request.errors import FieldError, too_long
from cbatch.server.http.errors import error_body
from cbatch.server.http.keys import KeyRing
from cbatch.server.protocol import translation
from cbatch.server.protocol.errors import UnknownItemError
from cbatch.server.protocol.response_store import ResponseStore
from cbatch.server.protocol.responses_request import parse_responses
from cbatch.server.serving.chat_encoder import ChatEncoder
from cbatch.server.serving.messages_encoder import MessagesEncoder
from cbatch.server.serving.replies import Encoder, Replies
from cbatch.server.serving.request_record import RequestRecord, RequestTotals
from cbatch.server.serving.responses_encoder import ResponsesEncoder
from cbatch.text import ChatTemplate
from tests.checking.clock import VirtualClock
from tests.server.agent_calls import MESSAGES, RESPONSES, ask, error_of
from tests.server.agent_servers import Scripted, scripted_server
from tests.server.http_client import CHAT, COMPLETIONS, Client, sample, serving
from tests.server.test_translation import USER, model, of_three, read
from tests.toy_engine import make_engine

TEMPLATE = ChatTemplate("{% for m in messages %}[{{ m.role }}]{{ m.content }}{% endfor %}", {}, "x")
STREAM = pytest.mark.parametrize("stream", [False, True])
PATHS = [COMPLETIONS, CHAT, RESPONSES, MESSAGES]


def body_of(path: str, text: str, max_tokens: int = 4) -> dict[str, Any]:
    turns = [{"role": "user", "content": text}]
    length = "max_output_tokens" if path == RESPONSES else "max_tokens"
    field = {COMPLETIONS: "prompt", RESPONSES: "input"}.get(path)
    return {length: max_tokens} | ({field: text} if field else {"messages": turns})


@pytest.fixture(scope="module")
def client() -> Iterator[Client]:
    with serving(make_engine(max_model_len=256), chat_template=TEMPLATE) as client:
        yield client


@pytest.fixture
def scripted() -> Iterator[Scripted]:
    with scripted_server(keys=KeyRing(["one", "two"])) as scripted:
        scripted.service.text = "Yes."
        yield scripted


def post_as(served: Scripted, key: str, body: dict[str, Any], **headers: str) -> Any:
    """Return status and answer of a call with an API key."""
    with served.client.open(body, RESPONSES, {"x-api-key": key} | headers) as response:
        return response.status, json.loads(response.read())


# ---- stored items -----------------------------------------------------------------------------


def test_a_stored_item_replaces_a_reference(scripted: Scripted) -> None:
    scripted.service.text = "<think>Hm.</think>Yes."
    question = {"type": "message", "role": "user", "content": "Rome?", "id": "msg_mine"}
    _, first = post_as(scripted, "one", {"input": [question]})
    whole = {"input": [question, *first["output"], USER]}
    assert post_as(scripted, "one", whole)[0] == 200
    prompt = scripted.service.prompt
    ids = ["msg_mine", *(item["id"] for item in first["output"])]
    for named in ({"type": "item_reference"}, {}, {"type": None}):
        references = [{"id": item_id} | named for item_id in ids]
        status, second = post_as(scripted, "one", {"input": [*references, USER]})
        assert status == 200 and scripted.service.prompt == prompt
        # A response that continues this one has the items, too.
        more = {"input": "x", "previous_response_id": second["id"]}
        assert post_as(scripted, "one", more)[0] == 200
        assert scripted.service.prompt.startswith(prompt.removesuffix("[assistant]"))


def test_other_references_are_not_found(scripted: Scripted) -> None:
    _, mine = post_as(scripted, "one", {"input": "x"})
    _, unkept = post_as(scripted, "one", {"input": "x", "store": False})
    (item,), (lost,) = mine["output"], unkept["output"]
    for key, item_id in (("two", item["id"]), ("one", lost["id"]), ("one", "msg_x"), ("one", "")):
        reference = {"type": "item_reference", "id": item_id}
        status, answer = post_as(scripted, key, {"input": [USER, reference]})
        assert (status, answer["error"]["param"]) == (404, "input[1].id")


def test_items_leave_with_their_response() -> None:
    clock = VirtualClock()
    store = ResponseStore(10_000, 10, clock).of("mine")
    store.keep("a", b"", [b"1", b"2"], {"i": b"1", "j": b"2"})
    store.keep("b", b"", [b"2", b"3"], {"j": b"2", "k": b"3"})
    assert [store.item(each, "x") for each in "ijk"] == [b"1", b"2", b"3"]
    store.delete("a")
    assert [store.item(each, "x") for each in "jk"] == [b"2", b"3"]
    clock.advance(11)
    for item_id in "ijk":
        with pytest.raises(UnknownItemError, match=f"x: '{item_id}' is not an item of a stored"):
            store.item(item_id, "x")
    store.keep("c", b"", [], {})
    store.delete("c")
    assert store.num_bytes == 0


def test_references_to_long_items_are_limited() -> None:
    store = ResponseStore(2**26, 10).of(None)
    item = json.dumps({"role": "user", "content": "x" * 2**20}).encode()
    store.keep("a", b"", [item], {"i": item})
    body = {"input": [{"type": "item_reference", "id": "i"}] * 17}
    with pytest.raises(FieldError, match="input: refers to too long items; refer to items of"):
        parse_responses(json.dumps(body).encode(), model(), store)


@STREAM
def test_no_response_replaces_another(scripted: Scripted, stream: bool) -> None:
    ids = set()
    for text in ("Yes.", "No.", "Well."):
        scripted.service.text = text
        with scripted.client.open(
            {"input": "x", "stream": stream},
            RESPONSES,
            {"x-api-key": "one", "x-request-id": "same"},
        ) as response:
            raw = response.read().decode()
            assert response.getheader("x-request-id") == "same"
        ids |= set(re.findall(r'"id":"(resp_\w+)"', raw))
    assert len(ids) == 3
    texts = set()
    for response_id in ids:
        headers = {"x-api-key": "one"}
        with scripted.client.open(None, f"{RESPONSES}/{response_id}", headers) as response:
            texts.add(json.loads(response.read())["output"][0]["content"][0]["text"])
    assert texts == {"Yes.", "No.", "Well."}


# ---- cached tokens ----------------------------------------------------------------------------


@STREAM
@pytest.mark.parametrize("path", PATHS)
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


# ---- a context that is full -------------------------------------------------------------------

WORDS = (
    r"This model's maximum context length is 256 tokens\. .* resulted in (at least )?(\d+) tokens"
)
ANTHROPIC_WORDS = r"prompt is too long: (\d+) tokens > 255 maximum"


@STREAM
@pytest.mark.parametrize("size", [300, 90_000])  # counted in tokens, or in characters
@pytest.mark.parametrize("path", PATHS)
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


# ---- unknown members --------------------------------------------------------------------------


@pytest.mark.parametrize("path", PATHS)
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
