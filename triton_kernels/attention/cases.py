"""Compile-check cases of the attention kernel: every tile, with its resource limits."""

from __future__ import annotations

from typing import Any

import triton

from triton_kernels.attention.kernel import attention_kernel
from triton_kernels.attention.table import TileKey, entries
from triton_kernels.attention.work_items import Tile, plan_kernel
from triton_kernels.build.case import CaseLimits, KernelCase, case_of

SPLIT_TOKENS = 1024
INVARIANT_ROWS = 64  # rows of the tile that batch-invariant attention uses for all query lengths
_STATISTICS = 24  # most narrow loads: partial maxima and sums, over all pipeline stages
_MEMORY_KIB = {"sm_80": 164, "sm_90": 228, "sm_100": 228, "gfx942": 64}  # shared, per SM
_AMD_REGISTERS = 512  # registers per lane that the waves of a SIMD share
_TYPES = {16: "bf16", 32: "fp32", 8: "fp8e4nv"}
_POINTERS = ("q", "tables", "out", "items", "num_items", "sums", "stats", "arrived")
_STRIDES = ("q_token", "q_head", "page", "slot", "kv_head", "table", "out_token")


def cases() -> list[KernelCase]:
    """Return each tile's case; for small groups and fp32 also one with a window and a soft cap; one
    case in fp16; and the planning kernel."""
    tile_cases = []
    for key, tile in entries().items():
        tile_cases.append(_case(key, tile))
        if key.group <= 4 or key.bits == 32:
            tile_cases.append(_case(key, tile, window=4096, soft_cap=50.0))
    first = next(iter(entries().items()))
    return [*tile_cases, _case(*first, dtype="fp16"), _plan_case()]


def _case(
    key: TileKey,
    tile: Tile,
    *,
    dtype: str | None = None,
    window: int | None = None,
    soft_cap: float | None = None,
) -> KernelCase:
    dtype = dtype or _TYPES[key.bits]
    kv = dtype if key.kv_bits == key.bits else _TYPES[key.kv_bits]
    if kv == "fp8e4nv" and key.arch == "gfx942":
        kv = "fp8e4b8"
    block_dim = triton.next_power_of_2(key.head_dim)
    pool = f"tensordesc<{kv}[1,1,{tile.keys},{block_dim}]>" if tile.descriptors else f"*{kv}"
    signature = {f"{name}_ptr": "*i32" for name in _POINTERS}
    signature |= {"q_ptr": f"*{dtype}", "out_ptr": f"*{dtype}", "k_pages": pool, "v_pages": pool}
    signature |= {"sums_ptr": "*fp32", "stats_ptr": "*fp32"}
    signature |= {"scale": "fp32", "v_scale": "fp32"}
    signature |= {f"stride_{name}": "i32" for name in _STRIDES}
    constexprs: dict[str, Any] = {
        "KV_HEADS": 8,
        "GROUP": key.group,
        "HEAD_DIM": key.head_dim,
        "BLOCK_DIM": block_dim,
        "PAGE": key.page_tokens,
        "ROWS": tile.rows,
        "KEYS": tile.keys,
        "SPLIT": SPLIT_TOKENS,
        "FOLDS": key.rows == INVARIANT_ROWS or key.bits == 32,
        "FIRST": 0,
        "WINDOW": window,
        "SOFT_CAP": soft_cap,
        "DESCRIPTORS": tile.descriptors,
        "EARLY": key.arch in ("sm_90", "sm_100"),
    }
    extras = f"{' window cap' if window else ''}{' tma' if tile.descriptors else ''}"
    return KernelCase(
        name="attention",
        config=f"{dtype}{f'/{kv}' if kv != dtype else ''} {tile.rows}x{tile.keys} "
        f"d{key.head_dim} g{key.group} page {key.page_tokens}{extras}",
        kernel=attention_kernel,
        signature=signature,
        constexprs=constexprs,
        divisible=tuple(n for n in signature if n.startswith("stride_") or signature[n][0] == "*"),
        num_warps=tile.num_warps,
        num_stages=tile.num_stages,
        limits={key.arch: _limits(key.arch, tile)},
        wgmma=tile.rows >= 64,
        wide_loads=True,
        max_narrow=_STATISTICS,
        tma=tile.descriptors,
        buffers=(tile.num_stages - 1, tile.keys, block_dim),
        maxnreg=tile.max_registers,
    )


def _limits(arch: str, tile: Tile) -> CaseLimits:
    """Return the limits at which `tile.programs` programs fit on a multiprocessor. On NVIDIA the
    hardware reserves one KiB of shared memory for each program."""
    shared_bytes = (_MEMORY_KIB[arch] << 10) // tile.programs
    if arch == "gfx942":
        return CaseLimits(_AMD_REGISTERS // tile.programs, shared_bytes)
    return CaseLimits(tile.max_registers, shared_bytes - 1024)


def _plan_case() -> KernelCase:
    constexprs = {"BALANCED": True, "BLOCK_SEQUENCES": 256, "LANES": 128}
    limits = CaseLimits(registers=128, shared_bytes=4096)
    return case_of("attention_plan", "256 sequences", plan_kernel, constexprs, limits, num_warps=4)
