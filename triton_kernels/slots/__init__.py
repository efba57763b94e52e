"""The state of running sequences on the device, and the kernels that read and update it.

`state` allocates it and applies changes. `draft_batch` and `target_batch` lay out the passes of
draft and target for a plan. `guesses` takes drafts from lookups on the host. `advance` applies the
results of a step. The reference is the bookkeeping of `cbatch.runtime.cpu.executor`: tests compare
whole steps.
"""

from __future__ import annotations

from triton_kernels.build.case import KernelCase
from triton_kernels.slots import advance, draft_batch, guesses, state, target_batch


def cases() -> list[KernelCase]:
    return [
        c for module in (state, target_batch, draft_batch, guesses, advance) for c in module.cases()
    ]
