"""Tokens from logits, without sorting and without a tensor of probabilities.

`rows` says what a caller hands over. `stats` reads every logit once; `settle` makes winners, masses
and cuts (`cut`) of what it leaves; both look at logits through `tiles`. `launch` runs them, and
`reference` does the same in plain torch.
"""

from __future__ import annotations

from triton_kernels.sample.launch import TILING, Tiling, cases, sample
from triton_kernels.sample.rows import (
    COUPLED,
    GREEDY,
    REJECTION,
    Batch,
    Drafts,
    Noise,
    Proposals,
    Requests,
    Rows,
    Shaping,
    rows_of,
)

__all__ = [
    "COUPLED",
    "GREEDY",
    "REJECTION",
    "TILING",
    "Batch",
    "Drafts",
    "Noise",
    "Proposals",
    "Requests",
    "Rows",
    "Shaping",
    "Tiling",
    "cases",
    "rows_of",
    "sample",
]
