"""Traces named on a command line: their options, and the engine's own step log read as one."""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING

from msgspec.structs import replace

from cbatch.core.config import SchedulerConfig
from cbatch.core.errors import FieldError
from cbatch.core.events import Added, Cancelled, Configured, Failed, TextFinished
from cbatch.core.request import Request
from cbatch.core.sequence import Commit
from cbatch.engine.steplog import AnyEvent, engines_of, replay

if TYPE_CHECKING:
    from cbatch.cli.simulate.scenario import Scenario
    from sim.traces.request import TraceRequest

STEP_LOG = "cbatch-step-log"


def add_trace_options(parser: argparse.ArgumentParser) -> None:
    add_trace_argument(parser)
    add_reading_options(parser.add_argument_group("reading"))


def add_trace_argument(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("trace", metavar="TRACE", help="a file, plain or gzip, or ServeGen windows")


def add_reading_options(group: argparse._ArgumentGroup) -> None:
    group.add_argument("--format", help="what the trace must be (default: found out)")
    group.add_argument(
        "--skip-empty", action="store_true", help="leave out requests without prompt or output"
    )
    group.add_argument(
        "--spread",
        type=float,
        metavar="SECONDS",
        help="stamps are rounded to so many seconds: spread them (3 for Mooncake conversations)",
    )


class OpenedTrace:
    """A trace and how it is read. Iterating reads it anew."""

    def __init__(
        self, args: argparse.Namespace | Scenario, seed: int, *, in_order: bool = True
    ) -> None:
        """`args` has the options of `add_trace_options`."""
        from sim.traces.formats import FORMAT_NAMES
        from sim.traces.reader import WINDOWS, Trace

        self.path = Path(args.trace)
        self._spread_s, self._seed = args.spread, seed
        known = (*FORMAT_NAMES, WINDOWS, STEP_LOG)
        if args.format not in (None, *known):
            raise FieldError("--format", f"{args.format!r} is unknown", f"use {', '.join(known)}")
        self._trace: Trace | None = None
        self._from_log: list[TraceRequest] = []
        self.recorded: SchedulerConfig | None = None  # of the last engine in a step log
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
            )
            self.format = self._trace.format

    @property
    def draws(self) -> bool:
        """Whether reading it draws random numbers."""
        from sim.traces.reader import WINDOWS

        return self._spread_s is not None or self.format == WINDOWS

    @property
    def skipped(self) -> int:
        return 0 if self._trace is None else self._trace.skipped

    def requests(self) -> Iterable[TraceRequest]:
        from sim.traces.changes import spread

        requests: Iterable[TraceRequest] = self._trace or self._from_log
        if self._spread_s is None:
            return requests
        return spread(requests, self._spread_s, self._seed)


def require_no_seed(args: argparse.Namespace, *, drawing: bool) -> int:
    """The seed, 0 where none is given. Raises `FieldError` if it would be ignored."""
    if args.seed is not None and not drawing:
        raise FieldError("--seed", "nothing is drawn here", "leave it out")
    return args.seed or 0


def require_place(option: str, path: Path) -> None:
    """Raises `FieldError` if no file can be there: before the work, not after it."""
    if path.is_dir() or not path.parent.is_dir():
        raise FieldError(option, f"{path} cannot be a file", "name one in a folder that exists")


def write_trace(
    out: Path,
    requests: Iterable[TraceRequest],
    what: str,
    skipped: Callable[[], int] = lambda: 0,
) -> int:
    """Writes our own request log, whole or not at all, and says so with `what` they are; `skipped`
    is asked when all have been read. Raises `FieldError`."""
    from sim.traces.reader import write_requests

    require_place("OUT", out)
    partial = out.with_name(f"{out.name}.part{out.suffix}")
    try:
        count = write_requests(partial, requests)
        if not count:
            raise FieldError("OUT", "nothing is left of the trace", "keep more of it")
        partial.replace(out)
    finally:
        partial.unlink(missing_ok=True)
    print(f"{out}: {count:,} requests, {what}")
    print(json.dumps({"out": str(out), "requests": count, "skipped": skipped()}), flush=True)
    return 0


