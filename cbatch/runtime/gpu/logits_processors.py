"""Penalties, biases and token restrictions of a request, as lists for the sampling kernels."""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from cbatch.core.request.errors import FieldError
from cbatch.core.request.request import SamplingParams
from cbatch.core.scheduler.plan import NewSequence
from triton_kernels.sampling.inputs import IN_PROMPT, IS_STOP
from triton_kernels.slots.state import ArenaSizes

I32 = NDArray[np.int32]


class Sparse(NamedTuple):
    """The fields of `triton_kernels.sampling.LogitsShaping` for one slot, unpadded."""

    plain: I32  # [ceil(V / 32)]
    listed: I32
    bias: NDArray[np.float32]
    counts: I32
    marks: I32
    penalties: NDArray[np.float32]  # [3]
    min_tokens: int


def shapes_logits(p: SamplingParams, *, has_stops: bool) -> bool:
    """Return whether a request changes logits; `has_stops`: some tokens end it."""
    return bool(
        p.allowed_token_ids is not None
        or p.banned_token_ids
        or (p.min_tokens and has_stops)
        or p.logit_bias
        or _has_penalties(p)
    )


def neutral(vocab_size: int) -> Sparse:
    """Return the lists that leave every logit unchanged."""
    empty = np.zeros(0, dtype=np.int32)
    plain = np.full(-(-vocab_size // 32), -1, dtype=np.int32)
    penalties = np.array([1, 0, 0], dtype=np.float32)
    return Sparse(plain, empty, empty.astype(np.float32), empty, empty, penalties, 0)


def check_lists(
    p: SamplingParams, prompt: Iterable[int], stop_ids: Iterable[int], max_new_tokens: int,
    sizes: ArenaSizes,
) -> None:  # fmt: skip
    """Raise FieldError if a request may need more entries at some time than a slot has."""
    stops = {i for i in stop_ids if i < sizes.vocab} if p.min_tokens else set()
    listed = stops.union(p.logit_bias)
    if p.repetition_penalty != 1:
        listed.update(prompt)
    listed.difference_update(p.banned_token_ids)
    if p.allowed_token_ids is not None:
        listed.intersection_update(p.allowed_token_ids)
    # With penalties every token that the sequence emits gets an entry, too.
    grows = max_new_tokens if _has_penalties(p) else 0
    if min(len(listed) + grows, sizes.vocab) <= sizes.listed:
        return
    field = "logit_bias" if len(p.logit_bias) >= len(stops) else "stop_token_ids"
    raise FieldError(
        field,
        f"with penalties and stop ids it lists up to {len(listed) + grows} tokens",
        f"list at most {sizes.listed}, or use --device cpu",
    )


def sparse_of(a: NewSequence, vocab_size: int) -> Sparse:
    """Return a sequence's lists, with its token counts so far."""
    params = a.params
    prompt, output = a.tokens[: a.num_prompt_tokens], a.tokens[a.num_prompt_tokens :]
    allowed = np.ones(vocab_size, dtype=np.bool_)
    if params.allowed_token_ids is not None:
        allowed[:] = False
        allowed[list(params.allowed_token_ids)] = True
    allowed[list(params.banned_token_ids)] = False
    min_tokens = max(params.min_tokens - len(output), 0)
    # EOS ids come from the model's files, which may name more ids than there are logits.
    stops = [i for i in a.stop_ids if i < vocab_size] if min_tokens else []
    bias, counts = np.zeros(vocab_size, dtype=np.float32), np.zeros(vocab_size, dtype=np.int32)
    marks = np.zeros(vocab_size, dtype=np.int32)
    bias[list(params.logit_bias)] = list(params.logit_bias.values())
    marks[stops] |= IS_STOP
    has_entry = (bias != 0) | (marks != 0)
    if _has_penalties(params):
        np.add.at(counts, output, 1)
        if params.repetition_penalty != 1:
            marks[prompt] |= IN_PROMPT
        has_entry |= (counts > 0) | (marks != 0)
    listed = np.flatnonzero(has_entry & allowed)
    return Sparse(
        plain=_bits(allowed & ~has_entry),
        listed=listed.astype(np.int32),
        bias=bias[listed],
        counts=counts[listed],
        marks=marks[listed],
        penalties=np.array(
            [params.repetition_penalty, params.presence_penalty, params.frequency_penalty],
            dtype=np.float32,
        ),
        min_tokens=min_tokens,
    )


def _has_penalties(p: SamplingParams) -> bool:
    return bool(p.repetition_penalty != 1 or p.presence_penalty or p.frequency_penalty)


def _bits(flags: NDArray[np.bool_]) -> I32:
    """Pack flags into words: bit i % 32 of word i // 32 is flag i."""
    packed = np.packbits(flags, bitorder="little")
    padded = np.zeros(-(-len(flags) // 32) * 4, dtype=np.uint8)
    padded[: len(packed)] = packed
    words: I32 = padded.view("<i4").astype(np.int32)
    return words
