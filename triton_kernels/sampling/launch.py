"""Launches of the sampling kernels, with checks of what they are given."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
import triton
from torch import Tensor

from triton_kernels.build import case as build_case
from triton_kernels.build.case import CaseLimits, KernelCase
from triton_kernels.build.check import check_fields
from triton_kernels.noise import host as noise
from triton_kernels.sampling import inputs as r
from triton_kernels.sampling.inputs import LogitsBatch
from triton_kernels.sampling.reduce import reduce_kernel
from triton_kernels.sampling.shortlist import ENDS, shortlist_kernel
from triton_kernels.sampling.tile_stats import stats_kernel

LOGITS = (torch.bfloat16, torch.float16, torch.float32)
NUM_WARPS = 8
# Left to itself the assembler spills a few registers of the long kernels for an occupancy that they
# have no use for.
ALL_REGISTERS = 255
NUM_STAGES = 2
LIMITS = {
    "sample_stats": CaseLimits(184, 16 << 10),
    "sample_measure": CaseLimits(168, 16 << 10),
    "sample_gather": CaseLimits(168, 16 << 10),
    "sample_reduce": CaseLimits(200, 8 << 10),
    "sample_walk": CaseLimits(176, 8 << 10),
    "verify_replace": CaseLimits(184, 16 << 10),
    "verify_finish": CaseLimits(32, 1 << 10),
    "verify_accept": CaseLimits(64, 1 << 10),
    "verify_ratios": CaseLimits(64, 1 << 10),
    "verify_masses": CaseLimits(184, 16 << 10),
    "verify_blocks": CaseLimits(96, 1 << 10),
}


class Tiling(NamedTuple):
    """[rows, block] logits at a time, [rows, reduce_block] in later passes. Noise does not depend
    on it; sums and comparisons across tiles do, by rounding: one tiling, one result."""

    rows: int = 1
    block: int = 4096
    reduce_block: int = 2048  # less, for more is held of each logit
    shares: int = 16  # programs that make the shortlist of a row, a power of two
    list_tokens: int = 4096  # that a shortlist holds at most


TILING = Tiling()


class Reduced(NamedTuple):
    """Of each row of logits."""

    floats: Tensor  # fp32 [N, 2]: maximum, kept mass relative to it
    ids: Tensor  # int32 [N, 4]: winner, cut (key, id), whether every logit was finite
    drafted_logits: Tensor  # fp32 [N]: shaped, of the draft that the row decides on


def sample(batch: LogitsBatch, purpose: int, tiling: Tiling = TILING) -> Tensor:
    """A token for each row, int32 [N]: the likeliest for greedy requests, else a draw from what
    temperature and filters leave, with COUPLED noise for coupled requests and that of `purpose` for
    the rest. Ties go to the lowest id. Raises ValueError naming the argument that does not fit."""
    return reduce_tiles(batch, purpose, tiling).ids[:, 0]


def reduce_tiles(
    batch: LogitsBatch, purpose: int | None, tiling: Tiling = TILING, *, of_drafts: bool = False
) -> Reduced:
    """Winners, maxima, masses and cuts; without a `purpose` requests whose drafts are weighed do
    not race, and have their cut and kept mass found instead. `of_drafts`: nothing else is asked."""
    check(batch)
    num_rows, device = len(batch.logits), batch.logits.device
    num_tiles = num_tiles_of(batch, tiling)
    floats = torch.empty((num_rows, num_tiles, 4), dtype=torch.float32, device=device)
    ids = torch.empty((num_rows, num_tiles, 2), dtype=torch.int32, device=device)
    reduced = Reduced(
        torch.empty((num_rows, 2), dtype=torch.float32, device=device),
        torch.empty((num_rows, 4), dtype=torch.int32, device=device),
        torch.full((num_rows,), -torch.inf, device=device),
    )
    if not num_rows:
        return reduced
    common = {
        **arguments(batch),
        "tile_floats_ptr": floats,
        "tile_ids_ptr": ids,
        "reduced": reduced,
        "num_rows": num_rows,
        "num_tiles": num_tiles,
        "PURPOSE": purpose,
        "OF_DRAFTS": of_drafts,
        **shape(batch, tiling),
    }
    launch(stats_kernel, (triton.cdiv(num_rows, tiling.rows), num_tiles), common)
    _reduce_rows(common, tiling)
    return reduced


def _reduce_rows(common: dict[str, Any], tiling: Tiling) -> None:
    """The rest, of what tiles left: shortlists, then rows that have one, then those without."""
    num_rows, device = common["num_rows"], common["tile_ids_ptr"].device
    blocks = triton.cdiv(num_rows, tiling.rows)
    i32, lists = torch.int32, (num_rows, tiling.list_tokens)
    measured = (num_rows, tiling.shares, 2, ENDS.value)
    common = common | {
        "short_keys_ptr": torch.empty(lists, dtype=i32, device=device),
        "short_ids_ptr": torch.empty(lists, dtype=i32, device=device),
        "short_lens_ptr": torch.zeros(num_rows, dtype=i32, device=device),
        "measured_ptr": torch.empty(measured, dtype=torch.float32, device=device),
        "STATS_BLOCK": tiling.block,
        "BLOCK": tiling.reduce_block,
        "TILES": triton.next_power_of_2(common["num_tiles"]),
        "SHARES": tiling.shares,
        "LIST": tiling.list_tokens,
    }
    for gathers in (False, True):
        launch(shortlist_kernel, (blocks, tiling.shares), common | {"GATHERS": gathers})
    for listed in (True, False):
        launch(reduce_kernel, (blocks,), common | {"LISTED": listed} | without_spills())


def launch(kernel: Any, grid: tuple[int, ...], values: dict[str, Any]) -> None:
    """With what the kernel takes of `values`."""
    names = {*kernel.arg_names, "num_warps", "num_stages", "enable_fp_fusion", "maxnreg"}
    kernel[grid](**{name: value for name, value in values.items() if name in names})


def num_tiles_of(batch: LogitsBatch, tiling: Tiling) -> int:
    """Dense tiles of the vocabulary, and sparse ones of the longest list that there may be."""
    listed = 0 if batch.shaping is None else batch.shaping.listed.shape[1]
    return num_tiles(batch.logits.shape[1], listed, tiling)


def num_tiles(vocab: int, listed: int, tiling: Tiling = TILING) -> int:
    return triton.cdiv(vocab, tiling.block) + triton.cdiv(listed, tiling.block)


def bytes_a_row(tiles: int, tiling: Tiling = TILING) -> int:
    """What is allocated for each row of logits that is drawn from or verified, at most: tiles of
    statistics, of masses and scores, the shortlist, and what is left of both."""
    of_tiles, of_list = 12 * tiles, 2 * tiling.list_tokens + 2 * tiling.shares * ENDS.value
    return 4 * (of_tiles + of_list + 32)


def arguments(batch: LogitsBatch) -> dict[str, Any]:
    """Arguments of a kernel, by name."""
    return {
        "batch": batch,
        "vocab": batch.logits.shape[1],
        "stride": batch.logits.stride(0),
        "list_width": 0 if batch.shaping is None else batch.shaping.listed.shape[1],
    }


def shape(batch: LogitsBatch, tiling: Tiling) -> dict[str, Any]:
    """How a kernel is built. Fused multiply-adds would not give the specified noise."""
    return {
        "SHAPED": batch.shaping is not None,
        "ROWS": tiling.rows,
        "BLOCK": tiling.block,
        "num_warps": NUM_WARPS,
        "num_stages": NUM_STAGES,
        "enable_fp_fusion": False,
    }


def without_spills() -> dict[str, int]:
    """An option of NVIDIA's assembler; AMD's has none."""
    return {} if torch.version.hip else {"maxnreg": ALL_REGISTERS}


def check(batch: LogitsBatch) -> None:
    """Raises ValueError naming the argument that does not fit."""
    logits, rows, requests, where, drafts, shaping = batch
    if logits.dim() != 2 or logits.dtype not in LOGITS or logits.stride(1) != 1:
        raise ValueError(
            f"logits: {logits.dtype} {list(logits.shape)} does not fit; give bf16, fp16 or fp32 "
            "[N, V], the logits of a row side by side"
        )
    (num_rows, vocab), count = logits.shape, len(requests.modes)
    i32, i64, f32 = torch.int32, torch.int64, torch.float32
    check_fields("rows", rows, {n: (i32, (num_rows,)) for n in rows._fields})
    of_requests = {n: (f32, (count,)) for n in ("temperatures", "top_p", "min_p")}
    of_requests |= {n: (i32, (count,)) for n in ("modes", "top_k")}
    check_fields("requests", requests, of_requests)
    of_noise = {"keys": (i64, (count, 2)), "choices": (i64, (count,)), "positions": (i64, (count,))}
    check_fields("noise", where, of_noise)
    of_drafts = {"tokens": (i32, (None,)), "starts": (i32, (count,)), "counts": (i32, (count,))}
    check_fields("drafts", drafts, of_drafts)
    if shaping is None:
        return
    width = shaping.listed.shape[-1]
    of_shaping = {n: (i32, (count, width)) for n in ("listed", "counts", "marks")}
    of_shaping |= {n: (i32, (count,)) for n in ("num_listed", "min_tokens")}
    of_shaping["plain"] = (i32, (count, triton.cdiv(vocab, 32)))
    of_shaping["bias"], of_shaping["penalties"] = (f32, (count, width)), (f32, (count, 3))
    check_fields("shaping", shaping, of_shaping)


def cases() -> list[KernelCase]:
    """bf16 logits, with and without shaping: tokens drawn, a step verified, its drafts' logits."""
    uses = {"draw": (noise.DRAFT, False), "verify": (None, False), "drafts": (None, True)}
    found = []
    for shaped in (True, False):
        tile = {"SHAPED": shaped, "ROWS": 1, "BLOCK": TILING.block}
        later = tile | {"STATS_BLOCK": TILING.block, "BLOCK": TILING.reduce_block, "TILES": 64}
        later |= {"SHARES": TILING.shares, "LIST": TILING.list_tokens}
        config = "shaped" if shaped else "plain"
        for name, gathers in (("sample_measure", False), ("sample_gather", True)):
            made = later | {"OF_DRAFTS": False, "GATHERS": gathers}
            found.append(case_of(name, config, shortlist_kernel, made))
        for use, (purpose, of_drafts) in uses.items():
            made = {"PURPOSE": purpose, "OF_DRAFTS": of_drafts}
            found.append(case_of("sample_stats", f"{config} {use}", stats_kernel, tile | made))
            for name, listed in (("sample_reduce", True), ("sample_walk", False)):
                constexprs = {n: v for n, v in (later | made).items() if n != "SHARES"}
                constexprs["LISTED"] = listed
                case = case_of(name, f"{config} {use}", reduce_kernel, constexprs)
                found.append(case._replace(maxnreg=ALL_REGISTERS))
    return found


