"""The Medusa drafter, without draft trees. The heads read the target's last state and need no KV
cache. Their drafts do not depend on each other: one pass makes all of them, but fewer are accepted.
"""

from __future__ import annotations

import numpy as np
import torch
from numpy.typing import NDArray

from cbatch.core.scheduler.plan import NewSequence
from cbatch.runtime.cpu.drafters.draft_model import Drafting
from cbatch.runtime.cpu.drafters.last_states import LastStates
from cbatch.runtime.cpu.drafters.medusa_head import MedusaHead
from cbatch.runtime.drafting.contract import DraftRows, ModelDrafter, Proposal, StepStates
from cbatch.runtime.input_batch import InputBatch


class MedusaDrafter(ModelDrafter):
    """Drafts with Medusa heads. `kv_len` counts a slot's positions up to its last state; it equals
    the target's after every step whose states it reads."""

    def __init__(self, head: MedusaHead) -> None:
        self.head, self.hidden_layers = head, head.head.hidden_layers
        self.context_tokens = head.config.max_position_tokens

    def bind(self, table: InputBatch, num_blocks: int) -> None:
        super().bind(table, num_blocks)
        self.kv_len = np.zeros(table.max_num_seqs, dtype=np.int64)
        self._states = LastStates(table, num_blocks, self.head.config.hidden_size)

    def zero_blocks(self, block_ids: NDArray[np.int32]) -> None:
        self._states.zero_blocks(block_ids)

    def admit(self, admission: NewSequence) -> None:
        self.kv_len[admission.slot] = admission.kv_len_tokens
        self._states.admit(admission)

    def read_states(self, states: StepStates) -> None:
        nonempty = states.lens > 0
        slots, starts, lens = states.slots[nonempty], states.starts[nonempty], states.lens[nonempty]
        if not len(slots):
            return
        hidden = states.hidden[:, 0]
        self._states.of_slot[_index(slots)] = hidden[torch.from_numpy(lens.cumsum() - 1)]
        self._states.keep_of_blocks(slots, starts, lens, hidden)
        self.kv_len[slots] = starts + lens

    def propose(self, rows: DraftRows) -> Proposal:
        slots, known = rows.slots, rows.num_tokens
        # The first token of a sequence has no state before it.
        has_state = (known > 1) & (self.kv_len[slots] == known - 1)
        depths = np.minimum(rows.num_drafts, self.head.head.num_heads) * has_state
        drafting = Drafting(self, rows, depths)
        deepest = int(depths.max(initial=0))
        active = [(depths > depth).nonzero()[0] for depth in range(deepest)]
        if deepest:
            states = self.head.fuse(self._states.of_slot[_index(slots)][:, None])
            all_logits = self.head.logits(states, [torch.from_numpy(at) for at in active])
            for depth, logits in enumerate(all_logits):
                # `choose` ends the drafts of a row at its first non-finite logits.
                continues = drafting.depths[active[depth]] > depth
                if not continues.all():
                    active[depth] = active[depth][continues]
                    logits = logits[torch.from_numpy(continues)]
                if len(active[depth]):
                    drafting.choose(logits, active[depth], depth)
        drafting.close()
        return Proposal(drafting.tokens, drafting.depths, drafting.probs(), drafting.non_finite)


def _index(slots: NDArray[np.integer]) -> torch.Tensor:
    return torch.from_numpy(slots.astype(np.int64))
