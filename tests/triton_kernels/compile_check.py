"""Compile every kernel that executors launch, and attention with every tile of its table, for every
target, without a GPU, and inspect the code.

    python -m tests.triton_kernels.compile_check [--target sm_90] [--kernel attention]

It reports these faults:

- register spills, and more registers or shared memory than a kernel may use;
- code larger than an instruction cache;
- products without wgmma;
- narrow loads, and loads without the descriptors that they should use;
- fewer tiles in flight than a pipeline has stages;
- loop bounds that Triton before 3.9 gets wrong.

It prints a table. Seconds are those of one core, 0 for code in Triton's cache.
"""

from __future__ import annotations

import argparse
import re
import resource
import struct
import subprocess
import sys
import tempfile
from collections import Counter
from collections.abc import Iterable
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NamedTuple, cast

import torch
import triton
from triton import knobs
from triton.backends.compiler import GPUTarget

from cbatch.runtime.layers import RecurrenceWeights
from cbatch.runtime.model.config import ModelConfig
from cbatch.runtime.model.records import Recurrence
from cbatch.runtime.state_memory import StateMemory
from tests.gpu_proofs.meta import SIZES, Size, Start
from tests.triton_kernels.driver import META, TARGETS, Recorded, recording
from triton_kernels.attention import Heads, Partials, Tile, WorkList, attention
from triton_kernels.attention.table import INVARIANT_ROWS, SPLIT_TOKENS, TileKey, entries
from triton_kernels.products.dense import MANY_ROWS, dense, tile_of
from triton_kernels.recurrence import Sequences, recur
from triton_kernels.sampling.inputs import DraftTokens, LogitsBatch, Noise, Requests, Rows
from triton_kernels.sampling.launch import COLLECTING, draw

MAX_CODE_BYTES = 128 << 10  # of one kernel: an H100's instruction cache
# The most registers of a thread with which enough programs share a multiprocessor.
_REGISTERS = {"norm": 64, "activation": 48, "scan": 112, "residual": 104, "finish": 32, "mask": 64}
_REGISTERS |= {"described": 216, "dense": 216, "shape": 128, "distributions": 128, "decide": 184}
_SHARED_KIB = {"sm_80": 164, "sm_90": 228, "sm_100": 228, "gfx942": 64}  # of a multiprocessor
_AMD_REGISTERS = 512  # registers per lane that the waves of a SIMD share
_WIDE = {"attention", "norm", "activation"}  # kernels whose loads are 128 bits wide
_PRODUCTS = {"dense", "described", "quantised", "grouped"}
_MAX_NARROW = 24  # loads of partial maxima and sums, over all pipeline stages
_WITHOUT_FP8, _LARGE_TILES = {"sm_80"}, {"sm_90", "sm_100"}
_TOOLS = Path(triton.__file__).parent / "backends" / "nvidia" / "bin"


class Case(NamedTuple):
    """A kernel for a target. `programs` share a multiprocessor."""

    kernel: Recorded
    target: str
    programs: int = 1

    @property
    def name(self) -> str:
        return self.kernel.name.removesuffix("_kernel")

    @property
    def constants(self) -> dict[str, Any]:
        names = self.kernel.kernel.arg_names
        return {names[at]: value for (at, *_), value in self.kernel.constexprs.items()}

    @property
    def config(self) -> str:
        sizes = [f"{n.lower()} {v}" for n, v in self.constants.items() if n.isupper() and v]
        return " ".join(sizes)[:60]


def recorded_cases(target: str, sizes: Iterable[Size] = SIZES) -> list[Case]:
    """Return the kernels of executors of these sizes."""
    with recording(TARGETS[target]) as launches:
        for size in sizes:
            if size.kv_cache_dtype == "auto" or target not in _WITHOUT_FP8:
                Start(size, target, launches).capture()
    return [Case(each, target) for each in launches.by_key.values()]


def table_cases(target: str) -> list[Case]:
    """Return attention with every tile of the table."""
    return [attention_case(*entry) for entry in entries().items() if entry[0].arch == target]


