"""The service over an engine in a thread: deadlines, slow readers, draining, long prompts."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from functools import partial
from typing import Any

import pytest

from cbatch import FieldError, FinishReason, Output, SamplingParams
from cbatch.engine.client import EngineClient
from cbatch.server import calls
from cbatch.server.admission import Limits
from cbatch.server.errors import (
    DeadlineError,
    OverloadedError,
    ServiceDownError,
    ServiceError,
    SlowReaderError,
)
from cbatch.server.service import EngineService
from cbatch.server.stream import OutputStream
from tests.engine.factories import SimFactory
from tests.engine.threads import EngineThread
from tests.toy_engine import TOKENIZER

PROMPT = "def add(a, b):"
LONG = SamplingParams(max_tokens=450, seed=1)


@asynccontextmanager
async def service(
    limits: Limits | None = None, step_s: float = 0.002, **sizes: Any
) -> AsyncIterator[EngineService]:
    factory = SimFactory(vocab_size=TOKENIZER.vocab_size, step_s=step_s, sizes=sizes)
    parts = factory()
    client = EngineClient(partial(EngineThread, parts.scheduler, parts.loop))
    made = EngineService(client, TOKENIZER, limits=limits)
    await made.start()
    try:
        yield made
    finally:
        await made.stop()


async def read(stream: OutputStream) -> list[Output]:
    return [output async for output in stream]


async def idle(made: EngineService) -> None:
    while made.stats is None or made.stats.num_running or made.stats.num_waiting:
        await asyncio.sleep(0.002)
    assert made.num_requests == made.queue.num_requests == made.queue.num_prompt_tokens == 0


def test_a_deadline_ends_a_request_after_what_it_has_got() -> None:
    async def scene(timeout_s: float | None) -> None:
        async with service(Limits(timeout_s=0.3)) as made:
            stream = await made.submit(PROMPT, LONG, request_id="r", timeout_s=timeout_s)
            outputs = []
            with pytest.raises(DeadlineError, match=f"{min(timeout_s or 9, 0.3):g} s is over"):
                async for output in stream:
                    outputs.append(output)
            assert outputs and outputs[-1].finished is None
            await idle(made)

    asyncio.run(scene(None))
    asyncio.run(scene(0.2))


def test_who_waits_too_long_for_a_slot_is_refused() -> None:
    async def scene() -> None:
        async with service(Limits(queue_timeout_s=0.3), max_slots=1) as made:
            first = await made.submit(PROMPT, LONG, request_id="first")
            waits = await made.submit(PROMPT, LONG, request_id="waits")
            with pytest.raises(OverloadedError, match="no slot became free") as caught:
                await read(waits)
            assert caught.value.retry_after_s >= 1
            assert made.queue.rejections == {"queue_timeout": 1}
            assert (await read(first))[-1].finished is not None, "a slot has no such deadline"

    asyncio.run(scene())


def test_a_slow_reader_holds_no_memory_and_no_slot() -> None:
    async def scene() -> None:
        async with service(Limits(max_unread_tokens=40)) as made:
            stream = await made.submit(PROMPT, LONG, request_id="slow")
            quick = await made.submit(PROMPT, LONG, request_id="quick")
            outputs = await read(quick)
            assert outputs[-1].finished is not None
            await idle(made)
            assert stream.unread_tokens == 0
            with pytest.raises(SlowReaderError, match="tokens unread"):
                await read(stream)

    asyncio.run(scene())


def test_draining_lets_the_accepted_finish_and_accepts_no_more() -> None:
    async def scene() -> None:
        async with service() as made:
            assert made.ready
            stream = await made.submit(PROMPT, SamplingParams(max_tokens=40), request_id="r")
            draining = asyncio.create_task(made.drain(30))
            await asyncio.sleep(0)
            assert made.running and not made.ready
            with pytest.raises(ServiceDownError, match="stopping"):
                await made.submit(PROMPT, LONG, request_id="late")
            await draining
            outputs = await read(stream)
            assert outputs[-1].finished is not None
            assert outputs[-1].finished.finish_reason is FinishReason.LENGTH

    asyncio.run(scene())


def test_draining_waits_for_a_prompt_that_is_being_tokenised() -> None:
    async def scene() -> None:
        async with service(max_model_tokens=8000, num_blocks=4000) as made:
            prompt = "ab " * 5000
            params = SamplingParams(max_tokens=3)
            submitting = asyncio.create_task(made.submit(prompt[:4000], params, request_id="r"))
            beside = asyncio.create_task(made.submit(prompt, params, request_id="too long"))
            await asyncio.sleep(0)
            await made.drain(30)
            assert (await read(await submitting))[-1].finished is not None
            with pytest.raises(FieldError, match="prompt: .* tokens do not fit"):
                await beside
            await idle(made)

    asyncio.run(scene())


def test_a_refused_request_gives_its_place_back() -> None:
    async def scene() -> None:
        async with service() as made:
            for prompt, params in (([10**6], LONG), ("", LONG), ([1] * 1000, LONG)):
                with pytest.raises(FieldError):
                    await made.submit(prompt, params, request_id="r")
            await made.submit(PROMPT, LONG, request_id="r")
            with pytest.raises(FieldError, match="request_id"):
                await made.submit(PROMPT, LONG, request_id="r")
            assert made.num_requests == 1 and made.queue.num_requests <= 1

    asyncio.run(scene())


def test_a_text_that_cannot_be_decoded_ends_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    class Broken(calls.LiveChoice):
        def extend(self, *args: Any) -> Output:
            if self.group_id == "broken":
                raise RuntimeError("on purpose")
            return super().extend(*args)

    monkeypatch.setattr(calls, "LiveChoice", Broken)

    async def scene() -> None:
        async with service() as made:
            broken = await made.submit(PROMPT, LONG, request_id="broken")
            fine = await made.submit(PROMPT, LONG, request_id="fine")
            with pytest.raises(ServiceError, match="on purpose"):
                await read(broken)
            assert (await read(fine))[-1].finished is not None

    asyncio.run(scene())


def test_several_tokens_of_a_step_are_one_output() -> None:
    async def scene() -> None:
        async with service() as made:
            outputs = await read(await made.submit(PROMPT, LONG, request_id="r"))
            assert max(len(output.token_ids) for output in outputs) > 1
            assert sum(len(output.token_ids) for output in outputs) == 450
            assert outputs[-1].token_ids and outputs[-1].finished, "the end comes with its tokens"

    asyncio.run(scene())
