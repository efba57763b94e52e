"""Corrupt model files: copies of a good one with a field replaced, bytes flipped, or cut.

Mutations target counts, lengths, types, values, the ends of fields, and the names of other tensors.
"""

from __future__ import annotations

import json
import random
import re
import struct
from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple

EXTREMES = (0, 1, 2, 2**16, 2**31 - 1, 2**31, 2**32 - 1, 2**32, 2**62, 2**63 - 1, 2**63, 2**64 - 1)
REALS = (0.0, -1.0, 0.5, 1e-300, 1e-45, 1e-38, 1e30, 1e300, float("inf"), float("nan"))
TEXTS = ("", "x", "llama", "yarn", "ÿ" * 9999, "{{ 2 ** 99 }}", "((" * 9999, "../..", "\0", "F64")
ODD: tuple[Any, ...] = (None, True, -1, 10**40, [], {}, [1], [[]], {"x": 1}, ["a", "b"], [0, 2**62])
ODD_JSON = [json.dumps(odd).encode() for odd in (*ODD, *EXTREMES, *REALS, *TEXTS)] + [
    b"[" * 100_000
]
_JSON_VALUE = re.compile(rb'"(?:[^"\\]|\\.)*"(?!\s*:)|-?\d[\d.eE+-]*|true|false|null')


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


def good_gguf(content: bytes, names: Iterable[str], last_entry: int) -> GoodFile:
    """Return a good file with the fields around the `names` of its keys and tensors: the length
    before a name, the name, and the two numbers after it (type and size, or dimensions).
    `last_entry`: bytes of the last tensor's entry after its name."""
    known = [struct.pack("<Q", len(name)) + name.encode() for name in names]
    numbers, fields, end = [(4, 8), (8, 16), (16, 24)], [], 0
    for name in known:
        at = content.index(name)
        end = at + len(name)
        fields += [Field(at, end, known), Field(end, end + 12, WHOLE_VALUES)]
        numbers += [(at, at + 8), (end, end + 4), (end + 4, end + 12)]
    for start, stop in numbers:
        width, old = 8 * (stop - start), int.from_bytes(content[start:stop], "little")
        near = (old + 1, old - 1, old * 2, old // 2, old + 32, old - 32, old ^ 1 << width - 1)
        odd = [(n % (1 << width)).to_bytes(width // 8, "little") for n in (*near, *EXTREMES)]
        fields.append(Field(start, stop, odd))
    end += last_entry

    def join(head: bytes, data: bytes) -> bytes:
        """Keep the alignment of the data after a head of another length."""
        return head + bytes(-len(head) % 32) + data

    return GoodFile(content[:end], fields, content[end + -end % 32 :], join)


WHOLE_VALUES = [struct.pack("<IQ", 10, whole) for whole in EXTREMES]
WHOLE_VALUES += [struct.pack("<Id", 12, real) for real in REALS]
WHOLE_VALUES += [struct.pack("<IIQ2d", 9, 12, 2, real, real) for real in REALS]
WHOLE_VALUES += [struct.pack("<Iq", 11, -1), struct.pack("<I?", 7, True)]
WHOLE_VALUES += [struct.pack("<IQ", 8, len(t.encode())) + t.encode() for t in TEXTS]
