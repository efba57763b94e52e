"""Compile every shipped kernel configuration for every target, without a GPU, and inspect the code.

    python -m tests.triton_kernels.compile_check [--target sm_90] [--kernel attention]

It reports these faults:

- register spills, and more registers or shared memory than a case allows;
- code larger than an instruction cache;
- products without wgmma;
- narrow loads, and loads without the descriptors that they should use;
- fewer tiles in flight than a pipeline has stages;
- loop bounds that Triton before 3.9 gets wrong.

It prints a table, then one JSON line. Seconds are those of one core, 0 for code in Triton's cache.
"""

from __future__ import annotations

import argparse
import inspect
import json
import re
import resource
import struct
import subprocess
import sys
import tempfile
from collections import Counter
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import triton
from triton import knobs
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from tests.triton_kernels.cases import FAMILIES, KernelCase

TARGETS = {
    "sm_80": GPUTarget("cuda", 80, 32),
    "sm_90": GPUTarget("cuda", 90, 32),
    "sm_100": GPUTarget("cuda", 100, 32),
    "gfx942": GPUTarget("hip", "gfx942", 64),
}
MAX_CODE_BYTES = 128 << 10  # of one kernel: an H100's instruction cache
_TOOLS = Path(triton.__file__).parent / "backends" / "nvidia" / "bin"


class Findings(NamedTuple):
    """Properties of the machine code of one case."""

    case: KernelCase
    target: str
    registers: int
    spill_bytes: int
    shared_bytes: int
    wgmmas: int
    descriptor_loads: int
    wide_loads: int
    narrow_loads: int
    buffers: int
    lost_bounds: int
    code_bytes: int
    seconds: float

    def faults(self) -> list[str]:
        case, limits = self.case, self.case.limits[self.target]
        problems = []
        if self.spill_bytes:
            problems.append(f"spills {self.spill_bytes} bytes")
        if self.registers > limits.registers:
            problems.append(f"{self.registers} registers, {limits.registers} allowed")
        if self.shared_bytes > limits.shared_bytes:
            problems.append(f"{self.shared_bytes} bytes shared, {limits.shared_bytes} allowed")
        if self.code_bytes > MAX_CODE_BYTES:
            problems.append(f"{self.code_bytes} bytes of code")
        if case.wgmma and self.target == "sm_90" and not self.wgmmas:
            problems.append("no wgmma")
        if case.tma and not self.descriptor_loads:
            problems.append("no loads through descriptors")
        if case.buffers is not None and self.buffers < case.buffers[0]:
            problems.append(f"{self.buffers} tiles in flight, {case.buffers[0]} expected")
        if self.lost_bounds:
            problems.append(f"{self.lost_bounds} carried values that only bound loops")
        if case.wide_loads and (self.narrow_loads > case.max_narrow or not self.wide_loads):
            problems.append(f"{self.narrow_loads} loads narrower than 128 bits")
        return problems


def all_cases(families: Iterable[str] = FAMILIES) -> list[KernelCase]:
    return [case for family in families for case in FAMILIES[family]()]


def check(case: KernelCase, target: str) -> Findings:
    """Compile `case` for `target` and read its code."""
    if knobs.runtime.interpret:
        raise RuntimeError("TRITON_INTERPRET: unset it; interpreted kernels cannot be compiled")
    options = {
        "num_warps": case.num_warps,
        "num_stages": case.num_stages,
        "enable_fp_fusion": case.fp_fusion,
    }
    gpu = TARGETS[target]
    if gpu.backend == "cuda" and gpu.arch >= 90 and case.maxnreg is not None:
        options["maxnreg"] = case.maxnreg
    began = _processor_seconds()
    compiled = triton.compile(_source(case), target=gpu, options=options)
    seconds = _processor_seconds() - began
    buffers = _buffers(compiled.asm["ttgir"], case.buffers)
    figures = figures_of(compiled, gpu) | {"buffers": buffers, "seconds": seconds}
    figures["lost_bounds"] = lost_bounds(compiled.asm["ttir"])
    return Findings(case, target, code_bytes=code_bytes(compiled), **figures)


def lost_bounds(code: str) -> int:
    """Count values in Triton's intermediate code that a loop carries and that are used only as
    bounds of inner loops. Triton before 3.9 takes them for the values before the loop."""
    lines = [re.sub(r" loc\(.*", "", line) for line in code.splitlines()]
    carried = [
        re.findall(r"(%[\w.#]+) = ", args) for args in re.findall(r"iter_args\((.*?)\)", code)
    ]
    bounds = [re.search(r"scf\.for \S+ = (\S+) to (\S+) step (\S+)", line) for line in lines]
    uses = Counter(name for line in lines for name in re.findall(r"%[\w.#]+", line))
    as_bound = Counter(name for match in bounds if match for name in match.groups())
    return sum(0 < as_bound[name] == uses[name] - 1 for names in carried for name in names)


