"""The step log on disk: every input of a scheduler, one JSON line each, and its replay.

The log of a killed process may end in the middle of a record, and a file may be damaged. Reading it
then returns a warning, and of each engine the events before the damage. Floats are stored exactly,
so a replay reproduces every decision to the bit.
"""

from __future__ import annotations

import fcntl
import functools
import os
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

import msgspec
import numpy as np

from cbatch.core.scheduler.events import (
    Added,
    Cancelled,
    Committed,
    Configured,
    Event,
    ExecutorReset,
    Failed,
    Planned,
    TextFinished,
)
from cbatch.core.scheduler.plan import StepPlan
from cbatch.core.scheduler.scheduler import Scheduler
from cbatch.core.scheduler.sequence import Commit

AnyEvent = (
    Configured | Added | Cancelled | TextFinished | Failed | Planned | Committed | ExecutorReset
)
FORMAT = "cbatch-step-log"
VERSION = 2
_CONFIGURED = b'"Configured"'  # in the first bytes of a `Configured` event's line
_LOOK_BYTES = 2**16  # bytes per read in the search for the last line, backwards from the end
# Larger sizes of a scheduler, which allocates memory by them, are damage.
_MAX_BLOCKS, _MAX_SLOTS, _MAX_CELLS = 2**22, 2**16, 2**27


class StepLogError(ValueError):
    """The file is not a step log, or nothing in it is whole. If an event does not follow from those
    before it, `event` is its index."""

    def __init__(self, problem: str, event: int = 0) -> None:
        super().__init__(problem)
        self.event = event


class Header(msgspec.Struct, frozen=True):
    format: str
    version: int


@functools.cache  # NumPy builds the name each time: two thirds of the time of a step's line
def _name_of(dtype: np.dtype[Any]) -> str:
    return dtype.name


def encode_array(value: Any) -> Any:
    """Encode an array as (dtype, values) and any other sequence, such as a simulated prompt, as a
    tuple. This is msgspec's `enc_hook`."""
    if isinstance(value, np.ndarray):
        return (_name_of(value.dtype), value.tolist())
    if isinstance(value, Sequence):
        return tuple(value)
    raise NotImplementedError(f"{type(value).__name__} cannot be written to a step log")


def decode_array(kind: type, value: Any) -> Any:
    """Decode what `encode_array` wrote. This is msgspec's `dec_hook`."""
    if kind is np.ndarray:
        dtype, values = value
        if np.dtype(dtype).kind not in "biuf":
            raise ValueError(f"an array of {dtype}")
        return np.asarray(values, dtype=dtype)
    raise NotImplementedError(f"{kind.__name__} cannot be written to a step log")


_encoder = msgspec.json.Encoder(enc_hook=encode_array)


def encode_line(record: msgspec.Struct) -> bytes:
    return _encoder.encode(record) + b"\n"


def is_step_log(path: Path) -> bool:
    if not path.is_file():
        return False
    with path.open("rb") as file:
        return FORMAT.encode() in file.readline(200)


def open_to_append(path: Path) -> int:
    """Open a new or existing log for appending, without an incomplete last record. Return the file
    descriptor. It holds a lock until the process ends, however it ends: two writers would mix their
    events. Raises OSError, or `StepLogError` for another kind of file, or one that is locked."""
    header = encode_line(Header(FORMAT, VERSION))
    file = os.open(path, os.O_RDWR | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o600)
    try:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            problem = "another engine is recording to it; name another file"
            raise StepLogError(f"{path}: {problem}") from error
        except OSError:  # the file system has no locks
            pass
        size_bytes = os.fstat(file).st_size
        begin = os.pread(file, len(header), 0)
        if not header.startswith(begin):
            raise StepLogError(f"{path}: not a step log of this version; name another file")
        if len(begin) < len(header):
            os.ftruncate(file, 0)
            os.write(file, header)
        else:
            os.ftruncate(file, _end_of_last_line(file, size_bytes))
    except BaseException:
        os.close(file)
        raise
    return file


def _end_of_last_line(file: int, size_bytes: int) -> int:
    end = size_bytes
    while True:
        start = max(0, end - _LOOK_BYTES)
        newline = os.pread(file, end - start, start).rfind(b"\n")
        if newline >= 0:
            return start + newline + 1
        end = start


class StepLog(msgspec.Struct, frozen=True):
    """The whole events of a file, and the line of each. `warning` says what else is in the file;
    None: nothing is."""

    events: tuple[AnyEvent, ...]
    lines: tuple[int, ...]
    warning: str | None


