"""What an engine is busy with, and that it goes on, written where it outlives the process.

A message may be lost with the process that sent it: the transport hands it over in the background.
A page of a shared file is the kernel's from the moment it is written.
"""

from __future__ import annotations

import mmap
import struct
from collections.abc import Collection
from pathlib import Path

import msgspec
import numpy as np
from numpy.typing import NDArray

_SIZE_BYTES = 2**20  # some ten thousand rows; pages that are not used cost nothing
_READING_BYTES = 2**16
_COMPILING_BYTES = 2**12
_HEADER = struct.Struct("<I")  # bytes of what follows; 0: nothing
_SIGNS = np.dtype("<i8")
_FIRST_BYTE = 64  # behind the signs of life


class _Names:
    """A list of names in a part of the file. What is half written counts as none."""

    def __init__(self, file: mmap.mmap, start: int, end: int) -> None:
        self._file, self._start, self._end = file, start, end

    def write(self, content: bytes) -> int:
        """Names as `msgspec.msgpack` writes a list of them. Returns what `show` shows them by; 0:
        there is no room for so many, they are none."""
        self.forget()
        first = self._start + _HEADER.size
        if first + len(content) > self._end:
            return 0
        self._file[first : first + len(content)] = content
        self.show(len(content))
        return len(content)

    def forget(self) -> None:
        self.show(0)

    def show(self, length_bytes: int) -> None:
        _HEADER.pack_into(self._file, self._start, length_bytes)

    def read(self) -> list[str]:
        (length_bytes,) = _HEADER.unpack_from(self._file, self._start)
        first = self._start + _HEADER.size
        content = self._file[first : first + length_bytes]
        return msgspec.msgpack.decode(content, type=list[str]) if length_bytes else []


class InFlightJournal:
    """One writer at a time of each of its lists; `read` is for after its death. The file must exist
    (see `create`).

    `signs` int64 [2] are counters that a living engine moves: the first with every command that it
    has carried out, the second, for the executor, with every part of a step.
    """

    def __init__(self, path: Path) -> None:
        with path.open("r+b") as file:
            self._file = mmap.mmap(file.fileno(), _SIZE_BYTES)
        compiling = _SIZE_BYTES - _COMPILING_BYTES
        reading = compiling - _READING_BYTES
        self._in_flight = _Names(self._file, _FIRST_BYTE, reading)
        self._reading = _Names(self._file, reading, compiling)
        self._compiling = _Names(self._file, compiling, _SIZE_BYTES)
        self.signs: NDArray[np.int64] = np.frombuffer(self._file, _SIGNS, 2)
        self._written: set[str] = set()
        self._length_bytes = 0

    @classmethod
    def create(cls, path: Path) -> InFlightJournal:
        with path.open("wb") as file:
            file.truncate(_SIZE_BYTES)
        return cls(path)

    def write(self, request_ids: Collection[str]) -> None:
        """They are in flight, and no others."""
        if not request_ids:
            self._in_flight.forget()
        elif self._written == request_ids:
            self._in_flight.show(self._length_bytes)
        else:
            self._in_flight.forget()
            self._length_bytes = self._in_flight.write(msgspec.msgpack.encode(sorted(request_ids)))
            self._written = set(request_ids)

    def begin_reading(self, names: bytes) -> None:
        """A command that brings the requests of these names (`msgspec.msgpack` of a list)."""
        self._reading.write(names)

    def end_reading(self) -> None:
        self._reading.forget()
        self.signs[0] += 1

    def write_compiling(self, request_ids: Collection[str]) -> None:
        """Whose grammars are being compiled."""
        if request_ids:
            self._compiling.write(msgspec.msgpack.encode(list(request_ids)))
        else:
            self._compiling.forget()

    def read(self) -> list[str]:
        """Who was in flight, being read, or had a grammar compiled; each once."""
        lists = (self._in_flight, self._reading, self._compiling)
        return list(dict.fromkeys(name for names in lists for name in names.read()))

    def close(self) -> None:
        del self.signs  # it looks into the file
        self._file.close()
