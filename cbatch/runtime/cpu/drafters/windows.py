"""The part of each sequence that a draft head has seen.

A head that did not read the target's states for some steps has no K and V of their positions. For
the head, the sequence then begins at the block of the first state read again. Its positions count
from there, which rotary embeddings allow: they depend on distances alone.
"""

from __future__ import annotations

import dataclasses

import numpy as np
from numpy.typing import NDArray

from cbatch.core.scheduler.plan import NewSequence
from cbatch.runtime.batch import RaggedBatch
from cbatch.runtime.input_batch import InputBatch
from cbatch.runtime.model.arrays import I64, iota


class Windows:
    """The first positions that the head sees, multiples of the block size: `first_of_slot` [slots]
    of the sequence, and `_first_of_block` [blocks] of the sequence that wrote the block. The latter
    is the block's end if the head has not seen the whole block."""

    def __init__(self, table: InputBatch, num_blocks: int) -> None:
        self._table = table
        self.first_of_slot = np.zeros(table.max_num_seqs, dtype=np.int64)
        self._first_of_block = np.zeros(num_blocks, dtype=np.int64)

    def clear(self) -> None:
        self.first_of_slot[:] = self._first_of_block[:] = 0

    def append_blocks(self, indices: NDArray[np.integer], blocks: NDArray[np.int32]) -> None:
        """Note that these blocks, by absolute index, are new: the head has not seen them."""
        self._first_of_block[blocks] = (indices.astype(np.int64) + 1) * self._table.block_size

    def admit(self, admission: NewSequence) -> None:
        """Begin where the sequence of the last shared block began, if the head saw the rest."""
        size = self._table.block_size
        shared, first = admission.kv_len_tokens // size, 0
        if shared:
            firsts = self._first_of_block[admission.blocks[:shared]]
            first = min(int(firsts[-1]), shared * size)
            if np.count_nonzero(firsts[first // size :] != first):  # of several windows, or unseen
                first = shared * size
        self.first_of_slot[admission.slot] = first
        indices = np.arange(shared, len(admission.blocks))
        self.append_blocks(indices, admission.blocks[shared:])

    def begin(self, slots: NDArray[np.integer], starts: I64) -> NDArray[np.int32]:
        """Begin windows at the blocks of positions `starts`, and return these blocks."""
        indices = starts // self._table.block_size
        self.first_of_slot[slots] = indices * self._table.block_size
        return self._table.blocks[slots, indices]

    def mark(self, ended: tuple[NDArray[np.integer], NDArray[np.int32]]) -> None:
        """Note that the head has seen these blocks to their ends; slots and blocks."""
        slots, blocks = ended
        self._first_of_block[blocks] = self.first_of_slot[slots]

    def as_seen(self, batch: RaggedBatch, slots: NDArray[np.integer]) -> RaggedBatch:
        """Return the batch as the head sees it: contexts and blocks count from the first of the
        window. A pass does not read `positions`, which stay."""
        firsts = self.first_of_slot[slots]
        if not np.count_nonzero(firsts):
            return batch
        width = batch.block_tables.shape[1]
        columns = iota(width) + (firsts // self._table.block_size)[:, None]
        tables = np.take_along_axis(batch.block_tables, np.minimum(columns, width - 1), 1)
        lens = batch.context_lens - firsts
        return dataclasses.replace(batch, context_lens=lens, block_tables=tables)
