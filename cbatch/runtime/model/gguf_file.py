"""GGUF files: metadata and memory-mapped tensors. Reading a file does not import torch.

Every size, count and offset is checked against the file before it is used. A broken file can cause
neither reads beyond its end, nor large allocations, nor long loops.
"""

from __future__ import annotations

import math
import mmap
import re
import struct
from dataclasses import dataclass
from importlib.util import find_spec
from itertools import pairwise
from pathlib import Path
from stat import S_ISREG
from typing import TYPE_CHECKING, Any, NamedTuple
from weakref import WeakValueDictionary

import numpy as np
from numpy.typing import NDArray

from cbatch.runtime.model.config import ModelError

if TYPE_CHECKING:
    import torch

SUFFIX = ".gguf"
_MAGIC = b"GGUF"
_VERSIONS = (2, 3)
_MAX_ENTRIES = 1 << 16  # maximum number of metadata keys, and of tensors
_MAX_NAME_BYTES = 1 << 10
_MAX_HEADER_BYTES = 1 << 26  # limit of a header; the largest known have 20 MB
_MAX_DIMS = 4
_SCALARS = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "?", 10: "Q", 11: "q"}
_SCALARS[12] = "d"
_STRING, _ARRAY = 8, 9
_SPLIT_NAME = re.compile(r"(.+)-(\d{5})-of-(\d{5})\.gguf")


class BlockType(NamedTuple):
    """A storage type: every `elements` values of a row take `bytes` bytes."""

    name: str
    elements: int
    bytes: int


TYPES = {
    0: BlockType("F32", 1, 4),
    1: BlockType("F16", 1, 2),
    2: BlockType("Q4_0", 32, 18),
    3: BlockType("Q4_1", 32, 20),
    6: BlockType("Q5_0", 32, 22),
    7: BlockType("Q5_1", 32, 24),
    8: BlockType("Q8_0", 32, 34),
    10: BlockType("Q2_K", 256, 84),
    11: BlockType("Q3_K", 256, 110),
    12: BlockType("Q4_K", 256, 144),
    13: BlockType("Q5_K", 256, 176),
    14: BlockType("Q6_K", 256, 210),
    20: BlockType("IQ4_NL", 32, 18),
    23: BlockType("IQ4_XS", 256, 136),
    30: BlockType("BF16", 1, 2),
    39: BlockType("MXFP4", 32, 17),
}
# Types that no product takes: they are widened while loading, by the package `gguf`.
WIDENED = {
    16: BlockType("IQ2_XXS", 256, 66),
    17: BlockType("IQ2_XS", 256, 74),
    18: BlockType("IQ3_XXS", 256, 98),
    19: BlockType("IQ1_S", 256, 50),
    21: BlockType("IQ3_S", 256, 110),
    22: BlockType("IQ2_S", 256, 82),
    29: BlockType("IQ1_M", 256, 56),
    34: BlockType("TQ1_0", 256, 54),
    35: BlockType("TQ2_0", 256, 66),
    40: BlockType("NVFP4", 64, 36),
}
TYPES |= WIDENED
_UNSUPPORTED = {24: "I8", 25: "I16", 26: "I32", 27: "I64", 28: "F64"}
_REMEDY = "pip install -U 'cbatch[models]'"


