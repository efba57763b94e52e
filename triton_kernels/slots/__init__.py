"""The state of running sequences on the device, and how a step reads and moves it.

`state` holds it and takes in what changed; `draft_batch` and `target_batch` turn what a plan asks
into the passes of draft and target, `guesses` takes drafts that the host looked up; `advance` moves
the slots on. The references of these are the slot table and the bookkeeping of
`cbatch.runtime.cpu.executor`, with which whole steps are compared.
"""

from __future__ import annotations

from triton_kernels.build.case import KernelCase
from triton_kernels.slots import advance, draft_batch, guesses, state, target_batch


def cases() -> list[KernelCase]:
    return [
        c for module in (state, target_batch, draft_batch, guesses, advance) for c in module.cases()
    ]
