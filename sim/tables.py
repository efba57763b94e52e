"""Step times from measured kernels: tables of how long each took, and straight lines between.

A table holds the dense layers by tokens, the head by the tokens whose logits are wanted, and
attention by the composition of a batch. Between measured points every axis is interpolated
linearly, and beyond the last point the last line goes on (all of these grow linearly once a device
is full). How far a table was measured is in `limits`: who builds a cost model of it compares that
with what the scheduler may ask, so that a long way beyond is refused before a run begins.
"""

from __future__ import annotations

from bisect import bisect_right
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Protocol

import msgspec
import numpy as np

from cbatch.core.errors import FieldError
from sim.costs import StepWork


class Curve:
    """Seconds by a whole number, from points of it; a count below the first point costs as much as
    the first."""

    def __init__(self, counts: Sequence[float], seconds: Sequence[float]) -> None:
        order = np.argsort(counts)
        xs, ys = np.asarray(counts)[order], np.asarray(seconds)[order]
        self.most = int(xs[-1])
        self._slope_s = float((ys[-1] - ys[-2]) / (xs[-1] - xs[-2]))
        self._seconds: list[float] = np.interp(np.arange(self.most + 1), xs, ys).tolist()

    def __call__(self, count: int) -> float:
        if count <= self.most:
            return self._seconds[count]
        return self._seconds[-1] + self._slope_s * (count - self.most)

    @classmethod
    def total(cls, curves: Sequence[tuple[int, Curve]]) -> Curve:
        """The sum of curves, each so many times; to the last point of the shortest."""
        most = min(curve.most for _, curve in curves)
        counts = range(most + 1)
        return cls(counts, [sum(times * curve(n) for times, curve in curves) for n in counts])


class Grid:
    """Multilinear interpolation in a full lattice: `values[i, j, ...]` at `axes[0][i], ...`; every
    axis ascends and has two points or more."""

    def __init__(self, axes: Sequence[Sequence[float]], values: np.ndarray) -> None:
        self.axes = [list(axis) for axis in axes]
        self._values = values

    def __call__(self, *point: float) -> float:
        slices, shares = [], []
        for axis, x in zip(self.axes, point, strict=True):
            low = min(max(bisect_right(axis, x) - 1, 0), len(axis) - 2)
            slices.append(slice(low, low + 2))
            shares.append((x - axis[low]) / (axis[low + 1] - axis[low]))
        cell = self._values[tuple(slices)]
        for share in shares:
            cell = cell[0] + share * (cell[1] - cell[0])
        return float(cell)


class Lines:
    """Seconds by two counts, of which the second was measured less far the larger the first is: a
    line along the second for each value of the first, straight lines between and beyond."""

    def __init__(self, points: Mapping[tuple[int, int], float]) -> None:
        """Needs two values of the first count or more, and with each of them two of the second."""
        self.firsts = sorted({first for first, _ in points})
        self._lines = []
        for at in self.firsts:
            line = sorted((second, s) for (first, second), s in points.items() if first == at)
            self._lines.append(([float(x) for x, _ in line], [s for _, s in line]))

    @classmethod
    def of(cls, points: Mapping[tuple[int, int], float] | None) -> Lines | None:
        """None of too few points."""
        counts = Counter(first for first, _ in points or ())
        thin = [first for first, count in counts.items() if count < 2]
        return cls(points) if points and len(counts) > 1 and not thin else None

    def __call__(self, first: float, second: float) -> float:
        low = min(max(bisect_right(self.firsts, first) - 1, 0), len(self.firsts) - 2)
        share = (first - self.firsts[low]) / (self.firsts[low + 1] - self.firsts[low])
        below, above = self._at(low, second), self._at(low + 1, second)
        return below + share * (above - below)

    def _at(self, line: int, second: float) -> float:
        xs, seconds = self._lines[line]
        low = min(max(bisect_right(xs, second) - 1, 0), len(xs) - 2)
        slope_s = (seconds[low + 1] - seconds[low]) / (xs[low + 1] - xs[low])
        return seconds[low] + (second - xs[low]) * slope_s


class Attention(Protocol):
    def layer_s(self, work: StepWork) -> float:
        """Seconds of the attention of one layer."""


class TableCost:
    """The cost model (see `sim.costs`) of a target that decodes and prefills. Nothing is known of
    drafters, nor of rows that verify: a step that does is refused."""

    def __init__(
        self,
        *,
        tokens: Curve,
        logits: Curve,
        attention: Attention,
        layers: int,
        limits: TableLimits,
        step_host_s: float = 0.0,
        request_host_s: float = 0.0,
    ) -> None:
        """`tokens` and `logits` are of the whole model, `attention` is of one layer of `layers`."""
        self.limits = limits
        self._tokens, self._logits = tokens, logits
        self._attention, self._layers = attention, layers
        self._step_host_s, self._request_host_s = step_host_s, request_host_s

    def step_s(self, work: StepWork) -> tuple[float, float, float]:
        if work.draft_depth or work.ingested_tokens:
            raise FieldError("--cost-table", "has no prices of drafts", "use --lookahead off")
        seconds = self._tokens(work.decode_tokens + work.prefill_tokens)
        if work.logit_tokens:
            seconds += self._logits(work.logit_tokens)
        seconds += self._layers * self._attention.layer_s(work)
        return 0.0, seconds, self._step_host_s + self._request_host_s * work.admitted


class TableLimits(msgspec.Struct, frozen=True):
    """How far a table was measured. A context may be longer: attention reads it at a constant rate,
    and the last line goes on."""

    step_tokens: int
    decode_rows: int
    context_tokens: int


def same_pairs_tokens(work: StepWork) -> tuple[float, float]:
    """The single chunk that stands for all chunks of a step: its tokens, and the tokens of context
    before it. It has their query-key pairs; several prompts at once have fewer pairs than one chunk
    of as many tokens, and are taken as a shorter one."""
    tokens, pairs = work.prefill_tokens, work.prefill_pairs
    history_tokens = (pairs - tokens * (tokens + 1) / 2) / tokens
    if history_tokens >= 0:
        return tokens, history_tokens
    return (2.0 * pairs) ** 0.5, 0.0


def require_lattice(
    where: str, axes: Mapping[str, Sequence[int]], found: Mapping[tuple[int, ...], float]
) -> Grid:
    """A grid of all combinations. Raises `FieldError` naming the first that was not measured."""
    names = list(axes)
    values = np.zeros([len(axis) for axis in axes.values()])
    for index in np.ndindex(values.shape):
        point = tuple(axes[name][i] for name, i in zip(names, index, strict=True))
        if point not in found:
            words = ", ".join(f"{name} {x}" for name, x in zip(names, point, strict=True))
            raise FieldError("--cost-table", f"{where} lacks {words}", "measure that point too")
        values[index] = found[point]
    for name, axis in axes.items():
        if len(axis) < 2:
            raise FieldError("--cost-table", f"{where}: {name} has one value", "measure two")
    return Grid(list(axes.values()), values)
