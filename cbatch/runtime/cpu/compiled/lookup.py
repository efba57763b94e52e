"""Lookups of drafts for many rows, by our own kernel."""

from __future__ import annotations

import ctypes
from ctypes import POINTER, c_double, c_long, c_void_p

import numpy as np
from numpy.typing import NDArray

from cbatch.runtime.cpu.compiled.build import library
from cbatch.runtime.model.arrays import I64

_COLUMNS = 4  # before the drafts of a row, see `look_up` in lookup.h


class LookupStruct(ctypes.Structure):
    """`lookup` of lookup.h."""

    _fields_ = [
        *((name, c_long) for name in ("shortest", "longest", "by_frequency")),
        ("spec_factor", c_double),
        ("least_probability", c_double),
    ]


class CompiledLookup:
    """Finds and scores drafts in rows of `tokens`, int64 [slots, width], contiguous; each in the
    last `half_window` to 2 `half_window` of the tokens before a position."""

    def __init__(self, kernel: ctypes.CDLL, struct: LookupStruct, half_window: int) -> None:
        self._struct, self._half = struct, half_window
        self._look_up, self._score = kernel.look_up, kernel.score_drafts
        arguments = [POINTER(LookupStruct), c_void_p, c_long, c_long, c_void_p, c_long]
        self._look_up.argtypes, self._score.argtypes = [*arguments, c_long], arguments

    @classmethod
    def of(cls, struct: LookupStruct | None, half_window: int) -> CompiledLookup | None:
        """None where there are no kernels, or none for it."""
        kernel = None if struct is None else library()
        return None if kernel is None or struct is None else cls(kernel, struct, half_window)

    def look_up(
        self, tokens: I64, slots: NDArray[np.integer], known: I64, depths: I64
    ) -> tuple[I64, I64]:
        """Drafts that go on with the first `known[i]` tokens, and how many of `depths[i]`."""
        depth = int(depths.max(initial=0))
        asked = np.zeros((len(slots), _COLUMNS + depth), dtype=np.int64)
        asked[:, 0], asked[:, 1], asked[:, 2] = slots, known, depths
        self._call(self._look_up, tokens, asked, depth)
        return asked[:, _COLUMNS:], asked[:, 3]

    def score(
        self, tokens: I64, slots: NDArray[np.integer], since: I64, known: I64
    ) -> tuple[I64, I64]:
        """Before how many tokens from `since[i]` on there is a draft, and how often it is they."""
        asked = np.empty((len(slots), 5), dtype=np.int64)
        asked[:, 0], asked[:, 1], asked[:, 2] = slots, since, known
        self._call(self._score, tokens, asked)
        return asked[:, 3], asked[:, 4]

    def _call(self, kernel: ctypes._CFuncPtr, tokens: I64, asked: I64, *more: int) -> None:
        places = tokens.ctypes.data, tokens.shape[1], self._half, asked.ctypes.data, len(asked)
        if kernel(self._struct, *places, *more):
            raise MemoryError(f"lookups in {len(asked)} rows of {tokens.shape[1]} tokens")
