"""What the sampling kernels are told: of requests, of rows of logits, and of what shapes them."""

from __future__ import annotations

from typing import Final, NamedTuple

import torch
from torch import Tensor

# How a request's tokens are decided; see `triton_kernels/verification/reference.py`, and for blocks
# `block_reference.py` beside it.
GREEDY: Final = 0
COUPLED: Final = 1
REJECTION: Final = 2
BLOCK: Final = 3

# Marks of a listed token.
IN_PROMPT: Final = 1
IS_STOP: Final = 2


class Requests(NamedTuple):
    """Sampling parameters of B requests."""

    modes: Tensor  # int32: GREEDY, COUPLED, REJECTION or BLOCK
    temperatures: Tensor  # fp32, > 0
    top_k: Tensor  # int32 >= 1; the vocabulary size where a request has none
    top_p: Tensor  # fp32 > 0; infinite where a request has none
    min_p: Tensor  # fp32 in [0, 1]; 0 where a request has none


class Noise(NamedTuple):
    """Where B requests draw their noise; as `triton_kernels.verification.reference.NoiseRows`."""

    keys: Tensor  # int64 [B, 2]
    choices: Tensor  # int64 [B]
    positions: Tensor  # int64 [B]: of the first token that the step decides


class Rows(NamedTuple):
    """N rows of logits. Row i follows the known tokens of its request and `depths[i]` drafts.
    Rows of padding name any request, with depth 0."""

    requests: Tensor  # int32 [N]
    depths: Tensor  # int32 [N]


class DraftTokens(NamedTuple):
    """Drafts of B requests: those of request b lie from `starts[b]` on."""

    tokens: Tensor  # int32 [any]
    starts: Tensor  # int32 [B]
    counts: Tensor  # int32 [B]


class LogitsShaping(NamedTuple):
    """What changes the logits of B requests before temperature and filters.

    A token is *plain* (its logit counts as it is), *listed* (it has an entry) or forbidden. Listed
    are: banned, biased and stop tokens, and, where a request has penalties, every token of its
    prompt (repetition only) and output. Drafts need not be. Entries are in no order.
    """

    plain: Tensor  # int32 [B, ceil(V / 32)]: bit i % 32 of word i // 32 says whether i is plain
    listed: Tensor  # int32 [B, L]: token ids
    num_listed: Tensor  # int32 [B]
    bias: Tensor  # fp32 [B, L]; minus infinity bans
    counts: Tensor  # int32 [B, L]: times in the output
    marks: Tensor  # int32 [B, L]: IN_PROMPT | IS_STOP
    penalties: Tensor  # fp32 [B, 3]: repetition (1: none), presence, frequency
    min_tokens: Tensor  # int32 [B]: stop tokens are forbidden for so many more


class LogitsBatch(NamedTuple):
    """What the kernels that read logits have in common."""

    logits: Tensor  # bf16, fp16 or fp32 [N, V]; rows may lie apart
    rows: Rows
    requests: Requests
    noise: Noise
    drafts: DraftTokens
    shaping: LogitsShaping | None  # None: no request changes its logits


class Proposals(NamedTuple):
    """What drafts were drawn from. Row drafts.starts[b] + j holds the logits behind draft j."""

    logits: Tensor  # bf16, fp16 or fp32 [M, V], as the draft gave them; rows may lie apart
    rows: Rows  # [M]
    certain: Tensor  # int32 [B]: 1 where drafts were chosen with certainty, whatever its rows say


def rows_of(num_drafts: Tensor, num_rows: int) -> tuple[Rows, Tensor]:
    """Rows of B requests with 1 + num_drafts[b] each, one after the other, and where each begins,
    int32 [B]. `num_rows` may exceed their sum: the rest is padding. No synchronisation."""
    ends = (num_drafts + 1).cumsum(0)
    starts = ends - num_drafts - 1
    row = torch.arange(num_rows, device=num_drafts.device)
    requests = torch.searchsorted(ends, row, right=True)
    padding = requests == len(num_drafts)
    requests = requests.masked_fill(padding, 0)
    depths = (row - starts[requests]).masked_fill(padding, 0)
    return Rows(requests.to(torch.int32), depths.to(torch.int32)), starts.to(torch.int32)
