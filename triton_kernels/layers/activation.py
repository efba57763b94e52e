"""The gated activation of the MLP: silu(gate) * up (Shazeer 2020, "GLU variants improve
transformer", arXiv 2002.05202, equation 6). Elementwise: bits do not depend on other rows."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra.cuda import gdc_wait

from triton_kernels.build.hopper import is_hopper, launch_options
from triton_kernels.build.jit import jit

BLOCK = 2048
NUM_WARPS = 4


@jit
def silu_mul_kernel(gate_up_ptr, out_ptr, width, stride, BLOCK: tl.constexpr, EARLY: tl.constexpr):
    if EARLY:
        gdc_wait()
    row = tl.program_id(0).to(tl.int64)
    at = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = at < width
    gate_ptr = gate_up_ptr + row * stride + at
    gate = tl.load(gate_ptr, mask=inside, other=0.0).to(tl.float32)
    up = tl.load(gate_ptr + width, mask=inside, other=0.0).to(tl.float32)
    y = gate / (1.0 + tl.exp(-gate)) * up
    tl.store(out_ptr + row * width + at, y.to(out_ptr.dtype.element_ty), mask=inside)


def silu_mul(gate_up: Tensor, *, early: bool = False) -> Tensor:
    """Return silu(gate) * up [T, n] of [T, gate | up] in fp32, bf16 or fp16, computed in fp32 and
    rounded once. Rows may be strided. `early` (see `build.hopper`): nothing is read early. Raises
    ValueError naming the argument that does not fit."""
    known = gate_up.dtype in (torch.float32, torch.bfloat16, torch.float16)
    if gate_up.dim() != 2 or gate_up.shape[1] % 2 or gate_up.stride(1) != 1 or not known:
        raise ValueError(
            f"gate_up: {gate_up.dtype} {list(gate_up.shape)} does not fit; give fp32, bf16 or fp16 "
            "[T, 2 n], elements side by side"
        )
    rows, width = gate_up.shape[0], gate_up.shape[1] // 2
    out = torch.empty((rows, width), dtype=gate_up.dtype, device=gate_up.device)
    if rows:
        grid, early = (rows, triton.cdiv(width, BLOCK)), early and is_hopper()
        silu_mul_kernel[grid](
            gate_up, out, width, gate_up.stride(0), BLOCK=BLOCK, EARLY=early,
            num_warps=NUM_WARPS, num_stages=1, enable_fp_fusion=True, **launch_options(early),
        )  # fmt: skip
    return out


def silu_mul_reference(gate_up: Tensor) -> Tensor:
    """Compute `silu_mul` in plain torch."""
    gate, up = gate_up.float().chunk(2, dim=-1)
    return (gate / (1.0 + torch.exp(-gate)) * up).to(gate_up.dtype)
