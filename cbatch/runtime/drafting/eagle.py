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
from cbatch.runtime.cpu.compiled_head import SlotStates
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
    """`kv_len` is the target's after every step: what still waits is ingested before it is read.
    Where only what is likeliest is asked for, all drafts of a step are one call."""

    def __init__(self, head: EagleHead) -> None:
        super().__init__(cast(Model, head))
        self.head, self.vocabulary = head, head.vocabulary
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
        rows = rows._replace(num_drafts=rows.num_drafts * (rows.num_tokens > 1))
        return self._propose_likeliest(rows) if self._is_plain(rows) else super().propose(rows)

    def _is_plain(self, rows: DraftRows) -> bool:
        """Whether what is likeliest is all that is asked for."""
        table = self.table
        shaped = table.logits_processors.num_active and table.logits_processors.active[rows.slots]
        return bool(table.greedy[rows.slots].all()) and not np.any(shaped)

    def _propose_likeliest(self, rows: DraftRows) -> Proposal:
        """As `DraftModel.propose`, in one call: the head is never behind."""
        depths = np.minimum(rows.num_drafts, self.context_tokens + 1 - rows.num_tokens)
        drafts = np.zeros((len(depths), max(int(depths.max()), 0)), dtype=np.int64)
        num_drafted, broken = np.zeros_like(depths), np.zeros(len(depths), dtype=np.bool_)
        at = (depths > 0).nonzero()[0]
        if len(at):
            slots, known = rows.slots[at], rows.num_tokens[at]
            found = self.head.compiled.draft(self._places(), slots, known, depths[at])
            drafts[at], num_drafted[at], broken[at] = found
            self.kv_len[slots] = known - 1 + num_drafted[at]
        self.kv_len[rows.slots[broken]] = 0
        return Proposal(drafts, num_drafted, None, broken)

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
        if len(steps) == 1:
            slots, starts, lens, hidden = steps[0]
        else:
            slots, starts, lens = (
                np.concatenate([field[at] for field in steps]) for at in range(3)
            )
            # Not by torch, whose threads sleep by now: their waking takes longer than the copy.
            hidden = torch.from_numpy(np.concatenate([step.hidden.numpy() for step in steps]))
        self.head.compiled.ingest(self._places(), slots.astype(np.int64), starts, lens, hidden)

    def _places(self) -> SlotStates:
        return SlotStates(self.table, self.kv, self._states.of_slot, self._states.of_block)

    def _logits(self, batch: RaggedBatch, slots: NDArray[np.integer] | None) -> Tensor:
        states = self._carried
        if slots is not None:
            states = self._states.of_slot[torch.from_numpy(slots.astype(np.int64))]
        logits, self._carried = self.head.choices(batch, self.kv, states)
        return logits

    def _go_on_with(self, at: I64) -> None:
        self._carried = self._carried[torch.from_numpy(at)]
