"""Products with constant weights: which implementation computes one, and whether its bits hold.

The implementations (see `products`) compete, per weight shape, by a short timing at start-up: one
may take few rows and another many. A row's bits must not depend on how many rows share the product:
that is measured too, and where it holds only from some row count on, or at multiples, rows are
padded.
"""

from __future__ import annotations

import functools
import time
from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from cbatch.runtime.compiled import CompiledProduct
from cbatch.runtime.products import Kind, Product

# Row counts whose bits are compared; beyond them libraries switch nothing we have seen.
_PROBE_ROWS = (1, 2, 3, 4, 5, 6, 7, 8, 9, 12, 16, 17, 31, 33, 64)
_PROBE_ROWS_LARGE = (1, 2, 4, 8, 9, 33)  # for weights so large that a probe would be felt
_LARGE_WEIGHT = 1 << 26
TIMED_ROWS = (1, 2, 8, 32)
_REPEATS = 12
_TIMING_BUDGET_S = (0.03, 0.01, 0.01, 0.01)  # per shape; one row is where they are closest
_MOST_TIMED_BYTES = 48 << 20  # of fp32 weights per shape: more than caches hold

Times = tuple[float, ...]  # seconds by TIMED_ROWS


class RowPadding(NamedTuple):
    """Rows are padded to `max(minimum, next multiple)`."""

    minimum: int
    multiple: int

    def rows(self, num_rows: int) -> int:
        return max(self.minimum, -(-num_rows // self.multiple) * self.multiple)


NO_PADDING = RowPadding(1, 1)
_PADDINGS = (
    NO_PADDING,
    *(RowPadding(n, 1) for n in (2, 4, 8)),
    *(RowPadding(n, n) for n in (8, 32)),
)


class Plan(NamedTuple):
    """How products of one weight shape are computed: by `few` up to `most_few` rows, and by `many`
    above.

    `padding` is what row-invariance needs; `invariant` whether it was reached. `times_s` by
    `TIMED_ROWS`, empty if nothing was timed.
    """

    few: Kind
    most_few: int
    many: Kind
    padding: RowPadding
    invariant: bool
    times_s: Times = ()

    @classmethod
    def of_one(cls, kind: Kind, padding: RowPadding, invariant: bool, times_s: Times = ()) -> Plan:
        return cls(kind, 0, kind, padding, invariant, times_s)


class Linear:
    """y = (x * in_scale) W^T + bias over fp32 rows: [T, in] -> [T, out], both contiguous."""

    def __init__(
        self, weight: Tensor, bias: Tensor | None, in_scale: Tensor | None, plan: Plan
    ) -> None:
        self.shape = (weight.shape[0], weight.shape[1])
        self.plan = plan
        self._many = plan.many.of(weight, bias, in_scale)
        self._few, self._most_few = self._many, plan.most_few
        if plan.most_few and plan.few is not plan.many:
            self._few = plan.few.of(weight, bias, in_scale)

    def __call__(self, x: Tensor) -> Tensor:
        rows = x.shape[0]
        padded = self.plan.padding.rows(rows)
        if padded == rows:
            return self.product(x, rows)
        return self.product(F.pad(x, (0, 0, 0, padded - rows)), padded)[:rows]

    @property
    def compiled(self) -> CompiledProduct | None:
        """Our own product, where it takes every number of rows as they come."""
        own = isinstance(self._many, CompiledProduct) and self._few is self._many
        return self._many if own and self.plan.padding == NO_PADDING else None

    def product(self, x: Tensor, rows: int) -> Tensor:
        """As a call, for `rows` that the plan's padding leaves as they are."""
        return (self._few if rows <= self._most_few else self._many)(x, rows)


def make_plan(
    shape: tuple[int, int],
    dtype: torch.dtype,
    device: torch.device,
    *,
    invariant: bool,
    may_pack: bool,
    count: int = 1,
) -> Plan:
    """The plan for weights [out, in] of which a model has `count`, measured once per process and
    setting. Timings go round as many weights, since those of a large model are never in a cache.

    `invariant` admits only one implementation, with padding under which bits agree; otherwise the
    fastest is taken at each row count. `may_pack` False where memory does not allow a copy.
    """
    threads = torch.get_num_threads() if device.type == "cpu" else 0
    copies = max(1, min(count, _MOST_TIMED_BYTES // (4 * shape[0] * shape[1])))
    return _measured_plan(shape, dtype, device, invariant, may_pack, threads, copies)


@functools.lru_cache(maxsize=256)
def _measured_plan(
    shape: tuple[int, int],
    dtype: torch.dtype,
    device: torch.device,
    invariant: bool,
    may_pack: bool,
    threads: int,
    copies: int,
) -> Plan:
    kinds = [
        kind
        for kind in (Kind.COMPILED, Kind.PACKED, Kind.NATIVE)
        if kind.available(shape, dtype, device) and (may_pack or kind is not Kind.PACKED)
    ]
    if invariant and is_compiled(shape, dtype, device):
        return Plan.of_one(Kind.COMPILED, NO_PADDING, True)
    if len(kinds) == 1:
        one = kinds[0]
        return (
            _invariant_plan(shape, dtype, device, {one: ()})
            if invariant
            else Plan.of_one(one, NO_PADDING, False)
        )
    times = _race(shape, dtype, tuple(kinds), threads, copies)
    if not invariant:
        return _fast_plan(times, _transposed_s(shape, dtype, threads, copies))
    return _invariant_plan(shape, dtype, device, _may_be_invariant(times, dtype))


def is_compiled(shape: tuple[int, int], dtype: torch.dtype, device: torch.device) -> bool:
    """Whether an invariant product of that kind is our own, whatever a timing would say: the pass
    that it makes possible saves more (see `CompiledDecoder`), and a restart cannot change bits.
    Instructions for bf16 products are another matter, of which it has none."""
    native = dtype == torch.bfloat16 and _has_bf16()
    return Kind.COMPILED.available(shape, dtype, device) and not native


def _may_be_invariant(times: Mapping[Kind, Times], dtype: torch.dtype) -> dict[Kind, Times]:
    """In the order of preference. Native fp32 products switch kernels at small row counts. So do
    emulated bf16 ones, and rounding to bf16 hides that from all but one output in ten thousand: a
    probe could miss it. Between the others no timing decides, lest a restart change bits."""
    found = {kind: each for kind, each in times.items() if kind is not Kind.NATIVE}
    native = times[Kind.NATIVE]
    if dtype != torch.bfloat16 or not _has_bf16():
        return found
    first = next(iter(found.values()))
    if _slowness(native, first) < len(TIMED_ROWS):
        return {Kind.NATIVE: native, **found}
    return {**found, Kind.NATIVE: native}


def _has_bf16() -> bool:
    checks = ("_is_avx512_bf16_supported", "_is_amx_tile_supported")
    return any(getattr(torch.cpu, name, bool)() for name in checks)


def _slowness(mine: Sequence[float], other: Sequence[float]) -> float:
    """Sum of ratios over the timed row counts: no count decides alone."""
    return sum(a / b for a, b in zip(mine, other, strict=True))


def _fast_plan(times: Mapping[Kind, Times], transposed_s: float) -> Plan:
    """The fastest at the largest count takes many rows; up to where it is beaten, whoever is best
    over those counts takes few."""
    many = min(times, key=lambda kind: times[kind][-1])
    beaten = 0  # at so many of the counts, from the first on
    while beaten < len(TIMED_ROWS) and min(t[beaten] for t in times.values()) < times[many][beaten]:
        beaten += 1
    least = [min(each) for each in zip(*times.values(), strict=True)]
    few = min(times, key=lambda kind: _slowness(times[kind][:beaten], least[:beaten]))
    best = list(times[few][:beaten] + times[many][beaten:])
    most_few = TIMED_ROWS[beaten - 1] if beaten else 0
    if beaten <= 1 and transposed_s < best[0]:
        few, most_few, best[0] = Kind.TRANSPOSED, 1, transposed_s
    return Plan(few, most_few, many, NO_PADDING, False, tuple(best))


def _random_weight(shape: tuple[int, int], dtype: torch.dtype, device: torch.device) -> Tensor:
    """Random rows, repeated where there are many: drawing them would take longer than the rest."""
    rows = min(shape[0], 64)
    drawn = torch.randn(rows, shape[1], generator=torch.Generator().manual_seed(0))
    return drawn.to(device, dtype).repeat(-(-shape[0] // rows), 1)[: shape[0]].contiguous()


def _examples(
    kind: Kind, shape: tuple[int, int], dtype: torch.dtype, device: torch.device, copies: int
) -> list[Product]:
    return [kind.of(_random_weight(shape, dtype, device), None, None) for _ in range(copies)]


@functools.lru_cache(maxsize=256)
def _race(
    shape: tuple[int, int],
    dtype: torch.dtype,
    kinds: tuple[Kind, ...],
    threads: int,
    copies: int,
) -> dict[Kind, Times]:
    """Seconds at `TIMED_ROWS`: of the best of a few interleaved rounds over `copies` weights, and
    no more than at larger counts, so that a stall of a busy machine decides nothing."""
    cpu = torch.device("cpu")
    contestants = [_examples(kind, shape, dtype, cpu, copies) for kind in kinds]
    best = np.array(
        [
            _best_rounds(contestants, torch.randn(rows, shape[1]), budget_s)
            for rows, budget_s in zip(TIMED_ROWS, _TIMING_BUDGET_S, strict=True)
        ]
    )
    settled = np.minimum.accumulate(best[::-1])[::-1].T
    return {kind: tuple(each.tolist()) for kind, each in zip(kinds, settled, strict=True)}


@functools.lru_cache(maxsize=256)
def _transposed_s(shape: tuple[int, int], dtype: torch.dtype, threads: int, copies: int) -> float:
    """Seconds of a single row with weights [in, out]; infinite in fp32, where it never wins."""
    if dtype == torch.float32:
        return float("inf")
    runs = _examples(Kind.TRANSPOSED, shape, dtype, torch.device("cpu"), copies)
    return _best_rounds((runs,), torch.randn(1, shape[1]), _TIMING_BUDGET_S[0])[0]


def _best_rounds(
    contestants: Sequence[Sequence[Product]], x: Tensor, budget_s: float
) -> list[float]:
    """Seconds a call of each contestant: of the best of a few interleaved rounds."""
    best = [float("inf")] * len(contestants)
    deadline = time.perf_counter() + budget_s
    for turn in range(_REPEATS):
        if turn >= 2 and time.perf_counter() > deadline:
            break
        for at, runs in enumerate(contestants):
            started = time.perf_counter()
            for run in runs:
                run(x, len(x))
            best[at] = min(best[at], (time.perf_counter() - started) / len(runs))
    return best


def _invariant_plan(
    shape: tuple[int, int], dtype: torch.dtype, device: torch.device, times: Mapping[Kind, Times]
) -> Plan:
    """The first kind with a padding under which its bits hold; else the first as it is."""
    for kind, times_s in times.items():
        (run,) = _examples(kind, shape, dtype, device, 1)
        padding = find_padding(lambda x, run=run: run(x, len(x)), shape, device)
        if padding is not None:
            return Plan.of_one(kind, padding, True, times_s)
    kind, times_s = next(iter(times.items()))
    return Plan.of_one(kind, NO_PADDING, False, times_s)


def find_padding(
    run: Callable[[Tensor], Tensor], shape: tuple[int, int], device: torch.device
) -> RowPadding | None:
    """The least padding under which a row of `run` has the same bits at every probed row count, or
    None."""
    counts = _PROBE_ROWS if shape[0] * shape[1] <= _LARGE_WEIGHT else _PROBE_ROWS_LARGE
    gen = torch.Generator().manual_seed(1)
    x = torch.randn(counts[-1] + 31, shape[1], generator=gen).to(device)
    whole = run(x[: counts[-1]].contiguous())
    results: dict[int, bool] = {}

    def holds(rows: int) -> bool:
        if rows not in results:
            some = run(x[:rows].contiguous())
            common = min(rows, len(whole))
            results[rows] = torch.equal(some[:common], whole[:common])
        return results[rows]

    for padding in _PADDINGS:
        if all(holds(padding.rows(n)) for n in counts):
            return padding
    return None
