"""Products with constant weights: the choice of implementation, and the padding for invariant bits.

The implementation (see `products`) is chosen by a rule: from the processor, the type of the weights
and the memory, never from a timing. So a restart changes no bits. In batch-invariant arithmetic the
bits of a row must not depend on the number of rows in the product. Library products are measured:
some are invariant only from some row count on, or at multiples of one, so rows are padded.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from cbatch.runtime.compiled import CompiledProduct, compiles
from cbatch.runtime.cpu.products import Kind, Product, packing_available
from cbatch.runtime.model.config import ModelConfig
from cbatch.runtime.model.shapes import Numerics, num_weights, weight_shapes
from cbatch.system.machine import memory_bytes

# Row counts whose bits are compared. Beyond them no library was seen to change its method.
_PROBE_ROWS = (1, 2, 3, 4, 5, 6, 7, 8, 9, 12, 16, 17, 31, 33, 64)
_PROBE_ROWS_LARGE = (1, 2, 4, 8, 9, 33)  # for weights so large that probing takes noticeable time
_LARGE_WEIGHT = 1 << 26  # elements
_PACK_BYTES_SHARE = 0.5  # limit of packed fp32 copies, as a share of the machine's memory


class RowPadding(NamedTuple):
    """Pads rows to `max(minimum, next multiple)`."""

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


class ProductPlan(NamedTuple):
    """The implementation of products with one weight shape. `padding`: the rows added for batch
    invariance. `invariant`: whether they suffice."""

    kind: Kind
    padding: RowPadding
    invariant: bool


class Linear:
    """y = (x * in_scale) W^T + bias over fp32 rows: [T, in] -> [T, out], both contiguous.

    `product(x, rows)` needs a number of rows that is padded already.
    """

    def __init__(
        self, weight: Tensor, bias: Tensor | None, in_scale: Tensor | None, plan: ProductPlan
    ) -> None:
        self.shape = (weight.shape[0], weight.shape[1])
        self.plan = plan
        self.product: Product = plan.kind.of(weight, bias, in_scale)

    @classmethod
    def of(cls, product: CompiledProduct) -> Linear:
        """Wrap a product of quantised blocks; only our kernels compute those."""
        linear = cls.__new__(cls)
        linear.shape, linear.product = product.shape, product
        linear.plan = ProductPlan(Kind.COMPILED, NO_PADDING, True)
        return linear

    def __call__(self, x: Tensor) -> Tensor:
        rows = x.shape[0]
        padded = self.plan.padding.rows(rows)
        if padded == rows:
            return self.product(x, rows)
        return self.product(F.pad(x, (0, 0, 0, padded - rows)), padded)[:rows]

    @property
    def description(self) -> str:
        """A description of the implementation."""
        types = self.compiled.block_types if self.compiled is not None else ()
        return " ".join([self.plan.kind.value, *types])

    @property
    def compiled(self) -> CompiledProduct | None:
        """Our own product if it accepts any number of rows without padding, else None."""
        is_ours = isinstance(self.product, CompiledProduct) and self.plan.padding == NO_PADDING
        return self.product if is_ours else None


class Machine(NamedTuple):
    """The features of this machine for weights of one type: our own kernels; MKL's packed product,
    with memory for the packed copy; bf16 instructions on vectors or on tiles (AMX)."""

    compiles: bool
    packs: bool
    bf16: bool
    tiles: bool


def kinds_for(dtype: torch.dtype, machine: Machine, *, invariant: bool) -> list[Kind]:
    """Return the kinds that may compute weights of this type, the preferred first.

    Our kernels are faster than a library's from 1 to 128 rows. With bf16 instructions they are not
    slower at 1,024 rows (measured on an AVX512_BF16 processor), mainly because one call then runs
    the whole pass (see `CompiledDecoder`). Their bits are batch-invariant. AMX tiles multiply bf16
    ten times faster than vectors multiply fp32. So where numerics is "fast", faster prompts are
    preferred to invariant bits. Emulated bf16 is the slowest.
    """
    native = machine.tiles or (machine.bf16 and not machine.compiles)
    if dtype == torch.bfloat16 and native and not invariant:
        return [Kind.NATIVE]
    candidates = ((Kind.COMPILED, machine.compiles), (Kind.PACKED, machine.packs))
    return [*(kind for kind, available in candidates if available), Kind.NATIVE]


def make_plan(
    shape: tuple[int, int],
    dtype: torch.dtype,
    *,
    invariant: bool,
    may_pack: bool,
) -> ProductPlan:
    """Return the plan for weights [out, in]: the first of `kinds_for`. With `invariant`, the
    first kind whose bits are invariant, with padding if necessary. `may_pack` is False if there is
    no memory for a packed copy.
    """
    machine = Machine(
        compiles=compiles(dtype),
        packs=may_pack and packing_available(),
        bf16=_cpu_supports("_is_avx512_bf16_supported"),
        tiles=_cpu_supports("_is_amx_tile_supported"),
    )
    kinds = kinds_for(dtype, machine, invariant=invariant)
    if kinds[0] is Kind.COMPILED:
        return ProductPlan(Kind.COMPILED, NO_PADDING, True)
    if not invariant:
        return ProductPlan(kinds[0], NO_PADDING, False)
    return _padded_plan(shape, dtype, tuple(kinds), torch.get_num_threads())


def _cpu_supports(feature: str) -> bool:
    return bool(getattr(torch.cpu, feature, bool)())


@functools.lru_cache(maxsize=256)
def _padded_plan(
    shape: tuple[int, int],
    dtype: torch.dtype,
    kinds: tuple[Kind, ...],
    threads: int,
) -> ProductPlan:
    """Return the first kind that some padding makes invariant; else the first kind, unpadded."""
    weight = _random_weight(shape, dtype)
    for kind in kinds:
        product = kind.of(weight, None, None)
        padding = find_padding(lambda x, run=product: run(x, len(x)), shape)
        if padding is not None:
            return ProductPlan(kind, padding, True)
    return ProductPlan(kinds[0], NO_PADDING, False)


def _random_weight(shape: tuple[int, int], dtype: torch.dtype) -> Tensor:
    """Return random rows, repeated if there are many: drawing all would take most of the time."""
    rows = min(shape[0], 64)
    drawn = torch.randn(rows, shape[1], generator=torch.Generator().manual_seed(0))
    return drawn.to(dtype).repeat(-(-shape[0] // rows), 1)[: shape[0]].contiguous()


def find_padding(run: Callable[[Tensor], Tensor], shape: tuple[int, int]) -> RowPadding | None:
    """Return the smallest padding with which a row of `run` has the same bits at every probed row
    count; None if there is none."""
    counts = _PROBE_ROWS if shape[0] * shape[1] <= _LARGE_WEIGHT else _PROBE_ROWS_LARGE
    gen = torch.Generator().manual_seed(1)
    x = torch.randn(counts[-1] + 31, shape[1], generator=gen)
    whole = run(x[: counts[-1]].contiguous())
    results: dict[int, bool] = {}

    def is_invariant(rows: int) -> bool:
        if rows not in results:
            part = run(x[:rows].contiguous())
            common = min(rows, len(whole))
            results[rows] = torch.equal(part[:common], whole[:common])
        return results[rows]

    for padding in _PADDINGS:
        if all(is_invariant(padding.rows(n)) for n in counts):
            return padding
    return None


def resolve_numerics(requested: str, config: ModelConfig, dtype: torch.dtype) -> Numerics:
    """Resolve "auto": "invariant" if every product of the model can be invariant, else "fast".

    In an invariant model neither other rows of the step, nor the chunks of a prompt, nor the blocks
    of its KV change the bits of a row's logits."""
    may_pack = 4 * num_weights(config) < _PACK_BYTES_SHARE * memory_bytes()
    if requested == "auto":
        plans = [
            make_plan(shape, dtype, invariant=True, may_pack=may_pack)
            for shape in weight_shapes(config)
        ]
        requested = "invariant" if all(plan.invariant for plan in plans) else "fast"
    return Numerics(requested, may_pack)
