"""Corrupt model files: copies of a good one with a field replaced, bytes flipped, or cut.

A walk over a good file finds its fields, so that mutations can target counts, lengths, offsets,
types, values, the ends of fields, and the names of other tensors.
"""

from __future__ import annotations

import json
import random
import re
import struct
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

EXTREMES = (0, 1, 2, 2**16, 2**31 - 1, 2**31, 2**32 - 1, 2**32, 2**62, 2**63 - 1, 2**63, 2**64 - 1)
REALS = (0.0, -1.0, 0.5, 1e-300, 1e-45, 1e-38, 1e30, 1e300, float("inf"), float("nan"))
TEXTS = ("", "x", "llama", "yarn", "ÿ" * 9999, "{{ 2 ** 99 }}", "((" * 9999, "../..", "\0", "F64")
ODD: tuple[Any, ...] = (None, True, -1, 10**40, [], {}, [1], [[]], {"x": 1}, ["a", "b"], [0, 2**62])
ODD_JSON = [json.dumps(odd).encode() for odd in (*ODD, *EXTREMES, *REALS, *TEXTS)] + [
    b"[" * 100_000
]
_JSON_VALUE = re.compile(rb'"(?:[^"\\]|\\.)*"(?!\s*:)|-?\d[\d.eE+-]*|true|false|null')
_WIDTHS = {0: 1, 1: 1, 2: 2, 3: 2, 4: 4, 5: 4, 6: 4, 7: 1, 10: 8, 11: 8, 12: 8}
_STRING, _ARRAY = 8, 9


class Field(NamedTuple):
    """Bytes [start, stop) of a head, and what may take their place."""

    start: int
    stop: int
    odd: Sequence[bytes]


class GoodFile(NamedTuple):
    """The head of a file with its fields, its data, and how both are joined again."""

    head: bytes
    fields: list[Field]
    data: bytes = b""
    join: Callable[[bytes, bytes], bytes] = bytes.__add__

    def mutated(self, chosen: random.Random) -> tuple[str, bytes]:
        """Return the mutation in words, and the mutated file."""
        draw = chosen.choices([self._odd, self._cut, self._flipped, self._span], [12, 2, 6, 1])[0]
        return draw(chosen)

    def _odd(self, chosen: random.Random) -> tuple[str, bytes]:
        start, stop, odd = chosen.choice(self.fields)
        new = chosen.choice(odd)
        head = self.head[:start] + new + self.head[stop:]
        return f"bytes {start} to {stop} are {new[:40]!r}", self.join(head, self.data)

    def _cut(self, chosen: random.Random) -> tuple[str, bytes]:
        """End the file in a field, at the end of one, or anywhere."""
        good = self.join(self.head, self.data)
        at_field = chosen.choice(self.fields).stop + chosen.choice([-1, 0, 1])
        size = chosen.choice([at_field, at_field, chosen.randrange(len(good))])
        return f"cut to {size}", good[:size]

    def _flipped(self, chosen: random.Random) -> tuple[str, bytes]:
        good, places = bytearray(self.join(self.head, self.data)), []
        size = chosen.choice([len(self.head), len(good)])
        for _ in range(chosen.choice([1, 1, 2, 8, 64])):
            places.append(chosen.randrange(size))
            good[places[-1]] ^= chosen.choice([1 << chosen.randrange(8), 0xFF])
        return f"flipped {places}", bytes(good)

    def _span(self, chosen: random.Random) -> tuple[str, bytes]:
        """Replace a span of the head by bytes from elsewhere, or remove it."""
        good, start = self.join(self.head, self.data), chosen.randrange(len(self.head))
        size, other = chosen.randrange(1, 64), chosen.randrange(len(good))
        new = good[other : other + chosen.choice([0, size, 2 * size])]
        mutated = good[:start] + new + good[start + size :]
        return f"{size} bytes at {start} are {len(new)} from {other}", mutated


def good_json(text: bytes) -> GoodFile:
    matches = list(_JSON_VALUE.finditer(text))
    kept = matches[:: max(1, len(matches) // 200)]  # a vocabulary has thousands of values
    return GoodFile(text, [Field(*match.span(), ODD_JSON) for match in kept])


def good_safetensors(content: bytes) -> GoodFile:
    end = 8 + struct.unpack_from("<Q", content)[0]
    head = good_json(content[8:end])
    return head._replace(
        data=content[end:], join=lambda text, data: struct.pack("<Q", len(text)) + text + data
    )


def good_gguf(content: bytes) -> GoodFile:
    walk = _GgufWalk(content)
    start = walk.at + -walk.at % 32

    def join(head: bytes, data: bytes) -> bytes:
        """Keep the alignment of the data after a head of another length."""
        return head + bytes(-len(head) % 32) + data

    return GoodFile(content[: walk.at], walk.fields, content[start:], join)


def _gguf_values() -> list[bytes]:
    """Return well-formed values of all types."""
    values = [struct.pack("<IQ", 10, whole) for whole in EXTREMES]
    values += [struct.pack("<Id", 12, real) for real in REALS]
    values += [struct.pack("<IIQ2d", _ARRAY, 12, 2, real, real) for real in REALS]
    values += [struct.pack("<Iq", 11, -1), struct.pack("<I?", 7, True)]
    values += [struct.pack("<IQ", _STRING, len(t.encode())) + t.encode() for t in TEXTS]
    return values


class _GgufWalk:
    """A walk over the head of a good file."""

    def __init__(self, content: bytes) -> None:
        self.content, self.at, self.fields = content, 4, list[Field]()
        self.texts, self.values = 0, _gguf_values()
        self.names: list[bytes] = [b"", struct.pack("<Q", 1) + b"\xff"]
        self.number(4)
        tensors, keys = self.number(8), self.number(8)
        for _ in range(keys):
            self.name()
            self.value()
        for _ in range(tensors):
            self.name()
            for _ in range(self.number(4)):
                self.number(8)
            self.number(4)
            self.number(8)

    def number(self, width: int, *, is_field: bool = True) -> int:
        """Take a number: it may become an extreme or a slightly different one."""
        start, self.at = self.at, self.at + width
        old = int.from_bytes(self.content[start : self.at], "little")
        near = (old + 1, old - 1, old * 2, old // 2, old + 32, old - 32, old ^ 1 << width * 8 - 1)
        odd = [(new % (1 << width * 8)).to_bytes(width, "little") for new in (*near, *EXTREMES)]
        if is_field:
            self.fields.append(Field(start, self.at, odd))
        return old

    def name(self) -> None:
        """Take a name: it may become that of another key or tensor."""
        start = self.at
        size = self.number(8)
        self.at += size
        self.names.append(self.content[start : self.at])
        self.fields.append(Field(start, self.at, self.names))

    def text(self) -> None:
        self.texts += 1  # one of a thousand is as good as another
        size = self.number(8, is_field=self.texts % 50 == 0)
        self.at += size

    def value(self) -> None:
        start, kind = self.at, self.number(4)
        if kind == _ARRAY:
            kind, count = self.number(4), self.number(8)
            for _ in range(count if kind == _STRING else 0):
                self.text()
            self.at += 0 if kind == _STRING else count * _WIDTHS[kind]
        elif kind == _STRING:
            self.text()
        else:
            self.number(_WIDTHS[kind])
        self.fields.append(Field(start, self.at, self.values))
