"""A kernel in one shipped configuration, as the compile check builds it."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any, NamedTuple

TARGETS = ("sm_80", "sm_90", "sm_100", "gfx942")


class CaseLimits(NamedTuple):
    """The most that a configuration may take on one target."""

    registers: int  # a thread
    shared_bytes: int  # a program


class KernelCase(NamedTuple):
    """`limits` names the targets ("sm_80", "sm_90", "sm_100", "gfx942") that it is shipped for."""

    name: str
    config: str  # what distinguishes it from other cases of the name
    kernel: Any  # triton's JITFunction
    signature: Mapping[str, Any]  # argument -> "*bf16", "i32", .. or a named tuple of these
    constexprs: Mapping[str, Any]
    divisible: tuple[str, ...]  # arguments that are multiples of 16 at every launch
    num_warps: int
    num_stages: int
    limits: Mapping[str, CaseLimits]
    wgmma: bool = False  # sm_90 must multiply with it: products of 64 rows and more
    wide_loads: bool = False  # memory must be read 128 bits at a time
    most_narrow: int = 0  # but for so many loads
    tma: bool = False  # sm_90 and later must load through descriptors
    # So many tiles at least, of so many rows and columns, must be in flight in shared memory.
    buffers: tuple[int, int, int] | None = None
    fp_fusion: bool = True
    maxnreg: int | None = None  # from sm_90 on: registers a thread that the assembler may use


def case_of(
    name: str,
    config: str,
    kernel: Any,
    constexprs: Mapping[str, Any],
    limits: CaseLimits,
    *,
    num_warps: int,
    types: Mapping[str, Any] | None = None,
    divisible: Iterable[str] = (),
    num_stages: int = 1,
    targets: Iterable[str] = TARGETS,
    **more: Any,
) -> KernelCase:
    """`types` are those of arguments that are neither int32 nor pointers (`_ptr`) to it. Pointers
    and tuples of them are `divisible`, and what is named."""
    given = [n for n in kernel.arg_names if n not in constexprs]
    signature = {n: "*i32" if n.endswith("_ptr") else "i32" for n in given}
    signature |= {n: kind for n, kind in (types or {}).items() if n in given}
    pointers = [n for n in given if n.endswith("_ptr") or isinstance(signature[n], tuple)]
    return KernelCase(
        name=name,
        config=config,
        kernel=kernel,
        signature=signature,
        constexprs=constexprs,
        divisible=(*pointers, *divisible),
        num_warps=num_warps,
        num_stages=num_stages,
        limits=dict.fromkeys(targets, limits),
        **more,
    )
