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
        # Text and requests of the last call; an address takes longer to get than a lookup in C.
        self._text = self._requests = np.zeros((0, 0), dtype=np.int64)
        self._text_address = self._requests_address = 0

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
        count, depth = len(slots), max(depths.tolist(), default=0)
        num_rows, width = self._requests.shape
        if count > num_rows or _COLUMNS + depth > width:
            num_rows, width = max(count, num_rows), max(_COLUMNS + depth, width)
            self._requests = np.zeros((num_rows, width), dtype=np.int64)
            self._requests_address = self._requests.ctypes.data
        if tokens is not self._text:
            self._text, self._text_address = tokens, tokens.ctypes.data
        requests = self._requests[:count]
        requests[:, 0], requests[:, 1], requests[:, 2] = slots, known, depths
        places = self._text_address, tokens.shape[1], self._half, self._requests_address
        if self._look_up(self._struct, *places, count, width - _COLUMNS):
            raise MemoryError(f"lookups in {count} rows of {tokens.shape[1]} tokens")
        result = requests[:, 3 : _COLUMNS + depth].copy()
        return result[:, 1:], result[:, 0]
