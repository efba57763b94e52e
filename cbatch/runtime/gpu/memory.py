"""Device memory of an executor without weights and KV cache, which gets the rest; its types."""

from __future__ import annotations

from typing import NamedTuple

import torch

from cbatch.core.request.errors import FieldError
from cbatch.runtime.gpu.attention import Tuning, heads_of
from cbatch.runtime.gpu.decoder import Decoder
from cbatch.runtime.gpu.device import SMALL, aligned, bucket
from cbatch.runtime.gpu.heads import GpuHead
from cbatch.runtime.gpu.logprobs import PROMPT_ROWS
from cbatch.runtime.model.config import ModelConfig
from cbatch.runtime.model.records import Attention
from triton_kernels.attention import MAX_ELEMENTS
from triton_kernels.attention.table import arch_of, tile_for
from triton_kernels.sampling.launch import bytes_a_row
from triton_kernels.sampling.mask import words_of
from triton_kernels.slots.guesses import HEAD_WORDS
from triton_kernels.slots.state import ArenaSizes

# Entries for biased and stop ids in a slot's list, in addition to one for each of its tokens.
_SPARE_ENTRIES = 1024
LIBRARY_BYTES = 128 << 20  # matrix product workspaces, of captured and of other steps
_FP32_BYTES = 4
# Memory for log probabilities, in sizes of the fp32 logits: two tensors each of logits, of log
# probabilities, and of int64 temporaries, which have twice the size.
LOGPROB_COPIES = 8


# Weights of a layer up to which the host needs longer to queue the layer, 0.3 ms, than the device
# to compute it for `_MAX_CAPTURED_TOKENS / 2` tokens.
_SMALL_LAYER = 64 << 20
_MAX_CAPTURED_TOKENS = 2048

Draft = Decoder | GpuHead


def host_binds(config: ModelConfig) -> bool:
    """Return whether the host is the slower side: launches of large steps and of parts of a step
    then cost more than their graphs."""
    mixer = config.attention
    width = mixer.row_width + mixer.heads * mixer.key_dim + 3 * config.widest_inner
    return config.hidden_size * width <= _SMALL_LAYER


