"""The torch noise equals the specification bit for bit. In machine code it has no fused
multiply-add: each operation rounds by itself."""

from __future__ import annotations

import re

import numpy as np
import pytest
import torch
import triton
import triton.language as tl
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from cbatch.core.request import noise as spec
from cbatch.core.request.noise import Purpose
from cbatch.runtime.sampling import noise
from triton_kernels.noise import device as noise_device
from triton_kernels.noise import streams


def test_constants_are_those_of_the_specification():
    names = [
        "LOG1P_COEFFICIENT_BITS",
        "THREE_QUARTERS_BITS",
        "SMALL_DRAW",
        "PHILOX_ROUNDS",
    ]
    assert [getattr(streams, n) for n in names] == [getattr(spec, n) for n in names]
    assert (streams.LN2, tuple(streams.COEFFICIENTS)) == noise.constants()
    assert all(getattr(each, p.name) == p for p in Purpose for each in (noise, streams))


def test_words_equal_bit_for_bit():
    rng = np.random.default_rng(1)
    keys = rng.integers(0, 2**32, (7, 2))
    positions, choices = rng.integers(0, 2**20, 7), rng.integers(0, 8, 7)
    purposes = np.array([Purpose(i % 5) for i in range(7)])
    want = spec.token_words(keys, positions, choices, purposes, 1003)
    as_tensor = torch.from_numpy
    got = noise.token_words(
        as_tensor(keys), as_tensor(positions), as_tensor(choices), as_tensor(purposes), 1003
    )
    assert np.array_equal(got.numpy(), want.astype(np.int64))
    ids = as_tensor(rng.integers(0, 1003, (7, 5)))
    some = noise.words_of(
        as_tensor(keys), as_tensor(positions), as_tensor(choices), as_tensor(purposes), ids
    )
    assert torch.equal(some, got.gather(1, ids))
    scalars = noise.scalar_words(
        as_tensor(keys), as_tensor(positions), as_tensor(choices), as_tensor(purposes)
    )
    assert np.array_equal(scalars.numpy(), want[:, 0].astype(np.int64))


def test_uniform_and_exponential_equal_bit_for_bit():
    edges = np.array([0, 1, 2**30 - 1, 2**30, 2**31, 2**32 - 2, 2**32 - 1], dtype=np.uint32)
    x = np.concatenate([edges, np.random.default_rng(2).integers(0, 2**32, 300_000)])
    x = x.astype(np.uint32)
    words = torch.from_numpy(x.astype(np.int64))
    assert np.array_equal(
        noise.uniform(words).numpy().view(np.int32), spec.uniform(x).view(np.int32)
    )
    assert np.array_equal(
        noise.exponential(words).numpy().view(np.int32), spec.exponential(x).view(np.int32)
    )


# --- compiled ------------------------------------------------------------------------------------


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
