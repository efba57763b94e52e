"""Products with constant weights: which implementation computes one, and whether its bits hold.

Two implementations compete, per weight shape, by a short timing at start-up:

- *native*: `F.linear` in the dtype of the weights. The choice for bf16 where the CPU has bf16
  instructions, and on other devices.
- *packed*: MKL's fp32 product with weights packed once. In fp32 it computes 8 rows in about the
  time of one. bf16 weights are widened to fp32 first (the values are the same, activations are not
  rounded): on a CPU without bf16 instructions that is far faster from a few rows on.

Both take and give fp32. A row's bits must not depend on how many rows share the product: that is
measured too, and where it holds only from some row count on, or at multiples, rows are padded.
"""

from __future__ import annotations

import functools
import time
from collections.abc import Callable, Sequence
from typing import NamedTuple

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

# Row counts whose bits are compared; beyond them libraries switch nothing we have seen.
_PROBE_ROWS = (1, 2, 3, 4, 5, 6, 7, 8, 9, 12, 16, 17, 31, 33, 64)
_PROBE_ROWS_LARGE = (1, 2, 4, 8, 9, 33)  # for weights so large that a probe would be felt
_LARGE_WEIGHT = 1 << 26
TIMED_ROWS = (1, 2, 8, 32)
_PACK_ROWS = 64  # one packing serves every row count; this one is near the best for all
_REPEATS = 12
_TIMING_BUDGET_S = (0.03, 0.01, 0.01, 0.01)  # per shape; one row is where they are closest
_MOST_TIMED_BYTES = 48 << 20  # of fp32 weights per shape: more than caches hold


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
    """How products of one weight shape are computed.

    Up to `native_rows` rows natively, packed above (None: natively always). `padding` is what
    row-invariance needs; `invariant` whether it was reached. `times_s` by `TIMED_ROWS`, empty if
    nothing was timed. `transposed`: native weights are kept as [in, out], which reads long rows of
    a wide product in order; for single rows only.
    """

    native_rows: int | None
    padding: RowPadding
    invariant: bool
    times_s: tuple[float, ...] = ()
    transposed: bool = False


class Linear:
    """y = (x * in_scale) W^T + bias over fp32 rows: [T, in] -> [T, out], both contiguous.

    `in_scale` (the weight of the norm before it) is folded into packed weights.
    """

    def __init__(
        self, weight: Tensor, bias: Tensor | None, in_scale: Tensor | None, plan: Plan
    ) -> None:
        self.shape = (weight.shape[0], weight.shape[1])
        self.plan, self.in_scale = plan, in_scale
        self._native_rows = plan.native_rows
        self._packed = self._weight = None
        if plan.native_rows is not None:
            wide = weight.float() if in_scale is None else weight.float() * in_scale
            self._packed = pack(wide)
            self._packed_product = torch.ops.mkl._mkl_linear.default
            # Only its shape is read while rows and packing agree.
            self._shape_only = wide.new_empty(1).expand(self.shape)
            self._wide_bias = None if bias is None else bias.float()
        if plan.native_rows != 0:
            self._weight, self._bias = weight, bias
        if plan.transposed:
            self._weight = weight.t().contiguous()

    def __call__(self, x: Tensor) -> Tensor:
        rows = x.shape[0]
        padded = self.plan.padding.rows(rows)
        if padded == rows:
            return self.product(x, rows)
        return self.product(F.pad(x, (0, 0, 0, padded - rows)), padded)[:rows]

    def product(self, x: Tensor, rows: int) -> Tensor:
        """As a call, for `rows` that the plan's padding leaves as they are."""
        native_rows = self._native_rows
        if native_rows is not None and rows > native_rows:
            return self._packed_product(x, self._packed, self._shape_only, self._wide_bias, rows)
        if self.in_scale is not None:
            x = x * self.in_scale
        x = x.to(self._weight.dtype)
        if self.plan.transposed:
            y = torch.mm(x, self._weight).float()
            return y if self._bias is None else y.add_(self._bias)
        if rows == 1 and self._bias is None:  # the faster kernel for half precision on CPUs
            return torch.mv(self._weight, x.view(-1)).float().view(1, -1)
        return F.linear(x, self._weight, self._bias).float()


def pack(weight: Tensor) -> Tensor:
    """fp32 [out, in] in MKL's packed layout."""
    return torch.ops.mkl._mkl_reorder_linear_weight(weight.contiguous(), _PACK_ROWS)


