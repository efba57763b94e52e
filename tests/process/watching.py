"""Requests of a client that record their results, and checks of the results."""

from __future__ import annotations

import asyncio
import os
import random
import signal
from collections.abc import AsyncIterator, Iterable, Sequence
from contextlib import asynccontextmanager
from functools import partial
from typing import Self

from cbatch.core.request.logprobs import TokenLogprobs
from cbatch.core.request.output import OutputRow
from cbatch.core.request.request import FinishReason, Request
from cbatch.process.client import EngineClient
from cbatch.process.crash_suspects import OpenSequence
from cbatch.process.server import EngineProcess, Factory
from tests.checking.language import reference_output
from tests.process.factories import SimFactory


class Watched(OpenSequence):
    """A sequence that records its events."""

    @classmethod
    def call(cls, client: EngineClient, choices: Sequence[Request]) -> list[Self]:
        """Add the requests of one call."""
        sequences = [cls(client, request, add=False) for request in choices]
        client.add(sequences)
        return sequences

    def __init__(self, client: EngineClient, request: Request, *, add: bool = True) -> None:
        self.request = request
        self.tokens: list[int] = []
        self.last_start = 0  # number of the engine start that sent the last tokens
        self.num_admissions = 0
        self.ending: OutputRow | None = None
        self.lost: str | None = None
        self.failed: Exception | None = None
        self.over = asyncio.Event()
        self._client = client
        if add:
            client.add([self])

    def on_admitted(self, ago_s: float, cached_tokens: int) -> None:
        self.num_admissions += 1

    def on_logprobs(self, entry: TokenLogprobs) -> None:
        pass

    def on_step(self, row: OutputRow) -> None:
        if row.tokens:
            self.last_start = self._client.num_starts
        if row.finish_reason is not None:
            assert self.ending is None, "it ended twice"
            self.ending = row
            self.over.set()

    def on_lost(self, message: str) -> None:
        self.lost = message
        self.over.set()

    def on_failed(self, error: Exception) -> None:
        self.failed = error
        self.over.set()

    @property
    def streaming(self) -> bool:
        return bool(self.tokens) and self.ending is None


@asynccontextmanager
async def running(factory: Factory, **timeouts: float) -> AsyncIterator[EngineClient]:
    """Run a client with an engine process."""
    client = EngineClient(partial(EngineProcess, factory), **timeouts)
    await client.start()
    try:
        yield client
    finally:
        await client.stop()


async def all_over(watched: Iterable[Watched], limit_s: float = 300) -> None:
    await asyncio.wait_for(asyncio.gather(*(each.over.wait() for each in watched)), limit_s)


def assert_undisturbed(watched: Iterable[Watched], factory: SimFactory) -> None:
    """Check that each sequence ended by itself, with the tokens that it gets when it runs alone."""
    config = factory.config()
    for request in watched:
        expected, reason = reference_output(
            request.request,
            vocab_size=config.vocab_size,
            eos_ids=config.eos_ids,
            max_model_len=config.max_sequence_tokens,
        )
        ending = request.ending
        assert ending is not None and ending.finish_reason is reason, ending
        assert request.tokens == expected, request.request.request_id
        assert request.num_admissions == 1


async def kill_mid_stream(client: EngineClient, watched: list[Watched], rng: random.Random) -> int:
    """Kill the engine after some more tokens, while most open requests stream, and wait until it
    starts again. Return the number of requests that streamed."""
    before = sum(len(each.tokens) for each in watched)
    more = rng.randrange(1, 8 * len(watched))
    cut = 0
    while sum(len(each.tokens) for each in watched) < before + more or 2 * cut <= client.num_open:
        assert client.num_open, "the streams were too short"
        await asyncio.sleep(0.001)
        cut = sum(each.streaming for each in watched)
    await kill_and_restart(client)
    return cut


async def kill_and_restart(client: EngineClient) -> None:
    """Kill the engine, and wait until it starts again: until then its tokens may still arrive."""
    starts = client.num_starts
    assert client.pid is not None
    os.kill(client.pid, signal.SIGKILL)
    while client.num_starts == starts:
        await asyncio.sleep(0.001)


def assert_ended_by(watched: Watched, reason: FinishReason, words: str) -> None:
    ending = watched.ending
    assert ending is not None and ending.finish_reason is reason and words in (ending.message or "")
