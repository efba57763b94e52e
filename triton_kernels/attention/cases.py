"""The configurations in which attention is shipped, and what each may take on a target."""

from __future__ import annotations

from typing import Any

import triton

from triton_kernels.attention.kernel import attention_kernel
from triton_kernels.attention.planner import Heads, Tile, plan_kernel
from triton_kernels.case import Case, Limits

SPLIT_TOKENS = 1024
_LLAMA_8B = Heads(kv_heads=8, group=4, head_dim=128)
_LLAMA_1B = Heads(kv_heads=8, group=4, head_dim=64)
_QWEN2_7B = Heads(kv_heads=4, group=7, head_dim=128)
_FEW_ROWS = Tile(rows=16, keys=64, num_warps=4, num_stages=3)
_FEW_KEYS = Tile(rows=16, keys=32, num_warps=4, num_stages=3)
_WGMMA = Tile(rows=64, keys=64, num_warps=4, num_stages=3)
_CHUNKS = Tile(rows=128, keys=64, num_warps=8, num_stages=3)
_FLOAT32 = Tile(rows=16, keys=16, num_warps=4, num_stages=2)
# Three programs share a multiprocessor with 16 rows, two with 64; two waves an AMD SIMD.
_REGISTERS = {_FEW_ROWS: 168, _FEW_KEYS: 168, _WGMMA: 255, _CHUNKS: 255, _FLOAT32: 96}
_AMD = Limits(registers=256, shared_bytes=64 << 10)

_POINTERS = ("q", "k", "v", "tables", "out", "items", "num_items", "sums", "stats", "arrived")
_STRIDES = ("q_token", "q_head", "page", "slot", "kv_head", "table", "out_token")


def cases() -> list[Case]:
    """`shared_kib` holds two buffers of K and V each, and the queries where wgmma reads them."""
    every = ("sm_80", "sm_90", "sm_100", "gfx942")
    new = ("sm_90", "sm_100")
    more = {"window": 4096, "soft_cap": 50.0}
    return [
        _case(_LLAMA_8B, _FEW_ROWS, every, 70),
        _case(_LLAMA_8B, _FEW_ROWS, every, 70, page=64, **more),
        _case(_LLAMA_8B, _FEW_ROWS, every, 70, dtype="fp16", page=128),
        _case(_LLAMA_8B, _FEW_ROWS, ("gfx942",), 34, kv="fp8e4b8"),
        _case(_LLAMA_1B, _FEW_ROWS, every, 36),
        _case(_QWEN2_7B, _FEW_ROWS, every[1:], 70),
        _case(_QWEN2_7B, _FEW_KEYS, every[:1], 37),
        _case(_LLAMA_8B, _FLOAT32, every, 26, dtype="fp32"),
        _case(_LLAMA_8B, _WGMMA, new, 113),
        _case(_LLAMA_8B, _WGMMA, new, 113, page=64, **more),
        _case(_LLAMA_8B, _WGMMA, new, 81, kv="fp8e4nv"),
        _case(_LLAMA_1B, _WGMMA, new, 57),
        _case(_QWEN2_7B, _WGMMA, new, 113),
        _case(_LLAMA_8B, _CHUNKS, new, 129, page=64),
        _plan_case(every),
    ]


def _case(
    heads: Heads,
    tile: Tile,
    targets: tuple[str, ...],
    shared_kib: int,
    *,
    dtype: str = "bf16",
    kv: str | None = None,
    page: int = 16,
    window: int | None = None,
    soft_cap: float | None = None,
) -> Case:
    signature = {f"{name}_ptr": "*i32" for name in _POINTERS}
    signature |= {"q_ptr": f"*{dtype}", "out_ptr": f"*{dtype}"}
    signature |= {"k_ptr": f"*{kv or dtype}", "v_ptr": f"*{kv or dtype}"}
    signature |= {"sums_ptr": "*fp32", "stats_ptr": "*fp32"}
    signature |= {"scale": "fp32", "v_scale": "fp32", "item_capacity": "i32"}
    signature |= {f"stride_{name}": "i32" for name in _STRIDES}
    constexprs: dict[str, Any] = {
        "KV_HEADS": heads.kv_heads,
        "GROUP": heads.group,
        "HEAD_DIM": heads.head_dim,
        "BLOCK_DIM": triton.next_power_of_2(heads.head_dim),
        "PAGE": page,
        "ROWS": tile.rows,
        "KEYS": tile.keys,
        "SPLIT": SPLIT_TOKENS,
        "WINDOW": window,
        "SOFT_CAP": soft_cap,
    }
    nvidia = Limits(_REGISTERS[tile], shared_kib << 10)
    extras = f"{' window' if window else ''}{' cap' if soft_cap else ''}"
    return Case(
        name="attention",
        config=f"{dtype}{f'/{kv}' if kv else ''} {tile.rows}x{tile.keys} "
        f"d{heads.head_dim} g{heads.group} page {page}{extras}",
        kernel=attention_kernel,
        signature=signature,
        constexprs=constexprs,
        divisible=tuple(n for n in signature if n.endswith("_ptr") or n.startswith("stride_")),
        num_warps=tile.num_warps,
        num_stages=tile.num_stages,
        limits={t: _AMD if t == "gfx942" else nvidia for t in targets},
        wgmma=tile.rows >= 64,
        wide_loads=True,
    )


def _plan_case(targets: tuple[str, ...]) -> Case:
    limits = Limits(registers=128, shared_bytes=4096)
    return Case(
        name="attention_plan",
        config="256 sequences",
        kernel=plan_kernel,
        signature={
            "query_starts_ptr": "*i32",
            "context_lens_ptr": "*i32",
            "items_ptr": "*i32",
            "num_items_ptr": "*i32",
            "capacity": "i32",
            "most_partials": "i32",
            "num_sequences": "i32",
        },
        constexprs={
            "BLOCK_SEQUENCES": 256,
            "BLOCK_TOKENS": 4,
            "SPLIT": SPLIT_TOKENS,
            "WINDOW": None,
            "MOST_BLOCKS": 8,
            "LANES": 128,
        },
        divisible=("query_starts_ptr", "context_lens_ptr", "items_ptr", "num_items_ptr"),
        num_warps=4,
        num_stages=1,
        limits=dict.fromkeys(targets, limits),
    )
