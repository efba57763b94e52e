"""What a watcher of the live page costs the engine: steps a second with and without one, window by
window in one run of the demo pair: `python -m bench.watching`.

The watcher is the server's own feed, read by a task beside the client of the engine process; the
sockets to a browser are left out. Beside it: the processor time of a note (every step) and of a
summary (ten a second) in the engine process, on a scheduler with as many requests running.
"""

from __future__ import annotations

import argparse
import asyncio
import itertools
import time
from functools import partial
from typing import Any

import numpy as np

from bench.report import print_report
from bench.scheduler import build_result, steady_state
from cbatch import EngineOptions, SamplingParams
from cbatch.assembly import EngineFactory
from cbatch.demo import demo_paths, demo_prompts
from cbatch.engine.client import EngineClient
from cbatch.engine.lens import Lens
from cbatch.engine.process import EngineProcess
from cbatch.engine.wire import EngineStats, Sight, Stepped, encode
from cbatch.server.live import LiveFeed
from cbatch.server.metrics import Metrics
from cbatch.server.model import ServedModel
from cbatch.server.service import EngineService
from cbatch.text import load_tokenizer

_RESAMPLES = 2000


def processor_us(running: int) -> tuple[float, float]:
    """Of a note and of a summary: medians."""
    scheduler, rng = steady_state(running, 4, prefix_cache=True)
    lens = Lens(scheduler)
    stats = EngineStats(running, 0, 1, 0, 0, 0.0, 0.0, 0.0, scheduler.stats, None)
    notes_s, summaries_s = [], []
    for number in range(400):
        plan = scheduler.plan(0.0)
        assert plan is not None
        result = build_result(plan, rng)
        commit = scheduler.commit(result, 0.0)
        begin_s = time.thread_time()
        lens.note(plan, result, commit)
        notes_s.append(time.thread_time() - begin_s)
        if number % 4 == 3:
            begin_s = time.thread_time()
            encode(Sight(lens.rows(), *lens.take_steps(), lens.blocks(), stats))
            summaries_s.append(time.thread_time() - begin_s)
    return 1e6 * float(np.median(notes_s)), 1e6 * float(np.median(summaries_s))


class Steps:
    """Counted as they come, but for those in the moments after a change."""

    SETTLE_S = 0.15

    def __init__(self) -> None:
        self.count, self.spent_s = 0, 0.0
        self._last_s: float | None = None

    def note(self, _: Stepped) -> None:
        now_s = time.monotonic()
        if self._last_s is not None:
            self.count += 1
            self.spent_s += now_s - self._last_s
        self._last_s = now_s

    async def window(self, seconds: float) -> float:
        """Seconds a step, over so long."""
        await asyncio.sleep(self.SETTLE_S)
        count, spent_s = self.count, self.spent_s
        await asyncio.sleep(seconds)
        return (self.spent_s - spent_s) / max(1, self.count - count)


async def keep_running(service: EngineService, number: int) -> None:
    """One request after the other, in one slot."""
    prompts = demo_prompts()
    for turn in itertools.count(number):
        params = SamplingParams(max_tokens=700, temperature=0.0, ignore_eos=True)
        prompt = prompts[turn % len(prompts)]
        async with await service.submit(prompt, params, request_id=f"b-{number}-{turn}") as stream:
            async for _ in stream:
                pass


async def watch(feed: LiveFeed, sizes: list[int]) -> None:
    async for event in feed.events():
        sizes.append(len(event))


async def measure(batch: int, pairs: int, window_s: float, lookahead: str) -> dict[str, Any]:
    """One row of the report."""
    target, draft = demo_paths()
    options = EngineOptions(lookahead=lookahead, max_slots=batch)
    client = EngineClient(partial(EngineProcess, EngineFactory(target, draft, options)))
    steps = Steps()
    client.on_step = steps.note
    tokenizer = load_tokenizer(target)
    service = EngineService(client, tokenizer)
    await service.start()
    model = ServedModel("demo", max_model_tokens=1024, created_s=0, tokenizer=tokenizer)
    feed = LiveFeed(service, model, Metrics("demo", service))
    load = [asyncio.create_task(keep_running(service, number)) for number in range(batch)]
    await steps.window(3.0)
    ratios, plain_s, sizes = [], [], list[int]()
    for pair in range(pairs):
        found: dict[bool, float] = {}
        for watched in (False, True) if pair % 2 else (True, False):
            watcher = asyncio.create_task(watch(feed, sizes)) if watched else None
            found[watched] = await steps.window(window_s)
            if watcher is not None:
                watcher.cancel()
                await asyncio.wait({watcher})
        ratios.append(found[True] / found[False])
        plain_s.append(found[False])
    for each in load:
        each.cancel()
    await asyncio.wait(load)
    await service.stop()
    note_us, summary_us = processor_us(batch)
    rng = np.random.default_rng(0)
    medians = np.median(rng.choice(ratios, (_RESAMPLES, pairs)), axis=1)
    return {
        "running": batch,
        "lookahead": lookahead,
        "pairs": pairs,
        "step_ms": round(1e3 * float(np.median(plain_s)), 2),
        "watched_over_not": round(float(np.median(ratios)), 4),
        "ci95": [round(float(edge), 4) for edge in np.quantile(medians, [0.025, 0.975])],
        "note_us": round(note_us, 1),
        "summary_us": round(summary_us, 1),
        "frames_a_s": round(len(sizes) / pairs / (window_s + Steps.SETTLE_S), 1),
        "frame_bytes": int(np.mean(sizes)),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--batch", type=int, nargs="+", default=[1, 32])
    parser.add_argument("--pairs", type=int, default=30)
    parser.add_argument("--window", type=float, default=0.6, help="seconds")
    parser.add_argument("--lookahead", default="off")
    args = parser.parse_args()
    rows = [
        asyncio.run(measure(batch, args.pairs, args.window, args.lookahead)) for batch in args.batch
    ]
    notes = ("median over pairs of windows in alternating order; the interval is of that median",)
    print_report("a watcher of the live page", rows, notes=notes)


if __name__ == "__main__":
    main()
