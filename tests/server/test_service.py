"""The service with an engine in a thread: deadlines, slow readers, draining, long prompts."""

from __future__ import annotations

import asyncio
import re
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from cbatch import FieldError, Output, SamplingParams
from cbatch.process.client import EngineClient
from cbatch.server.protocol.errors import SlowReaderError
from cbatch.server.protocol.fields import AnyPrompt, ApiRequest, RequestFields
from cbatch.server.serving import service as service_module
from cbatch.server.serving.admission_queue import Limits
from cbatch.server.serving.open_request import OpenRequest, merged_outputs
from cbatch.server.serving.service import EngineService
from tests.process.factories import SimFactory
from tests.process.threads import EngineThread
from tests.server.engines import PROMPT
from tests.server.http_client import open_request, served_model
from tests.server.raw_calls import run
from tests.toy_engine import TOKENIZER

LONG = SamplingParams(max_tokens=450, seed=1)
SHORT = SamplingParams(max_tokens=2)


@asynccontextmanager
async def service(
    limits: Limits | None = None, *, step_s: float = 0.002, lookahead: str = "fixed:3", **sizes: Any
) -> AsyncIterator[EngineService]:
    vocab_size = TOKENIZER.vocab_size
    core = SimFactory(vocab_size=vocab_size, step_s=step_s, lookahead=lookahead, sizes=sizes)()
    core.grammars = None
    made = EngineService(EngineClient(partial(EngineThread, core)), TOKENIZER, limits=limits)
    made.open(served_model(await made.start(), TOKENIZER))
    try:
        yield made
    finally:
        await made.stop()


async def submit(
    made: EngineService, prompt: AnyPrompt, params: SamplingParams, *, stream: bool = False
) -> OpenRequest:
    """Submit one prompt. Its final choices have the text unless it is streamed."""
    fields = RequestFields(stream=stream)
    return await anext(made.submit(ApiRequest(prompts=(prompt,), params=params, fields=fields)))


async def read(opened: OpenRequest) -> list[Output]:
    return [output async for output in opened]


def children() -> set[str]:
    """Return the process ids of this process's children."""
    tasks = Path("/proc/self/task").glob("*/children")
    return {pid for task in tasks for pid in task.read_text().split()}


async def idle(made: EngineService) -> None:
    while (stats := made.client.stats) is None or stats.num_running or stats.num_waiting:
        await asyncio.sleep(0.002)
    assert made.num_requests == made.queue.num_requests == made.queue.num_prompt_tokens == 0


# ---- the first steps and the last ----------------------------------------------------------------


