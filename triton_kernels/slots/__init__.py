"""The state of running sequences on the device, and how a step reads and moves it.

`state` holds it and takes in what changed; `drafting` and `lay_out` turn what a plan asks into the
passes of draft and target; `advance` moves the slots on. The references of the three are the slot
table and the bookkeeping of `cbatch.runtime.executor`, with which whole steps are compared.
"""

from __future__ import annotations

from triton_kernels.case import Case
from triton_kernels.slots import advance as advance_module
from triton_kernels.slots import drafting, lay_out, state


def cases() -> list[Case]:
    return [
        case for module in (state, lay_out, drafting, advance_module) for case in module.cases()
    ]
