"""A shadow of every physical KV block: which token prefix wrote each position.

A scheduler that frees a block too early, shares the wrong one or miscounts `kv_len` makes some row
read a position that another prefix wrote. A model would answer nonsense; the shadow raises.
"""

from __future__ import annotations

import numpy as np

UNWRITTEN = 0
POISON = 1  # a non-finite value; prefix hashes have their top bit set and never equal these


class ContractBreachError(BaseException):
    """A plan broke the contract. Not an `Exception`: a loop that survives the faults of an executor
    must not survive, and so hide, a bug of the scheduler."""


class ShadowKV:
    """Prefix hashes (uint64) by physical position, for one model's KV."""

    def __init__(self, name: str, num_blocks: int, block_size: int) -> None:
        self._name = name
        self._block_size_tokens = block_size
        self._cells = np.zeros((num_blocks, block_size), np.uint64)

    def _addresses(self, blocks: np.ndarray, start: int, stop: int) -> np.ndarray:
        positions = np.arange(start, stop)
        size = self._block_size_tokens
        return blocks[positions // size].astype(np.int64) * size + positions % size

    def write(self, blocks: np.ndarray, start: int, hashes: np.ndarray) -> None:
        """Write hashes at positions start .. start + len(hashes) of the sequence with block table
        `blocks`."""
        flat = self._cells.reshape(-1)
        flat[self._addresses(blocks, start, start + len(hashes))] = hashes

    def poison(self, blocks: np.ndarray, start: int, stop: int) -> None:
        self._cells.reshape(-1)[self._addresses(blocks, start, stop)] = POISON

    def check_read(self, who: str, blocks: np.ndarray, hashes: np.ndarray) -> None:
        """Raise unless positions 0 .. len(hashes) were written by exactly this prefix."""
        cells = self._cells.reshape(-1)[self._addresses(blocks, 0, len(hashes))]
        wrong = np.flatnonzero(cells != hashes)
        if len(wrong) == 0:
            return
        position = int(wrong[0])
        cell = int(cells[position])
        what = {UNWRITTEN: "was never written", POISON: "holds a non-finite value"}.get(
            cell, "was written by another prefix"
        )
        block = int(blocks[position // self._block_size_tokens])
        raise ContractBreachError(
            f"{who}: {self._name} KV position {position} (block {block}) {what}"
        )

    def check_finite(self, who: str, blocks: np.ndarray) -> None:
        """Raise if a block of the row holds poison anywhere: a masked NaN is still a NaN."""
        if (self._cells[blocks] == POISON).any():
            raise ContractBreachError(f"{who}: a block with non-finite {self._name} KV was reused")

    def zero(self, blocks: np.ndarray) -> None:
        self._cells[blocks] = UNWRITTEN

    def clear(self) -> None:
        self._cells[:] = UNWRITTEN
