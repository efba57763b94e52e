"""An engine process of two ranks: if one of them dies the engine is restarted, and its requests
continue from their transcripts."""

from __future__ import annotations

import asyncio
import os
import signal
from pathlib import Path

import pytest

from cbatch.core.request.request import FinishReason
from cbatch.demo import demo_paths
from cbatch.engine.options import EngineOptions
from cbatch.process.client import EngineClient
from cbatch.process.factory import EngineFactory
from tests.helpers import make_request
from tests.process.watching import Watched, all_over, running

FACTORY = EngineFactory(
    *demo_paths(),
    EngineOptions(tensor_parallel_size=2, threads=1, lookahead="fixed:3", dtype="float32"),
)


def rank_1_of(client: EngineClient) -> int:
    """Return the process id of rank 1; the engine's other children are not ranks."""
    children = Path(f"/proc/{client.pid}/task/{client.pid}/children").read_text().split()
    (rank,) = [
        int(pid)
        for pid in children
        if b"cbatch.engine.ranks.worker" in Path(f"/proc/{pid}/cmdline").read_bytes()
    ]
    return rank


def watch(client: EngineClient, name: str) -> list[Watched]:
    return [
        Watched(
            client,
            make_request(
                f"{name}{i}",
                [5 + i, 17, 900 + 3 * i] * (1 + i),
                seed=i,
                max_tokens=90 - i,
                temperature=0.7 * (i % 2),
                ignore_eos=True,
                verification="coupled",
            ),
        )
        for i in range(8)
    ]


async def strike(client: EngineClient, name: str, number: signal.Signals) -> list[list[int]]:
    """Send a signal to rank 1 while streams run, and return the tokens of the streams."""
    watched, start = watch(client, name), client.num_starts
    while not all(len(each.tokens) > 4 for each in watched):
        await asyncio.sleep(0.001)
    pid = rank_1_of(client)
    os.kill(pid, number)
    assert all(each.streaming for each in watched)
    await all_over(watched)
    assert client.num_starts == start + 1
    assert all(each.last_start == start + 1 for each in watched)
    assert not Path(f"/proc/{pid}").exists()
    return [each.tokens for each in watched]


def served(*strikes: signal.Signals) -> None:
    """Check that the tokens equal those of an undisturbed engine, whatever happens to a rank."""

    async def scene() -> None:
        async with running(FACTORY, hang_timeout_s=10.0) as client:
            undisturbed = watch(client, "plain")
            await all_over(undisturbed)
            assert client.num_starts == 1
            ends = [e.ending.finish_reason for e in undisturbed if e.ending]
            assert ends == [FinishReason.LENGTH] * 8
            expected = [each.tokens for each in undisturbed]
            assert [len(tokens) for tokens in expected] == [90 - i for i in range(8)]
            for number in strikes:
                assert await strike(client, number.name, number) == expected

    asyncio.run(scene())


def test_requests_survive_a_killed_rank() -> None:
    served(signal.SIGKILL)


@pytest.mark.statistics
@pytest.mark.slow
def test_requests_survive_a_hanging_rank() -> None:
    served(signal.SIGSTOP, signal.SIGKILL, signal.SIGSTOP)


@pytest.mark.statistics
@pytest.mark.slow
def test_an_idle_engine_ends_with_its_rank() -> None:
    async def scene() -> None:
        async with running(FACTORY) as client:
            first = client.pid
            os.kill(rank_1_of(client), signal.SIGKILL)
            while client.num_starts < 2 or not client.up:
                await asyncio.sleep(0.01)
            assert client.pid != first
            watched = watch(client, "after")
            await all_over(watched)
            assert all(each.last_start == 2 for each in watched)

    asyncio.run(scene())
