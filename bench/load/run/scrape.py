"""What a server's /metrics counts, under the names of vLLM, which cbatch and llama.cpp share."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from typing import Any, NamedTuple

from prometheus_client.parser import text_string_to_metric_families

from bench.load.client.call import CallError
from bench.load.client.http import HttpClient
from bench.load.run.report import ServerCounters, ServerSample

LOOK_EVERY_S = 1.0  # a server that writes this page sends nothing meanwhile
PREFIXES = ("vllm", "cbatch", "llamacpp")  # the first that has a name is asked for it
Counters = dict[tuple[str, int | None], float]  # by name without prefix, and draft position
_POSITIONS = "spec_decode_num_accepted_tokens_per_pos_total"
NAMES = {
    "prompt_tokens": "prompt_tokens_total",
    "output_tokens": "generation_tokens_total",
    "drafts": "spec_decode_num_drafts_total",
    "drafted_tokens": "spec_decode_num_draft_tokens_total",
    "accepted_tokens": "spec_decode_num_accepted_tokens_total",
    "preemptions": "num_preemptions_total",
    "prefix_hit_tokens": "prefix_cache_hits_total",
    "steps": "steps_total",
}
SAMPLED = ("prompt_tokens", "output_tokens", "drafted_tokens", "accepted_tokens", "steps")
_GAUGES = {
    "running": "num_requests_running",
    "waiting": "num_requests_waiting",
    "kv_share": "kv_cache_usage_perc",
}


async def scrape(client: HttpClient) -> Counters | None:
    """None where there is no such page."""
    try:
        status, page = await client.get("/metrics")
        return parse(page.decode()) if status == 200 else None
    except (CallError, ValueError):
        return None


def parse(page: str) -> Counters:
    """Sums over labels but the position, and of a share the largest. Raises ValueError if it is not
    Prometheus' format."""
    wanted = {*NAMES.values(), *_GAUGES.values(), _POSITIONS}
    found: dict[str, Counters] = {}
    for family in text_string_to_metric_families(page):
        for sample in family.samples:
            prefix, _, name = sample.name.partition(":")
            if prefix not in PREFIXES or name not in wanted:
                continue
            position = sample.labels.get("position") if name == _POSITIONS else None
            key = (name, None if position is None else int(position))
            counters = found.setdefault(prefix, {})
            known = counters.get(key, 0.0)
            is_share = name == _GAUGES["kv_share"]
            counters[key] = max(known, sample.value) if is_share else known + sample.value
    merged: Counters = {}
    for prefix in reversed(PREFIXES):
        merged |= found.get(prefix, {})
    return merged


def difference(
    before: Mapping[tuple[str, int | None], float] | None, after: Counters | None
) -> ServerCounters | None:
    """What was added between two looks; None where one of them saw nothing, or where a counter went
    back (the server, or its engine, was started anew)."""
    if not after or before is None:
        return None
    grown = {
        key: round(value - before.get(key, 0.0))
        for key, value in after.items()
        if key[0] not in _GAUGES.values()
    }
    if min(grown.values(), default=0) < 0:
        return None
    counts = {field: grown.get((name, None)) for field, name in NAMES.items()}
    positions = sorted(at for name, at in grown if name == _POSITIONS and at is not None)
    return ServerCounters.of(counts, (grown[_POSITIONS, at] for at in positions))


class Scrape(NamedTuple):
    at_s: float  # on the monotonic clock
    counters: Counters


class Watcher:
    """Looks at a server's /metrics now and then, from entering to leaving."""

    def __init__(self, client: HttpClient) -> None:
        self._client = client
        self.looks: list[Scrape] = []

    async def __aenter__(self) -> Watcher:
        self._task = asyncio.create_task(self._watch())
        return self

    async def __aexit__(self, *_: object) -> None:
        self._task.cancel()
        with suppress(asyncio.CancelledError):
            await self._task

    async def _watch(self) -> None:
        while (found := await scrape(self._client)) is not None:
            self.looks.append(Scrape(time.monotonic(), found))
            await asyncio.sleep(LOOK_EVERY_S)


def samples(looks: Sequence[Scrape], start_s: float) -> tuple[ServerSample, ...]:
    """Counters as grown since the first look, `start_s` being the 0 of the run."""
    first = looks[0].counters if looks else {}

    def sample(at_s: float, counters: Counters) -> ServerSample:
        told: dict[str, Any] = {field: counters.get((n, None)) for field, n in _GAUGES.items()}
        for field in SAMPLED:
            key = (NAMES[field], None)
            grown = counters[key] - first.get(key, 0.0) if key in counters else None
            told[field] = None if grown is None else round(grown)
        return ServerSample(at_s=at_s - start_s, **told)

    return tuple(sample(*look) for look in looks)
