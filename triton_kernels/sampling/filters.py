"""What the filters of a row allow. `limits`: top_k, top_p (infinite: none), the last key that min_p
keeps, [ROWS] each, and the vocabulary size."""

from __future__ import annotations

import triton.language as tl

from triton_kernels.build.jit import jit
from triton_kernels.sampling import tiles
from triton_kernels.sampling.tiles import FORBIDDEN


@jit
def limits_of(asked, requests, vocab):
    min_p = tl.load(asked.min_p + requests)
    key = tiles.key_of(-tl.log(tl.where(min_p > 0.0, min_p, 1.0)))
    last_key = tl.where(min_p > 0.0, key, FORBIDDEN)
    return tl.load(asked.top_k + requests), tl.load(asked.top_p + requests), last_key, vocab


@jit
def any_filter(limits):
    top_k, top_p, last_key, vocab = limits
    return (top_k < vocab) | (top_p < float("inf")) | (last_key < FORBIDDEN)


@jit
def nucleus_of(limits, mass):
    """The mass that must not be reached before a kept token; `mass` is what top_k leaves."""
    return tl.where(limits[1] < float("inf"), mass * tl.minimum(limits[1], 1.0), float("inf"))
