"""Report of a measured run. It has all fields of the simulator's report (`sim.report.report`), so
that a program reads both, and fields that only a client measures. Further definitions:

- Latencies count from the scheduled send; `ttft_from_send_s` counts from the send itself.
- Token counts are the server's (usage). Tokens of one socket read have the same time. Without usage
  in every chunk, the tokens of a call are spread evenly over its reads. Without any usage, every
  chunk with output is a token (`token_source`).
- The server says in its usage how many tokens of prompts were cached, or else in its metrics. If it
  says neither, all count as computed in `prompt_tokens_per_s`. Failed calls do not count.
- `normalised_s` is the end-to-end latency divided by the output tokens.
- Without streaming, TTFT is the end-to-end latency, and there is no time per token.
- `cut_requests` ended before `max_tokens` although they had `ignore_eos`.
- `refused` had status 400, 413 or 422; `errors` counts these too.
- Goodput's shares are of all calls sent: a failed call meets no objective.
- `queue_s`, `steps` and `mean_running` are unknown to a client; `server` has the server's figures.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Iterable, Iterator
from contextlib import asynccontextmanager, suppress
from pathlib import Path
from typing import Any, Literal, NamedTuple

import msgspec
from prometheus_client.parser import text_string_to_metric_families

from bench.load.client.http import CallError, HttpClient, TokenSource
from sim.report.capacity import Capacity
from sim.report.report import SCHEMA, VERSION, Record, Report, Spread

SWEEP_SCHEMA = "cbatch-sweep"
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
    "requests_processing": "running",  # of llama.cpp
    "num_requests_waiting": "waiting",
    "kv_cache_usage_perc": "kv_share",
}
_POSITIONS = "spec_decode_num_accepted_tokens_per_pos_total"
_FIELDS = COUNTERS | _GAUGES


class Estimate(msgspec.Struct, frozen=True):
    """The mean over repeats and its 95 % confidence interval (Student's t)."""

    mean: float
    low: float
    high: float


class Steady(msgspec.Struct, frozen=True, kw_only=True):
    """The steady window of a run, without the ramp and the drain at the end. Latencies are of calls
    scheduled in the window; rates count calls that ended and tokens that arrived in it."""

    start_s: float
    end_s: float
    requests_per_s: float
    output_tokens_per_s: float
    ttft_s: Spread
    tpot_s: Spread
    e2e_s: Spread


class ClientUse(msgspec.Struct, frozen=True, kw_only=True):
    """Load of the client. `cpu_share` is the share of a core that its busiest process used."""

    processes: int
    cpu_share: float
    send_lag_s: Spread  # delay of sends after their scheduled time
    chunks_per_s: float | None


class ServerCounters(msgspec.Struct, frozen=True, kw_only=True):
    """Growth of the server's counters (/metrics) during the run; None: no such counter."""

    prompt_tokens: int | None
    output_tokens: int | None
    drafts: int | None  # drafting steps, counted per sequence
    drafted_tokens: int | None
    accepted_tokens: int | None
    accepted_by_position: tuple[int, ...]
    acceptance: float | None  # accepted / drafted
    accepted_length: float | None  # 1 + accepted / drafts, with the bonus token
    preemptions: int | None
    prefix_hit_tokens: int | None
    steps: int | None

    @classmethod
    def of(cls, counts: dict[str, int | None], by_position: Iterable[int]) -> ServerCounters:
        names = ("drafts", "drafted_tokens", "accepted_tokens")
        drafts, drafted, accepted = (counts[name] for name in names)
        return cls(
            **counts,
            accepted_by_position=tuple(by_position),
            acceptance=accepted / drafted if drafted and accepted is not None else None,
            accepted_length=1 + accepted / drafts if drafts and accepted is not None else None,
        )


class ServerSample(msgspec.Struct, frozen=True, kw_only=True):
    """A sample of the server's /metrics, `at_s` after the start of the run: gauges, and the growth
    of counters since the first sample. None: the server has no such metric."""

    at_s: float
    running: float | None
    waiting: float | None
    kv_share: float | None
    prompt_tokens: int | None
    output_tokens: int | None
    drafted_tokens: int | None
    accepted_tokens: int | None
    prefix_hit_tokens: int | None
    steps: int | None


class Measured(Report, frozen=True, kw_only=True):
    sent: int
    errors: dict[str, int]  # number of failed calls by label
    error_examples: dict[str, str]  # message of the first failure with each label
    unfinished: int  # in flight when the run was interrupted
    interrupted: bool
    token_source: TokenSource
    chunks: int
    tokens_per_chunk: float | None
    mean_in_flight: float | None
    peak_in_flight: int
    ttft_from_send_s: Spread
    e2e_from_send_s: Spread
    normalised_s: Spread
    attainment: dict[str, float]  # by objective, the share of sent calls that met it
    good_output_tokens_per_s: float | None
    steady: Steady | None  # None for repeats, and for a run that was too short
    saturated: bool | None  # True if calls of an open loop piled up
    client: ClientUse
    server: ServerCounters | None
    server_over_time: tuple[ServerSample, ...] = ()  # empty for repeats
    repeats: int
    confidence: dict[str, Estimate]  # by measure; empty for a single run
    warnings: tuple[str, ...]
    machine: dict[str, Any]  # the client's
    versions: dict[str, str]


class MeasuredRecord(Record, frozen=True, kw_only=True):
    """A successful call, in the simulator's format. `queue_s` and `preemptions` are unknown to a
    client and are 0; `prefix_hit_tokens` is that of the server's usage."""

    run: int  # number of the repeat, from 0
    sent_s: float
    ttft_from_send_s: float
    chunks: int


class FailedRecord(msgspec.Struct, frozen=True, kw_only=True):
    index: int
    run: int
    arrival_s: float
    sent_s: float
    end_s: float
    prompt_tokens: int
    error: str
    detail: str
    session: str | None = None


class Knee(msgspec.Struct, frozen=True, kw_only=True):
    """The load from which throughput no longer grows, by the fit min(slope x load, plateau)."""

    load: float
    slope: float
    plateau: float
    reached: bool  # the sweep went beyond the knee


class Sweep(msgspec.Struct, frozen=True, kw_only=True):
    """Reports of several loads, in the order of `loads` (clients, or requests a second). `capacity`
    is the result of a search for the highest rate that meets the objectives."""

    over: Literal["concurrency", "rate_per_s"]
    loads: tuple[float, ...]
    reports: tuple[Measured, ...]
    knee: Knee | None
    capacity: Capacity | None = None
    schema: str = SWEEP_SCHEMA
    version: int = VERSION


def number_columns(report: Report | ServerCounters) -> dict[str, float | int]:
    """Return the numbers of a report, and the figures of its spreads, such as `ttft_s.p50`."""
    columns: dict[str, float | int] = {}
    for name in report.__struct_fields__:
        value = getattr(report, name)
        cuts = {name: value}
        if isinstance(value, Spread):
            cuts = {f"{name}.{cut}": getattr(value, cut) for cut in value.__struct_fields__[1:]}
        for column, number in cuts.items():
            if isinstance(number, int | float) and not isinstance(number, bool):
                columns[column] = number
    return columns


def read_reports(document: bytes) -> tuple[list[Report], list[str]]:
    """Return the reports of a document, and the names of their loads; a single report's name is
    empty. They are simulated or measured. Raises ValueError (also msgspec's) for other JSON."""
    header = msgspec.json.decode(document, type=_Header)
    if header.version != VERSION or header.schema not in (SCHEMA, SWEEP_SCHEMA):
        raise ValueError(f"{header.schema} version {header.version}; this reads version {VERSION}")
    if header.schema == SWEEP_SCHEMA:
        sweep = msgspec.json.decode(document, type=Sweep)
        return list(sweep.reports), [f"{sweep.over} {load:g}" for load in sweep.loads]
    kind = Measured if header.kind == "measured" else Report
    return [msgspec.json.decode(document, type=kind)], [""]


def read_records(path: Path) -> Iterator[Record]:
    """Yield the records of finished requests from a file of --records, simulated or measured.
    Raises OSError, and ValueError (msgspec's) for an invalid line."""
    with path.open("rb") as file:
        for line in file:
            record = msgspec.json.decode(line, type=dict[str, Any])
            if "error" not in record:
                yield msgspec.convert(record, Record)


class _Header(msgspec.Struct):
    schema: str
    version: int
    kind: str = ""


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


@asynccontextmanager
async def watching(client: HttpClient) -> AsyncIterator[list[Scrape]]:
    """Yield a list of scrapes of a server's /metrics: the first, and one every
    `SCRAPE_EVERY_S`. It is empty if the server has none."""
    first = await scrape(client)
    scrapes = [] if first is None else [first]

    async def watch() -> None:
        while scrapes:
            await asyncio.sleep(SCRAPE_EVERY_S)
            if (latest := await scrape(client)) is None:
                return
            scrapes.append(latest)

    task = asyncio.create_task(watch())
    try:
        yield scrapes
    finally:
        task.cancel()
        with suppress(asyncio.CancelledError):
            await task
