"""EAGLE heads as drafters (Li et al. 2024, arXiv 2401.15077; 2025, arXiv 2503.01840), as chains.

The head ingests whatever the target computes: its K and V at a position depend on the token there
and on the target's state one before, on no other, so that costs two products and no attention, in
prompts as at k = 0, where many steps are ingested at once. What it wrote while it guessed is
overwritten by that. It is so never behind, and nothing of it is to be taken back.

The state of the last position of each block is kept beside it: whoever goes on from a shared block
has the pair that its next token needs.
"""

from __future__ import annotations

from typing import cast

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from cbatch.core.scheduler.plan import NewSequence
from cbatch.runtime.cpu.decoder import Model, RaggedBatch
from cbatch.runtime.cpu.drafter import DraftRows, Proposal, StepStates
from cbatch.runtime.cpu.eagle_head import EagleHead
from cbatch.runtime.cpu.input_batch import InputBatch
from cbatch.runtime.drafting.draft_model import DraftModel
from cbatch.runtime.drafting.last_states import LastStates
from cbatch.runtime.model.arrays import I64

# States that wait to be ingested, at most, while nobody drafts.
MOST_WAITING = 512


class EagleDrafter(DraftModel):
    """`kv_len` is the target's after every step: what still waits is ingested before it is read."""

    def __init__(self, head: EagleHead) -> None:
        super().__init__(cast(Model, head))
        self.head = head
        self.hidden_layers = head.head.hidden_layers

    def bind(self, table: InputBatch, num_blocks: int) -> None:
        super().bind(table, num_blocks)
        size = self.head.config.hidden_size
        self._states = LastStates(table, num_blocks, size)
        self._carried = torch.empty(0, size)  # by the sequences of the latest batch
        self._waiting: list[StepStates] = []
        self._num_waiting = 0

    def reset(self) -> None:
        super().reset()
        self._waiting, self._num_waiting = [], 0

    def release(self, slot: int) -> None:
        """Its blocks may be another's from now on, or be shared as they are."""
        self._ingest_waiting()
        super().release(slot)

    def report_progress(self, counter: NDArray[np.int64]) -> None:
        """Its passes are one layer long; the target's tell of progress."""

    def zero_blocks(self, block_ids: NDArray[np.int32]) -> None:
        super().zero_blocks(block_ids)
        self._states.zero_blocks(block_ids)

    def admit(self, admission: NewSequence) -> None:
        """On a prefix hit, which is of whole blocks; what they hold of the head is as valid."""
        self._ingest_waiting()
        self.kv_len[admission.slot] = admission.kv_len_tokens
        self._states.admit(admission)

    def kv_lens(self, slots: NDArray[np.integer]) -> I64 | None:
        return self.kv_len[slots]

    def propose(self, rows: DraftRows) -> Proposal:
        self._ingest_waiting()
        # A first token has no state before it.
        return super().propose(rows._replace(num_drafts=rows.num_drafts * (rows.num_tokens > 1)))

    def read_states(self, states: StepStates) -> None:
        if not len(states.slots):
            return
        self._waiting.append(states)
        self._num_waiting += len(states.hidden)
        self.kv_len[states.slots] = states.starts + states.lens
        if self._num_waiting >= MOST_WAITING:
            self._ingest_waiting()

    def _ingest_waiting(self) -> None:
        """Of several steps at once: a sequence's latest state comes from the step before, or is
        what the slot holds."""
        if not self._waiting:
            return
        steps, self._waiting, self._num_waiting = self._waiting, [], 0
        fused = self.head.fuse(torch.cat([step.hidden for step in steps]))
        slots, starts, lens = (np.concatenate([field[at] for field in steps]) for at in range(3))
        ends = lens.cumsum()
        before = fused.roll(1, 0)
        latest, first = np.full(self.table.max_slots, -1), np.ones(len(slots), dtype=np.bool_)
        at = 0
        for step in steps:
            rows = slice(at, at + len(step.slots))
            known = latest[step.slots]
            first[rows] = known < 0
            on = torch.from_numpy((ends - lens)[rows][known >= 0])
            before[on] = fused[torch.from_numpy(known[known >= 0])]
            latest[step.slots] = ends[rows] - 1
            at = rows.stop
        places = torch.from_numpy((ends - lens)[first])
        before[places] = self._states.of_slot[torch.from_numpy(slots[first].astype(np.int64))]
        batch = self.table.ragged(slots, starts, lens, np.zeros_like(lens))
        self.head.ingest(batch, self.kv, before)
        moved = np.flatnonzero(latest >= 0)
        self._states.of_slot[torch.from_numpy(moved)] = fused[torch.from_numpy(latest[moved])]
        self._states.keep_of_blocks(slots, starts, lens, fused)

    def _logits(self, batch: RaggedBatch, slots: NDArray[np.integer] | None) -> Tensor:
        states = self._carried
        if slots is not None:
            states = self._states.of_slot[torch.from_numpy(slots.astype(np.int64))]
        logits, self._carried = self.head.forward(batch, self.kv, states)
        return logits

    def _go_on_with(self, at: I64) -> None:
        self._carried = self._carried[torch.from_numpy(at)]
