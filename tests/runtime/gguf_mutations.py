"""Corrupt GGUF files: copies of a good one, each with some of its fields or bytes changed.

A walk over the good file finds its fields. Mutations can therefore target counts, lengths, offsets,
types, the ends of fields, and the names of other tensors.
"""

from __future__ import annotations

import random
import struct
from collections.abc import Callable
from typing import NamedTuple

EXTREMES = (0, 1, 2, 2**16, 2**31 - 1, 2**31, 2**32 - 1, 2**32, 2**62, 2**63 - 1, 2**63, 2**64 - 1)
_WIDTHS = {0: 1, 1: 1, 2: 2, 3: 2, 4: 4, 5: 4, 6: 4, 7: 1, 10: 8, 11: 8, 12: 8}
_STRING, _ARRAY = 8, 9
_TYPES = (*range(15), 20, 23, 30, 39, 99)
_REALS = (0.0, -1.0, 0.5, 1e-300, 1e-45, 1e-38, 1e30, 1e300, float("inf"), float("nan"))


class Field(NamedTuple):
    """Bytes [start, stop) of the head and their meaning: size, kind, name or value. A value of a
    key includes the type before it."""

    start: int
    stop: int
    says: str


class _Walk:
    def __init__(self, data: bytes) -> None:
        self.data, self.at, self.fields = data, 4, list[Field]()

    def number(self, says: str, width: int) -> int:
        start, self.at = self.at, self.at + width
        self.fields.append(Field(start, self.at, says))
        return int.from_bytes(self.data[start : self.at], "little")

    def string(self, says: str) -> None:
        length = self.number("size", 8)
        self.fields.append(Field(self.at, self.at + length, says))
        self.at += length

    def value(self) -> None:
        start, kind = self.at, self.number("kind", 4)
        if kind == _ARRAY:
            kind, count = self.number("kind", 4), self.number("size", 8)
            if kind == _STRING:
                for _ in range(count):
                    self.string("text")
            else:
                self.at += count * _WIDTHS[kind]
        elif kind == _STRING:
            self.string("text")
        else:
            self.number("size", _WIDTHS[kind])
        self.fields.append(Field(start, self.at, "value"))


