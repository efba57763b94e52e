"""Passes of draft heads that read the target's states, and the states kept between steps.

A head ingests every token within the target's pass: it writes K and V from the token and the state
at the previous position. Entries of rejected drafts are overwritten later, as in the target's KV.
So a head never catches up, and the first draft of a row is a pass over one token.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from cbatch.runtime.gpu.decoder import FlatTokens
from cbatch.runtime.gpu.draft_pass import DraftPasses
from triton_kernels.slots.advance import DRAFT_KV
from triton_kernels.slots.state import SlotState
from triton_kernels.slots.target_batch import TargetLayout


class DeviceStates:
    """States that a head reads, [n, size]: of the latest pass, of each slot's last valid position,
    and of each block's last position, for sequences that continue from a shared block."""

    def __init__(
        self, head: Any, state: SlotState, *, num_blocks: int, block_size: int, most_tokens: int
    ) -> None:
        self._state, self._block_size = state, block_size
        slots, size = len(state.num_tokens), head.config.hidden_size
        options: dict[str, Any] = {"dtype": head.dtype, "device": head.device}
        self._pass_states = torch.zeros(most_tokens, size, **options)
        self._slot_states = torch.zeros(slots, size, **options)
        self._block_states = torch.zeros(num_blocks + 1, size, **options)  # last row: no block

    def zero_blocks(self, block_ids: NDArray[np.int32]) -> None:
        index = torch.from_numpy(block_ids.astype(np.int64)).to(self._block_states.device)
        self._block_states.index_fill_(0, index, 0)

    def before(self) -> Tensor:
        """Return each slot's state at the last position in the target's KV; zero for empty KV."""
        kv = self._state.kv_len
        entry = torch.div((kv - 1).clamp_min(0), self._block_size, rounding_mode="floor")
        block = self._state.blocks.gather(1, entry.long()[:, None])[:, 0]
        ends = (kv % self._block_size == 0)[:, None]
        states = torch.where(ends, self._block_states.index_select(0, block), self._slot_states)
        return states.masked_fill((kv == 0)[:, None], 0.0)

    def read(self, flat: FlatTokens, layout: TargetLayout, states: Tensor) -> Tensor:
        """Keep the states of a pass, and return the state before each token."""
        count = len(flat.tokens)
        self._pass_states[:count].copy_(states)
        ends = ((flat.positions + 1) % self._block_size == 0) & (flat.slots >= 0)
        blocks = torch.div(flat.slots, self._block_size, rounding_mode="floor")
        blocks = torch.where(ends, blocks, len(self._block_states) - 1)
        self._block_states.index_copy_(0, blocks.long(), states)
        # The extra row takes the states of slots without tokens in this pass.
        before = states.new_zeros(count + 1, states.shape[1])
        before[1:count].copy_(states[:-1])
        starts, stops = layout.query_starts[:-1], layout.query_starts[1:]
        first = torch.where(stops > starts, starts, count)
        return before.index_copy_(0, first.long(), self.before())[:count]

    def after_verification(self, layout: TargetLayout) -> None:
        """Keep the state of each slot's last valid position, once a pass is verified."""
        starts, stops = layout.query_starts[:-1], layout.query_starts[1:]
        queries = stops - starts
        valid = self._state.kv_len - layout.contexts + queries
        rows = (starts + valid - 1).clamp(0, len(self._pass_states) - 1)
        states = self._pass_states.index_select(0, rows)
        self._slot_states.copy_(torch.where((queries > 0)[:, None], states, self._slot_states))


class HeadPasses(DraftPasses):
    """Drafts of a head. The target's pass calls `read` and, later, `after_verification`."""

    lengths = [1]

    def __init__(self, *args: Any, states: DeviceStates, **settings: Any) -> None:
        super().__init__(*args, **settings)
        self.states = states
        self.hidden_layers: tuple[int, ...] = self._decoder.head.hidden_layers

    def read(self, flat: FlatTokens, layout: TargetLayout, hidden: Tensor) -> None:
        """Read the states [T, layers, H] of the target's layers for `flat`."""
        self.states.read(flat, layout, self._decoder.fuse(hidden))

    def after_verification(self, layout: TargetLayout, result: Tensor) -> None:
        """Set the head's KV length to the target's, also in the `result` of `slots.advance`."""
        self.states.after_verification(layout)
        self._state.draft_kv_len.copy_(self._state.kv_len)
        result[:, DRAFT_KV].copy_(self._state.kv_len)

    def _ingest(self, most_tokens: int, longest: int) -> None:
        self._state.draft_kv_len.copy_(self._state.kv_len)  # also for new sequences
        super()._ingest(most_tokens, longest)

    def _before(self, count: int) -> Tensor:
        """Return the state before the last known token of rows that draft."""
        return self.states.before().index_select(0, self.layout.row_slots[:count])


class EaglePasses(HeadPasses):
    """Drafts of an EAGLE head, each from the head's own state at the previous draft."""

    def read(self, flat: FlatTokens, layout: TargetLayout, hidden: Tensor) -> None:
        before = self.states.read(flat, layout, self._decoder.fuse(hidden))
        self._decoder.project(flat, before, self.attention, self._cos_sin)

    def _forward(self, flat: FlatTokens, *, first: bool) -> None:
        count = len(flat.tokens)
        states = self._before(count) if first else self._decoder.carried(self._hidden, count)
        self._decoder.forward(flat, states, self.attention, self._cos_sin, self._hidden)


class MedusaPasses(HeadPasses):
    """Head i drafts token i of a row, from the state before the row's last known token."""

    def __init__(self, *args: Any, **settings: Any) -> None:
        super().__init__(*args, **settings)
        self.most_drafts = min(self.most_drafts, self._decoder.head.num_heads)

    def _begin(self, flat: FlatTokens, longest: int) -> None:
        """Do nothing: no pass precedes the first head."""

    def _find_logits(self, rows: int, depth: int, out: Tensor) -> None:
        self._decoder.logits(depth, self._before(rows), out)
