"""All kernels that an executor launches are compiled before it serves. Kernels that few requests
need are compiled late: the others are all that plain requests launch, and a request waits only for
kernels that it launches."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from functools import partial
from typing import Any

import pytest
import torch

from cbatch.core.request.request import SamplingParams
from cbatch.runtime.gpu import capture
from cbatch.runtime.gpu.capture import GROUPS, SHAPED, groups_of, groups_of_key
from cbatch.runtime.gpu.device import CudaDevice
from tests.gpu_proofs.host_time import measured
from tests.gpu_proofs.interpreted.stream import substituted
from tests.gpu_proofs.meta import KINDS, SIZES, Size, Start
from tests.triton_kernels.driver import TARGETS, recording

MAX_KERNELS = 40  # of a start, each compiled in seconds
LATE = {"shape_kernel", "count_kernel"}
PLAIN = [kind for kind, params in KINDS.items() if not groups_of(SamplingParams(**params))]
SMALL, NO_DRAFT = SIZES[0], SIZES[3]
# Targets of NVIDIA differ only in their tiles. By hand, every size on each kind.
QUICK = [(size, "sm_90") for size in (SMALL, *SIZES[3:])] + [(SMALL, "gfx942")]
REST = [(size, target) for size in SIZES for target in ("sm_90", "gfx942")]
REST = [pytest.param(*each, marks=pytest.mark.gpu_proofs) for each in REST if each not in QUICK]


def kinds_of(keys: Iterable[Any]) -> set[Any]:
    """Return kinds of steps, without the numbers of tokens and rows."""
    return {(key[0], *(part for part in key[1:] if type(part) is not int)) for key in keys}


@pytest.mark.parametrize("size, target", QUICK + REST, ids=lambda item: getattr(item, "name", item))
def test_whatever_a_step_launches_is_compiled_ahead(size: Size, target: str) -> None:
    """Every kind of request is served alone, then all together, then a few."""
    with recording(TARGETS[target]) as launches:
        start = Start(size, target, launches)
        start.capture()
        device = start.device
        for kind, params in KINDS.items():
            before = Counter(device.replayed)
            start.serve(kind, count=4 if size.slots > 1 else 2)
            met = frozenset().union(*map(groups_of_key, device.replayed - before))
            assert met == groups_of(SamplingParams(**params)), kind
        masked = start.serve(*KINDS).masked
        start.serve("greedy", count=4)  # captured steps with prompts
        measured(start, f"fixed:{size.drafts}" if size.draft else "off", windows=8)
    assert start.late() == set() and masked > 5 and device.replayed.total() > 100
    # Steps used every kind of graph. A single row does not draft in two ways at once. Decisions may
    # all be in graphs of whole steps.
    kinds = kinds_of(device.replayed)
    never = {("guesses", False)} if size.slots == 1 else set()
    never |= {("decide", kind[1]) for kind in kinds if kind[0] == "whole"}
    assert kinds | never >= kinds_of(device.captured) >= kinds
    limit = start.executor.steps.captured_tokens
    assert all(key[1] > limit for key in device.missed), "a small step was missed"
    names = [each.name for each in launches.by_key.values()]
    assert 12 < len(names) <= MAX_KERNELS
    # Steps that are shaped, filtered, drawn, of one row or of many use the same specialisation.
    for kernel in ("shape", "scan", "distributions", "decide", "residual", "finish"):
        assert names.count(f"{kernel}_kernel") <= 1


# --- late kernels ---------------------------------------------------------------------------------


class Pending:
    """Kernels that are not compiled yet."""

    pending = GROUPS

    def __init__(self, by_group: Any = None) -> None: ...


@pytest.mark.parametrize("size", [SMALL, NO_DRAFT], ids=lambda size: size.name)
def test_plain_requests_launch_the_first_part_alone(
    size: Size, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(capture, "UncompiledKernels", Pending)
    with recording(TARGETS["sm_90"]) as launches:
        start = Start(size, "sm_90", launches)
        start.capture(frozenset())
        assert {group for key in start.device.captured for group in groups_of_key(key)} == set()
        for kind in PLAIN:
            start.serve(kind, count=2)
        assert start.late() == set() and len(PLAIN) > 6
        start.serve("shaped", count=2)
        assert start.late() == LATE


def test_groups_of_parameters() -> None:
    for plain in ({}, {"top_k": 4, "seed": 1}, {"logprobs": 5, "prompt_logprobs": 2}):
        assert groups_of(SamplingParams(**plain)) == set()
    for shaped in ({"allowed_token_ids": (1,)}, {"banned_token_ids": (1,)}, {"min_tokens": 2}):
        assert groups_of(SamplingParams(**shaped)) == {SHAPED}


def test_a_step_with_late_kernels_is_captured_after_it_has_run() -> None:
    ran: list[str] = []

    def failing() -> None:
        raise RuntimeError("does not compile")

    def run_both(device: CudaDevice) -> None:
        with device.working():
            for key in ("late", "large"):
                device.run(key, partial(ran.append, key))

    with substituted() as stream:
        device = CudaDevice(torch.device("cpu"))
        device.deferred = {"late"}
        with device.working(), pytest.raises(RuntimeError, match="does not compile"):
            device.run("late", failing)
        device.capture_late()
        run_both(device)
        assert device.graphs == {} and ran == ["late", "large"], "a launch captures nothing"
        device.capture_late()
        run_both(device)
        device.capture_late()
        assert [*device.graphs] == ["late"] and ran == ["late", "large", "late", "large"]
        assert stream.seen == {"captured": 1, "replayed": 1}, "and it never waits"
