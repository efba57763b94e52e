"""Streams that wait for a slot: heads, comments, and errors before and after the head."""

from __future__ import annotations

import asyncio
import json
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
from tests.server.http_client import CHAT, COMPLETIONS, MODEL, Client, open_request, wait_until
from tests.server.test_outcomes import LONG, one_slot

RESPONSES, MESSAGES = "/v1/responses", "/v1/messages"
TALK = {"messages": [{"role": "user", "content": "def add(a, b):"}], "seed": 5}
CALLS: dict[str, dict[str, Any]] = {
    COMPLETIONS: {"prompt": "def add(a, b):", "max_tokens": 6, "seed": 5},
    CHAT: TALK | {"max_tokens": 6},
    RESPONSES: {"input": "def add(a, b):", "max_output_tokens": 6, "seed": 5},
    MESSAGES: TALK | {"max_tokens": 6},
}
EACH_API = pytest.mark.parametrize("path", CALLS)
OFTEN = Limits(sse_heartbeat_s=0.1, max_queued_requests=1)
PINGS = {MESSAGES: 'event: ping\ndata: {"type":"ping"}'}
Events = list[tuple[str, dict[str, Any]]]


def events(raw: str) -> Events:
    """Return the events of a stream without comments and pings: names and data."""
    parsed: Events = []
    for block in raw.split("\n\n"):
        lines = dict(line.split(": ", 1) for line in block.split("\n") if line[:1] not in ("", ":"))
        if lines and lines.get("event") != "ping" and lines["data"] != "[DONE]":
            parsed.append((lines.get("event", ""), json.loads(lines["data"])))
    return parsed


def without_ids(stream: Events) -> Any:
    """Return what two streams of one text have in common."""
    changing = {"id", "item_id", "created", "created_at", "completed_at", "usage"}

    def kept(value: Any) -> Any:
        if isinstance(value, dict):
            return {name: kept(each) for name, each in value.items() if name not in changing}
        return [kept(each) for each in value] if isinstance(value, list) else value

    return [(name, kept(data)) for name, data in stream]


def read_pings(response: HTTPResponse, path: str, number: int) -> str:
    """Read until `number` pings have come, and return all that was read."""
    raw = ""
    while raw.count(PINGS.get(path, ": ping")) < number:
        line = response.readline().decode()
        assert line, f"it ended: {raw}"
        raw += line
    return raw


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
def a_busy_slot(limits: Limits) -> Iterator[tuple[Client, Callable[[], None]]]:
    """Yield a client of a server whose only slot is taken, and a function that frees the slot."""
    with one_slot(limits) as (client, service, _):
        client.post(CALLS[CHAT], CHAT)  # the workers start
        with busy(client) as leave:
            yield client, leave
        wait_until(lambda: not service.num_open)


@pytest.fixture(scope="module")
def slot() -> Iterator[tuple[Client, EngineService]]:
    """Return a server with one slot and one place in the queue."""
    with one_slot(OFTEN) as (client, service, _):
        client.post(CALLS[CHAT], CHAT)  # the workers start
        yield client, service


@EACH_API
def test_a_stream_that_waits_has_a_head_and_pings_and_then_the_same_events(
    slot: tuple[Client, EngineService], path: str
) -> None:
    client, service = slot
    with busy(client) as leave, client.open(CALLS[path] | {"stream": True}, path) as waiting:
        assert waiting.status == 200
        raw = read_pings(waiting, path, 2)
        begun = [name for name, _ in events(raw)]
        created = ["response.created", "response.in_progress"]
        assert begun == (created if path == RESPONSES else []), "before the first token"
        leave()
        raw += waiting.read().decode()
    with client.open(CALLS[path] | {"stream": True}, path) as alone:
        at_once = alone.read().decode()
    assert len(events(raw)) > 3 and without_ids(events(raw)) == without_ids(events(at_once))
    wait_until(lambda: not service.num_open)


@EACH_API
def test_a_waiting_client_that_leaves_frees_its_place(
    slot: tuple[Client, EngineService], path: str
) -> None:
    client, service = slot
    with busy(client):
        with client.open(CALLS[path] | {"stream": True}, path) as waiting:
            read_pings(waiting, path, 1)
            assert service.queue.num_requests == 1
        wait_until(lambda: service.queue.num_requests == 0)
        assert service.num_open == 1, "that of the first"
    wait_until(lambda: not service.num_open)