def _processor_seconds() -> float:
    """Return processor seconds of this process and of its finished children, such as the
    assembler."""
    used = map(resource.getrusage, (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN))
    return sum(each.ru_utime + each.ru_stime for each in used)


def code_bytes(compiled: Any) -> int:
    """Return the size of the machine code of a compiled kernel: the executable sections of an ELF
    file."""
    file = compiled.asm["cubin"] if "cubin" in compiled.asm else compiled.asm["hsaco"]
    table, (size, count) = (
        struct.unpack_from("<Q", file, 40)[0],
        struct.unpack_from("<2H", file, 58),
    )
    sections = (struct.unpack_from("<2I4Q", file, table + i * size) for i in range(count))
    return sum(length for _, _, flags, _, _, length in sections if flags & 4)


def figures_of(compiled: Any, gpu: GPUTarget) -> dict[str, int]:
    """Return properties of the machine code of a compiled kernel, by fields of `Findings`."""
    read = _read_nvidia if gpu.backend == "cuda" else _read_amd
    return {"shared_bytes": compiled.metadata.shared, **read(compiled, gpu)}


def resources_of(compiled: Any, gpu: GPUTarget) -> dict[str, int]:
    """Return the fields of `figures_of` about device resources, without inspecting the code."""
    read = _nvidia_resources if gpu.backend == "cuda" else _read_amd
    figures = {"shared_bytes": compiled.metadata.shared, **read(compiled, gpu)}
    return {name: figures[name] for name in ("registers", "spill_bytes", "shared_bytes")}


def _buffers(code: str, shape: tuple[int, int, int] | None) -> int:
    """Return how many tiles of the given shape exist at once; 0 for no shape."""
    if shape is None:
        return 0
    _, rows, columns = shape
    counts = re.findall(rf"memdesc<(\d+)x{rows}x{columns}x", code)
    return max((int(count) for count in counts), default=0)


def _source(case: KernelCase) -> ASTSource:
    names = list(inspect.signature(case.kernel.fn).parameters)
    constexprs = {(names.index(n),): value for n, value in case.constexprs.items()}
    signature, divisible = {}, {}
    for at, name in enumerate(names):
        signature[name] = _known(case.signature.get(name))
        for path, kind in _leaves(signature[name], (at,)):
            if kind == "constexpr":
                constexprs.setdefault(path, None)
            elif name in case.divisible:
                divisible[path] = [["tt.divisibility", 16]]
    return ASTSource(case.kernel, signature, constexprs=constexprs, attrs=divisible)


def _known(kind: Any) -> Any:
    """Return Triton's type of an argument, or of each in a tuple; None is a constant."""
    if isinstance(kind, tuple):
        return type(kind)(*map(_known, kind))
    return "constexpr" if kind is None else kind


def _leaves(kind: Any, path: tuple[int, ...]) -> Iterator[tuple[tuple[int, ...], str]]:
    if isinstance(kind, tuple):
        for at, element in enumerate(kind):
            yield from _leaves(element, (*path, at))
    else:
        yield path, kind


def _read_nvidia(compiled: Any, gpu: GPUTarget) -> dict[str, int]:
    with tempfile.TemporaryDirectory() as folder:
        cubin = Path(folder) / "kernel.cubin"
        cubin.write_bytes(compiled.asm["cubin"])
        code = _run(_TOOLS / "nvdisasm", "-c", cubin)
    loads = Counter(_load_bits(m[0]) for m in re.finditer(r"\bLDG(STS)?\.E[.\w]*", code))
    descriptor_loads = len(re.findall(r"\bUTMALDG\b", code))
    return {
        **_nvidia_resources(compiled, gpu),
        "wgmmas": len(re.findall(r"\b[HQI]GMMA\b", code)),
        "descriptor_loads": descriptor_loads,
        "wide_loads": loads[128] + descriptor_loads,
        # Loads of 32 bits through registers are indices; data come in pairs of 16 bits at worst.
        "narrow_loads": loads[8] + loads[16] + loads[64] + loads["async 32"] + loads["async 64"],
    }


