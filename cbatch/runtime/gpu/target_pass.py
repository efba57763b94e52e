"""The target's part of a step: one pass over all rows, then verification and sampling."""

from __future__ import annotations

from functools import partial
from typing import NamedTuple

import torch
from torch import Tensor

from cbatch.runtime.gpu.attention import PagedAttention
from cbatch.runtime.gpu.decoder import Decoder, Hidden
from cbatch.runtime.gpu.device import Device, aligned
from cbatch.runtime.gpu.draft_pass import DraftPasses, HeadPasses
from cbatch.runtime.gpu.layers import FlatTokens
from cbatch.runtime.kv_cache import KVCache
from triton_kernels.sampling.inputs import DraftTokens, LogitsBatch, Noise, Requests, Rows
from triton_kernels.slots.advance import NUM_FIELDS, advance
from triton_kernels.slots.draft_batch import DraftLayout
from triton_kernels.slots.state import SlotState
from triton_kernels.slots.target_batch import RUNS, TargetLayout, make_target_batch
from triton_kernels.verification.kernel import VerifyOutput, verify_logits


class SamplingFeatures(NamedTuple):
    """Sampling features that some row of a step needs; they choose the kernel."""

    shaped: bool = False  # penalties, biases or token restrictions
    filtered: bool = False  # top-k, top-p or min-p, of a row that is not greedy
    rejection_sampled: bool = False  # some drafts were sampled, so rejection sampling verifies them


PLAIN = SamplingFeatures()
MODEL_FEATURES = (PLAIN, SamplingFeatures(rejection_sampled=True))


class TargetPass:
    """The target's pass over a step. `result` int32 [slots, n] is the step's result for the host,
    packed by `triton_kernels.slots.advance`. `drafts` is None without speculation, `drafting`
    without a draft model. `logits` and `layout` are valid until the next step."""

    def __init__(
        self,
        decoder: Decoder,
        kv: KVCache,
        attention: PagedAttention,
        state: SlotState,
        drafts: DraftLayout | None,
        drafting: DraftPasses | None,
        *,
        max_tokens: int,
        max_positions: int,
        max_drafts: int,
    ) -> None:
        slots, device = len(state.num_tokens), decoder.device
        self._decoder, self._state, self.attention = decoder, state, attention
        self._drafts, self._drafting, self._block_size = drafts, drafting, kv.block_size
        self._reader = drafting if isinstance(drafting, HeadPasses) else None
        if self._reader is not None:
            decoder.keep_hidden(self._reader.hidden_layers)
        self._cos_sin = decoder.cos_sin(max_positions)
        self.hidden = Hidden.allocate(max_tokens, decoder)
        # At most one row of logits per token, and per slot one more than its drafts.
        self.max_logits = min(max_tokens, (slots - 1) * (1 + max_drafts))
        self.layout = TargetLayout.allocate(slots, max_tokens, self.max_logits, device)
        vocab = decoder.config.vocab_size
        memory = torch.zeros(self.max_logits, aligned(vocab), dtype=decoder.dtype, device=device)
        self.logits = memory[:, :vocab]
        width = NUM_FIELDS + 1 + max_drafts
        self.flat_result = torch.zeros(slots * width, dtype=torch.int32, device=device)
        self.result = self.flat_result.view(slots, width)
        self._zeros = torch.zeros(slots, dtype=torch.int32, device=device)

    def compute(self, device: Device, tokens: int, longest: int) -> None:
        """Queue the forward pass over up to `tokens` tokens, at most `longest` in one row."""
        key = "target", tokens, longest > self.attention.short_tokens
        device.run(key, partial(self._forward, tokens, longest))

    def find_logits(self, device: Device, count: int) -> None:
        """Queue up to `count` rows of logits, after `compute`."""
        if count:
            device.run(("logits", count), partial(self._find_logits, count))

    def decide(self, device: Device, count: int, features: SamplingFeatures) -> None:
        """Queue verification and sampling with up to `count` rows of logits; fills `result`."""
        if not count:
            features = PLAIN
        device.run(("decide", count, features), partial(self._decide, count, features))

    def run_whole(
        self, device: Device, tokens: int, count: int, features: SamplingFeatures
    ) -> None:
        """Queue all three as one graph: each of up to `count` tokens wants logits, and rows are
        short. `tokens` is the bucket of `count`."""

        def run() -> None:
            self._forward(tokens, self.attention.lengths[0])
            self._find_logits(count)
            self._decide(count, features)

        device.run(("whole", count, features), run)

    def num_rows(self) -> Tensor:
        """Return each slot's number of rows of logits, int32 [slots]."""
        return (self.layout.states == RUNS.value).int() * (self.layout.num_drafted + 1)

    def _forward(self, tokens: int, longest: int) -> None:
        layout, drafts = self.layout, self._drafts
        flat = FlatTokens(layout.tokens, layout.positions, layout.kv_slots).first(tokens)
        make_target_batch(
            self._state,
            self._zeros if drafts is None else drafts.depths,
            layout._replace(tokens=flat.tokens, positions=flat.positions, kv_slots=flat.slots),
            block_size=self._block_size,
            max_token=self._decoder.config.vocab_size - 1,
        )
        self.attention.plan(layout.query_starts, layout.contexts, longest)
        reader = self._reader
        states = () if reader is None else (self._decoder.allocate_hidden(tokens),)
        self._decoder.forward(flat, self.attention, self._cos_sin, self.hidden, *states)
        if reader is not None:
            reader.read(flat, layout, *states)

    def _find_logits(self, count: int) -> None:
        rows = self.layout.logit_tokens[:count]
        self._decoder.logits(self.hidden, rows, self.logits[:count])

    def _decide(self, num_logits: int, features: SamplingFeatures) -> None:
        decision: VerifyOutput | None = None
        if num_logits:
            logits = self.logits[:num_logits]
            proposals = None
            if features.rejection_sampled:
                assert self._drafting is not None
                proposals = self._drafting.proposals(features.shaped)
            batch = self._batch(logits, features.shaped)
            starts = self.layout.logit_starts
            decision = verify_logits(batch, starts, proposals, filtered=features.filtered)
        drafts = self._drafts
        advance(
            self._state,
            self.layout,
            decision,
            self._zeros if drafts is None else drafts.broken,
            self._zeros if drafts is None else drafts.next_kv,
            self.result,
            shaped=features.shaped,
        )
        if self._reader is not None:
            self._reader.after_verification(self.layout, self.result)

    def _batch(self, logits: Tensor, shaped: bool) -> LogitsBatch:
        state, layout, count = self._state, self.layout, len(logits)
        drafts = DraftTokens(self._zeros, self._zeros, self._zeros)
        if self._drafts is not None:
            drafts = DraftTokens(self._drafts.drafts, self._drafts.starts, self._zeros)
        return LogitsBatch(
            logits,
            Rows(layout.logit_slots[:count], layout.logit_depths[:count]),
            Requests(layout.modes, state.temperatures, state.top_k, state.top_p, state.min_p),
            Noise(state.keys, state.choices, layout.noise_positions),
            drafts._replace(counts=layout.num_drafted),
            state.shaping if shaped else None,
        )
