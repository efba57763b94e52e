"""The demo pair with 28 streams and with 1, through the public `LLM`: tokens per second with and
without speculation. A small model waits for the host, which kernel times do not show."""

from __future__ import annotations

import functools
import statistics
import time
from collections.abc import Iterator
from typing import Any

from bench.gpu.cells import Cell, Row
from bench.gpu.environment import Bench
from cbatch import LLM, SamplingParams
from cbatch.demo import demo_paths, demo_prompts

_LOOKAHEADS = ("off", "adaptive", "fixed:3")
_STREAMS, _TOKENS, _RUNS = 28, 96, 5
_KV_BYTES = 1 << 30


def cells(bench: Bench) -> Iterator[Cell]:
    for lookahead in _LOOKAHEADS:
        labels: Row = {"model": "demo pair", "lookahead": lookahead, "implementation": "cbatch"}
        pair = _Pair(bench, lookahead)
        yield Cell(f"{lookahead}, start", labels | {"what": "start"}, pair.start, timed=False)
        for streams in (_STREAMS, 1):
            stream_labels = labels | {"what": "streams", "batch": streams}
            yield Cell(
                f"{lookahead}, {streams}", stream_labels, functools.partial(pair.measure, streams)
            )


class _Pair:
    def __init__(self, bench: Bench, lookahead: str) -> None:
        self._bench, self._lookahead = bench, lookahead
        self._llm: LLM | None = None

    def start(self) -> Row:
        if not self._bench.full:
            return {"status": "unmeasured"}
        began_s = time.perf_counter()
        options: dict[str, Any] = {"device": "cuda", "lookahead": self._lookahead}
        self._llm = LLM(*demo_paths(), seed=1, kv_cache_memory_bytes=_KV_BYTES, **options)
        return {"seconds": time.perf_counter() - began_s}

    def measure(self, streams: int) -> Row:
        """Return the median speed of several runs, after one warm-up run."""
        if self._llm is None:
            return {"tokens_per_s": None, "status": "unmeasured"}
        prompts = (demo_prompts() * _STREAMS)[:streams]
        params = SamplingParams(max_tokens=_TOKENS, temperature=0, ignore_eos=True)
        rates = []
        for _ in range(1 + _RUNS):
            began_s = time.perf_counter()
            completions = self._llm.generate(prompts, params)
            seconds = time.perf_counter() - began_s
            rates.append(
                sum(len(c.token_ids) for each in completions for c in each.choices) / seconds
            )
        low, *_, high = sorted(rates[1:])
        return {
            "tokens_per_s": statistics.median(rates[1:]),
            "tokens_per_s_low": low,
            "tokens_per_s_high": high,
        }
