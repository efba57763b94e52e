"""Streams that wait for a slot: heads, comments, and errors before and after the head."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from http.client import HTTPResponse
from typing import Any

import anthropic
import openai
import pytest

from cbatch.core.request.errors import FieldError
from cbatch.core.request.request import FinishReason
from cbatch.server.serving.admission_queue import Limits
from cbatch.server.serving.open_request import Heartbeat, merged_outputs
from cbatch.server.serving.service import EngineService
from cbatch.text.outputs import Choice, Output, Speculation
from tests.server.apis import APIS, MESSAGES, RESPONSES, body_of, error_of, frames_of, prompt_field
from tests.server.engines import one_slot
from tests.server.http_client import CHAT, MODEL, Client, open_request, wait_until

EACH_API = pytest.mark.parametrize("path", APIS)
LONG = {"prompt": "def add(a, b):", "max_tokens": 400, "seed": 5, "stream": True}
Slot = tuple[Client, EngineService]
Frames = list[tuple[str, dict[str, Any]]]


def stream_of(path: str) -> dict[str, Any]:
    return body_of(path, "def add(a, b):", max_tokens=6, seed=5, stream=True)


def without_ids(stream: Frames) -> Any:
    """Return what two streams of one text have in common."""
    changing = {"id", "item_id", "created", "created_at", "completed_at", "usage"}

    def kept(value: Any) -> Any:
        if isinstance(value, dict):
            return {name: kept(each) for name, each in value.items() if name not in changing}
        return [kept(each) for each in value] if isinstance(value, list) else value

    return [(name, kept(data)) for name, data in stream]


def read_pings(response: HTTPResponse, path: str, number: int) -> str:
    """Read until `number` pings have come, and return all that was read."""
    raw, ping = "", 'data: {"type":"ping"}' if path == MESSAGES else ": ping"
    while raw.count(ping) < number:
        line = response.readline().decode()
        assert line, f"it ended: {raw}"
        raw += line
    return raw + response.readline().decode()


@contextmanager
def busy(client: Client) -> Iterator[Callable[[], None]]:
    """Take a slot until the yielded function is called, or the block ends."""
    with client.begin(LONG) as connection, connection.getresponse() as response:
        while not response.readline().startswith(b"data: "):  # pings come while it waits
            pass

        def leave() -> None:
            response.close()
            connection.close()

        yield leave


@contextmanager
def served(**limits: Any) -> Iterator[Slot]:
    """Serve one slot, with one place in the queue."""
    limits = {"sse_heartbeat_s": 0.1, "max_queued_requests": 1} | limits
    with one_slot(Limits(**limits)) as (client, service, _):
        client.post(body_of(CHAT), CHAT)  # the workers start
        yield client, service
        wait_until(lambda: not service.num_open)


@pytest.fixture(scope="module")
def slot() -> Iterator[Slot]:
    with served() as slot:
        yield slot


@EACH_API
def test_a_stream_that_waits_has_a_head_and_pings_and_then_the_same_events(
    slot: Slot, path: str
) -> None:
    client, service = slot
    with busy(client) as leave, client.open(stream_of(path), path) as waiting:
        assert waiting.status == 200
        raw = read_pings(waiting, path, 2)
        begun = [name for name, _ in frames_of(raw)]
        created = ["response.created", "response.in_progress"]
        assert begun == (created if path == RESPONSES else []), "before the first token"
        assert service.queue.num_requests == 1
        status, answer, headers = client.post(stream_of(path), path)  # the queue has one place
        assert status == 503 and int(headers["retry-after"]) >= 1 and answer["error"]
        leave()
        whole = list(frames_of(raw + waiting.read().decode()))
    with client.open(stream_of(path), path) as alone:
        at_once = list(frames_of(alone.read().decode()))
    assert len(whole) > 3 and without_ids(whole) == without_ids(at_once)
    wait_until(lambda: not service.num_open)


def test_a_waiting_client_that_leaves_frees_its_place(slot: Slot) -> None:
    client, service = slot
    with busy(client):
        with client.open(stream_of(CHAT), CHAT) as waiting:
            read_pings(waiting, CHAT, 1)
            assert service.queue.num_requests == 1
        wait_until(lambda: service.queue.num_requests == 0)
        assert service.num_open == 1, "that of the first"
    wait_until(lambda: not service.num_open)


@EACH_API
def test_what_is_wrong_before_its_place_in_the_queue_has_a_status(slot: Slot, path: str) -> None:
    long = stream_of(path) | {prompt_field(path): body_of(path, "abc " * 900)[prompt_field(path)]}
    for wrong in (stream_of(path) | {"temperature": -1}, long):
        status, answer, _ = slot[0].post(wrong, path)
        assert status == 400 and answer["error"]["message"]


def test_an_error_after_the_head_is_an_event_of_the_api() -> None:
    with served(queue_timeout_s=0.5, max_queued_requests=8) as (client, _), busy(client):
        for path in APIS:
            with client.open(stream_of(path), path) as waiting:
                assert waiting.status == 200
                name, last = list(frames_of(waiting.read().decode()))[-1]
            if path == RESPONSES:
                assert name == last["type"] == "response.failed"
                message = last["response"]["error"]["message"]
            else:
                kind, message = error_of(path, last)
                assert kind == ("overloaded_error" if path == MESSAGES else "overloaded")
                assert name == ("error" if path == MESSAGES else "")
            assert message.startswith("no slot became free within 0.5 s")


@EACH_API
def test_constraints_without_any_text_are_an_error_of_the_request(
    path: str, demo_client: Client
) -> None:
    """A stream has begun by then, so that an event says it."""
    ids = demo_client.post({"prompt": "a"}, "/tokenize")[1]["tokens"]
    body = body_of(path, structured_outputs={"regex": "[0-9]"}, allowed_token_ids=ids)
    status, answer, _ = demo_client.post(body, path)
    assert status == 400 and "no token is allowed next" in answer["error"]["message"]
    with demo_client.open(body | {"stream": True}, path) as stream:
        assert stream.status == 200
        _, last = list(frames_of(stream.read().decode()))[-1]
    if path == RESPONSES:
        assert last["response"]["error"]["code"] == "invalid_prompt"
    else:
        assert last["error"] == answer["error"]
        assert last["error"]["type"] == "invalid_request_error"


def test_without_heartbeats_a_stream_begins_with_its_first_token() -> None:
    with served(sse_heartbeat_s=0, queue_timeout_s=0.5) as (client, _):
        with busy(client):
            assert client.post(stream_of(CHAT), CHAT)[0] == 503
        with client.open(stream_of(CHAT), CHAT) as stream:
            raw = stream.read().decode()
    assert stream.status == 200 and "ping" not in raw and len(list(frames_of(raw))) > 3


PINGED_S = 0.35  # time in which a waiting stream gets pings


def test_sdks_read_streams_that_waited(slot: Slot) -> None:
    options: Any = {"api_key": "-", "max_retries": 0}
    common: Any = {"model": MODEL, "extra_body": {"seed": 5}, "max_tokens": 6}
    common["messages"] = [{"role": "user", "content": "def add(a, b):"}]
    client, _ = slot
    url = f"http://127.0.0.1:{client.port}"
    with busy(client) as leave:
        sdk = openai.OpenAI(base_url=f"{url}/v1", **options)
        with sdk.chat.completions.create(stream=True, **common) as chat:
            time.sleep(PINGED_S)
            leave()
            text = "".join(chunk.choices[0].delta.content or "" for chunk in chat)
    claude = anthropic.Anthropic(base_url=url, **options)
    with busy(client) as leave, claude.messages.stream(**common) as message:
        time.sleep(PINGED_S)
        leave()
        assert message.get_final_text() == text != ""


def test_a_heartbeat_is_due_only_in_silence() -> None:
    async def scene() -> list[int]:
        opened, heartbeat = open_request(), Heartbeat(0.2)
        end = Choice(0, "", (), FinishReason.STOP, None, Speculation())

        async def speak() -> None:
            for _ in range(8):  # for longer than the interval
                await asyncio.sleep(0.05)
                opened.put(Output("r", 0, "a", (5,)))
            await asyncio.sleep(1.5)
            opened.put(Output("r", 0, "", (7,), finished=end))

        speaking = asyncio.create_task(speak())
        sizes = []
        async for items in merged_outputs([opened], heartbeat):
            sizes.append(len(items))
            heartbeat.record_sent()
        heartbeat.close()
        await speaking
        return sizes

    sizes = asyncio.run(scene())
    assert sizes[-1] == 1 and sizes.count(0) >= 2, sizes
    assert sum(sizes) == 9


@pytest.mark.parametrize("value", [-1.0, float("inf"), float("nan")])
def test_a_heartbeat_is_a_time(value: float) -> None:
    with pytest.raises(FieldError, match="sse_heartbeat"):
        Limits(sse_heartbeat_s=value)
