"""Tokens drawn by exponential races, by our kernel where it is compiled."""

from __future__ import annotations

import functools
from collections.abc import Callable
from ctypes import c_long, c_void_p

import numpy as np
import torch
from torch import Tensor

from cbatch.core.request.noise import LN2_BITS, LOG1P_COEFFICIENT_BITS
from cbatch.runtime.compiled.build import library
from cbatch.runtime.compiled.threads import num_threads

_SINGLE_THREAD_BELOW = 1 << 15  # number of probabilities below which one thread is faster
_COEFFICIENTS = np.array((LN2_BITS, *LOG1P_COEFFICIENT_BITS), dtype=np.uint32)


def race_winners(probabilities: Tensor, noise: Tensor) -> Tensor | None:
    """Return the token of each row of `probabilities`, fp32 [B, V]: int64 [B]; None without
    kernels. `noise` has the coordinates of each row, int64 [B, 5]: two words of the key, choice,
    position, purpose. Raises ValueError for tensors of other types or sizes."""
    racer = _racer()
    if racer is None:
        return None
    if probabilities.dtype != torch.float32 or noise.dtype != torch.int64:
        problem = f"fp32 probabilities and int64 noise, got {probabilities.dtype}, {noise.dtype}"
        raise ValueError(f"race_winners needs {problem}")
    (rows, vocab), probabilities = probabilities.shape, probabilities.contiguous()
    if noise.shape != (rows, 5):
        raise ValueError(f"noise: needs shape {[rows, 5]}, got {list(noise.shape)}")
    noise, tokens = noise.contiguous(), torch.empty(rows, dtype=torch.int64)
    threads = 1 if rows * vocab < _SINGLE_THREAD_BELOW else num_threads()
    at = noise.data_ptr(), _COEFFICIENTS.ctypes.data, tokens.data_ptr()
    racer(probabilities.data_ptr(), rows, vocab, *at, threads)
    return tokens


@functools.cache
def _racer() -> Callable[..., None] | None:
    kernel = library()
    if kernel is None:
        return None
    race = kernel.race
    race.argtypes = [c_void_p, c_long, c_long, c_void_p, c_void_p, c_void_p, c_long]
    race.restype = None
    return race