def fields_of(data: bytes) -> tuple[list[Field], int]:
    """Return the fields of a good file's head, and the offset where the head ends."""
    walk = _Walk(data)
    walk.number("size", 4)
    tensors, keys = walk.number("size", 8), walk.number("size", 8)
    for _ in range(keys):
        walk.string("name")
        walk.value()
    for _ in range(tensors):
        walk.string("name")
        for _ in range(walk.number("size", 4)):
            walk.number("size", 8)
        walk.number("kind", 4)
        walk.number("size", 8)
    # One of a thousand strings is as good as another; fewer of them leave more mutations for the
    # rest.
    texts = [field for field in walk.fields if field.says == "text"]
    kept = set(texts[:: max(1, len(texts) // 20)])
    return [f for f in walk.fields if f.says != "text" or f in kept], walk.at


class GgufMutator:
    """Mutations of one good file."""

    _chosen: random.Random

    def __init__(self, good: bytes) -> None:
        self._good = good
        self._fields, self._head = fields_of(good)
        self._by = {
            says: [f for f in self._fields if f.says == says]
            for says in ("size", "kind", "name", "text", "value")
        }

    def mutated(self, chosen: random.Random) -> tuple[str, bytes]:
        """Return the mutation in words, and the mutated file."""
        self._chosen = chosen
        ways: tuple[tuple[int, Callable[[], tuple[str, bytes]]], ...] = (
            (5, self._number),
            (5, self._value),
            (2, self._cut),
            (2, self._name),
            (2, self._bytes_of_head),
            (4, self._bytes_of_data),
            (1, self._span),
        )
        draw = self._chosen.choices([way for _, way in ways], [weight for weight, _ in ways])[0]
        return draw()

    def _with(self, field: Field, new: bytes) -> bytes:
        """Replace bytes of the head; the data keep their alignment after a head of another
        length."""
        good, end = self._good, self._head
        head = good[: field.start] + new + good[field.stop : end]
        start = end + -end % 32
        return head + bytes(-len(head) % 32) + good[start:]

    def _number(self) -> tuple[str, bytes]:
        """Change a size or type: to an extreme value, a slightly different one, or that of another
        field."""
        field = self._chosen.choice(self._by[self._chosen.choice(["size", "size", "kind"])])
        width = field.stop - field.start
        old = int.from_bytes(self._good[field.start : field.stop], "little")
        near = (old + 1, old - 1, old * 2, old // 2, old + 32, old - 32, old ^ 1 << width * 8 - 1)
        all_of = _TYPES if field.says == "kind" else self._chosen.choice([EXTREMES, near])
        new = self._chosen.choice(all_of) % (1 << width * 8)
        changed = self._with(field, new.to_bytes(width, "little"))
        return f"{field.says} at {field.start}: {old} is {new}", changed

    def _value(self) -> tuple[str, bytes]:
        """Replace a key's value by a well-formed one of any type."""
        field, draw = self._chosen.choice(self._by["value"]), self._chosen.randrange
        whole, real = self._chosen.choice(EXTREMES), self._chosen.choice(_REALS)
        text = self._chosen.choice(["", "x", "llama", "ÿ" * 9999, "{{ 2 ** 99 }}", "((" * 9999])
        kind = draw(6)
        if kind == 0:
            new = struct.pack("<IQ", 10, whole)
        elif kind == 1:
            new = struct.pack("<Iq", 11, -whole % 2**63 - 2**63)
        elif kind == 2:
            new = struct.pack("<Id", 12, real)
        elif kind == 3:
            new = struct.pack("<I?", 7, draw(2))
        elif kind == 4:
            new = struct.pack("<IQ", _STRING, len(text.encode())) + text.encode()
        else:
            count = draw(4)
            new = struct.pack(f"<IIQ{count}d", _ARRAY, 12, count, *[real] * count)
        return f"value at {field.start}: {new[:40]!r}", self._with(field, new)

    def _cut(self) -> tuple[str, bytes]:
        """End the file in a field, at the end of one, or somewhere in the data."""
        if self._chosen.randrange(4):
            size = self._chosen.choice(self._fields).stop + self._chosen.choice([-1, 0, 1])
        else:
            size = self._chosen.randrange(len(self._good))
        return f"cut to {size}", self._good[:size]

    def _name(self) -> tuple[str, bytes]:
        """Replace a name, with its length, by another existing name or by an unused one."""
        at = self._chosen.randrange(len(self._by["name"]))
        field, other = self._by["name"][at], self._chosen.choice(self._by["name"])
        stolen = self._good[other.start : other.stop]
        new = self._chosen.choice([stolen, stolen, b"", b"x", b"blk.9.attn_q.weight", b"\xff"])
        whole = Field(field.start - 8, field.stop, "name")
        return f"name at {field.start}: {new!r}", self._with(
            whole, struct.pack("<Q", len(new)) + new
        )

    def _bytes_of_head(self) -> tuple[str, bytes]:
        return self._flipped(0, self._head)

    def _bytes_of_data(self) -> tuple[str, bytes]:
        return self._flipped(self._head, len(self._good))

    def _flipped(self, start: int, stop: int) -> tuple[str, bytes]:
        data, places = bytearray(self._good), []
        for _ in range(self._chosen.choice([1, 1, 2, 8, 64])):
            places.append(self._chosen.randrange(start, stop))
            data[places[-1]] ^= self._chosen.choice([1 << self._chosen.randrange(8), 0xFF])
        return f"flipped {places}", bytes(data)

    def _span(self) -> tuple[str, bytes]:
        """Replace a span of the head by bytes from elsewhere, or remove it."""
        start = self._chosen.randrange(self._head)
        size, from_ = self._chosen.randrange(1, 64), self._chosen.randrange(len(self._good))
        new = self._good[from_ : from_ + self._chosen.choice([0, size, 2 * size])]
        data = self._good[:start] + new + self._good[start + size :]
        return f"{size} bytes at {start} are {len(new)} from {from_}", data