def is_step_log(path: Path) -> bool:
    if not path.is_file():
        return False
    with path.open("rb") as file:
        return STEP_LOG.encode() in file.readline(200)


def read_recording(path: Path) -> tuple[list[TraceRequest], SchedulerConfig]:
    """The requests that engines recorded, with the output that each had, and the last engine's
    configuration. Requests that ended without a token are left out, and prompts share what their
    leading blocks share. Reads the log as a whole."""
    from cbatch.engine.steplog import StepLogError, read_step_log
    from sim.traces.reader import sort_requests
    from sim.traces.request import TraceRequest

    try:
        log = read_step_log(path)
        recorded = recorded_requests(log.events)
    except StepLogError as error:
        raise FieldError("step log", str(error), "record it anew") from error
    configs = [event.config for event in log.events if isinstance(event, Configured)]
    size = configs[0].block_size_tokens if configs else 1
    names = _BlockNames(size)
    found = [
        TraceRequest(
            arrival_s=each.arrival_s,
            prompt_tokens=len(each.request.prompt),
            output_tokens=each.output_tokens,
            hash_ids=names.of(each.request.prompt),
            hash_block_tokens=size,
            priority=each.request.priority or None,
        )
        for each in recorded
        if each.output_tokens
    ]
    if not found:
        raise FieldError("step log", f"{path} has no request with output", "record it anew")
    return sort_requests(found), configs[-1]


@dataclass
class Recorded:
    """A request in a step log. `output_tokens` is how many it had at its end."""

    request: Request
    arrival_s: float
    output_tokens: int = 0
    ended: bool = False


def recorded_requests(events: Sequence[AnyEvent]) -> list[Recorded]:
    """In order of arrival. A request that was open when its engine died goes on in the next one's
    log, under another name: it is one. Time goes on where a clock begins anew (the machine was
    started again). Raises `StepLogError`."""
    found: list[Recorded] = []
    shift_s = last_s = 0.0
    for engine in engines_of(events):
        times_s = [event.now_s for event in engine if not isinstance(event, Configured)]
        if not times_s:
            continue
        shift_s = max(shift_s, last_s - times_s[0])
        last_s = times_s[-1] + shift_s
        orphans = [each for each in found if not each.ended]
        found += _recorded_by(engine, orphans, shift_s)
    return found


def _recorded_by(
    engine: Sequence[AnyEvent], orphans: list[Recorded], shift_s: float
) -> list[Recorded]:
    """The requests that are new with this engine; what it says of `orphans` is noted there."""
    running: dict[str, Recorded] = {}
    new: list[Recorded] = []
    for event in engine:
        if not isinstance(event, Added):
            continue
        name = event.request.request_id
        nameless = replace(event.request, request_id="")
        resumed = next((each for each in orphans if each.request == nameless), None)
        if resumed is None:
            resumed = Recorded(nameless, event.now_s + shift_s)
            new.append(resumed)
        else:
            orphans.remove(resumed)
        resumed.output_tokens = len(event.output)
        running[name] = resumed

    def count(commit: Commit) -> None:
        for name, tokens, _, _ in commit.updates():
            running[name].output_tokens += len(tokens)
        for end in commit.finished:
            running[end.request_id].ended = True

    replay(engine, on_commit=count)
    for event in engine:
        if isinstance(event, TextFinished | Cancelled | Failed) and event.request_id in running:
            running[event.request_id].ended = True
        if isinstance(event, TextFinished):
            running[event.request_id].output_tokens = event.keep_tokens
    return new


class _BlockNames:
    """A number for every different prefix of whole blocks."""

    def __init__(self, block_tokens: int) -> None:
        self._block_tokens = block_tokens
        self._names: dict[tuple[int, tuple[int, ...]], int] = {}

    def of(self, prompt: tuple[int, ...]) -> tuple[int, ...]:
        names: list[int] = []
        cuts = range(0, len(prompt) + 1, self._block_tokens)
        for start, end in pairwise(cuts):
            key = (names[-1] + 1 if names else 0, prompt[start:end])
            names.append(self._names.setdefault(key, len(self._names)))
        return tuple(names)
