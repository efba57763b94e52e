"""The compile check on the shipped kernels (a case of each kind, one target), and on bad ones."""

from __future__ import annotations

import functools
import json
import re

import pytest
import triton
import triton.language as tl
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from tests.triton_kernels import compile_check
from tests.triton_kernels.cases import CaseLimits, KernelCase
from tests.triton_kernels.compile_check import Findings, all_cases, check, main
from triton_kernels.noise import device as noise_device

KINDS = {
    (c.name, c.wgmma, c.tma, c.constexprs.get("FOLDS")): c
    for c in all_cases()
    if "sm_90" in c.limits
}
SHIPPED = list(KINDS.values())


@triton.jit
def product_kernel(a_ptr, b_ptr, out_ptr, stride, ROWS: tl.constexpr, SIZE: tl.constexpr):
    row, column = tl.arange(0, ROWS)[:, None] * stride, tl.arange(0, SIZE)[None, :]
    a = tl.load(a_ptr + row + tl.arange(0, SIZE)[None, :])
    b = tl.load(b_ptr + tl.arange(0, SIZE)[:, None] * stride + column)
    tl.store(out_ptr + row + column, tl.dot(a, b))


def product(rows: int = 64, num_warps: int = 4) -> KernelCase:
    """A small product that passes the check."""
    return KernelCase(
        name="product",
        config=f"rows={rows}",
        kernel=product_kernel,
        signature={"a_ptr": "*bf16", "b_ptr": "*bf16", "out_ptr": "*fp32", "stride": "i32"},
        constexprs={"ROWS": rows, "SIZE": 64},
        divisible=("a_ptr", "b_ptr", "out_ptr", "stride"),
        num_warps=num_warps,
        num_stages=1,
        limits={"sm_90": CaseLimits(128, 64 << 10)},
        wgmma=True,
        wide_loads=True,
    )


@functools.cache
def small_product() -> Findings:
    """Return the findings about its code, under limits that it keeps."""
    return check(product(), "sm_90")


@pytest.mark.parametrize("case", SHIPPED, ids=lambda case: f"{case.name} {case.config}")
def test_shipped_kernels_pass(case: KernelCase) -> None:
    assert check(case, "sm_90").faults() == []


def test_few_rows_miss_wgmma() -> None:
    assert check(product(rows=16), "sm_90").faults() == ["no wgmma"]


def test_a_stride_of_any_size_makes_loads_narrow() -> None:
    case = product()._replace(divisible=("a_ptr", "b_ptr", "out_ptr"))
    (fault,) = check(case, "sm_90").faults()
    assert "narrower than 128 bits" in fault


def test_a_sum_too_large_for_its_threads_spills() -> None:
    limits = {"sm_90": CaseLimits(255, 64 << 10)}
    case = product(rows=256, num_warps=1)._replace(limits=limits, wgmma=False)
    spills, code = check(case, "sm_90").faults()
    assert spills.startswith("spills") and code.endswith("bytes of code")


def test_a_shorter_pipeline_is_seen() -> None:
    case = next(c for c in SHIPPED if c.tma)
    assert check(case, "sm_90").buffers >= 2
    shallow = check(case._replace(num_stages=1), "sm_90").faults()
    assert any("tiles in flight, 2 expected" in fault for fault in shallow)


@triton.jit
def sums_kernel(counts_ptr, out_ptr, USED: tl.constexpr):
    count, total = tl.load(counts_ptr), 0
    for turn in range(tl.load(counts_ptr + 1)):
        following = tl.load(counts_ptr + turn)
        for number in tl.range(0, count, disable_licm=True):
            total += tl.load(out_ptr + number)
        total += count if USED else 0
        count = following
    tl.store(out_ptr, total)


@pytest.mark.parametrize("used", [True, False])
def test_a_carried_value_that_only_bounds_a_loop_is_a_fault(used: bool) -> None:
    case = product()._replace(
        kernel=sums_kernel,
        signature={"counts_ptr": "*i32", "out_ptr": "*i32"},
        constexprs={"USED": used},
        divisible=(),
        wgmma=False,
        wide_loads=False,
    )
    expected = [] if used else ["1 carried values that only bound loops"]
    assert check(case, "sm_90").faults() == expected


def test_limits_hold() -> None:
    case = product()._replace(limits={"sm_90": CaseLimits(8, 8)}, tma=True)
    findings = small_product()
    assert findings.faults() == []
    faults = findings._replace(case=case, code_bytes=129 << 10).faults()
    assert "registers, 8 allowed" in faults[0] and "bytes shared, 8 allowed" in faults[1]
    assert faults[2:] == ["132096 bytes of code", "no loads through descriptors"]


@pytest.mark.parametrize("registers, status", [(128, 0), (8, 1)])
def test_the_command_ends_with_one_line_of_json(
    registers: int, status: int, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    case = product()._replace(limits={"sm_90": CaseLimits(registers, 64 << 10)})
    monkeypatch.setattr(compile_check, "all_cases", lambda families: [case])
    monkeypatch.setattr(compile_check, "check", lambda *_: small_product()._replace(case=case))
    assert main([]) == status
    (kernel,) = json.loads(capsys.readouterr().out.splitlines()[-1])["kernels"]
    assert 0 < kernel["code_bytes"] < 16 << 10 and kernel["name"] == "product"
    assert kernel["target"] == "sm_90", "not shipped for other targets"


# --- noise: no fused multiply-add, each operation rounds by itself --------------------------------


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