class StepLimits(NamedTuple):
    """The largest step that an executor is built for."""

    max_num_seqs: int
    max_sequence_tokens: int
    max_num_batched_tokens: int
    block_size: int
    max_drafts: int  # of a row; 0: no speculation
    is_head: bool = False  # the draft reads the target's states, and never catches up
    num_state_pages: int = 0  # of recurrent layers

    @classmethod
    def of(cls, draft: Draft | None, *step: int) -> StepLimits:
        """Return the limits of a step with this draft; `step` are the fields before `is_head`."""
        return cls(*step, is_head=isinstance(draft, GpuHead))

    @property
    def max_catch_up(self) -> int:
        """The most tokens that the draft computes in its first pass of a step."""
        return self.max_num_seqs + (0 if self.is_head else self.max_num_batched_tokens)

    @property
    def max_logits(self) -> int:
        """Most rows of logits: one per token, but per slot at most one more than its drafts."""
        return min(self.max_num_batched_tokens, self.max_num_seqs * (1 + self.max_drafts))

    def captured_tokens(self, target: ModelConfig) -> int:
        """Return the most tokens of a captured pass: every step with drafts, and if the host binds
        steps with prompts, too."""
        tokens = self.max_num_batched_tokens if host_binds(target) else 0
        limit = max(min(tokens, _MAX_CAPTURED_TOKENS), self.max_logits)
        return max(bucket(limit, self.max_num_batched_tokens), SMALL[-1])

    def tuning_of(self, decoder: Draft, kv_dtype: torch.dtype | None = None) -> Tuning:
        """Return attention's tuning; the KV cache is of `kv_dtype`, by default the decoder's."""
        heads, page_tokens = heads_of(decoder.config), self.block_size
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
        """Return the sizes of the device's slot state. One extra slot is for padding rows."""
        tokens, vocab = self.max_sequence_tokens, config.vocab_size
        blocks = aligned(-(-tokens // self.block_size))
        return ArenaSizes(
            slots=self.max_num_seqs + 1,
            tokens=aligned(tokens),
            blocks=blocks,
            vocab=vocab,
            listed=aligned(min(vocab, tokens + _SPARE_ENTRIES)),
            drafts=aligned(self.max_drafts),
            # The tokens that the pending step may emit, and the drafts after them.
            guess=HEAD_WORDS + 2 * self.max_drafts + 1 if self.max_drafts else 0,
            boundaries=blocks + 1 if config.recurrent else 0,
        )


def check_pool(config: ModelConfig, num_blocks: int, block_size: int) -> None:
    """Raise `FieldError` for more blocks than the 32-bit offsets of attention reach."""
    head_dim = config.attention.key_dim if config.layers else 0
    elements = 2 * block_size * head_dim  # of one head in a block; 0 without attention
    limit = (MAX_ELEMENTS - 1) // elements - 1 if elements else num_blocks
    if num_blocks > limit:
        problem = f"{num_blocks} blocks of {block_size} tokens are more than attention can address"
        raise FieldError("num_blocks", problem, f"give at most {limit}")


def step_memory_bytes(target: Decoder, draft: Draft | None, limits: StepLimits) -> int:
    """Return the bytes that an executor with these limits and its steps allocate, without KV cache.
    Captured passes share one memory pool, the others another."""
    arena, vocab = limits.arena_of(target.config), target.config.vocab_size
    used = LIBRARY_BYTES + arena.num_words * _FP32_BYTES
    used += LOGPROB_COPIES * PROMPT_ROWS * vocab * _FP32_BYTES
    used += limits.max_logits * aligned(vocab) * target.dtype.itemsize
    used += 2 * limits.max_logits * words_of(vocab) * _FP32_BYTES  # token masks
    models: list[tuple[Draft, int, int]] = []
    models.append((target, limits.max_num_batched_tokens, limits.max_logits))
    kept = 0  # bytes of target states per token, for a head
    if draft is not None and limits.max_drafts:
        rows = limits.max_num_seqs * limits.max_drafts
        used += rows * aligned(max(vocab, draft.config.vocab_size)) * draft.dtype.itemsize
        used += rows * (arena.listed + arena.drafts) * _FP32_BYTES  # listed tokens
        tokens = limits.max_catch_up
        if isinstance(draft, GpuHead):
            # A head's longest pass is the one over the target's tokens.
            tokens = limits.max_num_batched_tokens
            used += (tokens + 2 * limits.max_num_seqs + 2) * draft.state_bytes
            kept = len(draft.head.hidden_layers) * target.config.hidden_size * draft.dtype.itemsize
        models.append((draft, tokens, rows))
    eager = captured = 0
    for decoder, tokens, rows in models:
        used += _persistent_bytes(decoder, tokens, limits)
        eager = max(eager, decoder.pass_bytes(tokens) + tokens * kept)
        tokens = min(tokens, limits.captured_tokens(target.config))
        passes = decoder.pass_bytes(tokens) + tokens * kept
        captured = max(captured, passes, _decision_bytes(decoder, rows, arena))
    return used + eager + captured


def _persistent_bytes(decoder: Draft, tokens: int, limits: StepLimits) -> int:
    config = decoder.config
    if not config.num_layers:  # Medusa heads have no attention
        return 0
    heads, tuning = heads_of(config), limits.tuning_of(decoder)
    stream = tokens * config.hidden_size * (_FP32_BYTES + decoder.dtype.itemsize)
    mixers = (layer.mixer for layer in config.layers)
    num_tables = len({m.rope for m in mixers if isinstance(m, Attention)})
    rotary = 2 * limits.max_sequence_tokens * heads.head_dim * _FP32_BYTES * num_tables
    return stream + tuning.partial_bytes(heads) + rotary


def _decision_bytes(decoder: Draft, rows: int, arena: ArenaSizes) -> int:
    hidden = decoder.config.hidden_size * (_FP32_BYTES + 2 * decoder.dtype.itemsize)
    return rows * (hidden + bytes_a_row(arena.vocab, arena.listed + arena.drafts))


FP8 = (torch.float8_e4m3fn, torch.float8_e4m3fnuz)
_MIN_PAGE_TOKENS = 16


def kv_dtype_of(decoder: Draft, kv_cache_dtype: str) -> torch.dtype:
    """Return the type of a model's KV cache: the model's own if `kv_cache_dtype` is "auto", else
    the E4M3 type of its device (AMD has a variant of its own). Raises FieldError if the attention
    kernel has no tile for this model and device with that type."""
    if kv_cache_dtype == "auto":
        return decoder.dtype
    dtype = torch.float8_e4m3fnuz if torch.version.hip else torch.float8_e4m3fn
    arch = arch_of(decoder.device)
    try:
        heads = heads_of(decoder.config)
        tile_for(heads, decoder.dtype, _MIN_PAGE_TOKENS, arch=arch, kv_dtype=dtype)
    except ValueError as error:
        problem = f"fp8 is not supported with {decoder.dtype} on {arch}"
        raise FieldError("kv_cache_dtype", problem, "leave it out") from error
    return dtype


def kv_scales(decoder: Decoder, kv_dtype: torch.dtype) -> list[tuple[float, float]] | None:
    """Return, for each layer, the divisors of K and V before they are stored as `kv_dtype`. None:
    they are stored in the model's dtype, unscaled."""
    if kv_dtype == decoder.dtype:
        return None
    wider = 2.0 if kv_dtype == torch.float8_e4m3fnuz else 1.0  # AMD's type has half the range
    return [(k * wider, v * wider) for k, v in decoder.kv_scales]
