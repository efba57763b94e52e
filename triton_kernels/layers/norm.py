"""RMSNorm (Zhang, Sennrich 2019, "Root mean square layer normalization", equation 4) and LayerNorm
(Ba, Kiros, Hinton 2016, arXiv 1607.06450), alone or after a residual addition. One program per row:
its bits do not depend on other rows."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra.cuda import gdc_wait

from triton_kernels.build.hopper import is_hopper, launch_options
from triton_kernels.build.jit import jit

DTYPES = {torch.float32: "fp32", torch.bfloat16: "bf16", torch.float16: "fp16"}


@jit
def norm_kernel(
    x_ptr, residual_ptr, weight_ptr, bias_ptr, out_ptr, width, eps, x_stride, residual_stride,
    ADDS: tl.constexpr, CENTRED: tl.constexpr, BLOCK: tl.constexpr, EARLY: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    at = tl.arange(0, BLOCK)
    inside = at < width
    weight = tl.load(weight_ptr + at, mask=inside, other=0.0).to(tl.float32)
    if EARLY:
        gdc_wait()
    x = tl.load(x_ptr + row * x_stride + at, mask=inside, other=0.0).to(tl.float32)
    if ADDS:
        residual = residual_ptr + row * residual_stride + at
        x += tl.load(residual, mask=inside, other=0.0).to(tl.float32)
        # The norm reads the residual as it is stored.
        rounded = x.to(residual_ptr.dtype.element_ty)
        tl.store(residual, rounded, mask=inside)
        x = rounded.to(tl.float32)
    if CENTRED:
        x = tl.where(inside, x - tl.sum(x, axis=0) / width, 0.0)
    scale = 1.0 / tl.sqrt(tl.sum(x * x, axis=0) / width + eps)
    y = x * scale * weight
    if bias_ptr is not None:  # it is not read early: that takes too many registers
        y += tl.load(bias_ptr + at, mask=inside, other=0.0).to(tl.float32)
    tl.store(out_ptr + row * width + at, y.to(out_ptr.dtype.element_ty), mask=inside)


def norm_rows(
    x: Tensor,
    weight: Tensor,
    eps: float,
    residual: Tensor | None = None,
    *,
    bias: Tensor | None = None,
    centred: bool = False,
    early: bool = False,
) -> Tensor:
    """Return x / rms(x) * weight + bias of x [T, n]; with `centred`, of x minus its mean. With
    `residual` [T, n], x is first added to it in place, and the norm is of the sum.

    Tensors may be fp32, bf16 or fp16, independently. The result is rounded once, from fp32 to the
    type of `x`. Rows may be strided, elements must be adjacent. `early` (see `build.hopper`): the
    weight is read early. Raises ValueError naming the argument that does not fit."""
    _check(x, weight, residual, bias)
    rows, width = x.shape
    out = torch.empty((rows, width), dtype=x.dtype, device=x.device)
    if rows:
        block, early = triton.next_power_of_2(width), early and is_hopper()
        norm_kernel[(rows,)](
            x, residual, weight, bias, out, width, eps, x.stride(0),
            0 if residual is None else residual.stride(0), ADDS=residual is not None,
            CENTRED=centred, BLOCK=block, EARLY=early, num_warps=num_warps(block), num_stages=1,
            enable_fp_fusion=True, **launch_options(early),
        )  # fmt: skip
    return out


def norm_rows_reference(
    x: Tensor,
    weight: Tensor,
    eps: float,
    residual: Tensor | None = None,
    *,
    bias: Tensor | None = None,
    centred: bool = False,
) -> Tensor:
    """Compute `norm_rows` in plain torch."""
    wide = x.float()
    if residual is not None:
        residual.copy_(wide + residual.float())
        wide = residual.float()
    if centred:
        wide = wide - wide.mean(dim=-1, keepdim=True)
    scale = 1.0 / torch.sqrt(wide.square().mean(dim=-1, keepdim=True) + eps)
    y = wide * scale * weight.float()
    return (y if bias is None else y + bias.float()).to(x.dtype)


def num_warps(block: int) -> int:
    """Return the number of warps for about 16 elements per thread."""
    return min(max(block // 512, 1), 16)


def _check(x: Tensor, weight: Tensor, residual: Tensor | None, bias: Tensor | None) -> None:
    for name, tensor, shape in (
        ("x", x, (None, None)),
        ("weight", weight, (x.shape[-1],)),
        ("bias", bias, (x.shape[-1],)),
        ("residual", residual, tuple(x.shape)),
    ):
        if tensor is None:
            continue
        fits = tensor.dim() == len(shape) and all(
            want in (None, have) for have, want in zip(tensor.shape, shape, strict=True)
        )
        if not fits or tensor.dtype not in DTYPES or tensor.stride(-1) != 1:
            raise ValueError(
                f"{name}: {tensor.dtype} {list(tensor.shape)} does not fit; give "
                f"{', '.join(DTYPES.values())} in the shape of x [T, n], elements side by side"
            )