def test_draining_waits_for_a_prompt_that_is_being_tokenized(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(service_module, "TOKENIZING_GRACE_S", 60)

    async def scene() -> None:
        async with service(max_model_len=8000, num_blocks=4000) as made:
            prompt = "ab " * 5000
            fits = asyncio.create_task(submit(made, prompt[:4000], SHORT))
            too_long = asyncio.create_task(submit(made, prompt, SHORT))
            await asyncio.sleep(0)
            await made.drain(30)
            assert (await read(await fits))[-1].finished is not None
            with pytest.raises(FieldError, match="prompt: .* resulted in 10000 tokens"):
                await too_long
            await idle(made)

    run(scene())


@pytest.mark.parametrize("steps", [True, False])
def test_a_warm_service_has_started_its_first_worker_and_run_its_first_steps(steps: bool) -> None:
    async def scene() -> None:
        before = children()
        async with service() as made:
            assert children() == before
            await made.warm(steps=steps)
            assert children() > before and not made.num_open
            await idle(made)
            assert made.client.stats is not None and bool(made.client.stats.totals.steps) == steps
            assert not made.queue.rejections

    run(scene())


def test_requests_wait_for_the_first_steps_and_the_service_says_that_it_is_not_ready() -> None:
    async def scene() -> None:
        async with service(Limits(max_queued_requests=1), step_s=0.02) as made:
            assert made.ready
            made.start_warming(steps=True)
            assert made.running and not made.ready
            opened = await submit(made, PROMPT, SHORT)
            assert made.ready, "the first steps are over"
            assert (await read(opened))[-1].finished is not None
            await idle(made)
            assert not made.queue.rejections

    run(scene())


@pytest.mark.parametrize("grace_s", [None, 30])
def test_a_stop_does_not_wait_for_the_first_steps(grace_s: float | None) -> None:
    async def scene() -> None:
        async with service(step_s=1.5) as made:
            made.start_warming(steps=True)
            while not made.num_requests:
                await asyncio.sleep(0.01)
            if grace_s is not None:
                begin_s = time.monotonic()
                await made.drain(grace_s)
                assert time.monotonic() - begin_s < grace_s
                assert made.stopping and not made.num_open

    run(scene())


def test_requests_are_served_after_first_steps_that_fail(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    async def scene() -> None:
        async with service() as made:
            made.start_warming(steps=True)
            opened = await submit(made, [1, 2, 3], SHORT)
            assert (await read(opened))[-1].finished is not None and made.ready

    async def killed(*_: Any) -> None:
        raise OSError("the fork server was killed")

    monkeypatch.setattr(service_module.WorkerPool, "warm", killed)
    run(scene())
    assert "requests are served without them" in caplog.text


# ---- outputs -------------------------------------------------------------------------------------


def test_a_rejected_request_frees_its_place() -> None:
    async def scene() -> None:
        async with service(step_s=0.02) as made:
            for prompt in ([10**6], "", [1] * 1000):
                with pytest.raises(FieldError):
                    await submit(made, prompt, LONG)
            await submit(made, PROMPT, LONG)
            assert made.num_requests == 1 and made.queue.num_requests <= 1

    run(scene())


@pytest.mark.parametrize(("num_prompts", "share"), [(1, 300), (3, 100)])
def test_the_prompts_of_a_call_share_the_limit_of_unread_tokens(
    num_prompts: int, share: int
) -> None:
    """No output is read: each prompt ends at its share of the limit, and its outputs are
    dropped."""

    async def scene() -> None:
        sizes = {"max_model_len": 2048, "num_blocks": 4096}
        params = SamplingParams(max_tokens=1500, seed=1)
        async with service(Limits(max_unread_tokens=300), step_s=0.0, **sizes) as made:
            request = ApiRequest(prompts=(PROMPT,) * num_prompts, params=params)
            streams = [opened async for opened in made.submit(request)]
            await idle(made)
            for stream in streams:
                assert not stream.unread_tokens
                with pytest.raises(SlowReaderError, match=r"left \d+ tokens") as raised:
                    await read(stream)
                (unread,) = map(int, re.findall(r"left (\d+) tokens", str(raised.value)))
                assert share < unread <= share + 4

    run(scene())


def test_unread_outputs_of_merged_streams_stay_bounded() -> None:
    """A paused reader takes no outputs from the streams, whose unread outputs are limited. A failed
    stream ends the others."""

    async def scene() -> tuple[list[int], list[int]]:
        streams = [open_request(n=2) for _ in range(2)]
        for stream in streams:
            stream.put(Output("r", 0, "", (1, 2)))
        reading = merged_outputs(streams)
        first = await anext(reading)
        for stream in streams:
            stream.put(Output("r", 1, "", (3, 4, 5)))
        await asyncio.sleep(0.01)
        unread = [stream.unread_tokens for stream in streams]
        streams[1].fail(SlowReaderError("on purpose"))
        rest = await anext(reading)
        with pytest.raises(SlowReaderError):
            await anext(reading)
        while len(asyncio.all_tasks()) > 1:
            await asyncio.sleep(0)
        return unread, [at for at, _ in first + rest]

    assert asyncio.run(scene()) == ([3, 3], [0, 1, 0, 1])


def test_a_step_with_many_tokens_does_not_make_a_client_slow() -> None:
    async def scene() -> None:
        limits, params = Limits(max_unread_tokens=8), SamplingParams(max_tokens=40, n=32, seed=1)
        async with service(limits, step_s=0.0, lookahead="fixed:8", num_blocks=4096) as made:
            outputs = await read(await submit(made, PROMPT, params))
            assert sum(len(output.token_ids) for output in outputs) == 32 * 40

    run(scene())
