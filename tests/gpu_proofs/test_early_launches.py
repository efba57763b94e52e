"""A kernel with an early launch reads complete data before `gdc_wait` (see `build/hopper.py`):
between its writer and the kernel there is a normal launch, which waited for the writer. Products do
not count, because a library may launch them early, too."""

from __future__ import annotations

from typing import Any

import pytest
from torch.utils._python_dispatch import TorchDispatchMode

from tests.gpu_proofs.meta import SIZES, Size, Start
from tests.triton_kernels.driver import EARLY, TARGETS, recording

# Kernels that write what others read early: slots of tokens, positions, work lists, block tables.
WRITERS = {
    "apply_kernel",
    "draft_batch_kernel",
    "guess_kernel",
    "plan_kernel",
    "take_drafts_kernel",
    "target_batch_kernel",
}
NORMAL = {"aten.embedding.default", "aten.index_select.default", "aten.zero_.default"}


class TorchLaunches(TorchDispatchMode):
    """Adds the operations of torch to `order`."""

    def __init__(self, order: list[str]) -> None:
        super().__init__()
        self._order = order

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self._order.append(str(func))
        return func(*args, **kwargs or {})


def incomplete(order: list[str]) -> set[tuple[str, str]]:
    """Return early kernels and the writers that may still run when they begin."""
    early, writers = set(), set()
    for name in order:
        if name in WRITERS:
            writers.add(name)
        elif name in NORMAL:
            writers.clear()
        elif name.startswith(EARLY):
            early |= {(name, writer) for writer in writers}
    return early


@pytest.mark.parametrize("size", [SIZES[0], SIZES[3]], ids=lambda size: size.name)
def test_what_is_read_early_is_complete(size: Size) -> None:
    with recording(TARGETS["sm_90"]) as launches:
        start = Start(size, "sm_90", launches)
        with TorchLaunches(launches.order):
            start.capture()
    met = set(launches.order)
    assert incomplete(launches.order) == set()
    assert met >= NORMAL and len(met & WRITERS) > 2 and sum(n.startswith(EARLY) for n in met) > 2
    without = [name for name in launches.order if name not in NORMAL]
    assert incomplete(without), "the rule finds nothing"
