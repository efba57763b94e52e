"""The journal of an engine: its requests in flight and its progress, in a file.

A message may be lost when its sender dies, since the transport sends it in the background. A page
of a shared file belongs to the kernel as soon as it is written, so the file outlives the engine.
"""

from __future__ import annotations

import mmap
import struct
from collections.abc import Collection
from pathlib import Path

import msgspec
import numpy as np
from numpy.typing import NDArray

_SIZE_BYTES = 2**20  # size of the file, for about ten thousand ids
_READING_BYTES = 2**16  # size of the list of requests that are being read
_COMPILING_BYTES = 2**12  # size of the list of requests whose grammars are being compiled
_HEADER = struct.Struct("<I")  # length of a list in bytes; 0: empty
_COUNTER = np.dtype("<i8")
_FIRST_BYTE = 64  # offset of the first list, after the progress counters


class _NameList:
    """A list of names in a part of the file. A half-written list reads as empty."""

    def __init__(self, file: mmap.mmap, start: int, end: int) -> None:
        self._file, self._start, self._end = file, start, end

    def write(self, content: bytes) -> int:
        """Write a list of names, encoded by msgpack. Return the length to pass to `show`. If the
        list does not fit, it is left empty and 0 is returned."""
        self.hide()
        first = self._start + _HEADER.size
        if first + len(content) > self._end:
            return 0
        self._file[first : first + len(content)] = content
        self.show(len(content))
        return len(content)

    def hide(self) -> None:
        self.show(0)

    def show(self, length_bytes: int) -> None:
        _HEADER.pack_into(self._file, self._start, length_bytes)

    def read(self) -> list[str]:
        (length_bytes,) = _HEADER.unpack_from(self._file, self._start)
        first = self._start + _HEADER.size
        content = self._file[first : first + length_bytes]
        return msgspec.msgpack.decode(content, type=list[str]) if length_bytes else []


class InFlightJournal:
    """The journal of one engine. Each list has one writer at a time; call `read` after the
    engine has died. The file must exist (see `create`).

    `progress` int64 [2] are two counters: the first counts executed commands; the executor
    increments the second after every part of a step.
    """

    def __init__(self, path: Path) -> None:
        with path.open("r+b") as file:
            self._file = mmap.mmap(file.fileno(), _SIZE_BYTES)
        compiling = _SIZE_BYTES - _COMPILING_BYTES
        reading = compiling - _READING_BYTES
        self._in_flight = _NameList(self._file, _FIRST_BYTE, reading)
        self._reading = _NameList(self._file, reading, compiling)
        self._compiling = _NameList(self._file, compiling, _SIZE_BYTES)
        self.progress: NDArray[np.int64] = np.frombuffer(self._file, _COUNTER, 2)
        self._written: set[str] = set()
        self._length_bytes = 0

    @classmethod
    def create(cls, path: Path) -> InFlightJournal:
        """Create the file. Raises OSError, also if the disk is full: a page that has no place there
        would kill the process that writes it."""
        path.write_bytes(bytes(_SIZE_BYTES))
        return cls(path)

    def write(self, request_ids: Collection[str]) -> None:
        if not request_ids:
            self._in_flight.hide()
        elif self._written == request_ids:
            self._in_flight.show(self._length_bytes)
        else:
            self._in_flight.hide()
            self._length_bytes = self._in_flight.write(msgspec.msgpack.encode(sorted(request_ids)))
            self._written = set(request_ids)

    def begin_reading(self, encoded_ids: bytes) -> None:
        """Record the requests of a command before it is decoded: a list in msgpack."""
        self._reading.write(encoded_ids)

    def end_reading(self) -> None:
        self._reading.hide()
        self.progress[0] += 1

    def write_compiling(self, request_ids: Collection[str]) -> None:
        if request_ids:
            self._compiling.write(msgspec.msgpack.encode(list(request_ids)))
        else:
            self._compiling.hide()

    def read(self) -> list[str]:
        """Return the distinct requests in flight, being read, or with a grammar being compiled."""
        lists = (self._in_flight, self._reading, self._compiling)
        return list(dict.fromkeys(name for names in lists for name in names.read()))

    def close(self) -> None:
        del self.progress  # a view of the file
        self._file.close()
