"""Traces named on a command line: their options, and the engine's own step log read as one."""

from __future__ import annotations

import argparse
from collections.abc import Iterable
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING

from cbatch.core.errors import FieldError

if TYPE_CHECKING:
    from sim.traces.request import TraceRequest

STEP_LOG = "cbatch-step-log"


def add_trace_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("trace", metavar="TRACE", help="a file, plain or gzip, or ServeGen windows")
    add_reading_options(parser.add_argument_group("reading"))


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

    def __init__(self, args: argparse.Namespace, seed: int, *, in_order: bool = True) -> None:
        from sim.traces.formats import FORMAT_NAMES
        from sim.traces.reader import WINDOWS, Trace

        self.path = Path(args.trace)
        self._spread_s, self._seed = args.spread, seed
        known = (*FORMAT_NAMES, WINDOWS, STEP_LOG)
        if args.format not in (None, *known):
            raise FieldError("--format", f"{args.format!r} is unknown", f"use {', '.join(known)}")
        self._trace: Trace | None = None
        self._recorded: list[TraceRequest] = []
        if is_step_log(self.path):
            if args.format not in (None, STEP_LOG) or args.skip_empty:
                wrong = "--skip-empty" if args.skip_empty else "--format"
                raise FieldError(wrong, f"{self.path} is a step log", "leave it out")
            self._recorded = requests_of_step_log(self.path)
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

        requests: Iterable[TraceRequest] = self._trace or self._recorded
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


def is_step_log(path: Path) -> bool:
    if not path.is_file():
        return False
    with path.open("rb") as file:
        return STEP_LOG.encode() in file.readline(200)


def requests_of_step_log(path: Path) -> list[TraceRequest]:
    """The requests that an engine recorded, with the output that each had; those that ended without
    a token are left out, and prompts share what their leading blocks share. Reads it as a whole."""
    from cbatch.core.events import Added, Configured, TextFinished
    from cbatch.core.sequence import Commit
    from cbatch.engine.steplog import StepLogError, read_step_log, replay
    from sim.traces.reader import sort_requests
    from sim.traces.request import TraceRequest

    try:
        log = read_step_log(path)
        outputs: dict[str, int] = {}

        def count(commit: Commit) -> None:
            for name, tokens, _, _ in commit.updates():
                outputs[name] = outputs.get(name, 0) + len(tokens)

        replay(log.events, on_commit=count)
    except StepLogError as error:
        raise FieldError("step log", str(error), "record it anew") from error
    outputs |= {e.request_id: e.keep_tokens for e in log.events if isinstance(e, TextFinished)}
    size = next(e.config.block_size_tokens for e in log.events if isinstance(e, Configured))
    names = _BlockNames(size)
    found = [
        TraceRequest(
            arrival_s=event.now_s,
            prompt_tokens=len(event.request.prompt),
            output_tokens=outputs[event.request.request_id],
            hash_ids=names.of(event.request.prompt),
            hash_block_tokens=size,
            priority=event.request.priority or None,
        )
        for event in log.events
        if isinstance(event, Added) and outputs.get(event.request.request_id)
    ]
    if not found:
        raise FieldError("step log", f"{path} has no request with output", "record it anew")
    return sort_requests(found)


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
