"""A kernel in one shipped configuration, for the compile check."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any, NamedTuple

TARGETS = ("sm_80", "sm_90", "sm_100", "gfx942")


class CaseLimits(NamedTuple):
    """The most resources that a configuration may use on one target."""

    registers: int  # per thread
    shared_bytes: int  # per program


class KernelCase(NamedTuple):
    """A kernel in one configuration. `limits` has the targets ("sm_80", "sm_90", "sm_100",
    "gfx942") that it is shipped for."""

    name: str
    config: str  # distinguishes it from other cases with the same name
    kernel: Any  # triton's JITFunction
    signature: Mapping[str, Any]  # argument -> "*bf16", "i32", .. or a named tuple of these
    constexprs: Mapping[str, Any]
    divisible: tuple[str, ...]  # arguments that are multiples of 16 at every launch
    num_warps: int
    num_stages: int
    limits: Mapping[str, CaseLimits]
    wgmma: bool = False  # sm_90 must use wgmma, for products of 64 rows or more
    wide_loads: bool = False  # memory must be read 128 bits at a time
    max_narrow: int = 0  # most loads that may be narrower, with `wide_loads`
    tma: bool = False  # sm_90 and later must load through descriptors
    # At least (number, rows, columns) tiles must be in flight in shared memory.
    buffers: tuple[int, int, int] | None = None
    fp_fusion: bool = True
    maxnreg: int | None = None  # from sm_90 on: the most registers per thread for the assembler


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
    """Return a case. `types` has the arguments that are neither int32 nor pointers (`_ptr`) to
    int32. Pointers, tuples of pointers and the names in `divisible` are multiples of 16."""
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