def read_step_log(path: str | Path) -> StepLog:
    """Read a log, of each engine the events before a damaged record. Raises `StepLogError` if there
    is none."""
    header, *lines = Path(path).read_bytes().split(b"\n")
    _check_header(path, header)
    tail = lines.pop() if lines else b""  # b"" if the last record is whole
    decoder = msgspec.json.Decoder(AnyEvent, dec_hook=decode_array)
    events: list[AnyEvent] = []
    numbers, problems, is_whole = list[int](), list[str](), True
    for number, line in enumerate(lines, start=2):
        begins = _CONFIGURED in line[:40]
        if not begins and not is_whole:
            continue
        try:
            if not (begins or events):
                raise StepLogError("the configuration of an engine is missing")
            events.append(_checked(decoder.decode(line)))
            numbers.append(number)
            is_whole = True
        except (msgspec.MsgspecError, ValueError, TypeError, ArithmeticError, RecursionError) as e:
            problems.append(f"line {number}: damaged record ({e})")
            is_whole = False
    if problems and not events:
        raise StepLogError(f"{path}, {problems[0]}")
    warning = None
    if problems:
        rest = f", and {len(problems) - 1} more" if problems[1:] else ""
        warning = f"{path}, {problems[0]}{rest}; of its engine only the events before it are read"
    elif tail:
        warning = (
            f"{path}: the last record is cut short after {len(tail)} bytes and was dropped; "
            f"{len(events)} events before it are whole"
        )
    return StepLog(tuple(events), tuple(numbers), warning)


def _checked(event: AnyEvent) -> AnyEvent:
    """Return the event. Raises `StepLogError` for a configuration with sizes that are damage."""
    if isinstance(event, Configured):
        config = event.config
        blocks = -(-config.max_sequence_tokens // config.block_size)
        for name, size, limit in (
            ("num_blocks", config.num_blocks, _MAX_BLOCKS),
            ("block_size", config.num_blocks * config.block_size, _MAX_CELLS),
            ("max_num_seqs", config.max_num_seqs, _MAX_SLOTS),
            ("max_num_seqs", config.max_num_seqs * blocks, _MAX_CELLS),
        ):
            if size > limit:
                raise StepLogError(f"{name}: {getattr(config, name)} is too large")
    return event


def _check_header(path: str | Path, line: bytes) -> None:
    try:
        header = msgspec.json.decode(line, type=Header)
    except msgspec.MsgspecError as error:
        raise StepLogError(f"{path}: not a step log: its first line is not a header") from error
    if header != Header(FORMAT, VERSION):
        raise StepLogError(
            f"{path}: {header.format} version {header.version}; this reads {FORMAT} {VERSION}"
        )


def engines_of(events: Iterable[AnyEvent]) -> Iterator[list[AnyEvent]]:
    """Yield the events of each engine: every `Configured` event begins a new one. Raises
    `StepLogError` if the first event is of another kind."""
    engine: list[AnyEvent] = []
    for event in events:
        if isinstance(event, Configured) and engine:
            yield engine
            engine = []
        if not engine and not isinstance(event, Configured):
            raise StepLogError("events: the first one is not the configuration")
        engine.append(event)
    if engine:
        yield engine


def replay(
    events: Iterable[Event],
    *,
    on_plan: Callable[[StepPlan | None], None] | None = None,
    on_commit: Callable[[Commit], None] | None = None,
    log: Callable[[Event], None] | None = None,
) -> Scheduler:
    """Give the recorded inputs of one engine to a new scheduler, and return it. The callbacks
    receive its plans and commits. Raises `StepLogError` with the first event that does not follow
    from those before it."""
    remaining = iter(events)
    first = next(remaining, None)
    if not isinstance(first, Configured):
        raise StepLogError("events: the first one is not the configuration")
    scheduler = Scheduler(first.config, log)
    for index, event in enumerate(remaining, start=1):
        try:
            _apply(event, scheduler, on_plan, on_commit)
        except Exception as error:  # of any kind, also from the callbacks
            words = f"{type(event).__name__} does not follow from the events before it"
            raise StepLogError(f"{words} ({type(error).__name__}: {error})", index) from error
    return scheduler


def _apply(
    event: Event,
    scheduler: Scheduler,
    on_plan: Callable[[StepPlan | None], None] | None,
    on_commit: Callable[[Commit], None] | None,
) -> None:
    match event:
        case Planned(now_s):
            plan = scheduler.schedule(now_s)
            if on_plan is not None:
                on_plan(plan)
        case Committed(result, now_s):
            commit = scheduler.update_from_output(result, now_s)
            if on_commit is not None:
                on_commit(commit)
            scheduler.take_cache_changes()  # already published by the engine that was recorded
        case Added(request, now_s, output):
            scheduler.add(request, now_s, output)
        case Cancelled(request_id, now_s):
            scheduler.cancel(request_id, now_s)
        case TextFinished(request_id, keep_tokens, now_s):
            scheduler.finish(request_id, keep_tokens, now_s)
        case Failed(request_id, message, now_s):
            scheduler.fail(request_id, message, now_s)
        case ExecutorReset(now_s):
            scheduler.executor_reset(now_s)
        case _:
            raise StepLogError(f"events: a second {type(event).__name__}")
