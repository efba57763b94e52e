"""An engine process of two ranks: if one of them dies or hangs, the engine is restarted, and its
requests continue from their transcripts."""

from __future__ import annotations

import asyncio
import os
import signal
from pathlib import Path

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
                max_tokens=60 - i,
                temperature=0.7 * (i % 2),
                ignore_eos=True,
                verification="coupled",
            ),
        )
        for i in range(6)
    ]


def test_requests_survive_a_lost_rank() -> None:
    """Rank 1 is killed while the engine is idle, and later stopped in the middle of streams. Tokens
    equal those of an undisturbed engine."""

    async def scene() -> None:
        async with running(FACTORY, hang_timeout_s=10.0) as client:
            undisturbed = watch(client, "plain")
            await all_over(undisturbed)
            ends = [e.ending.finish_reason for e in undisturbed if e.ending]
            assert ends == [FinishReason.LENGTH] * 6 and client.num_starts == 1
            os.kill(rank_1_of(client), signal.SIGKILL)
            while client.num_starts < 2 or not client.up:
                await asyncio.sleep(0.01)
            watched = watch(client, "struck")
            while not all(len(each.tokens) > 4 for each in watched):
                await asyncio.sleep(0.001)
            pid = rank_1_of(client)
            os.kill(pid, signal.SIGSTOP)
            assert all(each.streaming for each in watched)
            await all_over(watched)
            assert all(each.last_start > 2 for each in watched)
            assert not Path(f"/proc/{pid}").exists()
            assert [each.tokens for each in watched] == [each.tokens for each in undisturbed]

    asyncio.run(scene())
