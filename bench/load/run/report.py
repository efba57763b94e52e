"""The report of a measured run: the simulator's schema (`sim.report.report`), and what only a
client of a real server can say beside it. Whoever reads the one reads the other.

Where a definition needs more words than there:

- every latency counts from the scheduled send; `ttft_from_send_s` from the send itself.
- tokens are the server's own (usage). What came in one read of a socket came at once. Where a
  server does not count tokens chunk by chunk, a call's tokens are spread evenly over its reads;
  where it does not count them at all, every chunk with output is a token (`token_source`).
- `normalised_s`: end to end over output tokens.
- of answers that are not streamed the first token comes with the last; they have no time per token.
- `cut_requests`: ended before `max_tokens`, though told to ignore the end of sequence.
- `refused`: answered with 400, 413 or 422; `errors` counts these too.
- goodput: shares are of what was sent: a failed call met nothing.
- `queue_s`, `steps`, `mean_running`: a client does not see these; what the server tells of them is
  in `server`.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any, Literal

import msgspec

from bench.load.client.call import TokenSource
from sim.replay.capacity import Capacity
from sim.report.report import SCHEMA, VERSION, Record, Report, Spread

SWEEP_SCHEMA = "cbatch-sweep"


class Estimate(msgspec.Struct, frozen=True):
    """The mean over repeats and its 95 % confidence interval (Student's t)."""

    mean: float
    low: float
    high: float


class Steady(msgspec.Struct, frozen=True, kw_only=True):
    """While the load was what it was meant to be: no ramp, and no drain at the end. Latencies are
    of calls that were scheduled then, rates of what ended or came then."""

    start_s: float
    end_s: float
    requests_per_s: float
    output_tokens_per_s: float
    ttft_s: Spread
    tpot_s: Spread
    e2e_s: Spread


class ClientUse(msgspec.Struct, frozen=True, kw_only=True):
    """The load tester itself. `cpu_share` is of a core, of the busiest process."""

    processes: int
    cpu_share: float
    send_lag_s: Spread  # from the scheduled send to the send
    loop_lag_s: Spread  # how late its event loop was, sampled
    chunks_per_s: float | None


class ServerCounters(msgspec.Struct, frozen=True, kw_only=True):
    """What the server's /metrics grew by during the run; None where it tells no such thing."""

    prompt_tokens: int | None
    output_tokens: int | None
    drafts: int | None  # steps of a sequence that drafted
    drafted_tokens: int | None
    accepted_tokens: int | None
    accepted_by_position: tuple[int, ...]
    acceptance: float | None  # accepted / drafted
    accepted_length: float | None  # 1 + accepted / drafts: the bonus token is in it
    preemptions: int | None
    prefix_hit_tokens: int | None
    steps: int | None

    @classmethod
    def of(cls, counts: dict[str, int | None], by_position: Iterable[int]) -> ServerCounters:
        """`counts` are all that is not worked out of others."""
        names = ("drafts", "drafted_tokens", "accepted_tokens")
        drafts, drafted, accepted = (counts[name] for name in names)
        return cls(
            **counts,
            accepted_by_position=tuple(by_position),
            acceptance=accepted / drafted if drafted and accepted is not None else None,
            accepted_length=1 + accepted / drafts if drafts and accepted is not None else None,
        )


class ServerSample(msgspec.Struct, frozen=True, kw_only=True):
    """A look at the server's /metrics, `at_s` since the run began: how it was then, and what it had
    counted since the first look. None where it tells no such thing."""

    at_s: float
    running: float | None
    waiting: float | None
    kv_share: float | None
    prompt_tokens: int | None
    output_tokens: int | None
    drafted_tokens: int | None
    accepted_tokens: int | None
    steps: int | None


class Measured(Report, frozen=True, kw_only=True):
    sent: int
    errors: dict[str, int]  # by class, of those that were sent
    error_examples: dict[str, str]  # what the first of each class said
    unfinished: int  # under way when the run was interrupted
    interrupted: bool
    token_source: TokenSource
    chunks: int
    tokens_per_chunk: float | None
    mean_in_flight: float | None
    peak_in_flight: int
    ttft_from_send_s: Spread
    e2e_from_send_s: Spread
    normalised_s: Spread
    attainment: dict[str, float]  # share of the sent that met each objective by itself
    good_output_tokens_per_s: float | None
    steady: Steady | None  # of one run, not of repeats; None too where it was too short
    saturated: bool | None  # of an open loop: whether calls piled up
    client: ClientUse
    server: ServerCounters | None
    server_over_time: tuple[ServerSample, ...] = ()  # of one run, not of repeats
    repeats: int
    confidence: dict[str, Estimate]  # by measure; empty with one repeat
    warnings: tuple[str, ...]
    machine: dict[str, Any]  # of the client
    versions: dict[str, str]


class MeasuredRecord(Record, frozen=True, kw_only=True):
    """A call that succeeded, as the simulator records it; nobody tells a client of `queue_s`,
    `prefix_hit_tokens` and `preemptions`, so these are 0."""

    run: int  # of the repeats, from 0
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
    """Where more load stops bringing more: throughput = min(slope x load, plateau), fitted."""

    load: float
    slope: float
    plateau: float
    reached: bool  # whether the sweep went past it


class Sweep(msgspec.Struct, frozen=True, kw_only=True):
    """Several loads. `reports` are in their order, `loads` clients or requests a second; `capacity`
    says what a search for the highest rate within objectives came to."""

    over: Literal["concurrency", "rate_per_s"]
    loads: tuple[float, ...]
    reports: tuple[Measured, ...]
    knee: Knee | None
    capacity: Capacity | None = None
    schema: str = SWEEP_SCHEMA
    version: int = VERSION


def sweep_to_json(sweep: Sweep) -> bytes:
    return msgspec.json.format(msgspec.json.encode(sweep), indent=2) + b"\n"


def read_reports(document: bytes) -> tuple[list[Report], list[str]]:
    """The reports of a document, simulated or measured, one or a sweep, and a name for each load
    (empty for a single one). Raises ValueError (of msgspec too) if it is neither."""
    told = msgspec.json.decode(document, type=_Header)
    if told.version != VERSION or told.schema not in (SCHEMA, SWEEP_SCHEMA):
        raise ValueError(f"{told.schema} version {told.version}; this reads version {VERSION}")
    if told.schema == SWEEP_SCHEMA:
        sweep = msgspec.json.decode(document, type=Sweep)
        return list(sweep.reports), [f"{sweep.over} {load:g}" for load in sweep.loads]
    kind = Measured if told.kind == "measured" else Report
    return [msgspec.json.decode(document, type=kind)], [""]


def read_records(path: Path) -> Iterator[Record]:
    """Of a file of records, simulated or measured, those of requests that finished. Raises OSError,
    and ValueError (msgspec's) for a line that is none."""
    with path.open("rb") as file:
        for line in file:
            told = msgspec.json.decode(line, type=dict[str, Any])
            if "error" not in told:
                yield msgspec.convert(told, Record)


class _Header(msgspec.Struct):
    schema: str
    version: int
    kind: str = ""