@EACH_API
def test_what_is_refused_before_its_place_in_the_queue_has_a_status(
    slot: tuple[Client, EngineService], path: str
) -> None:
    client, service = slot
    body = CALLS[path] | {"stream": True}
    name = {RESPONSES: "input", COMPLETIONS: "prompt"}.get(path)
    text: Any = "abc " * 900
    too_long = body | ({name: text} if name else {"messages": [{"role": "user", "content": text}]})
    with busy(client):
        for wrong in (body | {"temperature": -1}, body | {"top_k": "x"}, too_long):
            status, answer, _ = client.post(wrong, path)
            assert status == 400 and answer["error"]["message"]
        with client.open(body, path) as waiting:  # the queue has one place
            read_pings(waiting, path, 1)
            status, answer, headers = client.post(body, path)
            assert status == 503 and int(headers["retry-after"]) >= 1 and answer["error"]
    wait_until(lambda: not service.num_open)


@EACH_API
def test_an_error_after_the_head_is_an_event_of_the_api(path: str) -> None:
    limits = Limits(sse_heartbeat_s=0.1, queue_timeout_s=0.5)
    body = CALLS[path] | {"stream": True}
    with a_busy_slot(limits) as (client, _), client.open(body, path) as waiting:
        assert waiting.status == 200
        raw = waiting.read().decode()
    name, last = events(raw)[-1]
    assert raw.endswith("data: [DONE]\n\n") == (path in (COMPLETIONS, CHAT))
    if path == RESPONSES:
        assert name == last["type"] == "response.failed"
        message = last["response"]["error"]["message"]
    else:
        kind = "overloaded_error" if path == MESSAGES else "overloaded"
        assert last["error"]["type"] == kind and name == ("error" if path == MESSAGES else "")
        message = last["error"]["message"]
    assert message.startswith("no slot became free within 0.5 s")


@EACH_API
def test_constraints_without_any_text_are_an_error_of_the_request(
    path: str, demo_client: Client
) -> None:
    """A stream has begun by then, so that an event says it."""
    ids = demo_client.post({"prompt": "a"}, "/tokenize")[1]["tokens"]
    body = CALLS[path] | {"structured_outputs": {"regex": "[0-9]"}, "allowed_token_ids": ids}
    status, answer, _ = demo_client.post(body, path)
    assert status == 400 and "no token is allowed next" in answer["error"]["message"]
    with demo_client.open(body | {"stream": True}, path) as stream:
        assert stream.status == 200
        _, last = events(stream.read().decode())[-1]
    if path == RESPONSES:
        assert last["response"]["error"]["code"] == "invalid_prompt"
    else:
        assert last["error"] == answer["error"]
        assert last["error"]["type"] == "invalid_request_error"


@EACH_API
def test_without_heartbeats_a_stream_begins_with_its_first_token(path: str) -> None:
    limits = Limits(sse_heartbeat_s=0, queue_timeout_s=0.5)
    with a_busy_slot(limits) as (client, leave):
        assert client.post(CALLS[path] | {"stream": True}, path)[0] == 503
        leave()
        with client.open(CALLS[path] | {"stream": True}, path) as stream:
            raw = stream.read().decode()
    assert stream.status == 200 and "ping" not in raw and len(events(raw)) > 3


PINGED_S = 0.35  # time in which a waiting stream gets pings


def test_sdks_read_streams_that_waited(slot: tuple[Client, EngineService]) -> None:
    options: Any = {"api_key": "-", "max_retries": 0}
    common: Any = {"model": MODEL, "extra_body": {"seed": 5}}
    messages: Any = TALK["messages"]
    texts = set()
    client, _ = slot
    with busy(client) as leave:
        url = f"http://127.0.0.1:{client.port}"
        sdk = openai.OpenAI(base_url=f"{url}/v1", **options)
        with sdk.chat.completions.create(
            messages=messages, max_tokens=6, stream=True, **common
        ) as chat:
            time.sleep(PINGED_S)
            leave()
            texts.add("".join(chunk.choices[0].delta.content or "" for chunk in chat))
        with (
            busy(client) as leave,
            sdk.responses.create(
                input="def add(a, b):", max_output_tokens=6, stream=True, **common
            ) as response,
        ):
            assert next(iter(response)).type == "response.created"
            time.sleep(PINGED_S)
            leave()
            *_, last = response
            texts.add(last.response.output_text)
        claude = anthropic.Anthropic(base_url=url, **options)
        stream = claude.messages.stream(messages=messages, max_tokens=6, **common)
        with busy(client) as leave, stream as message:
            time.sleep(PINGED_S)
            leave()
            texts.add(message.get_final_text())
    assert len(texts) == 1 and texts != {""}


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
