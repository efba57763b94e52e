"""The compile check on the kernels of a start, and on bad ones."""

from __future__ import annotations

import functools
import re
from typing import Any

import pytest
import torch
import triton
import triton.language as tl

from tests.gpu_proofs.meta import SIZES
from tests.triton_kernels import compile_check
from tests.triton_kernels.compile_check import (
    Case,
    check,
    main,
    recorded_cases,
    recurrence_cases,
    table_cases,
    waiting_cases,
)
from tests.triton_kernels.driver import META, TARGETS, recording
from triton_kernels.noise import device as noise_device

EVERY_KERNEL = SIZES[4]  # our products, weights in blocks, keys in fp8, a draft
EVERY_OPTION = SIZES[-1]  # of a layer's records
LAYER_KERNELS = {"norm", "activation", "whole_norm", "kv_write", "attention"}
WITH_EXPERTS = SIZES[3]  # gate and up in bf16, down in MXFP4
EXPERT_KERNELS = {"described", "route", "sort", "grouped", "combine"}


@triton.jit
def product_kernel(a_ptr, b_ptr, out_ptr, stride, ROWS: tl.constexpr, SIZE: tl.constexpr):
    row, column = tl.arange(0, ROWS)[:, None] * stride, tl.arange(0, SIZE)[None, :]
    a = tl.load(a_ptr + row + tl.arange(0, SIZE)[None, :])
    b = tl.load(b_ptr + tl.arange(0, SIZE)[:, None] * stride + column)
    tl.store(out_ptr + row + column, tl.dot(a, b))


def recorded(kernel: Any, *arguments: Any, target: str = "sm_90", **options: Any) -> Case:
    with recording(TARGETS[target]) as launches:
        kernel[(1,)](*arguments, **options)
    (made,) = launches.by_key.values()
    return Case(made, target)


def product(rows: int = 64, stride: int = 64, num_warps: int = 4) -> Case:
    """Return a small product, which passes the check by default."""
    a, b = torch.empty(2, 4096, dtype=torch.bfloat16, device=META)
    out = torch.empty(4096, device=META)
    options = {"num_warps": num_warps, "num_stages": 1}
    return recorded(product_kernel, a, b, out, stride, rows, 64, **options)


@functools.cache
def small_product() -> Any:
    return check(product())


@pytest.fixture(autouse=True)
def wide_loads(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(compile_check, "_WIDE", {*compile_check._WIDE, "product"})


def test_every_kernel_of_a_start_passes() -> None:
    kernels = {each.name: each for each in recorded_cases("sm_90", [EVERY_KERNEL])}
    assert len(kernels) > 20
    cases = [*kernels.values()]
    for size, names in ((EVERY_OPTION, LAYER_KERNELS), (WITH_EXPERTS, EXPERT_KERNELS)):
        more = [each for each in recorded_cases("sm_90", [size]) if each.name in names]
        assert {each.name for each in more} == names
        cases += more
    cases += recurrence_cases("sm_90")
    cases += waiting_cases("sm_90")
    faults = [(each.name, each.config, check(each).faults()) for each in cases]
    assert [each for each in faults if each[2]] == []


def test_faults_of_a_product_are_seen() -> None:
    assert small_product().faults() == []
    assert check(product(rows=16)).faults() == [], "too few rows for wgmma"
    (narrow,) = check(product(stride=65)).faults()
    assert "narrower than 128 bits" in narrow
    spills, *_ = check(product(rows=256, num_warps=1)).faults()
    assert spills.startswith("spills")


def test_a_shorter_pipeline_is_seen() -> None:
    case = next(each for each in table_cases("sm_90") if each.constants["DESCRIPTORS"])
    findings = check(case)
    assert findings.buffers >= 2 and findings.faults() == []
    kernel = case.kernel._replace(options=case.kernel.options | {"num_stages": 1})
    shallow = check(case._replace(kernel=kernel))
    assert shallow.buffers < findings.buffers
    faults = shallow._replace(case=case).faults()
    assert any("tiles in flight, 2 expected" in fault for fault in faults)


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
    ints = torch.empty(8, dtype=torch.int32, device=META)
    expected = [] if used else ["1 carried values that only bound loops"]
    assert check(recorded(sums_kernel, ints, ints, used)).faults() == expected


def test_limits_hold(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(compile_check, "_REGISTERS", {"product": 8})
    findings = small_product()._replace(code_bytes=129 << 10, wgmmas=0, shared_bytes=300_000)
    registers, *others = findings.faults()
    assert "registers, 8 allowed" in registers
    limit = (228 << 10) - 1024
    shared = f"300000 bytes shared, {limit} allowed"
    assert others == [shared, "132096 bytes of code", "no wgmma"]


@pytest.mark.parametrize("registers, status", [(128, 0), (8, 1)])
def test_the_command_prints_a_row_for_each_kernel(
    registers: int, status: int, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(compile_check, "_REGISTERS", {"product": registers})
    monkeypatch.setattr(compile_check, "recorded_cases", lambda target: [product()])
    monkeypatch.setattr(compile_check, "table_cases", lambda target: [])
    monkeypatch.setattr(compile_check, "check", lambda case: small_product())
    assert main(["--target", "sm_90"]) == status
    row = capsys.readouterr().out.splitlines()[-1]
    assert row.startswith("product ") and row.endswith("ok") == (status == 0)


# --- noise: no fused multiply-add, each operation rounds by itself --------------------------------


@triton.jit
def exponential_kernel(words_ptr, out_ptr, BLOCK: tl.constexpr):
    at = tl.arange(0, BLOCK)
    words = tl.load(words_ptr + at).to(tl.uint32, bitcast=True)
    tl.store(out_ptr + at, noise_device.exponential(words))


@pytest.mark.parametrize("target, code", [("sm_90", "ptx"), ("gfx942", "amdgcn")])
def test_nothing_is_fused_unless_asked_for(target: str, code: str) -> None:
    words, out = torch.empty(2, 1024, dtype=torch.int32, device=META)
    counts = []
    for fuses in (False, True):
        arguments = (words, out.view(torch.float32), 1024)
        case = recorded(exponential_kernel, *arguments, target=target, enable_fp_fusion=fuses)
        text = case.kernel.compile(TARGETS[target]).asm[code]
        fused = r"\bfma\.rn\.f32|\bv_(?:pk_)?(?:fma|fmac|mad|mac)\w*_f32"
        counts.append(len(re.findall(fused, text)))
    assert counts[0] == 0 and counts[1] >= 8