@functools.lru_cache(maxsize=1)
def packing_available() -> bool:
    """Whether this build of torch has MKL's packed product, and it computes what it should."""
    if not torch.backends.mkl.is_available() or not hasattr(torch.ops.mkl, "_mkl_linear"):
        return False
    gen = torch.Generator().manual_seed(0)
    weight = torch.randn(96, 64, generator=gen)
    x = torch.randn(33, 64, generator=gen)
    try:
        packed, expected = pack(weight), x @ weight.T
        proxy = weight.new_empty(1).expand(weight.shape)
        return all(
            torch.allclose(
                torch.ops.mkl._mkl_linear(x[:n], packed, proxy, None, n), expected[:n], atol=1e-4
            )
            for n in (1, 7, 8, 33)
        )
    except (RuntimeError, AttributeError):
        return False


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
    faster one is taken at each row count. `may_pack` False where memory does not allow a copy.
    """
    threads = torch.get_num_threads() if device.type == "cpu" else 0
    packing = may_pack and device.type == "cpu" and packing_available()
    copies = max(1, min(count, _MOST_TIMED_BYTES // (4 * shape[0] * shape[1])))
    return _measured_plan(shape, dtype, device, invariant, packing, threads, copies)


@functools.lru_cache(maxsize=256)
def _measured_plan(
    shape: tuple[int, int],
    dtype: torch.dtype,
    device: torch.device,
    invariant: bool,
    packing: bool,
    threads: int,
    copies: int,
) -> Plan:
    if not packing:
        native = _native(shape, dtype, device)
        return _invariant_plan([native], [()]) if invariant else Plan(None, NO_PADDING, False)
    times = _race(shape, dtype, threads, copies)
    if not invariant:
        return _fast_plan(times, _transposed_s(shape, dtype, threads, copies))
    candidates, times_s = [_packed(shape, dtype)], [times[1]]
    if _native_may_be_invariant(dtype):
        candidates.append(_native(shape, dtype, device))
        times_s.append(times[0])
        if _slowness(times[0], times[1]) < len(TIMED_ROWS):
            candidates.reverse()
            times_s.reverse()
    return _invariant_plan(candidates, times_s)


def _native_may_be_invariant(dtype: torch.dtype) -> bool:
    """Native fp32 products switch kernels at small row counts. So do emulated bf16 ones, and
    rounding to bf16 hides that from all but one output in ten thousand: a probe could miss it."""
    if dtype != torch.bfloat16:
        return False
    checks = ("_is_avx512_bf16_supported", "_is_amx_tile_supported")
    return any(getattr(torch.cpu, name, bool)() for name in checks)


def _slowness(mine: Sequence[float], other: Sequence[float]) -> float:
    """Sum of ratios over the timed row counts: no count decides alone."""
    return sum(a / b for a, b in zip(mine, other, strict=True))


def _crossover(native: Sequence[float], packed: Sequence[float]) -> int:
    """Row counts up to which native is the faster: 0 if it never is."""
    cut = 0
    for rows, n, p in zip(TIMED_ROWS, native, packed, strict=True):
        if n >= p:
            return cut
        cut = rows
    return cut


def _fast_plan(times: Sequence[Sequence[float]], transposed_s: float) -> Plan:
    cut = _crossover(*times)
    best = [n if rows <= cut else p for rows, n, p in zip(TIMED_ROWS, *times, strict=True)]
    if cut <= 1 and transposed_s < best[0]:
        best[0] = transposed_s
        return Plan(1, NO_PADDING, False, tuple(best), transposed=True)
    return Plan(cut, NO_PADDING, False, tuple(best))


class _Candidate(NamedTuple):
    packed: bool
    device: torch.device
    shape: tuple[int, int]
    run: Callable[[Tensor], Tensor]


def _native(shape: tuple[int, int], dtype: torch.dtype, device: torch.device) -> _Candidate:
    run = Linear(_random_weight(shape, dtype, device), None, None, Plan(None, NO_PADDING, False))
    return _Candidate(False, device, shape, run)


def _packed(shape: tuple[int, int], dtype: torch.dtype) -> _Candidate:
    cpu = torch.device("cpu")
    run = Linear(_random_weight(shape, dtype, cpu), None, None, Plan(0, NO_PADDING, False))
    return _Candidate(True, cpu, shape, run)


def _random_weight(shape: tuple[int, int], dtype: torch.dtype, device: torch.device) -> Tensor:
    """Random rows, repeated where there are many: drawing them would take longer than the rest."""
    rows = min(shape[0], 64)
    drawn = torch.randn(rows, shape[1], generator=torch.Generator().manual_seed(0))
    return drawn.to(device, dtype).repeat(-(-shape[0] // rows), 1)[: shape[0]].contiguous()


@functools.lru_cache(maxsize=256)
def _race(
    shape: tuple[int, int], dtype: torch.dtype, threads: int, copies: int
) -> tuple[tuple[float, ...], tuple[float, ...]]:
    """Seconds at `TIMED_ROWS`, native and packed: of the best of a few interleaved rounds over
    `copies` weights, and no more than at larger counts, so that a stall of a busy machine decides
    nothing."""
    native = [_native(shape, dtype, torch.device("cpu")).run for _ in range(copies)]
    packed = [_packed(shape, dtype).run for _ in range(copies)]
    best = np.array(
        [
            _best_rounds((native, packed), torch.randn(rows, shape[1]), budget_s)
            for rows, budget_s in zip(TIMED_ROWS, _TIMING_BUDGET_S, strict=True)
        ]
    )
    native_s, packed_s = (tuple(t.tolist()) for t in np.minimum.accumulate(best[::-1])[::-1].T)
    return native_s, packed_s


@functools.lru_cache(maxsize=256)
def _transposed_s(shape: tuple[int, int], dtype: torch.dtype, threads: int, copies: int) -> float:
    """Seconds of a single row with weights [in, out]; infinite in fp32, where it never wins."""
    if dtype == torch.float32:
        return float("inf")
    weight = _random_weight(shape, dtype, torch.device("cpu"))
    plan = Plan(None, NO_PADDING, False, transposed=True)
    runs = [Linear(weight, None, None, plan) for _ in range(copies)]
    return _best_rounds((runs,), torch.randn(1, shape[1]), _TIMING_BUDGET_S[0])[0]


def _best_rounds(
    contestants: Sequence[Sequence[Callable[[Tensor], Tensor]]], x: Tensor, budget_s: float
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
                run(x)
            best[at] = min(best[at], (time.perf_counter() - started) / len(runs))
    return best


def _invariant_plan(candidates: list[_Candidate], times_s: list[tuple[float, ...]]) -> Plan:
    """The first candidate with a padding under which its bits hold; else the first as it is."""
    for candidate, times in zip(candidates, times_s, strict=True):
        padding = find_padding(candidate.run, candidate.shape, candidate.device)
        if padding is not None:
            return Plan(0 if candidate.packed else None, padding, True, times)
    return Plan(0 if candidates[0].packed else None, NO_PADDING, False, times_s[0])


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
