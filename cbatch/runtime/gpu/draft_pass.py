"""The draft model's part of a step: a first pass brings its KV cache up to date, then each row
drafts its planned number of tokens, one pass per draft position."""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
from torch import Tensor

from cbatch.runtime.gpu.attention import PagedAttention
from cbatch.runtime.gpu.buckets import MOST_CAPTURED_TOKENS, aligned
from cbatch.runtime.gpu.decoder import FlatTokens, Hidden
from cbatch.runtime.gpu.device import Device
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
from triton_kernels.slots.draft_batch import DraftLayout, make_draft_batch, take_drafts
from triton_kernels.slots.state import SlotState, SlotWork


class DraftPasses:
    """The passes of a draft model. A row's drafts, and the distributions that they were sampled
    from, start at index `layout.starts[slot]`.

    `most_drafts` is the most drafts of a row. The draft's vocabulary may be smaller or larger than
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
        most_tokens: int,
        most_positions: int,
        most_drafts: int,
        vocab: int,
    ) -> None:
        """`attention` is None for Medusa heads, which have no attention."""
        slots, device = len(state.num_tokens), decoder.device
        self._decoder, self._state = decoder, state
        self.attention: Any = attention
        self._block_size, self._most_drafts, self._vocab = block_size, most_drafts, vocab
        self.context_tokens, self.most_drafts = decoder.config.max_position_tokens, most_drafts
        if attention is not None:
            self._cos_sin = decoder.cos_sin(most_positions)
            self._hidden = Hidden.allocate(most_tokens, decoder)
        self.layout = layout
        rows, own = slots - 1, decoder.config.vocab_size
        shape = (rows, most_drafts, aligned(max(own, vocab)))
        # Logit of ids outside the draft's vocabulary: finite, so that no row counts as broken, and
        # too low to be drawn.
        lowest = torch.finfo(decoder.dtype).min
        self._logits = torch.full(shape, lowest, dtype=decoder.dtype, device=device)
        self._dists = Distributions.allocate(rows * most_drafts, device)
        width = state.listed.shape[1]
        self._listed = torch.zeros(rows, most_drafts, width, dtype=torch.float32, device=device)
        self._rows = torch.arange(rows, dtype=torch.int32, device=device)
        depths = torch.arange(most_drafts, dtype=torch.int32, device=device)
        self._depths = depths[:, None].repeat(1, aligned(rows))
        self._no_drafts = torch.zeros(slots, dtype=torch.int32, device=device)

    @property
    def lengths(self) -> list[int]:
        """One query length for each launch variant of the first pass."""
        lengths: list[int] = self.attention.lengths
        return lengths

    def run(
        self, device: Device, most_tokens: int, longest: int, rows: int, depth: int, shaped: bool
    ) -> None:
        """Queue the first pass and all drafts of a step. `most_tokens` (tokens of the first pass)
        and `rows` (rows that draft) are buckets; a row has at most `longest` tokens in the first
        pass and `depth` drafts. `shaped`: some row has penalties, biases or token restrictions."""
        self.ingest(device, most_tokens, longest)
        for j in range(depth if rows else 0):
            self.draft(device, rows, j, shaped)

    def ingest(self, device: Device, most_tokens: int, longest: int) -> None:
        """Queue the first pass."""
        key = "ingest", most_tokens, longest >= self.lengths[-1] > 1
        ingest = partial(self._ingest, most_tokens, longest)
        if most_tokens > MOST_CAPTURED_TOKENS:
            ingest()
        else:
            device.run(key, ingest)

    def draft(self, device: Device, rows: int, depth: int, shaped: bool) -> None:
        """Queue draft number `depth` (from 0) of every row that has that many."""
        device.run(("draft", rows, depth, shaped), partial(self._draft, rows, depth, shaped))

    def drafts(self) -> DraftTokens:
        """Return the drafts of all slots, without the number of drafts per slot."""
        return DraftTokens(self.layout.drafts, self.layout.starts, self._no_drafts)

    def proposals(self, shaped: bool) -> Proposals:
        """Return the distributions that the drafts were sampled from."""
        logits = self._logits.flatten(0, 1)[:, : self._vocab]
        listed = self._listed.flatten(0, 1) if shaped else None
        return Proposals(logits, listed, self._dists, self._state.work[SlotWork().looked_up])

    def _ingest(self, most_tokens: int, longest: int) -> None:
        layout = self.layout
        flat = FlatTokens(layout.tokens, layout.positions, layout.kv_slots).first(most_tokens)
        make_draft_batch(
            self._state,
            layout._replace(tokens=flat.tokens, positions=flat.positions, kv_slots=flat.slots),
            block_size=self._block_size,
            most_drafts=self._most_drafts,
            most_token=self._decoder.config.vocab_size - 1,
            context_tokens=self.context_tokens,
        )
        self._begin(flat, longest)

    def _begin(self, flat: FlatTokens, longest: int) -> None:
        """Run the first pass over the tokens of `layout`."""
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
            step=self._most_drafts,
            listed=self._listed[:rows, depth] if shaped else None,
        )
        take_drafts(
            self._state,
            layout,
            self._dists.tokens,
            rows,
            depth,
            block_size=self._block_size,
            most_drafts=self._most_drafts,
            most_token=self._decoder.config.vocab_size - 1,
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
