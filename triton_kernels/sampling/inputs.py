"""Inputs and outputs of the sampling kernels: requests, rows of logits, shaping, distributions."""

from __future__ import annotations

from typing import Final, NamedTuple

import torch
from torch import Tensor

# How a request's tokens are sampled and its drafts verified: see
# `cbatch/runtime/sampling/rejection_sampler.py`.
GREEDY: Final = 0
COUPLED: Final = 1
REJECTION: Final = 2

# In place of a noise purpose: each row of a verification uses the purpose of the token it gives.
VERIFY: Final = -1

# Marks of a listed token.
IN_PROMPT: Final = 1
IS_STOP: Final = 2


class Requests(NamedTuple):
    """Sampling parameters of B requests."""

    modes: Tensor  # int32: GREEDY, COUPLED or REJECTION
    temperatures: Tensor  # fp32, > 0
    top_k: Tensor  # int32 >= 1; the vocabulary size where a request has none
    top_p: Tensor  # fp32 > 0; infinite where a request has none
    min_p: Tensor  # fp32 in [0, 1]; 0 where a request has none


class Noise(NamedTuple):
    """Noise coordinates of B requests, as `NoiseRows` of `rejection_sampler.py`."""

    keys: Tensor  # int64 [B, 2]
    choices: Tensor  # int64 [B]
    positions: Tensor  # int64 [B]: position of the first token of the step


class Rows(NamedTuple):
    """N rows of logits. Row i follows the known tokens of its request and `depths[i]` drafts.
    Rows of padding may have any request, with depth 0."""

    requests: Tensor  # int32 [N]
    depths: Tensor  # int32 [N]


class DraftTokens(NamedTuple):
    """Drafts of B requests: those of request b begin at `starts[b]`."""

    tokens: Tensor  # int32 [any]
    starts: Tensor  # int32 [B]
    counts: Tensor  # int32 [B]


class LogitsShaping(NamedTuple):
    """Changes to the logits of B requests before temperature and filters.

    A token is *plain* (its logit is used as it is), *listed* (it has an entry) or forbidden. Stop
    tokens and those with a bias are listed; with penalties also every token of the output, and with
    a repetition penalty of the prompt. Drafts need no entry, but the lists have room for them after
    the entries. Entries are in no order.
    """

    plain: Tensor  # int32 [B, ceil(V / 32)]: bit i % 32 of word i // 32 says whether i is plain
    listed: Tensor  # int32 [B, L]: token ids
    num_listed: Tensor  # int32 [B]
    bias: Tensor  # fp32 [B, L]; minus infinity forbids the token
    counts: Tensor  # int32 [B, L]: times in the output
    marks: Tensor  # int32 [B, L]: IN_PROMPT | IS_STOP
    penalties: Tensor  # fp32 [B, 3]: repetition (1: none), presence, frequency
    min_tokens: Tensor  # int32 [B]: stop tokens are forbidden for this many more tokens


class LogitsBatch(NamedTuple):
    """Common inputs of the kernels that read logits."""

    logits: Tensor  # bf16, fp16 or fp32 [N, V]; rows may be strided
    rows: Rows
    requests: Requests
    noise: Noise
    drafts: DraftTokens
    shaping: LogitsShaping | None  # None: no request changes its logits


class Distributions(NamedTuple):
    """Distributions of N rows after temperature and filters. A token before the cut has the
    probability exp(-y) / mass, with y = (maximum - logit) / temperature; others have 0."""

    floats: Tensor  # fp32 [N, 3]: maximum, mass, probability of the token drawn
    cuts: Tensor  # int64 [N]: codes, see `order`
    tokens: Tensor  # int32 [N, 2]: the token drawn, and 1 if every logit was finite

    @classmethod
    def allocate(cls, num_rows: int, device: torch.device) -> Distributions:
        return cls(
            torch.empty((num_rows, 3), dtype=torch.float32, device=device),
            torch.empty(num_rows, dtype=torch.int64, device=device),
            torch.empty((num_rows, 2), dtype=torch.int32, device=device),
        )


class Overlay(NamedTuple):
    """Shaped logits of the listed tokens of N rows (see `shape`)."""

    ids: Tensor  # int32 [N, L]
    logits: Tensor  # fp32 [N, L]; rows may be strided

    @classmethod
    def allocate(cls, num_rows: int, width: int, device: torch.device) -> Overlay:
        shape = (num_rows, width)
        ids = torch.empty(shape, dtype=torch.int32, device=device)
        return cls(ids, torch.empty(shape, dtype=torch.float32, device=device))


class Proposals(NamedTuple):
    """Distributions that drafts were drawn from. Row `drafts.starts[b] + j` belongs to draft j of
    request b."""

    logits: Tensor  # bf16, fp16 or fp32 [M, V], as `draw` left them; rows may be strided
    listed: Tensor | None  # fp32 [M, L]: logits of the overlays; None if logits are not shaped
    dists: Distributions  # [M]
    certain: Tensor  # int32 [B]: 1: drafts were chosen with certainty, and q is not read


def rows_of(num_drafts: Tensor, num_rows: int) -> tuple[Rows, Tensor]:
    """Return the rows of B requests, 1 + num_drafts[b] for request b, one after the other, and the
    first row of each request, int32 [B]. `num_rows` may exceed the sum: the rest is padding. Does
    not synchronise."""
    ends = (num_drafts + 1).cumsum(0)
    starts = ends - num_drafts - 1
    row = torch.arange(num_rows, device=num_drafts.device)
    requests = torch.searchsorted(ends, row, right=True)
    padding = requests == len(num_drafts)
    requests = requests.masked_fill(padding, 0)
    depths = (row - starts[requests]).masked_fill(padding, 0)
    return Rows(requests.to(torch.int32), depths.to(torch.int32)), starts.to(torch.int32)
