"""The most likely token of each row, by our kernel where it is compiled."""

from __future__ import annotations

import functools
from collections.abc import Callable
from ctypes import CDLL, c_long, c_void_p

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from cbatch.runtime.compiled.build import library
from cbatch.runtime.compiled.threads import num_threads
from cbatch.runtime.model.arrays import I64, iota

_SINGLE_THREAD_BELOW = 1 << 17  # number of logits below which one thread is faster than several


def greedy_tokens(logits: Tensor) -> tuple[I64, NDArray[np.bool_]]:
    """Return the most likely token of each row (the lowest id of a tie), and whether all logits of
    the row are finite. A row with NaN gives the id of its first NaN. `logits`: fp32 [R, vocab]."""
    kernel = library()
    if kernel is None:
        return logits.numpy().argmax(axis=1), _all_finite(logits.numpy())
    logits, (rows, vocab) = logits.contiguous(), logits.shape
    tokens, finite = np.empty(rows, dtype=np.int64), np.empty(rows, dtype=np.bool_)
    threads = 1 if rows * vocab < _SINGLE_THREAD_BELOW else num_threads()
    to = tokens.ctypes.data, finite.ctypes.data
    _chooser(kernel)(logits.data_ptr(), rows, vocab, *to, threads)
    return tokens, finite


@functools.cache
def _chooser(kernel: CDLL) -> Callable[..., None]:
    choose = kernel.choose
    choose.argtypes = [c_void_p, c_long, c_long, c_void_p, c_void_p, c_long]
    choose.restype = None
    return choose


def greedy_drafts(logits: Tensor) -> tuple[I64, NDArray[np.bool_]]:
    """Return `greedy_tokens`, and whether each chosen logit is finite (NaN and +inf are chosen)."""
    tokens, _ = greedy_tokens(logits)
    return tokens, np.isfinite(logits.numpy()[iota(len(tokens)), tokens])


def _all_finite(x: NDArray[np.float32]) -> NDArray[np.bool_]:
    # One pass: a finite sum has finite terms. A sum of finite terms may overflow, so rows that fail
    # are checked again: minimum and maximum propagate NaN and show infinities.
    with np.errstate(over="ignore", invalid="ignore"):
        finite = np.isfinite(np.add.reduce(x, axis=1))
        if np.count_nonzero(finite) < len(finite):
            finite = np.isfinite(x.min(axis=1)) & np.isfinite(x.max(axis=1))
    return finite
