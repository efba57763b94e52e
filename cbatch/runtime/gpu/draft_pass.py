"""The draft's part of a step: a first pass brings its KV cache up to date, then each row drafts its
planned number of tokens, one pass per draft position. Heads draft from the target's states."""

from __future__ import annotations

from functools import partial
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from cbatch.runtime.gpu.attention import PagedAttention
from cbatch.runtime.gpu.decoder import Hidden
from cbatch.runtime.gpu.device import Device, aligned
from cbatch.runtime.gpu.layers import FlatTokens
from cbatch.runtime.sampling import noise
from triton_kernels.sampling.inputs import (
    Distributions,
    DraftTokens,
    LogitsBatch,
    Noise,
    Proposals,
    Requests,
    Rows,
)
from triton_kernels.sampling.launch import draw
from triton_kernels.slots.advance import DRAFT_KV
from triton_kernels.slots.draft_batch import DraftLayout, make_draft_batch, take_drafts
from triton_kernels.slots.state import SlotState, SlotWork
from triton_kernels.slots.target_batch import TargetLayout


class DraftPasses:
    """The passes of a draft model. A row's drafts, and the distributions that they were sampled
    from, start at index `layout.starts[slot]`.

    `max_drafts` is the most drafts of a row. The draft's vocabulary may be smaller or larger than
    the target's (`vocab`): input ids are clamped to its own, and ids outside it are never drafted.
    """

    def __init__(
        self,
        decoder: Any,
        attention: PagedAttention | None,
        state: SlotState,
        layout: DraftLayout,
        *,
        block_size: int,
        max_tokens: int,
        max_positions: int,
        max_drafts: int,
        vocab: int,
    ) -> None:
        """`attention` is None for Medusa heads, which have no attention."""
        slots, device = len(state.num_tokens), decoder.device
        self._decoder, self._state = decoder, state
        self.attention: Any = attention
        self._block_size, self._max_drafts, self._vocab = block_size, max_drafts, vocab
        self.context_tokens, self.max_drafts = decoder.config.max_position_tokens, max_drafts
        if attention is not None:
            self._cos_sin = decoder.cos_sin(max_positions)
            self._hidden = Hidden.allocate(max_tokens, decoder)
        self.layout = layout
        rows, own = slots - 1, decoder.config.vocab_size
        shape = (rows, max_drafts, aligned(max(own, vocab)))
        # Logit of ids outside the draft's vocabulary: finite, so that no row counts as broken, and
        # too low to be drawn.
        lowest = torch.finfo(decoder.dtype).min
        self._logits = torch.full(shape, lowest, dtype=decoder.dtype, device=device)
        self._dists = Distributions.allocate(rows * max_drafts, device)
        width = state.listed.shape[1]
        self._listed = torch.zeros(rows, max_drafts, width, dtype=torch.float32, device=device)
        self._rows = torch.arange(rows, dtype=torch.int32, device=device)
        depths = torch.arange(max_drafts, dtype=torch.int32, device=device)
        self._depths = depths[:, None].repeat(1, aligned(rows))
        self._no_drafts = torch.zeros(slots, dtype=torch.int32, device=device)

    @property
    def lengths(self) -> list[int]:
        """One query length for each launch variant of the first pass."""
        lengths: list[int] = self.attention.lengths
        return lengths

    def run(
        self, device: Device, max_tokens: int, longest: int, rows: int, depth: int, shaped: bool
    ) -> None:
        """Queue the first pass and all drafts of a step. `max_tokens` (tokens of the first pass)
        and `rows` (rows that draft) are buckets; a row has at most `longest` tokens in the first
        pass and `depth` drafts. `shaped`: some row has penalties, biases or token restrictions."""
        self.ingest(device, max_tokens, longest)
        if rows and depth:
            self.draft(device, rows, depth, shaped)

    def ingest(self, device: Device, max_tokens: int, longest: int) -> None:
        """Queue the first pass."""
        key = "ingest", max_tokens, longest >= self.lengths[-1] > 1
        device.run(key, partial(self._ingest, max_tokens, longest))

    def draft(self, device: Device, rows: int, depth: int, shaped: bool) -> None:
        """Queue up to `depth` drafts of every row. They are one graph, because a launch costs the
        host as much as a pass of a small model takes."""

        def draft_all() -> None:
            for j in range(depth):
                self._draft(rows, j, shaped)

        device.run(("draft", rows, depth, shaped), draft_all)

    def drafts(self) -> DraftTokens:
        """Return the drafts of all slots, without the number of drafts per slot."""
        return DraftTokens(self.layout.drafts, self.layout.starts, self._no_drafts)

    def proposals(self, shaped: bool) -> Proposals:
        """Return the distributions that the drafts were sampled from."""
        logits = self._logits.flatten(0, 1)[:, : self._vocab]
        listed = self._listed.flatten(0, 1) if shaped else None
        return Proposals(logits, listed, self._dists, self._state.work[SlotWork().looked_up])

    def _ingest(self, max_tokens: int, longest: int) -> None:
        layout = self.layout
        flat = FlatTokens(layout.tokens, layout.positions, layout.kv_slots).first(max_tokens)
        make_draft_batch(
            self._state,
            layout._replace(tokens=flat.tokens, positions=flat.positions, kv_slots=flat.slots),
            block_size=self._block_size,
            max_drafts=self._max_drafts,
            max_token=self._decoder.config.vocab_size - 1,
            context_tokens=self.context_tokens,
        )
        self._begin(flat, longest)

    def _begin(self, flat: FlatTokens, longest: int) -> None:
        self.attention.plan(self.layout.query_starts, self.layout.contexts, longest)
        self._forward(flat, first=True)

    def _forward(self, flat: FlatTokens, *, first: bool) -> None:
        self._decoder.forward(flat, self.attention, self._cos_sin, self._hidden)

    def _find_logits(self, rows: int, depth: int, out: Tensor) -> None:
        layout = self.layout
        last = layout.row_tokens[:rows]
        if depth:
            flat = FlatTokens(layout.tokens, layout.positions, layout.kv_slots).first(rows)
            self.attention.plan(layout.row_starts, layout.row_contexts, 1)
            self._forward(flat, first=False)
            last = self._rows[:rows]
        self._decoder.logits(self._hidden, last, out)

    def _draft(self, rows: int, depth: int, shaped: bool) -> None:
        layout = self.layout
        own = self._logits[:rows, depth, : self._decoder.config.vocab_size]
        self._find_logits(rows, depth, own)
        draw(
            self._batch(rows, depth, shaped),
            noise.DRAFT,
            dists=self._dists,
            first=depth,
            step=self._max_drafts,
            listed=self._listed[:rows, depth] if shaped else None,
        )
        take_drafts(
            self._state,
            layout,
            self._dists.tokens,
            rows,
            depth,
            block_size=self._block_size,
            max_drafts=self._max_drafts,
            max_token=self._decoder.config.vocab_size - 1,
        )

    def _batch(self, rows: int, depth: int, shaped: bool) -> LogitsBatch:
        state = self._state
        logits: Tensor = self._logits[:rows, depth, : self._vocab]
        return LogitsBatch(
            logits,
            Rows(self.layout.row_slots[:rows], self._depths[depth, :rows]),
            Requests(state.modes, state.temperatures, state.top_k, state.top_p, state.min_p),
            Noise(state.keys, state.choices, self.layout.noise_positions),
            self.drafts(),
            state.shaping if shaped else None,
        )


class DeviceStates:
    """States that a head reads, [n, size]: of the latest pass, of each slot's last valid position,
    and of each block's last position, for sequences that continue from a shared block."""

    def __init__(
        self, head: Any, state: SlotState, *, num_blocks: int, block_size: int, max_tokens: int
    ) -> None:
        self._state, self._block_size = state, block_size
        slots, size = len(state.num_tokens), head.config.hidden_size
        options: dict[str, Any] = {"dtype": head.dtype, "device": head.device}
        self._pass_states = torch.zeros(max_tokens, size, **options)
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

    def _ingest(self, max_tokens: int, longest: int) -> None:
        self._state.draft_kv_len.copy_(self._state.kv_len)  # also for new sequences
        super()._ingest(max_tokens, longest)

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
        self.max_drafts = min(self.max_drafts, self._decoder.head.num_heads)

    def _begin(self, flat: FlatTokens, longest: int) -> None:
        """Do nothing: no pass precedes the first head."""

    def _find_logits(self, rows: int, depth: int, out: Tensor) -> None:
        self._decoder.logits(depth, self._before(rows), out)
