"""Lines of a trace file, plain or gzip, and a row's fields. Errors name file, line and field."""

from __future__ import annotations

import csv
import gzip
import math
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec

from sim.workload.lengths import MAX_TOKENS
from sim.workload.traces.request import TraceError

MAX_LINE_BYTES = 2**28  # limit of a line, and of a file that is read whole
_GZIP_MAGIC = b"\x1f\x8b"
Lines = Iterator[tuple[int, str]]


def read_whole(path: Path) -> bytes:
    """Read a file that the user named. Raises OSError, also for a file above `MAX_LINE_BYTES`."""
    _require_regular(path)
    with path.open("rb") as file:
        content = file.read(MAX_LINE_BYTES + 1)
    if len(content) > MAX_LINE_BYTES:
        raise OSError(f"it has more than {MAX_LINE_BYTES >> 20} MiB")
    return content


def _require_regular(path: Path) -> None:
    if path.exists() and not path.is_file():
        raise OSError("it is not a regular file")  # a pipe blocks, a device may have no end


def read_lines(path: Path) -> Lines:
    """Yield (line number from 1, text without line end) for every line that is not blank. A gzip
    file is recognised by its first bytes. Reads line by line."""
    number = 0
    try:
        _require_regular(path)
        with path.open("rb") as probe:
            zipped = probe.read(2) == _GZIP_MAGIC
        with gzip.open(path, "rb") if zipped else path.open("rb") as file:
            while raw := file.readline(MAX_LINE_BYTES + 1):
                number += 1
                if len(raw) > MAX_LINE_BYTES:
                    problem = f"has more than {MAX_LINE_BYTES >> 20} MiB"
                    raise TraceError(path, number, "line", problem, "write one request per line")
                text = raw.decode("utf-8-sig" if number == 1 else "utf-8").rstrip("\r\n")
                if text.strip():
                    yield number, text
    except UnicodeDecodeError as error:
        raise TraceError(path, number, "line", "is not UTF-8", "give a text file") from error
    except (EOFError, zlib.error, gzip.BadGzipFile) as error:
        raise TraceError(
            path,
            number,
            "gzip",
            f"the file ends or breaks after this line ({error})",
            "download it again",
        ) from error
    except OSError as error:
        raise TraceError(path, None, "file", f"cannot be read ({error})", "name a file") from error


class TraceRow:
    """One row of a trace: its values by name, as text or from JSON."""

    def __init__(self, path: Path, line: int, values: dict[str, Any]) -> None:
        self.path, self.line, self.values = path, line, values

    def fail(self, field: str, problem: str, remedy: str) -> TraceError:
        return TraceError(self.path, self.line, field, problem, remedy)

    def number(self, field: str) -> float:
        value = self._value(field)
        try:
            number = float(value)
        except (TypeError, ValueError, OverflowError) as error:
            raise self.fail(field, f"{value!r:.80} is not a number", "give a number") from error
        if isinstance(value, bool) or not math.isfinite(number):
            raise self.fail(field, f"{value!r} is not a finite number", "give a finite number")
        return number

    def stamp(self, field: str) -> float:
        number = self.number(field)
        if number < 0:
            raise self.fail(field, f"{number} is negative", "count time from 0")
        return number

    def count(self, field: str) -> int:
        number = self.number(field)
        if number != int(number):
            raise self.fail(field, f"{number} is not a whole number", "give a number of tokens")
        if not 0 <= number <= MAX_TOKENS:
            problem = "negative" if number < 0 else f"more than {MAX_TOKENS}"
            raise self.fail(field, f"{number:.0f} is {problem}", "give a number of tokens")
        return int(number)

    def text(self, field: str) -> str:
        return str(self._value(field))

    def hash_ids(self, field: str) -> tuple[int, ...]:
        value = self._value(field)
        if not isinstance(value, list) or not all(type(h) is int and h >= 0 for h in value):
            raise self.fail(field, "is not a list of numbers from 0", "name each block by a number")
        return tuple(value)

    def known_only(self, known: frozenset[str]) -> None:
        unknown = [name for name in self.values if name not in known]
        if unknown:
            raise self.fail(unknown[0], "is not a field of this format", f"it has {_list(known)}")

    def _value(self, field: str) -> Any:
        value = self.values.get(field)
        if value is None or value == "":
            raise self.fail(field, "is missing", "give every row this field")
        return value


def csv_rows(
    path: Path, lines: Lines, required: frozenset[str], optional: frozenset[str]
) -> Iterator[TraceRow]:
    """Yield the rows below a header. Raises `TraceError` for missing or unknown columns."""
    numbers: list[int] = []

    def texts() -> Iterator[str]:
        for number, text in lines:
            numbers[:] = [number]
            yield text

    rows = csv.reader(texts(), strict=True)
    try:
        header = [name.strip() for name in next(rows, [])]
        for name in sorted(required - set(header)):
            raise TraceError(path, 1, name, "is not a column of this file", f"add {name}")
        for name in header:
            if name not in required | optional:
                known = _list(required | optional)
                raise TraceError(path, 1, name, "is an unknown column", f"known are {known}")
        for cells in rows:
            if len(cells) != len(header):
                raise TraceError(
                    path,
                    numbers[0],
                    "columns",
                    f"{len(cells)} cells under {len(header)} names",
                    "fix the row",
                )
            yield TraceRow(path, numbers[0], dict(zip(header, map(str.strip, cells), strict=True)))
    except csv.Error as error:
        line = numbers[0] if numbers else 1
        raise TraceError(path, line, "columns", f"not CSV ({error})", "fix the row") from error


def json_rows(
    path: Path, lines: Lines, required: frozenset[str], optional: frozenset[str]
) -> Iterator[TraceRow]:
    """Yield a row for each line, a JSON object. Raises `TraceError` for unknown fields."""
    known = required | optional
    for number, text in lines:
        row = TraceRow(path, number, json_object(path, number, text))
        row.known_only(known)
        yield row


def json_object(path: Path, line: int, text: str) -> dict[str, Any]:
    try:
        value = msgspec.json.decode(text)
    except (msgspec.DecodeError, RecursionError, UnicodeError) as error:
        raise TraceError(
            path, line, "line", f"is not JSON ({error})", "write one object per line"
        ) from error
    if not isinstance(value, dict):
        raise TraceError(path, line, "line", "is not a JSON object", "write one object per line")
    return value


def _list(names: frozenset[str]) -> str:
    return ", ".join(sorted(names))
