"""Everything that a compiled kernel can be shown to do right, most telling first."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import chain

from bench.gpu import combine, correct_attention, correct_laws, correct_rows, correct_sampling
from bench.gpu.cells import Cell
from bench.gpu.world import Bench


def cells(bench: Bench) -> Iterator[Cell]:
    parts = (correct_attention, correct_rows, correct_sampling, correct_laws, combine)
    return chain.from_iterable(part.cells(bench) for part in parts)
