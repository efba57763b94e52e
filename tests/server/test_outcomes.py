"""Too many calls, too late, too slowly read, or while the server stops: the status says which."""

from __future__ import annotations

import asyncio
import contextlib
import re
from collections.abc import Iterator
from functools import partial
from typing import Any, NamedTuple

import pytest

from cbatch import SamplingParams
from cbatch.engine.client import EngineClient
from cbatch.outputs import Accepted, Output
from cbatch.server.admission import Limits
from cbatch.server.errors import OverloadedError, SlowReaderError
from cbatch.server.model import ServedModel
from cbatch.server.service import EngineService
from cbatch.server.stream import OutputStream, joined
from cbatch.text import ChatTemplate
from tests.engine.factories import SimFactory
from tests.engine.threads import EngineThread
from tests.server.http_client import (
    CHAT,
    Client,
    sample,
    serving,
    serving_service,
    wait_until,
)
from tests.toy_engine import TOKENIZER, make_engine

PROMPT = "def add(a, b):"
TEMPLATE = ChatTemplate("[{{ messages[0].content }}]", {}, "the test")
BODY = {"prompt": PROMPT, "max_tokens": 20, "seed": 5}
LONG = BODY | {"max_tokens": 400, "stream": True}
ENVOY = "x-envoy-expected-rq-timeout-ms"


class Scene(NamedTuple):
    client: Client
    service: EngineService


@contextlib.contextmanager
def one_slot(limits: Limits, step_s: float = 0.004) -> Iterator[Scene]:
    sizes = {"max_slots": 1, "num_blocks": 512}
    parts = SimFactory(vocab_size=TOKENIZER.vocab_size, step_s=step_s, sizes=sizes)()
    link = EngineClient(partial(EngineThread, parts.scheduler, parts.loop))
    service = EngineService(link, TOKENIZER, limits=limits)
    with serving_service(service, TOKENIZER, chat_template=TEMPLATE) as client:
        yield Scene(client, service)


def test_a_full_queue_says_when_to_come_back(monkeypatch: pytest.MonkeyPatch) -> None:
    async def full(*_: Any, **__: Any) -> None:
        raise OverloadedError("64 requests wait", retry_after_s=3)

    monkeypatch.setattr(EngineService, "submit", full)
    with serving(make_engine()) as client:
        for stream in (False, True):
            status, answer, headers = client.post(BODY | {"stream": stream})
            assert (status, headers["retry-after"]) == (503, "3")
            assert answer["error"]["type"] == "overloaded"


def test_what_the_queue_refuses_is_counted_by_why() -> None:
    """One request holds the slot, one waits; the bound on prompt tokens comes into play alone."""
    limits = Limits(max_queued_requests=2, max_queued_prompt_tokens=40)
    with one_slot(limits) as (client, service), client.open(LONG), client.begin(LONG):
        wait_until(lambda: service.queue.num_requests == 1)
        assert client.post(BODY | {"prompt": [1] * 40})[0] == 503
        with client.begin(LONG):
            wait_until(lambda: service.queue.num_requests == 2)
            messages = [{"role": "user", "content": PROMPT}]
            for path in ("/v1/completions", CHAT):
                status, answer, headers = client.post(BODY | {"messages": messages}, path)
                assert status == 503 and int(headers["retry-after"]) >= 1
                assert answer["error"]["type"] == "overloaded"
            assert sample(client, "cbatch:queued_requests") == 2
        for reason, count in (("queued_prompt_tokens", 1), ("queued_requests", 2)):
            assert sample(client, "vllm:admission_rejections_total", reason=reason) == count


