"""Traces named on a command line, opened with their options. A step log is read as a trace too."""

from __future__ import annotations

import argparse
from collections.abc import Callable, Iterable
from pathlib import Path

from cbatch.cli.output import print_line, require_place
from cbatch.cli.settings import flag_of
from cbatch.core.request.errors import FieldError
from cbatch.core.scheduler.config import SchedulerConfig
from sim.cli.scenario import Reading, warn
from sim.workload.traces.changes import spread
from sim.workload.traces.formats import BLOCK_TOKENS, FORMAT_NAMES, STAMP_UNITS
from sim.workload.traces.reader import WINDOWS, Trace, write_requests
from sim.workload.traces.request import TraceRequest
from sim.workload.traces.step_log import STEP_LOG, is_step_log, read_recording


class OpenedTrace:
    """A trace and the options to read it. Each iteration of `requests()` reads the file from the
    start. Raises `FieldError` for an option that the format does not support."""

    def __init__(
        self, path: str | Path, args: Reading, seed: int, *, in_order: bool = True
    ) -> None:
        self.path = Path(path)
        self._spread_s, self._seed = args.spread, seed
        known = (*FORMAT_NAMES, WINDOWS, STEP_LOG)
        if args.format not in (None, *known):
            raise FieldError("--format", f"{args.format!r} is unknown", f"use {', '.join(known)}")
        self._trace: Trace | None = None
        self._from_log: list[TraceRequest] = []
        self.recorded: SchedulerConfig | None = None  # configuration of a step log's last engine
        if is_step_log(self.path):
            if args.format not in (None, STEP_LOG) or args.skip_empty:
                wrong = "--skip-empty" if args.skip_empty else "--format"
                raise FieldError(wrong, f"{self.path} is a step log", "leave it out")
            self._from_log, self.recorded = read_recording(self.path)
            self.format = STEP_LOG
        else:
            self._trace = Trace(
                self.path,
                format=args.format,
                skip_empty=args.skip_empty,
                in_order=in_order,
                seed=seed,
                block_tokens=args.block_tokens,
                time_unit=args.time_unit,
            )
            self.format = self._trace.format
            if args.time_unit is None and self._trace.has_stamps_like_seconds():
                warn(f"{self.path}: stamps look like seconds: give --time-unit s, or ms")
        for option, formats in (("block_tokens", BLOCK_TOKENS), ("time_unit", STAMP_UNITS)):
            value = getattr(args, option)
            if value is not None and (self.format not in formats or not value):
                problem = f"{value} is of no use for a trace of {self.format}"
                raise FieldError(flag_of(option), problem, "leave it out")

    @property
    def draws(self) -> bool:
        """True if reading the trace draws random numbers."""
        return self._spread_s is not None or self.format == WINDOWS

    @property
    def skipped(self) -> int:
        return 0 if self._trace is None else self._trace.skipped

    def requests(self) -> Iterable[TraceRequest]:
        requests: Iterable[TraceRequest] = self._trace or self._from_log
        if self._spread_s is None:
            return requests
        return spread(requests, self._spread_s, self._seed)


def require_no_seed(args: argparse.Namespace, *, drawing: bool) -> int:
    """Return the seed, by default 0. Raises `FieldError` if one is given but would be ignored."""
    if args.seed is not None and not drawing:
        raise FieldError("--seed", "nothing is drawn here", "leave it out")
    return args.seed or 0


def write_trace(
    out: Path,
    requests: Iterable[TraceRequest],
    description: str,
    skipped: Callable[[], int] = lambda: 0,
) -> int:
    """Write a trace in cbatch's own format and print `description`. On an error no file is left.
    `skipped` is called after all requests were read. Raises `FieldError` for an empty trace."""
    require_place("OUT", out)
    partial = out.with_name(f"{out.name}.part{out.suffix}")
    try:
        count = write_requests(partial, requests)
        if not count:
            raise FieldError("OUT", "nothing is left of the trace", "keep more of it")
        partial.replace(out)
    finally:
        partial.unlink(missing_ok=True)
    print(f"{out}: {count:,} requests, {description}")
    print_line({"out": str(out), "requests": count, "skipped": skipped()})
    return 0