class GgufTensor(NamedTuple):
    """A tensor as stored. `raw` holds the bytes of all rows, one after the other, in whole blocks;
    `shape` is [rows, columns] as in torch, or [experts, rows, columns]."""

    name: str
    type: BlockType
    shape: tuple[int, ...]
    raw: NDArray[np.uint8]

    @property
    def rows(self) -> NDArray[np.uint8]:
        """Return the bytes by row, uint8 [rows, bytes per row]."""
        return self.raw.reshape(self.shape[0], -1)

    @property
    def matrix(self) -> NDArray[np.uint8]:
        """Return the bytes by row of the last two dimensions, all experts' rows after another."""
        return self.raw.reshape(-1, self.shape[-1] // self.type.elements * self.type.bytes)

    def dequantised(self, dtype: torch.dtype) -> torch.Tensor:
        from cbatch.runtime.model.gguf_blocks import dequantised

        blocks = self.raw.reshape(-1, self.type.bytes)
        return dequantised(self.type.name, blocks, dtype).view(self.shape)


@dataclass(frozen=True, eq=False)
class Gguf:
    """One file, or all parts of a split file. In `metadata`, arrays of numbers are numpy arrays and
    arrays of strings are lists."""

    path: Path
    metadata: dict[str, Any]
    tensors: dict[str, GgufTensor]

    def error(self, field: str, problem: str) -> ModelError:
        return ModelError(f"{self.path}: {field}: {problem}")


def is_gguf(path: Path) -> bool:
    """Return whether a path names a GGUF file; the file itself need not exist."""
    return path.suffix == SUFFIX and not path.is_dir()


_open_files: WeakValueDictionary[tuple[str, int, int, int], Gguf] = WeakValueDictionary()


def read_gguf(path: Path) -> Gguf:
    """Read a file, or return the same object as before if it is still in use and the file has not
    changed. Raises ModelError naming the file, and the field or tensor at fault."""
    try:
        stat = path.stat()
    except OSError as err:
        raise _unreadable(path, err) from None
    if not S_ISREG(stat.st_mode):  # opening a pipe would block until it has a writer
        raise ModelError(f"{path}: cannot be read (not a regular file; use a copy of it)")
    key = str(path), stat.st_ino, stat.st_size, stat.st_mtime_ns
    file = _open_files.get(key)
    if file is None:
        file = _open_files[key] = read_parts(path)
    return file


def _unreadable(path: Path, err: OSError) -> ModelError:
    return ModelError(f"{path}: cannot be read ({err.strerror or err})")


def read_parts(path: Path) -> Gguf:
    first = _Reader(path).read()
    count = first.metadata.get("split.count", 0)
    if not isinstance(count, int):
        raise first.error("split.count", "must be a number")
    if count in (0, 1):
        return first
    name = _SPLIT_NAME.fullmatch(path.name)
    if name is None or int(name[3]) != count:
        raise first.error(
            "split.count", f"{count} does not match the file's name, which ends in -00001-of-00002"
        )
    parts = [path.with_name(f"{name[1]}-{i + 1:05}-of-{name[3]}.gguf") for i in range(count)]
    if path != parts[0]:
        raise first.error("split.no", f"this is a part; name the first, {parts[0].name}")
    for number, part in enumerate(parts[1:], 1):
        next_part = _Reader(part).read()
        if next_part.metadata.get("split.no") != number:
            raise next_part.error(
                "split.no", f"must be {number}, got {next_part.metadata.get('split.no')!r:.40}"
            )
        for tensor in next_part.tensors:
            if tensor in first.tensors:
                raise next_part.error(f"tensor {tensor}", "is in an earlier part already")
        first.tensors.update(next_part.tensors)
    return first


def _is_widened(name: str) -> bool:
    """Return whether the package `gguf` is installed and knows a type."""
    if find_spec("gguf") is None:
        return False
    from gguf import GGMLQuantizationType

    return name in GGMLQuantizationType.__members__


class _Reader:
    """Reads the header of a file in one pass. `at` is the next byte and never exceeds `size`."""

    def __init__(self, path: Path) -> None:
        self.path, self.at = path, 0
        try:
            with path.open("rb") as file:
                # Private and writable, since torch wants writable memory; no code writes to it.
                self.data = (
                    mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_COPY) if file.seek(0, 2) else b""
                )
        except OSError as err:
            raise _unreadable(path, err) from None
        self.size = len(self.data)

    def read(self) -> Gguf:
        if self.data[:4] != _MAGIC:
            raise self._error("magic", "is not GGUF; the file is of another kind, or damaged")
        self.at = 4
        version = self._scalar("I", "version")
        if version not in _VERSIONS:
            other = " (of a big-endian machine)" if version >> 16 else ""
            raise self._error("version", f"{version}{other} is not supported; supported: 2, 3")
        num_tensors = self._count("number of tensors", 24)
        num_keys = self._count("number of keys", 13)
        metadata: dict[str, Any] = {}
        for i in range(num_keys):
            key = self._name(f"key {i + 1} of {num_keys}")
            if key in metadata:
                raise self._error(key, "appears twice")
            metadata[key] = self._value(self._scalar("I", key), key)
            if self.at > _MAX_HEADER_BYTES:
                raise self._error(key, f"ends at byte {self.at}, the limit is {_MAX_HEADER_BYTES}")
        fields = [f"tensor {i + 1} of {num_tensors}" for i in range(num_tensors)]
        entries = [self._tensor_entry(field) for field in fields]
        alignment = metadata.get("general.alignment", 32)
        return Gguf(self.path, metadata, self._tensors(entries, alignment))

    def _error(self, field: str, problem: str) -> ModelError:
        return ModelError(f"{self.path}: {field}: {problem}")

    def _take(self, count: int, field: str) -> int:
        start = self.at
        if count > self.size - start:
            problem = f"the file ends at byte {self.size}, {start + count} are needed"
            raise self._error(field, f"{problem}; the download may be cut")
        self.at += count
        return start

    def _scalar(self, format: str, field: str) -> Any:
        start = self._take(struct.calcsize(format), field)
        return struct.unpack_from(f"<{format}", self.data, start)[0]

    def _count(self, field: str, min_bytes: int) -> int:
        count = self._scalar("Q", field)
        if count > min(_MAX_ENTRIES, (self.size - self.at) // min_bytes):
            raise self._error(field, f"{count} are more than the file can hold")
        return int(count)

    def _name(self, field: str) -> str:
        length = self._scalar("Q", field)
        if not 0 < length <= _MAX_NAME_BYTES:
            raise self._error(
                field, f"its name has {length} bytes, 1 to {_MAX_NAME_BYTES} are allowed"
            )
        start = self._take(length, field)
        name = self.data[start : self.at]
        if not name.isascii() or not (text := name.decode("ascii")).isprintable():
            raise self._error(field, f"its name {name[:40]!r} is not printable ASCII")
        return text

    def _value(self, kind: int, field: str) -> Any:
        if kind in _SCALARS:
            return self._scalar(_SCALARS[kind], field)
        if kind == _STRING:
            return self._strings(1, field)[0]
        if kind != _ARRAY:
            raise self._error(field, f"its type {kind} is not known")
        kind, count = self._scalar("I", field), self._scalar("Q", field)
        if kind == _STRING:
            return self._strings(count, field)
        if kind not in _SCALARS:
            raise self._error(field, f"an array of type {kind} is not supported")
        dtype = np.dtype(_SCALARS[kind]).newbyteorder("<")
        start = self._take(count * dtype.itemsize, field)
        return np.frombuffer(self.data, dtype, count, start)

    def _strings(self, count: int, field: str) -> list[str]:
        if count > (min(self.size, _MAX_HEADER_BYTES) - self.at) // 8:
            raise self._error(field, f"{count} strings are more than the file can hold")
        data, at, length_at = self.data, self.at, struct.Struct("<Q").unpack_from
        strings = []
        try:
            for _ in range(count):  # vocabularies have 100,000s of strings: avoid calls
                start = at + 8
                at = start + length_at(data, at)[0]
                if at > self.size:
                    self.at = start
                    self._take(at - start, field)
                strings.append(data[start:at].decode())
        except struct.error:
            self.at = self.size
            self._take(8, field)
        except UnicodeDecodeError as err:
            raise self._error(field, f"string {len(strings)} is not UTF-8 ({err.reason})") from None
        self.at = at
        return strings

    def _tensor_entry(self, field: str) -> tuple[str, BlockType, tuple[int, ...], int]:
        name = self._name(field)
        field = f"tensor {name}"
        dims = self._scalar("I", field)
        if not 1 <= dims <= _MAX_DIMS:
            raise self._error(field, f"has {dims} dimensions, 1 to {_MAX_DIMS} are allowed")
        shape = tuple(self._scalar("Q", field) for _ in range(dims))[::-1]
        kind, offset = self._scalar("I", field), self._scalar("Q", field)
        if kind not in TYPES:
            known = ", ".join(each.name for each in TYPES.values())
            raise self._error(
                field, f"type {_UNSUPPORTED.get(kind, kind)} is not supported; supported: {known}"
            )
        if kind in WIDENED and not _is_widened(TYPES[kind].name):
            problem = f"type {TYPES[kind].name} needs the package gguf, or a newer one: {_REMEDY}"
            raise self._error(field, problem)
        if not all(shape) or shape[-1] % TYPES[kind].elements:
            problem = f"shape {list(shape)} does not fit type {TYPES[kind].name}"
            raise self._error(field, problem)
        return name, TYPES[kind], shape, offset

    def _tensors(
        self, entries: list[tuple[str, BlockType, tuple[int, ...], int]], alignment: Any
    ) -> dict[str, GgufTensor]:
        if not isinstance(alignment, int) or alignment < 8 or alignment & (alignment - 1):
            problem = f"must be a power of 2 and at least 8, got {alignment!r:.40}"
            raise self._error("general.alignment", problem)
        base = -(-self.at // alignment) * alignment
        tensors: dict[str, GgufTensor] = {}
        spans = []
        for name, kind, shape, offset in entries:
            field, num_bytes = f"tensor {name}", math.prod(shape) // kind.elements * kind.bytes
            if name in tensors:
                raise self._error(field, "appears twice")
            if offset % alignment:
                raise self._error(field, f"offset {offset} is not a multiple of {alignment}")
            self.at = base + offset
            start = self._take(num_bytes, field)
            tensors[name] = GgufTensor(
                name, kind, shape, np.frombuffer(self.data, np.uint8, num_bytes, start)
            )
            spans.append((start, self.at, name))
        for (_, stop, first), (start, _, other) in pairwise(sorted(spans)):
            if start < stop:
                raise self._error(f"tensor {other}", f"its data overlap those of {first}")
        return tensors
