"""The changes since the last step, packed into one message for the device's slot state."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from triton_kernels.slots.state import RUN_WORDS, FieldPlace

Words = NDArray[np.int32]


class SlotUpdate:
    """Collects runs of int32 words. `write` packs them in the format that
    `triton_kernels.slots.state.apply` reads: first those of new sequences, then runs that may
    overwrite them."""

    def __init__(self, places: dict[str, FieldPlace]) -> None:
        self._places = places
        self._first: list[tuple[int, Words]] = []
        self._second: list[tuple[int, Words]] = []
        self._scattered: list[tuple[Words, Words]] = []

    def put(self, name: str, slot: int, values: NDArray[np.generic]) -> None:
        """Set the first elements of a slot's field `name`."""
        offset, stride = self._places[name]
        words = np.ascontiguousarray(values).reshape(-1).view(np.int32)
        to = offset + slot * stride
        for start in range(0, len(words), RUN_WORDS):
            self._first.append((to + start, words[start : start + RUN_WORDS]))

    def put_all(self, name: str, values: NDArray[np.int32]) -> None:
        """Set a whole field, for every slot."""
        offset = self._places[name].offset
        self._second.append((offset, np.ascontiguousarray(values).reshape(-1)))

    def scatter(self, name: str, slots: Words, indices: Words, values: Words) -> None:
        """Set single elements; the last of several values for an element wins. Call it at most
        once per message, and not for a field that `put_all` sets."""
        offset, stride = self._places[name]
        to = offset + slots.astype(np.int64) * stride + indices
        _, last = np.unique(to[::-1], return_index=True)
        kept = len(to) - 1 - last
        self._scattered.append((to[kept].astype(np.int32), values[kept].astype(np.int32)))

    def num_runs(self) -> tuple[int, int]:
        """Return the number of runs in each of the two parts, which `apply` writes in order."""
        scattered = sum(len(to) for to, _ in self._scattered)
        return len(self._first), len(self._second) + scattered

    def num_words(self) -> int:
        payload = sum(len(words) for _, words in self._first + self._second)
        first, second = self.num_runs()
        scattered = second - len(self._second)
        return 3 * (first + second) + payload + scattered

    def write(self, out: Words) -> None:
        """Fill the first `num_words()` words of `out`."""
        num_runs = sum(self.num_runs())
        runs, at = out[: 3 * num_runs].reshape(-1, 3), 3 * num_runs
        row = 0
        for to, words in self._first + self._second:
            runs[row] = to, at, len(words)
            out[at : at + len(words)] = words
            row, at = row + 1, at + len(words)
        for to_many, words in self._scattered:
            part = runs[row : row + len(words)]
            part[:, 0], part[:, 1], part[:, 2] = to_many, at + np.arange(len(words)), 1
            out[at : at + len(words)] = words
            row, at = row + len(words), at + len(words)
