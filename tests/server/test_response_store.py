"""Responses that the server keeps: continued, read again, named by their items, and dropped."""

from __future__ import annotations

import json
import re
from typing import Any

import pytest

from cbatch.core.request.errors import FieldError
from cbatch.server.http.keys import KeyRing
from cbatch.server.protocol.errors import UnknownItemError
from cbatch.server.protocol.response_store import ResponseStore
from cbatch.server.protocol.responses_request import parse_responses
from cbatch.server.serving.admission_queue import Limits
from tests.checking.clock import VirtualClock
from tests.server.apis import CHAT, RESPONSES, USER, ask, body_of
from tests.server.engines import FIRST_CONTENT
from tests.server.http_client import Client, call, serving, wait_until
from tests.server.parsing import model
from tests.server.scripted import Scripted, scripted_server
from tests.toy_engine import make_engine

STREAM = pytest.mark.parametrize("stream", [False, True])


@pytest.fixture
def client(wide_client: Client) -> Client:
    return wide_client


def post(served: Scripted, body: dict[str, Any], key: str = "") -> Any:
    """Return status and answer of a call with an API key."""
    with served.client.open(body, RESPONSES, {"x-api-key": key}) as response:
        return response.status, json.loads(response.read())


@STREAM
def test_a_conversation_goes_on_from_a_stored_response(client: Client, stream: bool) -> None:
    """The text is that of the same conversation sent whole. Instructions are not carried on."""
    replies, turns = [], []
    for number, text in enumerate(("def f(", "x", "y")):
        body = body_of(RESPONSES, text, max_tokens=8, seed=number)
        if replies:
            body["previous_response_id"] = replies[-1].body["id"]
            counted = client.post(
                {"input": text, "previous_response_id": replies[-1].body["id"]},
                f"{RESPONSES}/input_tokens",
            )[1]["input_tokens"]
        else:
            body["instructions"] = "Be brief."
        reply = ask(client, RESPONSES, body, stream=stream)
        turns.append({"role": "user", "content": text})
        if replies:
            chat = {"messages": turns, "max_tokens": 8, "seed": number}
            whole = ask(client, CHAT, chat)
            assert reply.text == whole.text
            usage = reply.body["usage"]
            assert usage["input_tokens"] == whole.body["usage"]["prompt_tokens"] == counted
            assert reply.body["previous_response_id"] == replies[-1].body["id"]
        turns.append({"role": "assistant", "content": reply.text})
        replies.append(reply)


@STREAM
def test_a_response_can_be_read_again_and_deleted(client: Client, stream: bool) -> None:
    body = ask(client, RESPONSES, body_of(RESPONSES), stream=stream).body
    place = f"{RESPONSES}/{body['id']}"
    assert client.get(place) == (200, body)
    status, answer, _ = call(client, "DELETE", place)
    deleted = {"id": body["id"], "object": "response", "deleted": True}
    assert (status, json.loads(answer)) == (200, deleted)
    status, answer = client.get(place)
    assert status == 404 and answer["error"]["code"] == "previous_response_not_found"
    assert answer["error"]["param"] == "response_id"
    unkept = ask(client, RESPONSES, body_of(RESPONSES, store=False), stream=stream).body
    assert client.get(f"{RESPONSES}/{unkept['id']}")[0] == 404
    for response_id in (body["id"], unkept["id"], "resp_other"):
        continued = body_of(RESPONSES, previous_response_id=response_id, stream=stream)
        status, answer, _ = client.post(continued, RESPONSES)
        assert status == 404 and answer["error"]["param"] == "previous_response_id"
        assert f"{response_id!r} is unknown or has expired" in answer["error"]["message"]


@pytest.mark.parametrize("limit", [{"response_store_age_s": 0.2}, {"response_store_bytes": 0}])
def test_an_expired_response_is_not_found(limit: dict[str, Any]) -> None:
    with serving(make_engine(), Limits(**limit), chat_template=FIRST_CONTENT) as client:
        body = ask(client, RESPONSES, body_of(RESPONSES)).body
        wait_until(lambda: client.get(f"{RESPONSES}/{body['id']}")[0] == 404)


def test_responses_belong_to_their_key_and_leave_when_they_are_old() -> None:
    clock = VirtualClock()
    store = ResponseStore(10_000, 10, clock)
    mine, other = store.of("mine"), store.of("other")
    mine.keep("a", b"body", [b"1", b"2"], {})
    assert (mine.body("a"), mine.items("a")) == (b"body", [b"1", b"2"])
    assert store.of("mine") is mine
    for use in (other.body, other.delete):
        with pytest.raises(FieldError, match="response_id: 'a' is unknown or has expired"):
            use("a")
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
    def has(response_id: object) -> bool:
        try:
            return bool(store.body(str(response_id)))
        except FieldError:
            return False

    limit = 20_000
    store = ResponseStore(limit, 60).of(None)
    for number in range(100):
        store.keep(str(number), b"b" * 500, [b"i" * 400] * 2, {})
        assert store.num_bytes <= limit and has(number)
    kept = list(filter(has, range(100)))
    assert kept == list(range(100 - len(store), 100)) and 5 < len(kept) < 15
    store.keep("huge", b"b" * limit, [], {})
    assert not has("huge") and len(store) == len(kept), "it displaced others"


def test_a_stored_item_replaces_a_reference(scripted: Scripted) -> None:
    scripted.service.text = "<think>Hm.</think>Yes."
    question = {"type": "message", "role": "user", "content": "Rome?", "id": "msg_mine"}
    _, first = post(scripted, {"input": [question]})
    assert post(scripted, {"input": [question, *first["output"], USER]})[0] == 200
    prompt = scripted.service.prompt
    ids = ["msg_mine", *(item["id"] for item in first["output"])]
    for named in ({"type": "item_reference"}, {}, {"type": None}):
        references = [{"id": item_id} | named for item_id in ids]
        status, second = post(scripted, {"input": [*references, USER]})
        assert status == 200 and scripted.service.prompt == prompt
        # A response that continues this one has the items, too.
        more = {"input": "x", "previous_response_id": second["id"]}
        assert post(scripted, more)[0] == 200
        assert scripted.service.prompt.startswith(prompt.removesuffix("[assistant]"))


def test_other_references_are_not_found() -> None:
    with scripted_server(keys=KeyRing(["one", "two"])) as served:
        served.service.text = "Yes."
        _, mine = post(served, {"input": "x"}, "one")
        _, unkept = post(served, {"input": "x", "store": False}, "one")
        ids = [("two", mine["output"][0]["id"]), ("one", unkept["output"][0]["id"])]
        for key, item_id in (*ids, ("one", "msg_x"), ("one", "")):
            reference = {"type": "item_reference", "id": item_id}
            status, answer = post(served, {"input": [USER, reference]}, key)
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
    texts = {}
    for scripted.service.text in ("Yes.", "No.", "Well."):
        headers = {"x-request-id": "same"}
        with scripted.client.open({"input": "x", "stream": stream}, RESPONSES, headers) as response:
            raw = response.read().decode()
            assert response.getheader("x-request-id") == "same"
        (response_id,) = set(re.findall(r'"id":"(resp_\w+)"', raw))
        texts[response_id] = scripted.service.text
    assert len(texts) == 3
    for response_id, text in texts.items():
        _, body = scripted.client.get(f"{RESPONSES}/{response_id}")
        assert body["output"][0]["content"][0]["text"] == text
