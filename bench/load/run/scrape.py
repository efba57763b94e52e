"""Reader of a server's /metrics, by the metric names of vLLM, which cbatch and llama.cpp share."""

from __future__ import annotations

import asyncio
import time
from contextlib import suppress
from typing import NamedTuple

from prometheus_client.parser import text_string_to_metric_families

from bench.load.client.call import CallError
from bench.load.client.http import HttpClient
from bench.load.run.report import ServerCounters, ServerSample

SCRAPE_EVERY_S = 1.0  # interval; a server may send no tokens while it writes the page.
PREFIXES = ("vllm", "cbatch", "llamacpp")  # if several prefixes have a metric, the first counts.
Key = str | int  # name of a field in a report, or a draft position
COUNTERS = {
    "prompt_tokens_total": "prompt_tokens",
    "generation_tokens_total": "output_tokens",
    "spec_decode_num_drafts_total": "drafts",
    "spec_decode_num_draft_tokens_total": "drafted_tokens",
    "spec_decode_num_accepted_tokens_total": "accepted_tokens",
    "num_preemptions_total": "preemptions",
    "prefix_cache_hits_total": "prefix_hit_tokens",
    "steps_total": "steps",
}
_GAUGES = {
    "num_requests_running": "running",
    "num_requests_waiting": "waiting",
    "kv_cache_usage_perc": "kv_share",
}
_POSITIONS = "spec_decode_num_accepted_tokens_per_pos_total"
_FIELDS = COUNTERS | _GAUGES


class Scrape(NamedTuple):
    at_s: float  # on the monotonic clock
    values: dict[Key, float]


async def scrape(client: HttpClient) -> Scrape | None:
    """Return the server's metrics, or None if it has none."""
    try:
        status, page = await client.request("GET", "/metrics")
        return Scrape(time.monotonic(), parse(page.decode())) if status == 200 else None
    except (CallError, ValueError):
        return None


def parse(page: str) -> dict[Key, float]:
    """Return the metrics of a page, summed over all labels except the draft position; `kv_share` is
    a maximum instead. Raises ValueError if the page is not in Prometheus' format."""
    by_prefix: dict[str, dict[Key, float]] = {prefix: {} for prefix in PREFIXES}
    for family in text_string_to_metric_families(page):
        for sample in family.samples:
            prefix, _, name = sample.name.partition(":")
            position = sample.labels.get("position") if name == _POSITIONS else None
            key = _FIELDS.get(name) if position is None else int(position)
            if prefix not in PREFIXES or key is None:
                continue
            total = by_prefix[prefix].get(key, 0.0)
            is_share = key == "kv_share"
            by_prefix[prefix][key] = max(total, sample.value) if is_share else total + sample.value
    merged: dict[Key, float] = {}
    for prefix in reversed(PREFIXES):
        merged |= by_prefix[prefix]
    return merged


def difference(before: Scrape | None, after: Scrape | None) -> ServerCounters | None:
    """Return the growth of counters between two scrapes. None if a scrape is missing, or if a
    counter decreased because the server or its engine was restarted."""
    if before is None or after is None or not after.values:
        return None
    counters = {key: n for key, n in after.values.items() if key not in _GAUGES.values()}
    grown = {key: round(n - before.values.get(key, 0.0)) for key, n in counters.items()}
    if min(grown.values(), default=0) < 0:
        return None
    counts = {field: grown.get(field) for field in COUNTERS.values()}
    positions = sorted(key for key in grown if isinstance(key, int))
    return ServerCounters.of(counts, (grown[position] for position in positions))


def samples_of(scrapes: list[Scrape], start_s: float) -> tuple[ServerSample, ...]:
    """Return the gauges of each scrape, and the growth of counters since the first. `start_s` is
    the start of the run on the monotonic clock."""

    def sample(at_s: float, values: dict[Key, float]) -> ServerSample:
        fields: dict[str, float | None] = {}
        for name in ServerSample.__struct_fields__[1:]:  # without `at_s`
            fields[name] = values.get(name)
            if name in COUNTERS.values() and name in values:
                fields[name] = round(values[name] - scrapes[0].values.get(name, 0.0))
        return ServerSample(at_s=at_s - start_s, **fields)  # type: ignore[arg-type]

    return tuple(sample(*each) for each in scrapes)


class Watcher:
    """Context manager that scrapes a server's /metrics at its start, every `SCRAPE_EVERY_S`, and at
    its end. `growth` is the growth of counters from the start to the end."""

    def __init__(self, client: HttpClient) -> None:
        self._client = client
        self.scrapes: list[Scrape] = []
        self.growth: ServerCounters | None = None

    async def __aenter__(self) -> Watcher:
        first = await scrape(self._client)
        self._task = asyncio.create_task(self._watch(first))
        return self

    async def __aexit__(self, *_: object) -> None:
        self._task.cancel()
        with suppress(asyncio.CancelledError):
            await self._task
        if self.scrapes:
            self.growth = difference(self.scrapes[0], await scrape(self._client))

    async def _watch(self, latest: Scrape | None) -> None:
        while latest is not None:
            self.scrapes.append(latest)
            await asyncio.sleep(SCRAPE_EVERY_S)
            latest = await scrape(self._client)
