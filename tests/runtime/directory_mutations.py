"""Corrupt Hugging Face directories: copies of a good one, each with one changed file."""

from __future__ import annotations

import json
import random
import shutil
import struct
from pathlib import Path
from typing import Any

WEIGHTS, DEEP = "model.safetensors", "[" * 100_000
_ODD: tuple[Any, ...] = (
    (None, True, False, -1, 0, 1, 2, 3, 0.5, 2**31, 2**63, 2**64, 10**40, 1e-300, 1e300, -1.5)
    + (float("inf"), float("nan"), "", "x", "$B", "a:b", "yarn", "longrope", "F64", "../..", "\0")
    + (
        [],
        {},
        [1],
        [[]],
        {"x": 1},
        ["a", "b"],
        [10**9, 10**9],
        "{{ x.y.z }}",
        "((" * 999,
        [0, 2**62],
    )
)


class DirectoryMutator:
    """Mutations of one good directory."""

    _chosen: random.Random

    def __init__(self, good: Path) -> None:
        self._good = good
        self._files = sorted(path.name for path in good.iterdir())

    def mutated(self, chosen: random.Random, folder: Path) -> str:
        """Write a mutated copy to `folder`; return the mutation in words."""
        self._chosen = chosen
        name = self._chosen.choice(self._files)
        whole = (self._good / name).read_bytes()
        way = self._chosen.choice([self._odd, self._odd, self._odd, self._bytes])
        what, data = way(name, whole)
        shutil.copytree(self._good, folder)
        (folder / name).write_bytes(data)
        return f"{name}: {what}"

    def _odd(self, name: str, whole: bytes) -> tuple[str, bytes]:
        """Change or remove one value of the JSON."""
        behind = b""
        if name == WEIGHTS:
            end = 8 + struct.unpack_from("<Q", whole)[0]
            whole, behind = whole[8:end], whole[end:]
        values = json.loads(whole)
        what = self._put(values)
        text = json.dumps(values).replace('"DEEP"', DEEP).encode()
        size = struct.pack("<Q", len(text)) if name == WEIGHTS else b""
        return what, size + text + behind

    def _put(self, values: Any) -> str:
        inner = list(values.values() if isinstance(values, dict) else values)
        deeper = [each for each in inner if isinstance(each, dict | list) and each]
        if deeper and self._chosen.randrange(3):
            return self._put(self._chosen.choice(deeper))
        at = self._chosen.choice([*values] if isinstance(values, dict) else range(len(values)))
        odd = self._chosen.choice([*_ODD, "DEEP", *inner])
        if self._chosen.randrange(8):
            values[at] = odd
            return f"{at!r} is {odd!r:.60}"
        del values[at]
        return f"{at!r} is gone"

    def _bytes(self, name: str, whole: bytes) -> tuple[str, bytes]:
        """Change bytes, mostly near the start, or cut the file."""
        if not self._chosen.randrange(4):
            size = self._chosen.randrange(len(whole))
            return f"cut to {size}", whole[:size]
        data, places = bytearray(whole), []
        for _ in range(self._chosen.choice([1, 1, 2, 8, 64])):
            places.append(int(len(whole) * self._chosen.random() ** 4))
            data[places[-1]] ^= self._chosen.choice([1 << self._chosen.randrange(8), 0xFF])
        return f"flipped {places}", bytes(data)