def attention_case(key: TileKey, tile: Tile, window: int | None = 4096) -> Case:
    """Return attention with a tile of the table, a window and a soft cap."""
    dtype = {16: torch.bfloat16, 32: torch.float32}[key.bits]
    fp8 = torch.float8_e4m3fnuz if key.arch == "gfx942" else torch.float8_e4m3fn
    heads, kv = Heads(8, key.group, key.head_dim), dtype if key.kv_bits == key.bits else fp8
    fused = torch.empty(16, 8, key.group + 2, key.head_dim, dtype=dtype, device=META)
    pool = torch.empty(32, key.page_tokens, 8, 2, key.head_dim, dtype=kv, device=META)
    ints = torch.empty(16, 16, dtype=torch.int32, device=META)
    out = torch.empty(16, 8 * key.group * key.head_dim, dtype=dtype, device=META)
    with recording(TARGETS[key.arch]) as launches:
        work = WorkList.allocate(
            Partials.allocate(16, heads, tile, META),
            heads,
            tile,
            max_tokens=16,
            max_sequences=16,
            split_tokens=SPLIT_TOKENS,
            balanced=None if key.rows == INVARIANT_ROWS or key.bits == 32 else 16,
            window=window,
        )
        pages, q = (pool[:, :, :, 0], pool[:, :, :, 1]), fused[:, :, : key.group]
        attention(q, *pages, ints, out, work, scale=0.1, soft_cap=50.0, num_programs=16, early=True)
    (kernel,) = launches.by_key.values()
    return Case(kernel, key.arch, tile.programs)


def recurrence_cases(target: str) -> list[Case]:
    """Return the kernels of recurrent layers, as wide as LFM2's, Qwen3.5's and Granite 4 H's."""
    many: dict[str, Any] = {"kernel": 4, "norm_eps": 1e-6, "value_dim": 128}
    mixers = (
        Recurrence(rule="convolution", heads=1, value_dim=2048, kernel=3),
        Recurrence(rule="delta", heads=32, key_heads=16, key_dim=128, **many),
        Recurrence(rule="scan", heads=48, key_heads=1, key_dim=128, **many | {"value_dim": 64}),
    )
    with recording(TARGETS[target]) as launches:
        for m in mixers:
            config = SimpleNamespace(layers=[SimpleNamespace(mixer=m)])
            (memory,) = StateMemory(cast("ModelConfig", config), 64, 4, 16, 4, META).layers
            floats = torch.empty(m.inner, device=META)
            of_heads = {"decay": floats, "step_bias": floats, "skip": floats, "norm": floats}
            conv = torch.empty(m.kernel, m.channels, device=META)
            weights = RecurrenceWeights(conv, **of_heads if m.key_dim else {})
            ints = (torch.empty(n, dtype=torch.int32, device=META) for n in (17, 16, 16))
            starts, contexts, slots = ints
            pages = torch.empty(16, 65, dtype=torch.int32, device=META)
            rows = torch.empty(40, m.row_width, dtype=torch.bfloat16, device=META)
            recur(rows, m, weights, memory, Sequences(starts, contexts, pages, slots), 64)
    return [Case(each, target) for each in launches.by_key.values()]


def waiting_cases(target: str) -> list[Case]:
    """Return the kernels that executors launch only once a device has measured them: filters by
    lists made by tiles (on sm_80 they spill), and products whose sums have parts."""

    def empty(*shape: int, dtype: torch.dtype = torch.int32) -> torch.Tensor:
        return torch.empty(shape, dtype=dtype, device=META)

    ints, floats = empty(64), empty(64, dtype=torch.float32)
    requests, longs = Requests(ints, floats, ints, floats, floats), empty(64, dtype=torch.int64)
    noise, drafts = Noise(empty(64, 2, dtype=longs.dtype), longs, longs), DraftTokens(*[ints] * 3)
    logits, weight = (empty(*n, dtype=torch.bfloat16) for n in ((64, 128_256), (4096, 14336)))
    with recording(TARGETS[target]) as launches:
        if target != "sm_80":
            draw(
                LogitsBatch(logits, Rows(ints, ints), requests, noise, drafts, None), 0, COLLECTING
            )
        for rows in (16, MANY_ROWS) if target in _LARGE_TILES else ():
            kind = weight.dtype, *weight.shape
            tile = tile_of(*kind, described=True, num_rows=rows, has_parts=True)
            dense(weight.new_empty(rows, 14336), weight, None, weight.new_empty(rows, 4096), tile)
    return [Case(each, target) for each in launches.by_key.values()]


