"""The noise in machine code has no fused multiply-add: each operation rounds by itself."""

from __future__ import annotations

import re

import pytest
import triton
import triton.language as tl
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from triton_kernels.noise import device as noise_device


@triton.jit
def exponential_kernel(words_ptr, out_ptr, BLOCK: tl.constexpr):
    at = tl.arange(0, BLOCK)
    words = tl.load(words_ptr + at).to(tl.uint32, bitcast=True)
    tl.store(out_ptr + at, noise_device.exponential(words))


def fused_operations(fp_fusion: bool, target: GPUTarget) -> int:
    signature = {"words_ptr": "*i32", "out_ptr": "*fp32", "BLOCK": "constexpr"}
    source = ASTSource(exponential_kernel, signature, constexprs={(2,): 1024})
    compiled = triton.compile(source, target=target, options={"enable_fp_fusion": fp_fusion})
    code = compiled.asm["ptx" if target.backend == "cuda" else "amdgcn"]
    return len(re.findall(r"\bfma\.rn\.f32|\bv_(?:pk_)?(?:fma|fmac|mad|mac)\w*_f32", code))


@pytest.mark.parametrize("arch", [90, "gfx942"])
def test_nothing_is_fused_unless_asked_for(arch: int | str) -> None:
    target = GPUTarget("cuda", arch, 32) if arch == 90 else GPUTarget("hip", arch, 64)
    assert fused_operations(False, target) == 0
    assert fused_operations(True, target) >= 8
