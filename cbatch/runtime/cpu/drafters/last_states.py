"""States that draft heads keep after a step: the last one of each slot and of each block."""

from __future__ import annotations

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from cbatch.core.scheduler.plan import NewSequence
from cbatch.runtime.input_batch import InputBatch
from cbatch.runtime.model.arrays import I64, iota


class LastStates:
    """The last states, fp32: `of_slot` [slots, size] and `of_block` [blocks, size]. A sequence with
    a prefix hit takes the state for its next token from its last shared block."""

    def __init__(self, table: InputBatch, num_blocks: int, size: int) -> None:
        self._table = table
        self.of_slot = torch.zeros(table.max_num_seqs, size)
        self.of_block = torch.zeros(num_blocks, size)

    def zero_blocks(self, block_ids: NDArray[np.int32]) -> None:
        self.of_block[torch.from_numpy(block_ids).long()] = 0

    def admit(self, admission: NewSequence) -> None:
        """On a prefix hit, set the slot's state to that of its last shared block."""
        computed = admission.kv_len_tokens
        if computed:
            last_block = admission.blocks[computed // self._table.block_size - 1]
            self.of_slot[admission.slot] = self.of_block[int(last_block)]

    def keep_of_blocks(
        self, slots: NDArray[np.integer], starts: I64, lens: I64, states: Tensor
    ) -> tuple[NDArray[np.integer], NDArray[np.int32]]:
        """Keep the states at the ends of blocks. `states` [sum of lens, size] has the
        states at positions [starts[i], starts[i] + lens[i]) of slots[i]. Return the blocks with
        their slots."""
        size = self._table.block_size
        positions = (starts - lens.cumsum() + lens).repeat(lens) + iota(len(states))
        at = ((positions + 1) % size == 0).nonzero()[0]
        ending = slots.repeat(lens)[at]
        blocks = self._table.blocks[ending, positions[at] // size]
        if len(at):
            self.of_block[torch.from_numpy(blocks).long()] = states[torch.from_numpy(at)]
        return ending, blocks
