"""Which requests a step in flight holds, written where it outlives the process that runs it.

A message may be lost with the process that sent it: the transport hands it over in the background.
A page of a shared file is the kernel's from the moment it is written.
"""

from __future__ import annotations

import mmap
import struct
from collections.abc import Collection
from pathlib import Path

import msgspec

_SIZE_BYTES = 2**20  # some ten thousand rows; pages that are not used cost nothing
_HEADER = struct.Struct("<I")  # bytes of what follows; 0: nothing is in flight


class FlightRecorder:
    """One writer at a time; `read` is for after its death. The file must exist (see `create`)."""

    def __init__(self, path: Path) -> None:
        with path.open("r+b") as file:
            self._map = mmap.mmap(file.fileno(), _SIZE_BYTES)
        self._written: set[str] = set()
        self._length_bytes = 0

    @classmethod
    def create(cls, path: Path) -> FlightRecorder:
        with path.open("wb") as file:
            file.truncate(_SIZE_BYTES)
        return cls(path)

    def write(self, request_ids: Collection[str]) -> None:
        """They are in flight, and no others. What is half written counts as nothing."""
        if not request_ids:
            self._set_length(0)
            return
        if self._written != request_ids:
            self._set_length(0)
            content = msgspec.msgpack.encode(sorted(request_ids))
            self._map[_HEADER.size : _HEADER.size + len(content)] = content
            self._written, self._length_bytes = set(request_ids), len(content)
        self._set_length(self._length_bytes)

    def read(self) -> list[str]:
        (length_bytes,) = _HEADER.unpack_from(self._map)
        if not length_bytes:
            return []
        content = self._map[_HEADER.size : _HEADER.size + length_bytes]
        return msgspec.msgpack.decode(content, type=list[str])

    def close(self) -> None:
        self._map.close()

    def _set_length(self, length_bytes: int) -> None:
        _HEADER.pack_into(self._map, 0, length_bytes)
