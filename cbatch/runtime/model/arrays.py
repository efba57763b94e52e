"""Index arithmetic for batches and step layouts."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

I64 = NDArray[np.int64]

_iota = np.arange(4096, dtype=np.int64)


def iota(n: int) -> I64:
    """Return 0..n-1 as a view of one shared array; callers must not write to it."""
    global _iota
    if n > len(_iota):
        _iota = np.arange(2 * n, dtype=np.int64)
    return _iota[:n]
