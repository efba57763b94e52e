"""A kernel in one shipped configuration, as the compile check builds it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple


class Limits(NamedTuple):
    """The most that a configuration may take on one target."""

    registers: int  # a thread
    shared_bytes: int  # a program


class Case(NamedTuple):
    """`limits` names the targets ("sm_80", "sm_90", "sm_100", "gfx942") that it is shipped for."""

    name: str
    config: str  # what distinguishes it from other cases of the name
    kernel: Any  # triton's JITFunction
    signature: Mapping[str, str]  # argument -> "*bf16", "i32", ..
    constexprs: Mapping[str, Any]
    divisible: tuple[str, ...]  # arguments that are multiples of 16 at every launch
    num_warps: int
    num_stages: int
    limits: Mapping[str, Limits]
    wgmma: bool = False  # sm_90 must multiply with it: products of 64 rows and more
    wide_loads: bool = False  # memory must be read 128 bits at a time
    tma: bool = False  # sm_90 and later must load through descriptors
    # So many tiles at least, of so many rows and columns, must be in flight in shared memory.
    buffers: tuple[int, int, int] | None = None
    fp_fusion: bool = True
    maxnreg: int | None = None  # NVIDIA: registers a thread that the assembler may use
