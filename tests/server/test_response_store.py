"""Responses that the server keeps: continued, read again, named by their items, and dropped."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from typing import Any

import pytest

from cbatch.core.request.errors import FieldError
from cbatch.server.http.keys import KeyRing
from cbatch.server.protocol.errors import UnknownItemError
from cbatch.server.protocol.response_store import ResponseStore
from cbatch.server.protocol.responses_request import parse_responses
from cbatch.server.serving.admission_queue import Limits
from cbatch.text import ChatTemplate
from tests.checking.clock import VirtualClock
from tests.server.agents import MESSAGES, RESPONSES, Scripted, ask, scripted_server
from tests.server.http_client import CHAT, Client, call, serving, wait_until
from tests.server.test_translation import model
from tests.toy_engine import make_engine

TEMPLATE = ChatTemplate("{% for m in messages %}[{{ m.role }}]{{ m.content }}{% endfor %}", {}, "x")


STREAM = pytest.mark.parametrize("stream", [False, True])


USER: Any = {"role": "user", "content": "def add(a, b):"}


BODIES: dict[str, Any] = {
    CHAT: {"messages": [USER], "max_tokens": 24},
    RESPONSES: {"input": [USER], "max_output_tokens": 24},
    MESSAGES: {"messages": [USER], "max_tokens": 24},
}


@pytest.fixture
def client(wide_client: Client) -> Client:
    return wide_client


@pytest.fixture
def scripted() -> Iterator[Scripted]:
    with scripted_server(keys=KeyRing(["one", "two"])) as scripted:
        scripted.service.text = "Yes."
        yield scripted


def post_as(served: Scripted, key: str, body: dict[str, Any], **headers: str) -> Any:
    """Return status and answer of a call with an API key."""
    with served.client.open(body, RESPONSES, {"x-api-key": key} | headers) as response:
        return response.status, json.loads(response.read())


def chat(client: Client, fields: dict[str, Any]) -> tuple[dict[str, Any], dict[str, Any]]:
    """Return message and usage of a chat completion; the message has its finish reason as well."""
    status, answer, _ = client.post(BODIES[CHAT] | fields, CHAT)
    assert status == 200, answer
    (choice,) = answer["choices"]
    return choice["message"] | {"reason": choice["finish_reason"]}, answer["usage"]


def text(reply: Any) -> str:
    (block,) = reply.blocks
    return str(block.text)


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
