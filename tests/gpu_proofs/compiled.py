"""Compile recorded specialisations, each once, and list those that no device could run."""

from __future__ import annotations

import multiprocessing
import os
from collections.abc import Iterable
from typing import NamedTuple

import torch
import triton
from triton.compiler import ASTSource

from tests.gpu_proofs.driver import Specialisation
from tests.triton_kernels.compile_check import TARGETS, resources_of

_REGISTERS = {"cuda": 1 << 16, "hip": 1 << 17}  # of an NVIDIA multiprocessor; of four AMD SIMDs
_PROGRAM_BYTES = {"sm_80": 163 << 10, "sm_90": 227 << 10, "sm_100": 227 << 10, "gfx942": 64 << 10}
_RESERVED_BYTES = 1 << 10  # reserved by NVIDIA in each program's share of a multiprocessor


class Code(NamedTuple):
    kernel: str
    registers: int
    spill_bytes: int
    shared_bytes: int
    num_threads: int


class Verdict(NamedTuple):
    """Resources of one specialisation, or the reason why it does not compile."""

    key: str
    code: Code | None
    fault: str


def verdicts(target: str, specialisations: Iterable[Specialisation]) -> list[Verdict]:
    """Compile specialisations in two processes; return a verdict for each."""
    global _work
    # Those with the most arguments take longest: they come first, so that no process is left
    # waiting.
    _work = (target, sorted(specialisations, key=lambda one: -len(str(one.signature))))
    torch.set_num_threads(1)  # no thread runs while this process forks
    with multiprocessing.get_context("fork").Pool(min(2, os.cpu_count() or 1)) as pool:
        return pool.map(_verdict, range(len(_work[1])), chunksize=1)


_work: tuple[str, list[Specialisation]] = ("", [])


def _verdict(at: int) -> Verdict:
    target, specialisations = _work
    one = specialisations[at]
    try:
        code = _compile(target, one)
    except Exception as error:
        return Verdict(one.key, None, f"{type(error).__name__}: {error}")
    return Verdict(one.key, code, "; ".join(_faults(target, code, one.options.get("maxnreg"))))


def _compile(target: str, one: Specialisation) -> Code:
    gpu = TARGETS[target]
    source = ASTSource(one.kernel, one.signature, one.constexprs, one.attributes)
    compiled = triton.compile(source, target=gpu, options=one.options)
    threads = gpu.warp_size * compiled.metadata.num_warps
    return Code(one.name, num_threads=threads, **resources_of(compiled, gpu))


def _faults(target: str, code: Code, max_registers: int | None) -> list[str]:
    """Return faults. `max_registers` a thread tells how many programs are to share a
    multiprocessor."""
    faults = []
    there = _REGISTERS[TARGETS[target].backend]
    if code.spill_bytes:
        faults.append(f"spills {code.spill_bytes} bytes")
    if code.registers * code.num_threads > there:
        faults.append(f"{code.num_threads} threads of {code.registers} registers")
    programs = max(there // (code.num_threads * max_registers), 1) if max_registers else 1
    shared = (_PROGRAM_BYTES[target] + _RESERVED_BYTES) // programs - _RESERVED_BYTES
    if code.shared_bytes > shared:
        faults.append(f"{code.shared_bytes} bytes shared, a share is {shared}")
    return faults