def case_of(
    name: str, config: str, kernel: Any, constexprs: dict[str, Any], **types: Any
) -> KernelCase:
    """`types` of arguments that are no part of a batch."""
    shaping = _SHAPING if constexprs.get("SHAPED") else None
    types |= {n: "*fp32" for n in ("tile_floats_ptr", "tile_scores_ptr", "measured_ptr")}
    types |= {"batch": _BATCH._replace(shaping=shaping), "reduced": REDUCED}
    return build_case.case_of(
        name,
        config,
        kernel,
        constexprs,
        LIMITS[name],
        num_warps=NUM_WARPS,
        num_stages=NUM_STAGES,
        types=types,
        divisible=("vocab", "stride", "q_stride"),
        fp_fusion=False,
    )


_ROWS = r.Rows("*i32", "*i32")
_SHAPING = r.LogitsShaping(*["*i32"] * 8)._replace(bias="*fp32", penalties="*fp32")
_REQUESTS = r.Requests("*i32", "*fp32", "*i32", "*fp32", "*fp32")
_NOISE, _DRAFTS = r.Noise(*["*i64"] * 3), r.DraftTokens(*["*i32"] * 3)
_BATCH = LogitsBatch("*bf16", _ROWS, _REQUESTS, _NOISE, _DRAFTS, None)
REDUCED = Reduced("*fp32", "*i32", "*fp32")
PROPOSALS = r.Proposals("*bf16", _ROWS, "*i32")
