"""All kernels that an executor launches are compiled before it serves, and none makes the host
wait."""

from __future__ import annotations

from collections.abc import Iterable
from functools import partial
from typing import Any

import pytest
import torch
import triton
import triton.language as tl

from cbatch.core.request.errors import FieldError
from cbatch.runtime.gpu import capture
from cbatch.runtime.gpu import target_pass as verifying
from cbatch.runtime.gpu.device import MAX_CAPTURED_TOKENS
from tests.gpu_proofs.compiled import verdicts
from tests.gpu_proofs.driver import Launches, recording
from tests.gpu_proofs.launches import late, launches_of
from tests.gpu_proofs.meta import META, Refused
from tests.gpu_proofs.sizes import MORE, USUAL, Size, is_supported
from tests.gpu_proofs.steps import KINDS, Run
from tests.triton_kernels.compile_check import TARGETS
from tests.triton_kernels.test_compile_check import product_kernel

FP8_KERNELS = {"attention_kernel", "kv_write_kernel"}
SIZE = USUAL[2]  # the quickest size that drafts
FUSED = {"enable_fp_fusion": True}


def by_name(sizes: tuple[Size, ...]) -> Any:
    return pytest.mark.parametrize("size", sizes, ids=lambda size: size.name)


def kinds_of(keys: Iterable[Any]) -> set[Any]:
    """Return kinds of steps, without the numbers of tokens and rows."""
    return {(key[0], *(part for part in key[1:] if type(part) is not int)) for key in keys}


def check(size: Size, target: str) -> None:
    launches, run = launches_of(size, target)
    assert late(launches) == []
    assert len(launches.first_launched_in("captured")) > 12
    check_kernels(size, launches)
    assert run.device.replayed.total() > 100
    # Steps used every kind of graph. A single row does not draft in two ways at once.
    never = {("guesses", False)} if size.slots == 1 else set()
    assert kinds_of(run.device.replayed) == kinds_of(run.device.captured) - never
    large = [key for key in run.device.missed if key[1] > MAX_CAPTURED_TOKENS]
    assert run.device.missed == large, "work of steps that are captured"
    assert {*run.queued.copies} == {"enters", "comes back"}
    # A step sends one message and fetches one result, plus requested log probabilities; `capture`
    # sends one more, and a step that follows a grammar one of masks.
    assert run.queued.copies["enters"] == 1 + run.steps + run.masked
    assert run.masked > 5
    assert run.queued.copies["comes back"] > run.steps > 60


def check_kernels(size: Size, launches: Launches) -> None:
    """Check that products and keys are of the kind that the size is for."""
    specialisations = [each for _, each in launches.specialisations.values()]
    names = {each.name for each in specialisations}
    products = {"dense_kernel", "described_kernel"} & names
    assert bool(products) == (size.numerics == "invariant")
    signatures = [each.signature for each in specialisations if each.name == "quantised_kernel"]
    kinds = {(types["codes_ptr"], types["offsets_ptr"]) for types in signatures}
    in_blocks = {("*u8", "*fp16"), ("*u8", "constexpr"), ("*i8", "constexpr")}
    assert kinds == (in_blocks if size.in_blocks else set())
    in_fp8 = {each.name for each in specialisations if "fp8" in str(each.signature)}
    assert in_fp8 == (FP8_KERNELS if size.kv_cache_dtype == "fp8" else set())


@by_name(USUAL)
def test_whatever_a_step_launches_is_compiled_ahead(size: Size) -> None:
    check(size, "sm_90")


def test_a_gpu_of_amd_knows_the_options_of_every_launch() -> None:
    check(SIZE, "gfx942")


# Targets of NVIDIA differ only in their tiles, of which the usual sizes launch each kind.
_EVERY = [(size, target) for size in USUAL for target in TARGETS if target != "sm_90"]
_EVERY += [(size, target) for size in MORE for target in ("sm_90", "gfx942")]


@pytest.mark.gpu_proofs
@pytest.mark.parametrize("size, target", _EVERY, ids=lambda item: getattr(item, "name", item))
def test_on_every_target(size: Size, target: str) -> None:
    if is_supported(size, target):
        check(size, target)
    else:
        with recording(TARGETS[target]) as launches, pytest.raises(FieldError, match="fp8"):
            Run(size, target, launches)


def test_what_is_compiled_late_is_caught(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(capture, "MODEL_FEATURES", capture.MODEL_FEATURES[:1])
    launches, run = launches_of(SIZE, "sm_90")
    names = {each.split(":")[0] for each in late(launches)}
    assert names >= {"residual_kernel", "finish_kernel"} and run.device.missed


def reading(real: Any, state: Any, layout: Any, *rest: Any, **more: Any) -> None:
    int(layout.num_drafted.sum())
    real(state, layout, *rest, **more)


def choosing(real: Any, state: Any, layout: Any, *rest: Any, **more: Any) -> None:
    layout.num_drafted[layout.states == 1]
    real(state, layout, *rest, **more)


def mixing(real: Any, state: Any, layout: Any, *rest: Any, **more: Any) -> None:
    layout.num_drafted + torch.ones(len(layout.num_drafted), dtype=torch.int32)
    real(state, layout, *rest, **more)


def sending(real: Any, state: Any, layout: Any, *rest: Any, **more: Any) -> None:
    torch.ones(len(layout.num_drafted), dtype=torch.int32).to(META)
    real(state, layout, *rest, **more)


@pytest.mark.parametrize("broken", [reading, choosing, mixing, sending])
def test_a_host_that_waits_is_caught(broken: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(verifying, "advance", partial(broken, verifying.advance))
    with recording(TARGETS["sm_90"]) as launches:
        run = Run(SIZE, "sm_90", launches)
        with pytest.raises(Refused):
            run.serve(*KINDS)


@triton.jit
def misspelt_kernel(out_ptr, SIZE: tl.constexpr):
    tl.store(out_ptr + tl.arange(0, SIZE), missing)  # noqa: F821


def test_what_spills_or_does_not_compile_is_caught() -> None:
    tensor = torch.zeros(256 * 64, dtype=torch.bfloat16, device=META)
    with recording(TARGETS["sm_90"]) as launches:
        product_kernel[(1,)](tensor, tensor, tensor, 64, 256, 64, num_warps=1, **FUSED)
        misspelt_kernel[(1,)](tensor, 128, **FUSED)
    specialisations = [each for _, each in launches.specialisations.values()]
    spills, does_not = verdicts("sm_90", specialisations)
    assert spills.fault.startswith("spills")
    assert "missing" in does_not.fault


def test_a_grid_that_no_device_takes_is_caught() -> None:
    tensor = torch.zeros(128, device=META)
    with recording(TARGETS["sm_90"]), pytest.raises(AssertionError, match="cannot be launched"):
        misspelt_kernel[(1, 1 << 16)](tensor, 128, **FUSED)
