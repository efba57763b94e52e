"""The reader of traces: recognises the format and yields checked requests one by one."""

from __future__ import annotations

import gzip
import os
from collections.abc import Callable, Iterable, Iterator
from contextlib import suppress
from itertools import islice
from pathlib import Path
from typing import Any

import msgspec

from sim.workload.traces import formats
from sim.workload.traces.files import read_lines
from sim.workload.traces.request import TraceError, TraceRequest

_LOOK_ROWS = 1000  # rows read to check the unit of timestamps
_MAX_RATE_PER_S = 10.0  # a published trace in milliseconds has at most 7


class Trace:
    """The requests of a file, in order of arrival.

    Every iteration reads the file again, row by row, so memory does not grow with the trace.
    Exceptions: a vLLM bench result is read whole, and the ids of Bailian's conversations are kept.
    Raises `TraceError` with file, line and field. The first request's arrival is 0.
    """

    def __init__(
        self,
        path: str | Path,
        *,
        format: str | None = None,
        skip_empty: bool = False,
        in_order: bool = True,
        block_tokens: int | None = None,
        time_unit: str | None = None,
        on_cut: Callable[[str], None] | None = None,
    ) -> None:
        """`skip_empty` leaves out requests without prompt or output (failed requests, in some
        traces) and counts them in `skipped`. `in_order=False` allows timestamps that go backwards.
        `block_tokens` and `time_unit` (a key of `formats.UNITS_S`) default to the format's. With
        `on_cut`, which gets a warning, a file may end in the middle of a row."""
        self.path = Path(path)
        self.skipped = 0
        self._skip_empty, self._in_order = skip_empty, in_order
        self._format_name, self._on_cut = format, on_cut
        self.format = self._open()[0]
        self._block_tokens = block_tokens or formats.BLOCK_TOKENS.get(self.format, 1)
        self._unit_s = formats.UNITS_S[time_unit or formats.STAMP_UNITS.get(self.format, "s")]

    def _open(self) -> tuple[str, Iterator[formats.Raw]]:
        return formats.parse_lines(self.path, read_lines(self.path), self._format_name)

    def __iter__(self) -> Iterator[TraceRequest]:
        request = None
        try:
            for request in self._requests():
                yield request
        except TraceError as error:
            if request is None or self._on_cut is None or not self._is_cut(error):
                raise
            self._on_cut(
                f"{self.path} is cut short at line {error.line}; the rows before it are used"
            )

    def _is_cut(self, error: TraceError) -> bool:
        """Return whether an error is in the last line, and the file ends without a line end."""
        if error.field == "gzip":
            return isinstance(error.__cause__, EOFError)
        with self.path.open("rb") as file:
            file.seek(-1, os.SEEK_END)
            return file.read() != b"\n" and error.line == max(n for n, _ in read_lines(self.path))

    def _requests(self) -> Iterator[TraceRequest]:
        self.skipped = 0
        first_s: float | None = None
        last_s = 0.0
        for line, stamp, prompt_tokens, output_tokens, other_fields in self._open()[1]:
            stamp_s = stamp * self._unit_s
            if "think_s" in other_fields:
                other_fields["think_s"] *= self._unit_s
                if other_fields.get("session") is None:
                    remedy = "a turn after another needs a session"
                    raise TraceError(self.path, line, "session", "is missing", remedy)
            if "hash_ids" in other_fields:
                self._check_blocks(line, prompt_tokens, other_fields)
            if not (prompt_tokens and output_tokens):
                self._empty(line, prompt_tokens)
                continue
            if first_s is None:
                first_s = last_s = stamp_s
            if stamp_s < last_s and self._in_order:
                raise TraceError(
                    self.path,
                    line,
                    "arrival",
                    f"is {last_s - stamp_s:.6g} s before the row above",
                    "sort the trace (cbatch trace convert --sort)",
                )
            last_s = stamp_s
            yield TraceRequest(
                arrival_s=stamp_s - first_s,
                prompt_tokens=prompt_tokens,
                output_tokens=output_tokens,
                **other_fields,
            )
        if first_s is None:
            raise TraceError(self.path, None, "file", "has no requests", "give a trace with some")

    def _check_blocks(self, line: int, prompt_tokens: int, other_fields: dict[str, Any]) -> None:
        """Require a hash id for each full block; a last block that is not full may have one."""
        size = other_fields.setdefault("hash_block_tokens", self._block_tokens)
        count, max_blocks = len(other_fields["hash_ids"]), -(-prompt_tokens // size)
        if not prompt_tokens // size <= count <= max_blocks:
            problem = f"names {count} blocks of {size} tokens"
            remedy = f"a prompt of {prompt_tokens} tokens has {max_blocks}; give --block-tokens"
            raise TraceError(self.path, line, "hash_ids", problem, remedy)

    def has_stamps_like_seconds(self) -> bool:
        """Return True if the first rows are too close together for a unit below a second."""
        stamps: list[float] = []
        with suppress(TraceError):  # the iteration will raise it
            stamps += [raw.stamp for raw in islice(self._open()[1], _LOOK_ROWS)]
        span_s = (max(stamps, default=0.0) - min(stamps, default=0.0)) * self._unit_s
        return self._unit_s < 1 and len(stamps) - 1 > _MAX_RATE_PER_S * span_s > 0

    def _empty(self, line: int, prompt_tokens: int) -> None:
        if not self._skip_empty:
            what = "output" if prompt_tokens else "prompt"
            raise TraceError(
                self.path,
                line,
                what,
                "has 0 tokens",
                "leave such requests out (--skip-empty), or fix the row",
            )
        self.skipped += 1


def sort_requests(requests: Iterable[TraceRequest]) -> list[TraceRequest]:
    """Return all requests sorted by arrival, counted from the first."""
    ordered = sorted(requests, key=lambda request: request.arrival_s)
    first_s = ordered[0].arrival_s if ordered else 0.0
    return [msgspec.structs.replace(r, arrival_s=r.arrival_s - first_s) for r in ordered]


def write_requests(path: str | Path, requests: Iterable[TraceRequest]) -> int:
    """Write cbatch's own request log: a header, then one request per line; gzip if the name ends in
    .gz. Return the number of requests."""
    path = Path(path)
    encoder = msgspec.json.Encoder()
    count = 0
    # mtime 0: the same requests give the same bytes.
    with path.open("wb") as file:
        zipped = gzip.GzipFile("", "wb", fileobj=file, mtime=0) if path.suffix == ".gz" else None
        out = zipped or file
        out.write(
            encoder.encode({"format": formats.LOG_FORMAT, "version": formats.LOG_VERSION}) + b"\n"
        )
        for request in requests:
            out.write(encoder.encode(request) + b"\n")
            count += 1
        if zipped is not None:
            zipped.close()
    return count
