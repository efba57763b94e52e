"""The activation of a feed-forward, gated (Shazeer 2020, "GLU variants improve transformer", arXiv
2002.05202) or not. Elementwise: bits do not depend on other rows."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra.cuda import gdc_wait

from triton_kernels.build.check import check_tensor
from triton_kernels.build.hopper import is_hopper, launch_options
from triton_kernels.build.jit import jit
from triton_kernels.layers.norm import DTYPES

ACTIVATIONS = ("silu", "gelu_tanh", "relu_squared", "xielu")
BLOCK = 2048
NUM_WARPS = 4


@jit
def activated(x, KIND: tl.constexpr):
    if KIND == "silu":
        y = x / (1.0 + tl.exp(-x))
    elif KIND == "gelu_tanh":
        # x (1 + tanh(u)) / 2 = x / (1 + exp(-2 u)) with u = sqrt(2 / pi) (x + 0.044715 x^3)
        doubled = 1.5957691216057308 * (x + 0.044715 * x * x * x)
        y = x / (1.0 + tl.exp(tl.minimum(-doubled, 80.0)))  # the limit keeps exp finite
    else:
        y = tl.maximum(x, 0.0) * tl.maximum(x, 0.0)
    return y


@jit
def activation_kernel(
    rows_ptr, factors_ptr, out_ptr, width, stride, KIND: tl.constexpr, GATED: tl.constexpr,
    BLOCK: tl.constexpr, EARLY: tl.constexpr,
):  # fmt: skip
    if EARLY:
        gdc_wait()
    row = tl.program_id(0).to(tl.int64)
    at = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = at < width
    x_ptr = rows_ptr + row * stride + at
    x = tl.load(x_ptr, mask=inside, other=0.0).to(tl.float32)
    if KIND == "xielu":
        below = tl.load(factors_ptr + 1) * (tl.exp(tl.minimum(x, 0.0)) - 1.0 - x)
        y = tl.where(x > 0.0, tl.load(factors_ptr) * x * x, below) + tl.load(factors_ptr + 2) * x
    else:
        y = activated(x, KIND)
    if GATED:
        y *= tl.load(x_ptr + width, mask=inside, other=0.0).to(tl.float32)
    tl.store(out_ptr + row * width + at, y.to(out_ptr.dtype.element_ty), mask=inside)


def activate(
    rows: Tensor,
    kind: str = "silu",
    *,
    gated: bool = True,
    factors: Tensor | None = None,
    early: bool = False,
) -> Tensor:
    """Return act(gate) * up [T, n] of rows [T, gate | up] in fp32, bf16 or fp16, or act(x) of rows
    [T, n] without `gated`. Computed in fp32 and rounded once; `kind` is one of ACTIVATIONS. Rows
    may be strided. `factors` fp32 [3] of xIELU (arXiv:2411.13010): of x^2 above 0, of e^x - 1 - x
    below, and of x. `early` (see `build.hopper`): nothing is read early. Raises ValueError naming
    the argument that does not fit."""
    if (
        rows.dim() != 2
        or rows.shape[1] % (1 + gated)
        or rows.stride(1) != 1
        or (rows.dtype not in DTYPES)
    ):
        raise ValueError(
            f"rows: {rows.dtype} {list(rows.shape)} does not fit; give fp32, bf16 or fp16 "
            f"[T, {'2 n' if gated else 'n'}], elements side by side"
        )
    if kind not in ACTIVATIONS:
        raise ValueError(f"kind: {kind!r}; give one of {', '.join(ACTIVATIONS)}")
    if kind == "xielu":
        assert factors is not None
        check_tensor("factors", factors, torch.float32, (3,))
    count, width = rows.shape[0], rows.shape[1] // (1 + gated)
    out = torch.empty((count, width), dtype=rows.dtype, device=rows.device)
    if count:
        grid, early = (count, triton.cdiv(width, BLOCK)), early and is_hopper()
        activation_kernel[grid](
            rows, factors, out, width, rows.stride(0), KIND=kind, GATED=gated, BLOCK=BLOCK,
            EARLY=early, num_warps=NUM_WARPS, num_stages=1, enable_fp_fusion=True,
            **launch_options(early),
        )  # fmt: skip
    return out


def activate_reference(
    rows: Tensor, kind: str = "silu", *, gated: bool = True, factors: Tensor | None = None
) -> Tensor:
    """Compute `activate` in plain torch."""
    x, up = rows.float().chunk(2, dim=-1) if gated else (rows.float(), 1.0)
    if kind == "silu":
        y = x / (1.0 + torch.exp(-x))
    elif kind == "gelu_tanh":
        y = torch.nn.functional.gelu(x, approximate="tanh")
    elif factors is not None:
        above, below, linear = factors
        y = torch.where(x > 0, above * x * x, below * (torch.expm1(x) - x)) + linear * x
    else:
        y = x.relu().square()
    return (y * up).to(rows.dtype)
