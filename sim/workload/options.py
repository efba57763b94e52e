"""Options that simulations and load tests share, and a trace opened with them. A step log counts
as a trace."""

from __future__ import annotations

import sys
from collections.abc import Iterable, Iterator
from functools import cache, partial
from multiprocessing import parent_process
from pathlib import Path
from typing import Annotated, Literal

import msgspec

from cbatch.cli.settings import flag_of
from cbatch.core.request.errors import FieldError
from cbatch.core.request.typed import knob
from cbatch.core.scheduler.config import SchedulerConfig
from cbatch.steplog.step_log import FORMAT as STEP_LOG
from cbatch.steplog.step_log import is_step_log
from sim.workload.traces.changes import spread
from sim.workload.traces.formats import BLOCK_TOKENS, FORMAT_NAMES, STAMP_UNITS
from sim.workload.traces.reader import Trace
from sim.workload.traces.request import TraceRequest
from sim.workload.traces.step_log import read_recording

_reading = partial(knob, "reading")
RATE_SCALE_KNOB = knob("load", "scale the trace's rate by X", "X")
THINK_KNOB = knob("load", "pause of a client between its requests", "S")
SHARE_KNOB = knob("goodput", "share of requests that must meet every --slo", "X")
SLO_KNOB = knob(
    "goodput", "objective for goodput: ttft, tpot or e2e in seconds; repeatable", "NAME=S"
)


class Reading(msgspec.Struct, frozen=True, kw_only=True):
    """Options to read a trace."""

    format: Annotated[str | None, _reading("format of the trace", default="detected")] = None
    skip_empty: Annotated[bool, _reading("skip requests without prompt or output")] = False
    block_tokens: Annotated[
        int | None, _reading("tokens per block of hash_ids", "N", default="the format's")
    ] = None
    time_unit: Annotated[
        Literal["s", "ms", "us", "ns"] | None,
        _reading("unit of timestamps", default="the format's"),
    ] = None
    spread: Annotated[
        float | None,
        _reading(
            "spread timestamps that are rounded to SECONDS (3 for Mooncake conversations)",
            "SECONDS",
        ),
    ] = None


class OpenedTrace:
    """A trace and the options to read it. Each iteration of `requests()` reads the file from the
    start. Raises `FieldError` for an option that the format does not support."""

    def __init__(
        self, path: str | Path, args: Reading, seed: int, *, in_order: bool = True
    ) -> None:
        self.path = Path(path)
        self._spread_s, self._seed = args.spread, seed
        known = (*FORMAT_NAMES, STEP_LOG)
        if args.format not in (None, *known):
            raise FieldError("--format", f"{args.format!r} is unknown", f"use {', '.join(known)}")
        self._trace: Trace | None = None
        self._from_log: list[TraceRequest] = []
        self.remarks: list[str] = []  # which part of the trace was used
        self.recorded: SchedulerConfig | None = None  # configuration of a step log's last engine
        if is_step_log(self.path):
            if args.format not in (None, STEP_LOG) or args.skip_empty:
                option = "--skip-empty" if args.skip_empty else "--format"
                raise FieldError(option, f"{self.path} is a step log", "leave it out")
            self._from_log, self.recorded, damage = read_recording(self.path)
            if damage is not None:
                self._remark(damage)
            self.format = STEP_LOG
        else:
            self._trace = Trace(
                self.path,
                format=args.format,
                skip_empty=args.skip_empty,
                in_order=in_order,
                block_tokens=args.block_tokens,
                time_unit=args.time_unit,
                on_cut=self._remark,
            )
            self.format = self._trace.format
            if args.time_unit is None and self._trace.has_stamps_like_seconds():
                warn(f"{self.path}: timestamps look like seconds: give --time-unit s, or ms")
        for option, formats in (("block_tokens", BLOCK_TOKENS), ("time_unit", STAMP_UNITS)):
            value = getattr(args, option)
            if value is not None and (self.format not in formats or not value):
                problem = f"{value} does not apply to a trace of {self.format}"
                raise FieldError(flag_of(option), problem, "leave it out")

    @property
    def draws(self) -> bool:
        """True if reading the trace draws random numbers."""
        return self._spread_s is not None

    @property
    def skipped(self) -> int:
        return 0 if self._trace is None else self._trace.skipped

    def requests(self) -> Iterable[TraceRequest]:
        requests: Iterable[TraceRequest] = self._trace or self._from_log
        if self._spread_s is None:
            return requests
        return spread(requests, self._spread_s, self._seed)

    def first(self, count: int) -> Iterator[TraceRequest]:
        """Yield the first `count` requests. Raises `FieldError` for none."""
        if count < 1:
            raise FieldError("--requests", f"{count} is not allowed", "ask for at least 1")
        for index, request in enumerate(self.requests()):
            if index == count:
                self.remarks.append(f"only the first {count:,} requests of the trace are used")
                break
            yield request

    def _remark(self, words: str) -> None:
        self.remarks.append(words)
        warn(words)


@cache
def warn(words: str) -> None:
    """Print a warning, only once: a search or a sweep opens its trace many times."""
    if parent_process() is None:
        print(f"cbatch: warning: {words}", file=sys.stderr)