class Findings(NamedTuple):
    """Properties of the machine code of one case."""

    case: Case
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
        case, constants, problems = self.case, self.case.constants, []
        name, stages = case.name, case.kernel.options["num_stages"]
        amd = case.target == "gfx942"
        max_registers = _AMD_REGISTERS // case.programs if amd else _REGISTERS.get(name, 255)
        shared = (_SHARED_KIB[case.target] << 10) // case.programs - 1024 * (not amd)
        described = name == "described" or constants.get("DESCRIPTORS")
        halves = "16" in str(case.kernel.signature)  # bf16 or fp16, not fp32
        products = (
            name in ("dense", "described", "quantised", "grouped") or constants.get("ROWS", 0) >= 64
        )
        if self.spill_bytes:
            problems.append(f"spills {self.spill_bytes} bytes")
        if self.registers > max_registers:
            problems.append(f"{self.registers} registers, {max_registers} allowed")
        if self.shared_bytes > shared:
            problems.append(f"{self.shared_bytes} bytes shared, {shared} allowed")
        if self.code_bytes > MAX_CODE_BYTES:
            problems.append(f"{self.code_bytes} bytes of code")
        if case.target == "sm_90" and products and halves and not self.wgmmas:
            problems.append("no wgmma")
        if described and not self.descriptor_loads:
            problems.append("no loads through descriptors")
        if name == "attention" and self.buffers < stages - 1:
            problems.append(f"{self.buffers} tiles in flight, {stages - 1} expected")
        if self.lost_bounds:
            problems.append(f"{self.lost_bounds} carried values that only bound loops")
        narrow = self.narrow_loads > _MAX_NARROW * (name == "attention") or not self.wide_loads
        if name in _WIDE and narrow:
            problems.append(f"{self.narrow_loads} loads narrower than 128 bits")
        return problems


def check(case: Case) -> Findings:
    """Compile `case` and read its code."""
    if knobs.runtime.interpret:
        raise RuntimeError("TRITON_INTERPRET: unset it; interpreted kernels cannot be compiled")
    gpu, constants, began = TARGETS[case.target], case.constants, _processor_seconds()
    compiled = case.kernel.compile(gpu)
    seconds = _processor_seconds() - began
    read = _read_nvidia if gpu.backend == "cuda" else _read_amd
    return Findings(
        case=case,
        shared_bytes=compiled.metadata.shared,
        buffers=_buffers(compiled.asm["ttgir"], constants.get("KEYS"), constants.get("BLOCK_DIM")),
        lost_bounds=lost_bounds(compiled.asm["ttir"]),
        code_bytes=code_bytes(compiled),
        seconds=seconds,
        **read(compiled, gpu),
    )


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


def _buffers(code: str, rows: int | None, columns: int | None) -> int:
    """Return how many tiles of the given shape exist at once."""
    counts = re.findall(rf"memdesc<(\d+)x{rows}x{columns}x", code)
    return max((int(count) for count in counts), default=0)


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
        f"{case.name:<16} {case.config:<60} {case.target:<7} {findings.registers:>5} "
        f"{findings.spill_bytes:>6} {findings.shared_bytes:>7} {findings.code_bytes >> 10:>5} "
        f"{findings.seconds:>5.1f}  {verdict}"
    )


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.triton_kernels.compile_check")
    parser.add_argument("--target", choices=TARGETS, action="append", help="default: all")
    parser.add_argument("--kernel", action="append", help="default: all")
    options = parser.parse_args(arguments)
    head = f"{'kernel':<16} {'configuration':<60} {'target':<7}  regs spills  shared   KiB     s"
    print(f"{head}  verdict")
    every = []
    for target in options.target or list(TARGETS):
        for case in (
            *recorded_cases(target),
            *recurrence_cases(target),
            *waiting_cases(target),
            *table_cases(target),
        ):
            if options.kernel is None or case.name in options.kernel:
                every.append(check(case))
                print(_row(every[-1]), flush=True)
    return 1 if any(findings.faults() for findings in every) else 0


if __name__ == "__main__":
    sys.exit(main())
