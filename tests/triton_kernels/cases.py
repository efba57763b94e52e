"""Every kernel in its shipped configurations, for the compile check."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Iterator, Mapping
from functools import partial
from typing import Any, NamedTuple

import torch
import triton

from triton_kernels.attention import Tile
from triton_kernels.attention.kernel import attention_kernel
from triton_kernels.attention.table import INVARIANT_ROWS, SPLIT_TOKENS, TileKey, entries
from triton_kernels.attention.work_items import plan_kernel
from triton_kernels.layers import activation, kv_write, norm
from triton_kernels.products import dense, quantised
from triton_kernels.sampling import inputs, launch, mask
from triton_kernels.slots import advance, draft_batch, guesses, state, target_batch
from triton_kernels.verification import kernel as verification
from triton_kernels.verification.residual import residual_kernel

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
    max_narrow: int = 0  # loads that may be narrower, with `wide_loads`
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


# --- attention ------------------------------------------------------------------------------------

_STATISTICS = 24  # narrow loads: partial maxima and sums, over all pipeline stages
_MEMORY_KIB = {"sm_80": 164, "sm_90": 228, "sm_100": 228, "gfx942": 64}  # shared, per SM
_AMD_REGISTERS = 512  # registers per lane that the waves of a SIMD share
_TYPES = {16: "bf16", 32: "fp32", 8: "fp8e4nv"}
_POINTERS = ("q", "tables", "out", "items", "num_items", "sums", "stats", "arrived")
_STRIDES = ("q_token", "q_head", "page", "slot", "kv_head", "table", "out_token")


def attention_cases() -> Iterator[KernelCase]:
    """Yield each tile's case; for small groups and fp32 also one with a window and a soft cap; one
    case in fp16; and the planning kernel."""
    for key, tile in entries().items():
        yield attention_case(key, tile)
        if key.group <= 4 or key.bits == 32:
            yield attention_case(key, tile, window=4096, soft_cap=50.0)
    yield attention_case(*next(iter(entries().items())), dtype="fp16")
    constexprs = {"BALANCED": True, "BLOCK_SEQUENCES": 256, "LANES": 128}
    limits = CaseLimits(registers=128, shared_bytes=4096)
    yield case_of("attention_plan", "256 sequences", plan_kernel, constexprs, limits, num_warps=4)


def attention_case(
    key: TileKey,
    tile: Tile,
    *,
    dtype: str | None = None,
    window: int | None = None,
    soft_cap: float | None = None,
) -> KernelCase:
    """Return a case with the limits at which `tile.programs` programs fit on a multiprocessor. On
    NVIDIA the hardware reserves one KiB of shared memory for each program."""
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
    shared_bytes = (_MEMORY_KIB[key.arch] << 10) // tile.programs
    limits = CaseLimits(tile.max_registers, shared_bytes - 1024)
    if key.arch == "gfx942":
        limits = CaseLimits(_AMD_REGISTERS // tile.programs, shared_bytes)
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
        limits={key.arch: limits},
        wgmma=tile.rows >= 64,
        wide_loads=True,
        max_narrow=_STATISTICS,
        tma=tile.descriptors,
        buffers=(tile.num_stages - 1, tile.keys, block_dim),
        maxnreg=tile.max_registers,
    )


# --- layers ---------------------------------------------------------------------------------------


def activation_cases() -> Iterator[KernelCase]:
    yield case_of(
        "silu_mul",
        f"block={activation.BLOCK}",
        activation.silu_mul_kernel,
        {"BLOCK": activation.BLOCK, "EARLY": False},
        CaseLimits(48, 1 << 10),
        num_warps=activation.NUM_WARPS,
        types={"gate_up_ptr": "*bf16", "out_ptr": "*bf16"},
        divisible=("width", "stride"),
        wide_loads=True,
    )


def kv_write_cases() -> Iterator[KernelCase]:
    """Yield cases for Llama-3.1-8B and Qwen3-8B (norms), and for a pool in fp8."""
    for kv, has_norm in ((None, False), (None, True), ("fp8e4nv", True)):
        types = {f"{name}_ptr": f"*{kv or 'bf16'}" for name in ("k", "v")}
        types |= {"fused_ptr": "*bf16", "cos_sin_ptr": "*fp32"}
        types |= dict.fromkeys(("eps", "k_scale", "v_scale"), "fp32")
        types |= {"weight_ptr": "*fp32"} if has_norm else {}
        constexprs: dict[str, object] = {} if has_norm else {"weight_ptr": None}
        constexprs |= {"GROUP": 4, "ROLES": 8, "HEAD_DIM": 128, "BLOCK_DIM": 128, "PAGE": 16}
        yield case_of(
            "kv_write",
            f"bf16{f'/{kv}' if kv else ''} d128 g4{' norm' if has_norm else ''}",
            kv_write.kv_write_kernel,
            constexprs | {"MOST": 448.0 if kv else None, "EARLY": False},
            CaseLimits(registers=128, shared_bytes=16 << 10),
            num_warps=2,
            types=types,
            divisible=("stride_token", "stride_page", "stride_slot", "stride_kv_head"),
            targets=("sm_90", "sm_100") if kv else TARGETS,
        )


def norm_cases() -> Iterator[KernelCase]:
    """Yield cases for the widths of supported models; the residual has the same type."""
    pointers = ("x_ptr", "residual_ptr", "weight_ptr", "out_ptr")
    for width, adds in itertools.product((1024, 4096, 8192), (False, True)):
        yield case_of(
            "rms_norm",
            f"n={width}{' add' if adds else ''}",
            norm.norm_kernel,
            {"ADDS": adds, "BLOCK": width, "EARLY": False},
            CaseLimits(56, 1 << 10),
            num_warps=norm.num_warps(width),
            types=dict.fromkeys(pointers, "*bf16") | {"eps": "fp32"},
            divisible=("width", "x_stride", "residual_stride"),
            wide_loads=True,
        )


# --- products -------------------------------------------------------------------------------------

_PRODUCT = ("num_outs", "num_columns", "stride_x", "stride_out")


def dense_cases() -> Iterator[KernelCase]:
    """Yield 16-bit cases with and without bias, for all tiles; fp32 does not use tensor cores."""
    tiles: dict[tuple[Any, ...], None] = {}  # with the targets and the bias, each once
    for num_outs, biased in itertools.product((4096, 8192, 32768), (False, True)):
        for targets, stages in ((TARGETS[:3], dense.STAGES), (TARGETS[3:], dense.AMD_STAGES)):
            tile = dense.tile_of(torch.bfloat16, num_outs, described=False, num_rows=1)
            tiles[tile._replace(num_stages=stages), biased, targets] = None
        for num_rows in (1, dense.MANY_ROWS):
            tile = dense.tile_of(torch.bfloat16, num_outs, described=True, num_rows=num_rows)
            tiles[tile, biased, ("sm_90", "sm_100")] = None
    for tile, biased, targets in tiles:
        sizes: dict[str, Any] = {"ROWS": tile.rows, "OUTS": tile.outs, "COLUMNS": tile.columns}
        sizes |= {"BAND": dense.BAND, "FLATTEN": tile.flatten} if tile.programs else {"EVEN": True}
        types = {f"{name}_ptr": "*bf16" for name in ("x", "weight", "bias", "out")}
        types |= {"x": f"tensordesc<bf16[{tile.rows},{tile.columns}]>"}
        types |= {"weight": f"tensordesc<bf16[{tile.outs},{tile.columns}]>"}
        name = f"bf16 {tile.rows}x{tile.outs}{' bias' if biased else ''}"
        yield case_of(
            "dense",
            f"{name}{' tma' * (tile.programs > 0)}",
            dense.described_kernel if tile.programs else dense.dense_kernel,
            sizes | ({} if biased else {"bias_ptr": None}),
            CaseLimits(registers=216, shared_bytes=(227 << 10) // max(tile.programs, 1) - 1024),
            num_warps=tile.num_warps,
            num_stages=tile.num_stages,
            types=types,
            divisible=_PRODUCT,
            targets=targets,
            wgmma=True,
            wide_loads=not biased,  # a bias is a vector
            tma=tile.programs > 0,
        )


def quantised_cases() -> Iterator[KernelCase]:
    q = quantised
    for config, codes, offsets in (
        ("4 bits", "u8", True),
        ("4 bits", "u8", False),
        ("8", "i8", False),
    ):
        constants = {
            "FOUR_BIT": codes == "u8",
            "ROWS": q.ROWS,
            "OUTS": q.OUTS,
            "COLUMNS": q.COLUMNS,
        }
        constants |= {"bias_ptr": None} | ({} if offsets else {"offsets_ptr": None})
        types = {"x_ptr": "*bf16", "out_ptr": "*bf16", "codes_ptr": f"*{codes}"}
        types |= {"scales_ptr": "*fp16", "offsets_ptr": "*fp16"}
        for targets, stages in ((TARGETS[:3], 3), (TARGETS[3:], 2)):
            yield case_of(
                "quantised",
                f"{config}{' offsets' if offsets else ''}",
                q.quantised_kernel,
                constants,
                CaseLimits(registers=255, shared_bytes=64 << 10),
                num_warps=q.NUM_WARPS,
                num_stages=stages,
                types=types,
                divisible=_PRODUCT,
                targets=targets,
                wgmma=True,
                fp_fusion=False,
            )


# --- sampling, verification and slots -------------------------------------------------------------

_DISTRIBUTIONS = inputs.Distributions("*fp32", "*i64", "*i32")
_BATCH = inputs.LogitsBatch(
    "*bf16",
    inputs.Rows("*i32", "*i32"),
    inputs.Requests("*i32", "*fp32", "*i32", "*fp32", "*fp32"),
    inputs.Noise(*["*i64"] * 3),
    inputs.DraftTokens(*["*i32"] * 3),
    None,
)
_SHAPING = inputs.LogitsShaping(*["*i32"] * 8)._replace(bias="*fp32", penalties="*fp32")
_DECISION = verification.VerifyOutput(*["*i32"] * 3)
_SAMPLING_TYPES: dict[str, Any] = {
    "batch": _BATCH,
    "shaping": _SHAPING,
    "overlay": launch.Overlay("*i32", "*fp32"),
    "scanned": launch.Scanned("*fp32", "*i64", "*fp32", "*fp32"),
    "scratch": launch.Scratch("*i32", "*i64"),
    "dists": _DISTRIBUTIONS,
    "q_dists": _DISTRIBUTIONS,
    "decision": _DECISION,
    "keys_ptr": "*i64",
    "q_logits_ptr": "*bf16",
    **dict.fromkeys(("chances_ptr", "ratios_ptr", "masses_ptr", "q_listed_ptr"), "*fp32"),
}


def sampling_cases() -> Iterator[KernelCase]:
    """Yield the cases for bf16 logits."""
    tiling = launch.TILING
    tile = {"PIECES": tiling.pieces, "PIECE": tiling.piece}
    row = tile | {"TILES": 64, "ALL_PIECES": 64 * tiling.pieces}
    row |= {"CHUNK": tiling.chunk, "LIST": tiling.list_tokens}
    for name, config, kernel, constexprs, build, limits in (
        ("sample_shape", "listed tokens", launch.shape_kernel, tile, tiling.shape, (128, 32 << 10)),
        ("sample_scan", "tiles", launch.scan_kernel, tile, tiling.scan, (112, 4 << 10)),
        (
            "sample_distributions", "rows", launch.distributions_kernel, row, tiling.distributions,
            (128, 24 << 10),
        ),
        (
            "verify_decide", "requests", verification.decide_kernel,
            {"TILES": 64, "ROWS": verification.ROWS}, verification.DECIDE, (184, 4 << 10),
        ),
        ("verify_residual", "tiles", residual_kernel, tile, tiling.residual, (104, 4 << 10)),
        (
            "verify_finish", "requests", verification.finish_kernel, {"TILES": 64},
            verification.ONE_WARP, (32, 1 << 10),
        ),
    ):  # fmt: skip
        yield case_of(
            name,
            config,
            kernel,
            constexprs,
            CaseLimits(*limits),
            num_warps=build.num_warps,
            types=_SAMPLING_TYPES,
            divisible=("vocab", "stride", "q_stride", "list_width", "logits_step", "q_step"),
            fp_fusion=False,
            maxnreg=build.registers,
        )
    yield case_of(
        "sample_mask",
        f"block={mask.BLOCK}",
        mask.mask_kernel,
        {"BLOCK": mask.BLOCK},
        CaseLimits(registers=64, shared_bytes=1 << 10),
        num_warps=mask.NUM_WARPS,
        types={"logits_ptr": "*bf16"},
        divisible=("vocab", "stride"),
    )


def slots_cases() -> Iterator[KernelCase]:
    floats = dict.fromkeys(("temperatures", "top_p", "min_p", "bias", "penalties"), "*fp32")
    fields = {name: "*i32" for name in state.SlotState._fields} | floats
    states = state.SlotState(**fields | {"keys": "*i64", "choices": "*i64"})
    drafts = {name: "*i32" for name in draft_batch.DraftLayout._fields}
    draft = draft_batch.DraftLayout(**drafts | {"noise_positions": "*i64"})
    *_, last = target_batch.TargetLayout._fields
    fields = {name: "*i32" for name in target_batch.TargetLayout._fields} | {last: "*i64"}
    target = target_batch.TargetLayout(**fields)
    case = partial(case_of, limits=CaseLimits(registers=128, shared_bytes=4 << 10))
    of_draft, of_target = {"state": states, "layout": draft}, {"state": states, "layout": target}
    block = {"BLOCK": state.BLOCK}
    yield case("slots_apply", "words", state.apply_kernel, block, num_warps=state.NUM_WARPS)
    for slots in (16, 64, 1024):
        sizes = {"PAGE": 16, "LANES": target_batch.LANES, "BLOCK_SLOTS": slots}
        batch = partial(
            case, config=f"{slots} slots", constexprs=sizes, num_warps=target_batch.NUM_WARPS
        )
        yield batch("slots_target_batch", kernel=target_batch.target_batch_kernel, types=of_target)
        yield batch("slots_draft_batch", kernel=draft_batch.draft_batch_kernel, types=of_draft)
    yield case(
        "slots_take",
        f"{draft_batch.ROWS} rows",
        draft_batch.take_drafts_kernel,
        {"PAGE": 16, "ROWS": draft_batch.ROWS},
        num_warps=draft_batch.TAKE_WARPS,
        types=of_draft,
    )
    for config, alone in (("alone", True), ("with a model", False)):
        sizes = {"ALONE": alone, "SLOTS": guesses.SLOTS_A_TIME}
        guess = partial(case, "slots_guesses", config, guesses.guess_kernel, sizes, types=of_draft)
        yield guess(num_warps=guesses.NUM_WARPS)
    for config, decision in (("decided", _DECISION), ("no logits", None)):
        constants: dict[str, Any] = {"DECIDED": bool(decision), "SLOTS": advance.SLOTS_A_TIME}
        constants |= {} if decision else {"decision": None}
        types = of_target | {"decision": decision}
        moved = partial(case, "slots_advance", config, advance.advance_kernel, constants)
        yield moved(types=types, num_warps=advance.NUM_WARPS)
    yield case(
        "slots_count",
        f"{advance.LANES} entries",
        advance.count_kernel,
        {"LANES": advance.LANES},
        types={"shaping": _SHAPING},
        num_warps=advance.NUM_WARPS,
    )


FAMILIES = {
    "activation": activation_cases,
    "attention": attention_cases,
    "dense": dense_cases,
    "kv_write": kv_write_cases,
    "norm": norm_cases,
    "quantised": quantised_cases,
    "sampling": sampling_cases,  # and verification
    "slots": slots_cases,
}