def test_no_time_is_spent_on_a_prompt_before_it_has_its_place(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Neither template nor tokenizer sees what the queue refuses, chat or cut to its end."""
    made: list[int] = []  # prompt tokens that were reserved meanwhile
    limits = Limits(max_queued_prompt_tokens=100)
    with one_slot(limits) as (client, service):
        encode = ServedModel.encode

        def watched(*args: Any, **options: Any) -> tuple[int, ...]:
            made.append(service.queue.num_prompt_tokens)
            return encode(*args, **options)

        monkeypatch.setattr(ServedModel, "encode", watched)
        chat = {"messages": [{"role": "user", "content": "a" * 200}], "max_tokens": 1}
        cut = {"prompt": "a" * 200, "truncate_prompt_tokens": 5, "max_tokens": 1}
        with client.open(LONG), client.begin(LONG):
            wait_until(lambda: service.queue.num_requests == 1)
            for path, body in ((CHAT, chat), ("/v1/completions", cut)):
                assert client.post(body, path)[0] == 503
        assert not made
        for path, body in ((CHAT, chat), ("/v1/completions", cut)):
            assert client.post(body, path)[0] == 200
        assert len(made) == 2 and min(made) >= 200, "made, but not in a place of its own"
        wait_until(lambda: service.queue.num_prompt_tokens == 0)


@pytest.mark.parametrize("stream", [False, True])
def test_who_gets_no_slot_in_time_is_told_by_a_status(stream: bool) -> None:
    with one_slot(Limits(queue_timeout_s=0.2)) as (client, _), client.open(LONG) as first:
        for path, more in (("/v1/completions", {}), (CHAT, chat_of(PROMPT))):
            status, answer, headers = client.post(BODY | more | {"stream": stream}, path)
            assert status == 503 and int(headers["retry-after"]) >= 1
            assert answer["error"]["type"] == "overloaded"
        assert first.read().endswith(b"data: [DONE]\n\n"), "who has a slot is left alone"


@pytest.mark.parametrize("stream", [False, True])
def test_the_time_that_a_call_sets_itself(stream: bool) -> None:
    """408 where nothing has come by then; an event where something has. The server's own is 504."""
    limits = Limits(timeout_s=30)
    body = BODY | {"stream": stream}
    # Steps so long that the first call has the slot until it leaves, on a busy machine too.
    with one_slot(limits, step_s=0.02) as (client, service), client.open(LONG) as first:
        wait_until(lambda: service.queue.num_requests == 0)
        status, answer, _ = client.post(body | {"timeout": 0.2})
        assert (status, answer["error"]["type"]) == (408, "timeout")
        assert "0.2 s is over" in answer["error"]["message"]
        with client.open(body, headers={ENVOY: "150"}) as response:
            assert response.status == 408 and b"0.15 s is over" in response.read()
        for wrong in ({"timeout": 0}, {"timeout": "1"}, {"timeout": 1e9}):
            status, answer, _ = client.post(body | wrong)
            assert (status, answer["error"]["param"]) == (400, "timeout")
        with client.open(body, headers={ENVOY: "soon"}) as response:
            assert response.status == 400 and ENVOY in response.read().decode()
        first.close()
        wait_until(lambda: not service.num_requests)
        with client.open(LONG | {"timeout": 1.0}, headers={ENVOY: "0"}) as response:
            told = response.read().decode()
            assert response.status == 200 and told.endswith("data: [DONE]\n\n")
            assert '"type":"timeout"' in told.split("\n\n")[-3] and told.count("data: ") > 3
        wait_until(lambda: not service.num_requests)


def test_the_servers_own_time() -> None:
    with one_slot(Limits(timeout_s=0.3)) as (client, _):
        status, answer, _ = client.post(LONG | {"stream": False, "timeout": 9})
        assert (status, answer["error"]["type"]) == (504, "timeout")


def test_a_stopping_server_says_when_its_successor_may_be_there() -> None:
    with one_slot(Limits()) as (client, service), client.open(LONG) as first:
        draining = asyncio.run_coroutine_threadsafe(service.drain(7), service_loop(service))
        wait_until(lambda: not service.ready)
        for stream in (False, True):
            status, answer, headers = client.post(BODY | {"stream": stream})
            assert status == 503 and "stopping" in answer["error"]["message"]
            assert 1 <= int(headers["retry-after"]) <= 7
        first.close()
        draining.result(timeout=30)


def service_loop(service: EngineService) -> asyncio.AbstractEventLoop:
    task = service._client._task
    assert task is not None
    return task.get_loop()


def chat_of(text: str) -> dict[str, Any]:
    return {"messages": [{"role": "user", "content": text}]}


def test_the_prompts_of_a_call_share_what_may_be_left_unread() -> None:
    async def scene(num_prompts: int) -> list[int]:
        """Of each prompt, the unread tokens that ended it; nothing was read."""
        sizes = {"max_model_tokens": 2048, "num_blocks": 4096}
        parts = SimFactory(vocab_size=TOKENIZER.vocab_size, sizes=sizes)()
        link = EngineClient(partial(EngineThread, parts.scheduler, parts.loop))
        service = EngineService(link, TOKENIZER, limits=Limits(max_unread_tokens=300))
        await service.start()
        params = SamplingParams(max_tokens=1500, seed=1)
        streams = [
            await service.submit(PROMPT, params, request_id=str(at), num_prompts=num_prompts)
            for at in range(num_prompts)
        ]
        while service.num_requests:
            await asyncio.sleep(0)
        unread = []
        for stream in streams:
            assert not stream.unread_tokens, "what was unread is dropped"
            with pytest.raises(SlowReaderError) as raised:
                [output async for output in stream]
            unread += map(int, re.findall(r"left (\d+) tokens", str(raised.value)))
        await service.stop()
        return unread

    for num_prompts, share in ((1, 300), (3, 100)):
        unread = asyncio.run(scene(num_prompts))
        assert len(unread) == num_prompts
        assert all(share < each <= share + 4 for each in unread), unread


def test_joined_streams_keep_what_is_unread_where_it_is_bounded() -> None:
    """A reader that stands still takes nothing from the streams that it joins."""

    async def scene() -> tuple[list[int], list[int]]:
        streams = [OutputStream(Accepted("r", (1,), 1, 2), lambda: None) for _ in range(2)]
        for stream in streams:
            stream.put(Output("r", 0, "", (1, 2)))
        reading = joined(streams)
        first = await anext(reading)
        for stream in streams:
            stream.put(Output("r", 1, "", (3, 4, 5)))
        await asyncio.sleep(0.01)
        unread = [stream.unread_tokens for stream in streams]
        streams[1].fail(SlowReaderError("on purpose"))
        rest = await anext(reading)
        with pytest.raises(SlowReaderError):
            await anext(reading)
        return unread, [at for at, _ in first + rest]

    assert asyncio.run(scene()) == ([3, 3], [0, 1, 0, 1])


def test_a_step_that_brings_much_at_once_is_no_slow_reader() -> None:
    async def scene() -> int:
        sizes = {"max_slots": 32, "num_blocks": 4096}
        parts = SimFactory(vocab_size=TOKENIZER.vocab_size, sizes=sizes, lookahead="fixed:8")()
        link = EngineClient(partial(EngineThread, parts.scheduler, parts.loop))
        service = EngineService(link, TOKENIZER, limits=Limits(max_unread_tokens=8))
        await service.start()
        params = SamplingParams(max_tokens=40, n=32, seed=1)
        stream = await service.submit(PROMPT, params, request_id="r")
        tokens = sum([len(output.token_ids) async for output in stream])
        await service.stop()
        return tokens

    assert asyncio.run(scene()) == 32 * 40
