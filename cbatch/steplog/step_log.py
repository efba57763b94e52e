"""The step log on disk: every input of a scheduler, one JSON line each, and its replay.

The log of a killed process may end in the middle of a record. Reading it then returns a warning and
all earlier events. Floats are stored exactly, so a replay reproduces every decision to the bit.
"""

from __future__ import annotations

import functools
import os
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

import msgspec
import numpy as np

from cbatch.core.request.typed import OLD_NAMES
from cbatch.core.scheduler.config import SchedulerConfig
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
VERSION = 1
_CONFIGURED = b'{"type":"Configured"'  # beginning of a `Configured` event's line
_LOOK_BYTES = 2**16  # bytes per read in the search for the last line, backwards from the end


class StepLogError(ValueError):
    """The file is not a step log, or is damaged before its last record."""


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
        return np.asarray(values, dtype=dtype)
    raise NotImplementedError(f"{kind.__name__} cannot be written to a step log")


_encoder = msgspec.json.Encoder(enc_hook=encode_array)


def encode_line(record: msgspec.Struct) -> bytes:
    return _encoder.encode(record) + b"\n"


def open_to_append(path: Path) -> int:
    """Open a new or existing log for appending, without an incomplete last record. Return the file
    descriptor. Raises OSError, or `StepLogError` for another kind of file."""
    header = encode_line(Header(FORMAT, VERSION))
    file = os.open(path, os.O_RDWR | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o600)
    try:
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
    """The events of a file. `warning` says what was dropped from its end; None: nothing was."""

    events: tuple[AnyEvent, ...]
    warning: str | None


def read_step_log(path: str | Path) -> StepLog:
    """Read a log. Raises `StepLogError` with the line of a damaged record that is not the last."""
    header, *lines = Path(path).read_bytes().split(b"\n")
    _check_header(path, header)
    tail = lines.pop() if lines else b""  # b"" if the last record is whole
    decoder = msgspec.json.Decoder(AnyEvent, dec_hook=decode_array)
    events = []
    for number, line in enumerate(lines, start=2):
        try:
            renamed = _with_new_names(line) if line.startswith(_CONFIGURED) else line
            events.append(decoder.decode(renamed))
        except (msgspec.MsgspecError, ValueError, TypeError) as error:
            raise StepLogError(f"{path}, line {number}: damaged record ({error})") from error
    warning = None
    if tail:
        warning = (
            f"{path}: the last record is cut short after {len(tail)} bytes and was dropped; "
            f"{len(events)} events before it are whole"
        )
    return StepLog(tuple(events), warning)


def _with_new_names(line: bytes) -> bytes:
    for old, new in OLD_NAMES.items():
        if new in SchedulerConfig.__struct_fields__:
            line = line.replace(f'"{old}":'.encode(), f'"{new}":'.encode())
    return line


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
    receive its plans and commits. Raises `StepLogError`."""
    remaining = iter(events)
    first = next(remaining, None)
    if not isinstance(first, Configured):
        raise StepLogError("events: the first one is not the configuration")
    scheduler = Scheduler(first.config, log)
    for event in remaining:
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
    return scheduler
