"""Tokens from logits, without sorting and without a tensor of probabilities.

`inputs` says what a caller hands over. `tile_stats` reads every logit once; `reduce` makes winners,
masses and cuts (`cut`) of what it leaves; both look at logits through `tiles`. `launch` runs them,
and `reference` does the same in plain torch. `mask` forbids tokens before all of these.
"""

from __future__ import annotations

from triton_kernels.build.case import KernelCase
from triton_kernels.sampling import launch, mask
from triton_kernels.sampling.inputs import (
    BLOCK,
    COUPLED,
    GREEDY,
    REJECTION,
    DraftTokens,
    LogitsBatch,
    LogitsShaping,
    Noise,
    Proposals,
    Requests,
    Rows,
    rows_of,
)
from triton_kernels.sampling.launch import TILING, Tiling, sample

__all__ = [
    "BLOCK",
    "COUPLED",
    "GREEDY",
    "REJECTION",
    "TILING",
    "LogitsBatch",
    "DraftTokens",
    "Noise",
    "Proposals",
    "Requests",
    "Rows",
    "LogitsShaping",
    "Tiling",
    "cases",
    "rows_of",
    "sample",
]


def cases() -> list[KernelCase]:
    return launch.cases() + mask.cases()
