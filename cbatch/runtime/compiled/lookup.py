"""Lookup drafts for many rows, by our own kernel."""

from __future__ import annotations

import ctypes
from ctypes import POINTER, c_long, c_void_p
from typing import Any

import numpy as np
from numpy.typing import NDArray

from cbatch.runtime.compiled.build import library
from cbatch.runtime.compiled.structs import struct
from cbatch.runtime.model.arrays import I64

_COLUMNS = 4  # columns of a request before its drafts, see `look_up` in lookup.h


LookupStruct = struct("lookup")  # of lookup.h


class CompiledLookup:
    """A lookup over rows of `tokens`, int64 [slots, width], contiguous. At each position it reads
    only the last `half_window` to 2 `half_window` tokens."""

    def __init__(self, kernel: ctypes.CDLL, of: Any, half_window: int) -> None:
        self._look_up, self._struct, self._half = kernel.look_up, of, half_window
        places = [c_void_p, c_long, c_long, c_void_p, c_long, c_long]
        self._look_up.argtypes = [POINTER(LookupStruct), *places]
        self._text, self._address = np.zeros((0, 0), dtype=np.int64), 0  # of the last call

    @classmethod
    def of(cls, lookup: Any, half_window: int) -> CompiledLookup | None:
        """Return the compiled form of a lookup struct, or None without kernels or struct."""
        kernel = None if lookup is None else library()
        return None if kernel is None else cls(kernel, lookup, half_window)

    def look_up(
        self, tokens: I64, slots: NDArray[np.integer], known: I64, depths: I64
    ) -> tuple[I64, I64]:
        """Draft up to `depths[i]` tokens after the first `known[i]` of a slot; return drafts and
        counts."""
        depth = int(np.maximum.reduce(depths, initial=0))
        requests = np.zeros((len(slots), _COLUMNS + depth), dtype=np.int64)
        requests[:, 0], requests[:, 1], requests[:, 2] = slots, known, depths
        if tokens is not self._text:  # an address takes longer to get than a lookup in C
            self._text, self._address = tokens, tokens.ctypes.data
        places = self._address, tokens.shape[1], self._half, requests.ctypes.data
        status = self._look_up(self._struct, *places, len(requests), depth)
        if status:
            raise MemoryError(f"lookups in {len(requests)} rows of {tokens.shape[1]} tokens")
        return requests[:, _COLUMNS:], requests[:, 3]
