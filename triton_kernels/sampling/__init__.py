"""Tokens from logits, without sorting and without a tensor of probabilities.

`scan` reads the logits of a step once, with a program for each tile of a row. Before it, where
requests shape their logits, `shape` writes the listed tokens of each row to an overlay. After it,
where requests have filters, `distributions` finds the cut of each row, and reads again only the
pieces of the row that can contain it. `launch` runs these kernels on the `inputs`; `order` has
device functions that they share. `mask` forbids tokens before all of these.
"""

from __future__ import annotations

from triton_kernels.sampling.inputs import (
    COUPLED,
    GREEDY,
    REJECTION,
    Distributions,
    DraftTokens,
    LogitsBatch,
    LogitsShaping,
    Noise,
    Proposals,
    Requests,
    Rows,
    rows_of,
)
from triton_kernels.sampling.launch import TILING, Tiling, draw, sample

__all__ = [
    "COUPLED",
    "GREEDY",
    "REJECTION",
    "TILING",
    "DraftTokens",
    "Distributions",
    "LogitsBatch",
    "Noise",
    "Proposals",
    "Requests",
    "Rows",
    "LogitsShaping",
    "Tiling",
    "draw",
    "rows_of",
    "sample",
]