def _nvidia_resources(compiled: Any, gpu: GPUTarget) -> dict[str, int]:
    with tempfile.TemporaryDirectory() as folder:
        cubin = Path(folder) / "kernel.cubin"
        cubin.write_bytes(compiled.asm["cubin"])
        usage = _run(_TOOLS / "cuobjdump", "--dump-resource-usage", cubin)
        match = re.search(r"REG:(\d+) STACK:(\d+) .*LOCAL:(\d+)", usage)
        if match is None:
            raise RuntimeError(f"cuobjdump: no resource usage in {usage!r}")
        registers, *local = map(int, match.groups())
        # Spilled values are in local memory.
        spilled = _ptxas_spills(compiled, gpu, Path(folder)) if any(local) else 0
    return {"registers": registers, "spill_bytes": spilled}


def _load_bits(opcode: str) -> int | str:
    """Return the width of an LDG (through registers) or an LDGSTS (asynchronous, to shared
    memory)."""
    if ".128" in opcode:
        return 128
    bits = 64 if ".64" in opcode else 32
    if opcode.startswith("LDGSTS"):
        return f"async {bits}"
    narrow = re.search(r"\.[US](8|16)\b", opcode)
    return int(narrow[1]) if narrow else bits


def _ptxas_spills(compiled: Any, gpu: GPUTarget, folder: Path) -> int:
    """Return bytes of spill stores and loads, as reported by the assembler that triton uses."""
    from triton.backends.nvidia.compiler import get_ptxas, sm_arch_from_capability

    ptx = folder / "kernel.ptx"
    ptx.write_text(compiled.asm["ptx"])
    name = sm_arch_from_capability(gpu.arch)
    log = _run(get_ptxas(gpu.arch).path, "-v", f"--gpu-name={name}", ptx, "-o", folder / "again")
    spills = re.search(r"(\d+) bytes spill stores, (\d+) bytes spill loads", log)
    if spills is None:
        raise RuntimeError(f"ptxas: no spill figures in {log!r}")
    return int(spills[1]) + int(spills[2])


def _read_amd(compiled: Any, gpu: GPUTarget) -> dict[str, int]:
    code = compiled.asm["amdgcn"]

    def figure(name: str) -> int:
        match = re.search(rf"\.{name}:\s+(\d+)", code)
        if match is None:
            raise RuntimeError(f"amdgcn: no {name} for {gpu.arch}")
        return int(match[1])

    def loads(kind: str) -> int:
        return len(re.findall(rf"\b(?:global|buffer)_load_(?:{kind})\b", code))

    return {
        "registers": figure("vgpr_count"),
        "spill_bytes": figure("private_segment_fixed_size"),  # scalar spills go to vector lanes
        "wgmmas": 0,
        "descriptor_loads": 0,
        "wide_loads": loads("dwordx4"),
        "narrow_loads": loads("[us]byte|[us]short|ubyte_d16\\w*|short_d16\\w*"),
    }


def _run(*command: str | Path) -> str:
    done = subprocess.run([str(c) for c in command], capture_output=True, text=True, check=True)
    return done.stdout + done.stderr


def _row(findings: Findings) -> str:
    case, verdict = findings.case, "; ".join(findings.faults()) or "ok"
    return (
        f"{case.name:<16} {case.config:<30} {findings.target:<7} {findings.registers:>5} "
        f"{findings.spill_bytes:>6} {findings.shared_bytes:>7} {findings.code_bytes >> 10:>5} "
        f"{findings.seconds:>5.1f}  {verdict}"
    )


def _entry(findings: Findings) -> dict[str, object]:
    figures = ("target", "registers", "spill_bytes", "shared_bytes", "code_bytes", "seconds")
    named = {"name": findings.case.name, "config": findings.case.config}
    return named | {name: getattr(findings, name) for name in figures}


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.triton_kernels.compile_check")
    parser.add_argument("--target", choices=TARGETS, action="append", help="default: all")
    parser.add_argument("--kernel", choices=FAMILIES, action="append", help="default: all")
    options = parser.parse_args(arguments)
    targets = options.target or list(TARGETS)
    head = f"{'kernel':<16} {'configuration':<30} {'target':<7}  regs spills  shared   KiB     s"
    print(f"{head}  verdict")
    every = []
    for case in all_cases(options.kernel or FAMILIES):
        for target in targets:
            if target in case.limits:
                every.append(check(case, target))
                print(_row(every[-1]), flush=True)
    print(json.dumps({"kernels": [_entry(findings) for findings in every]}))
    return 1 if any(findings.faults() for findings in every) else 0


if __name__ == "__main__":
    sys.exit(main())
