"""The EAGLE drafter (Li et al. 2024, arXiv 2401.15077; 2025, arXiv 2503.01840), without draft
trees.

The head ingests every position whose state it reads. Its K and V depend only on the token and
the target's previous state, so this costs two products and no attention. While no row drafts, the
states of many steps are ingested at once. Ingesting overwrites the K and V that drafting wrote. So
rejected drafts need no rollback.

The state of each block's last position is kept, because a sequence that continues from a shared
block needs it for its next token.

While no row drafts for long, the target's states are not read. The head does not catch up on them.
After such a gap a sequence begins for it at the first block with a state read again (windows.py).
"""

from __future__ import annotations

from typing import cast

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from cbatch.core.scheduler.plan import Deltas, NewSequence
from cbatch.runtime.batch import RaggedBatch
from cbatch.runtime.cpu.decoder import Model
from cbatch.runtime.cpu.drafters.draft_model import DraftModel
from cbatch.runtime.cpu.drafters.eagle_head import EagleHead
from cbatch.runtime.cpu.drafters.last_states import LastStates
from cbatch.runtime.cpu.drafters.windows import Windows
from cbatch.runtime.drafting.contract import DraftRows, Proposal, StepStates
from cbatch.runtime.input_batch import InputBatch
from cbatch.runtime.model.arrays import I64, iota

# Maximum number of states (one per token) that wait while no row drafts, to bound their memory; and
# of those that are ingested in the pass of a draft, which then computes attention for them.
MAX_WAITING_STATES, MAX_STATES_WITH_DRAFTS = 512, 64


