"""Reader of a server's /metrics, by the metric names of vLLM, which cbatch and llama.cpp share."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Mapping
from contextlib import suppress
from typing import Any, NamedTuple

from prometheus_client.parser import text_string_to_metric_families

from bench.load.client.call import CallError
from bench.load.client.http import HttpClient
from bench.load.run.report import ServerCounters, ServerSample

SCRAPE_EVERY_S = 1.0  # interval; a server may send no tokens while it writes the page.
PREFIXES = ("vllm", "cbatch", "llamacpp")  # if several prefixes have a metric, the first counts.
Counters = dict[tuple[str, int | None], float]  # by (name without prefix, draft position)
_POSITIONS = "spec_decode_num_accepted_tokens_per_pos_total"
COUNTER_NAMES = {
    "prompt_tokens": "prompt_tokens_total",
    "output_tokens": "generation_tokens_total",
    "drafts": "spec_decode_num_drafts_total",
    "drafted_tokens": "spec_decode_num_draft_tokens_total",
    "accepted_tokens": "spec_decode_num_accepted_tokens_total",
    "preemptions": "num_preemptions_total",
    "prefix_hit_tokens": "prefix_cache_hits_total",
    "steps": "steps_total",
}
SAMPLED = [name for name in COUNTER_NAMES if name in ServerSample.__struct_fields__]
_GAUGES = {
    "running": "num_requests_running",
    "waiting": "num_requests_waiting",
    "kv_share": "kv_cache_usage_perc",
}


async def scrape(client: HttpClient) -> Counters | None:
    """Return the server's metrics, or None if it has none."""
    try:
        status, page = await client.request("GET", "/metrics")
        return parse(page.decode()) if status == 200 else None
    except (CallError, ValueError):
        return None


def parse(page: str) -> Counters:
    """Return the metrics of a page, summed over all labels except the draft position; `kv_share` is
    a maximum instead. Raises ValueError if the page is not in Prometheus' format."""
    names = {*COUNTER_NAMES.values(), *_GAUGES.values(), _POSITIONS}
    by_prefix: dict[str, Counters] = {}
    for family in text_string_to_metric_families(page):
        for sample in family.samples:
            prefix, _, name = sample.name.partition(":")
            if prefix not in PREFIXES or name not in names:
                continue
            position = sample.labels.get("position") if name == _POSITIONS else None
            key = (name, None if position is None else int(position))
            counters = by_prefix.setdefault(prefix, {})
            total = counters.get(key, 0.0)
            is_share = name == _GAUGES["kv_share"]
            counters[key] = max(total, sample.value) if is_share else total + sample.value
    merged: Counters = {}
    for prefix in reversed(PREFIXES):
        merged |= by_prefix.get(prefix, {})
    return merged


def difference(
    before: Mapping[tuple[str, int | None], float] | None, after: Counters | None
) -> ServerCounters | None:
    """Return the growth of counters between two scrapes. None if a scrape is missing, or if a
    counter decreased because the server or its engine was restarted."""
    if not after or before is None:
        return None
    counters = [(key, n) for key, n in after.items() if key[0] not in _GAUGES.values()]
    grown = {key: round(n - before.get(key, 0.0)) for key, n in counters}
    if min(grown.values(), default=0) < 0:
        return None
    counts = {field: grown.get((name, None)) for field, name in COUNTER_NAMES.items()}
    positions = sorted(i for name, i in grown if name == _POSITIONS and i is not None)
    return ServerCounters.of(counts, (grown[_POSITIONS, i] for i in positions))


class Scrape(NamedTuple):
    at_s: float  # on the monotonic clock
    counters: Counters


class Watcher:
    """Context manager that scrapes a server's /metrics at its start, every `SCRAPE_EVERY_S`, and at
    its end."""

    def __init__(self, client: HttpClient) -> None:
        self._client = client
        self.scrapes: list[Scrape] = []
        self._last: Counters | None = None

    async def __aenter__(self) -> Watcher:
        await self._scrape()
        self._task = asyncio.create_task(self._watch())
        return self

    async def __aexit__(self, *_: object) -> None:
        self._task.cancel()
        with suppress(asyncio.CancelledError):
            await self._task
        self._last = await scrape(self._client)

    async def _scrape(self) -> bool:
        counters = await scrape(self._client)
        if counters is not None:
            self.scrapes.append(Scrape(time.monotonic(), counters))
        return counters is not None

    async def _watch(self) -> None:
        while self.scrapes:
            await asyncio.sleep(SCRAPE_EVERY_S)
            if not await self._scrape():
                return

    def growth(self) -> ServerCounters | None:
        """Return the growth of counters from the start to the end."""
        return difference(self.scrapes[0].counters if self.scrapes else None, self._last)

    def samples(self, start_s: float) -> tuple[ServerSample, ...]:
        """Return the gauges of each scrape, and the growth of counters since the first. `start_s`
        is the start of the run on the monotonic clock."""
        first = self.scrapes[0].counters if self.scrapes else {}

        def sample(at_s: float, counters: Counters) -> ServerSample:
            fields: dict[str, Any] = {f: counters.get((n, None)) for f, n in _GAUGES.items()}
            for field in SAMPLED:
                key = (COUNTER_NAMES[field], None)
                known = key in counters
                fields[field] = round(counters[key] - first.get(key, 0.0)) if known else None
            return ServerSample(at_s=at_s - start_s, **fields)

        return tuple(sample(*each) for each in self.scrapes)
