"""What steps take of a device's memory beside weights and KV: counted before KV takes the rest."""

from __future__ import annotations

from typing import NamedTuple

import torch

from cbatch.runtime.gpu.attention import Tuning, heads_of
from cbatch.runtime.gpu.buckets import MOST_CAPTURED_TOKENS, aligned
from cbatch.runtime.gpu.decoder import Decoder
from cbatch.runtime.gpu.heads import GpuHead
from cbatch.runtime.gpu.logprobs import PROMPT_ROWS
from cbatch.runtime.model.config import ModelConfig
from triton_kernels.sampling.launch import bytes_a_row
from triton_kernels.sampling.mask import words_of
from triton_kernels.slots.guesses import HEAD_WORDS
from triton_kernels.slots.state import ArenaSizes

# Entries that shape logits besides the tokens of the sequence itself: biased and stop ids.
_SPARE_ENTRIES = 1024
_LIBRARY_BYTES = 128 << 20  # workspaces of products, of steps that are captured and that are not
_FP32_BYTES = 4
_LOGPROB_COPIES = 8  # of logits in fp32: as they are, normalised, and as integers of two words


Draft = Decoder | GpuHead


class StepLimits(NamedTuple):
    """The most that a step can bring, as the executor is made for it."""

    max_slots: int
    max_sequence_tokens: int
    step_budget_tokens: int
    block_size_tokens: int
    max_drafts: int  # 0: nobody drafts
    reads: bool = False  # a head drafts, which is never behind

    @property
    def most_catch_up(self) -> int:
        """Tokens that the draft model takes in, at most."""
        return self.max_slots + (0 if self.reads else self.step_budget_tokens)

    @property
    def most_logits(self) -> int:
        """No more rows of logits than tokens, and of each slot its drafts and one more."""
        return min(self.step_budget_tokens, self.max_slots * (1 + self.max_drafts))

    def tuning_of(self, decoder: Draft, kv_dtype: torch.dtype | None = None) -> Tuning:
        """Of attention over keys and values of `kv_dtype`, the decoder's unless given."""
        heads, page_tokens = heads_of(decoder.config), self.block_size_tokens
        return Tuning.of(
            heads,
            decoder.dtype,
            decoder.device,
            page_tokens,
            kv_dtype,
            numerics=decoder.numerics,
            query_tokens=1 + self.max_drafts,
        )

    def arena_of(self, config: ModelConfig) -> ArenaSizes:
        """One slot more stands for rows of padding."""
        tokens, vocab = self.max_sequence_tokens, config.vocab_size
        return ArenaSizes(
            slots=self.max_slots + 1,
            tokens=aligned(tokens),
            blocks=aligned(-(-tokens // self.block_size_tokens)),
            vocab=vocab,
            listed=aligned(min(vocab, tokens + _SPARE_ENTRIES)),
            drafts=aligned(self.max_drafts),
            # What the step under way may emit, and drafts behind that.
            guess=HEAD_WORDS + 2 * self.max_drafts + 1 if self.max_drafts else 0,
        )


def step_memory_bytes(target: Decoder, draft: Draft | None, limits: StepLimits) -> int:
    """All that an executor with these limits allocates but KV, and all that its steps do. Passes
    that are captured share one pool of memory, those that are not have another."""
    arena, vocab = limits.arena_of(target.config), target.config.vocab_size
    used = _LIBRARY_BYTES + arena.num_words * _FP32_BYTES
    used += _LOGPROB_COPIES * PROMPT_ROWS * vocab * _FP32_BYTES
    used += limits.most_logits * aligned(vocab) * target.dtype.itemsize
    used += 2 * limits.most_logits * words_of(vocab) * _FP32_BYTES  # of masks
    models: list[tuple[Draft, int, int]] = []
    models.append((target, limits.step_budget_tokens, limits.most_logits))
    kept = 0  # of the target's states, beside each token of its pass
    if draft is not None and limits.max_drafts:
        rows = limits.max_slots * limits.max_drafts
        used += rows * aligned(max(vocab, draft.config.vocab_size)) * draft.dtype.itemsize
        used += rows * (arena.listed + arena.drafts) * _FP32_BYTES  # of listed tokens
        tokens = limits.most_catch_up
        if isinstance(draft, GpuHead):
            # Its pass over the target's tokens is the longest.
            tokens = limits.step_budget_tokens
            used += (tokens + 2 * limits.max_slots + 2) * draft.state_bytes
            kept = len(draft.head.hidden_layers) * target.config.hidden_size * draft.dtype.itemsize
        models.append((draft, tokens, rows))
    eager = captured = 0
    for decoder, tokens, rows in models:
        used += _held_bytes(decoder, tokens, limits)
        eager = max(eager, decoder.pass_bytes(tokens) + tokens * kept)
        tokens = min(tokens, MOST_CAPTURED_TOKENS)
        passes = decoder.pass_bytes(tokens) + tokens * kept
        captured = max(captured, passes, _decision_bytes(decoder, rows, arena))
    return used + eager + captured


def _held_bytes(decoder: Draft, tokens: int, limits: StepLimits) -> int:
    """The residual stream, partial results of attention, the table of rotary factors."""
    config = decoder.config
    if not config.num_layers:  # Medusa heads attend to nothing
        return 0
    heads, tuning = heads_of(config), limits.tuning_of(decoder)
    stream = tokens * config.hidden_size * (_FP32_BYTES + decoder.dtype.itemsize)
    rotary = 2 * limits.max_sequence_tokens * heads.head_dim * _FP32_BYTES
    return stream + tuning.partial_bytes(heads) + rotary


def _decision_bytes(decoder: Draft, rows: int, arena: ArenaSizes) -> int:
    """Of so many rows of logits: what they are made of, and what is drawn and verified."""
    hidden = decoder.config.hidden_size * (_FP32_BYTES + 2 * decoder.dtype.itemsize)
    return rows * (hidden + bytes_a_row(arena.vocab, arena.listed + arena.drafts))