class EagleDrafter(DraftModel):
    """Drafts with an EAGLE head. `kv_len` counts positions up to the last state read, of
    which some may wait: they are ingested before the KV cache is read."""

    def __init__(self, head: EagleHead) -> None:
        super().__init__(cast(Model, head))
        self.head, self.vocabulary = head, head.vocabulary
        self.hidden_layers = head.head.hidden_layers

    def bind(self, table: InputBatch, num_blocks: int) -> None:
        super().bind(table, num_blocks)
        size = self.head.config.hidden_size
        self._states = LastStates(table, num_blocks, size)
        self._windows = Windows(table, num_blocks)
        self._output_states = torch.empty(0, size)  # of the head, by row of the latest batch
        self._waiting: list[StepStates] = []
        self._num_waiting = 0

    def reset(self) -> None:
        super().reset()
        self._windows.clear()
        self._waiting, self._num_waiting = [], 0

    def release(self, slot: int) -> None:
        """Ingest waiting states first: the slot's blocks may be reused or shared from now on."""
        self._ingest_waiting()
        super().release(slot)

    def report_progress(self, counter: NDArray[np.int64]) -> None:
        """Do nothing: the head's passes are one layer long, and the target reports progress."""

    def zero_blocks(self, block_ids: NDArray[np.int32]) -> None:
        super().zero_blocks(block_ids)
        self._states.zero_blocks(block_ids)

    def append_blocks(self, deltas: Deltas) -> None:
        self._windows.append_blocks(deltas.append_indices, deltas.append_blocks)

    def admit(self, admission: NewSequence) -> None:
        """Take over the prefix hit: shared blocks have the head's K and V, too."""
        self._ingest_waiting()
        self.kv_len[admission.slot] = admission.kv_len_tokens
        self._states.admit(admission)
        self._windows.admit(admission)

    def propose(self, rows: DraftRows) -> Proposal:
        if self._num_waiting > MAX_STATES_WITH_DRAFTS:
            self._ingest_waiting()
        # The first token of a window has no state before it, nor has one after a gap.
        drafts = rows.num_tokens > self._windows.first_of_slot[rows.slots] + 1
        zeros = np.zeros_like(rows.catch_up)
        return super().propose(rows._replace(num_drafts=rows.num_drafts * drafts, catch_up=zeros))

    def read_states(self, states: StepStates) -> None:
        """Read the states of a step. A slot begins a window after steps that were not read, and
        after logits of its drafts that were not finite."""
        if not len(states.slots):
            return
        after_gap = states.starts > self.kv_len[states.slots]
        if np.count_nonzero(after_gap):
            self._ingest_waiting()
            slots = states.slots[after_gap]
            blocks = self._windows.begin(slots, states.starts[after_gap])
            self.kv.zero_blocks(blocks)  # they may have K and V of a sequence before
            self._states.of_slot.numpy()[slots] = 0  # nor has it a state before the gap
        self._waiting.append(states)
        self._num_waiting += len(states.hidden)
        self.kv_len[states.slots] = states.starts + states.lens
        if self._num_waiting >= MAX_WAITING_STATES:
            self._ingest_waiting()

    def _ingest_waiting(self) -> None:
        """Ingest the waiting states of all steps in one call."""
        if not self._waiting:
            return
        steps, states = self._take_waiting()
        if len(states):
            batch = self._batch(*steps, np.zeros_like(steps[2]))
            self.head.choices(batch, self.kv, states)

    def _take_waiting(self) -> tuple[tuple[NDArray[np.integer], I64, I64], Tensor]:
        """Return slots, starts and lengths of the waiting states, and the state before each. That
        before a slot's first position is its last state, kept from earlier."""
        steps, self._waiting, self._num_waiting = self._waiting, [], 0
        if len(steps) == 1:
            slots, starts, lens, hidden = steps[0]
        elif steps:
            slots, starts, lens = (
                np.concatenate([field[at] for field in steps]) for at in range(3)
            )
            # NumPy, because torch would first wake its threads, which takes longer than the copy.
            hidden = torch.from_numpy(np.concatenate([step.hidden.numpy() for step in steps]))
        if not steps or not len(hidden):
            none = iota(0)
            return (none, none, none), self._output_states[:0]
        fused = self.head.fuse(hidden)
        states, last, now = fused.roll(1, 0), self._states.of_slot.numpy(), fused.numpy()
        ends, some = lens.cumsum(), lens > 0
        firsts, lasts, of = (ends - lens)[some], ends[some] - 1, slots[some]
        # By slot, in the order of steps: an entry continues from the one before of its slot.
        order = np.argsort(of, kind="stable")
        of, firsts, lasts = of[order], firsts[order], lasts[order]
        is_first = np.append(True, of[1:] != of[:-1])
        before = now[np.roll(lasts, 1)]
        before[is_first] = last[of[is_first]]
        states.numpy()[firsts] = before
        is_last = np.roll(is_first, -1)
        last[of[is_last]] = now[lasts[is_last]]
        self._windows.mark(self._states.keep_of_blocks(slots, starts, lens, fused))
        return (slots, starts, lens), states

    def _first_logits(self, slots: NDArray[np.integer], starts: I64, query_lens: I64) -> Tensor:
        """Also ingest waiting states, since one pass costs less than two."""
        waiting, states = self._take_waiting()
        num_logits = np.concatenate([np.zeros_like(waiting[2]), np.ones_like(query_lens)])
        last = self._states.of_slot[torch.from_numpy(slots.astype(np.int64))]
        batch = self._batch(
            np.concatenate((waiting[0], slots)),
            np.concatenate((waiting[1], starts)),
            np.concatenate((waiting[2], query_lens)),
            num_logits,
        )
        self._drafting = slots
        return self._choices(batch, torch.cat([states, last]))

    def _next_logits(self, batch: RaggedBatch) -> Tensor:
        return self._choices(self._windows.as_seen(batch, self._drafting), self._output_states)

    def _batch(
        self, slots: NDArray[np.integer], starts: I64, query_lens: I64, num_logits: I64
    ) -> RaggedBatch:
        return self._windows.as_seen(super()._batch(slots, starts, query_lens, num_logits), slots)

    def _choices(self, batch: RaggedBatch, states: Tensor) -> Tensor:
        logits, self._output_states = self.head.choices(batch, self.kv, states)
        return logits

    def _keep_rows(self, at: I64) -> None:
        self._drafting = self._drafting[at]
        self._output_states = self._output_states[torch.from_numpy(at)]
