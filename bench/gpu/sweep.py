"""The search for attention tiles: candidates for each kind of query, and the resulting table in the
format of `triton_kernels/attention/tiles.json`.

Candidates are compared with torch's SDPA, which has no pages, and with the lower limit of each
step. Tiles of 16 or 32 rows are for decodes and verifications, tiles of 128 for chunks of prompts.
Tiles of 64 rows serve queries of every length under batch-invariant numerics.
"""

from __future__ import annotations

import functools
import json
import math
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from bench.gpu import peers
from bench.gpu.ceilings import load_ceilings
from bench.gpu.cells import Cell, Row
from bench.gpu.environment import Bench
from bench.gpu.limits import HEADS, TINY_HEADS, GridHeads, attention_cost, workload
from bench.gpu.steps import TINY, StepQueries, launches, make_steps, relative_error
from bench.gpu.timing import input_sets, time_calls
from cbatch.runtime.gpu.attention import MIN_SPLIT_KEYS, Tuning
from triton_kernels.attention import Heads, Tile, arch_of, balanced_partials, resident_programs
from triton_kernels.build import ahead

TABLE = "tiles.json"
SDPA = "torch SDPA, no pages"
# Weights of the workloads in the geometric mean that the search minimises.
DECODES = {"64q1s540": 3.0, "q1s540": 2.0, "64q1s4k": 2.0, "8q1s4k": 1.0, "128q1s540": 1.0}
VERIFIES = {"64q5s540": 3.0, "64q1s540": 2.0, "q1s540": 1.0, "64q1s4k": 1.0}
CHUNKS = {"q2k": 2.0, "q2ks8k": 1.0}
ALL_QUERIES = {"64q1s4k": 3.0, "64q5s540": 2.0, "64q1s540": 2.0, "q2k": 1.0, "q2ks8k": 1.0}
_SAMPLE_S = 0.04  # sampling time of a workload
MOST_ERROR = 2e-2  # largest relative error of an attention result

# Fields of a tile: rows, keys, num_warps, num_stages, programs; then its head size (None: any).
_BY_DESCRIPTORS = (
    (16, 64, 4, 3, 3, None),
    (16, 32, 4, 4, 4, None),
    (16, 32, 2, 4, 4, 128),
    (16, 64, 4, 4, 2, 128),
    (16, 64, 2, 3, 3, 128),
    (16, 32, 1, 3, 6, 128),
    (16, 64, 4, 3, 5, 64),
    (16, 32, 2, 4, 8, 64),
    (32, 64, 4, 3, 2, None),
    (32, 32, 4, 3, 4, None),
    (32, 32, 2, 4, 3, None),
    (64, 64, 4, 3, 2, None),
    (64, 32, 4, 3, 3, None),
    (128, 64, 8, 3, 1, None),
    (128, 64, 8, 4, 1, None),
    (128, 64, 4, 3, 2, 64),
    (128, 32, 8, 4, 1, 128),
)
_BY_POINTERS = (
    (16, 64, 4, 3, 3, None),
    (16, 32, 4, 4, 4, None),
    (32, 32, 4, 4, 3, None),
    (64, 64, 4, 3, 2, None),
    (128, 64, 8, 3, 1, None),
)
_SMALL_BY_DESCRIPTORS = ((16, 16, 1, 6, 6, None), (16, 16, 2, 6, 4, None), (16, 16, 4, 6, 4, None))


def tunings(shape: GridHeads, page_tokens: int, device: torch.device) -> Iterator[Tuning]:
    """Yield candidates; the first candidate also with other lengths of KV parts."""
    described = _BY_DESCRIPTORS if page_tokens >= 64 else _SMALL_BY_DESCRIPTORS
    candidates = [(*fields, True) for fields in described]
    candidates += [(*fields, False) for fields in _BY_POINTERS[: None if page_tokens < 64 else 1]]
    for at, (*fields, head_dim, descriptors) in enumerate(candidates):
        if head_dim in (None, shape.head_dim):
            tile = Tile(*fields, descriptors)
            parts = (1, 2, 4) if at == 0 and page_tokens >= 64 else (1,)
            for part_tokens in (MIN_SPLIT_KEYS * part for part in parts):
                yield _tuning(shape, tile, part_tokens, device)


def _tuning(shape: GridHeads, tile: Tile, part_tokens: int, device: torch.device) -> Tuning:
    programs = resident_programs(tile, device) if device.type == "cuda" else 4
    partials = balanced_partials(programs, Heads(*shape))
    return Tuning(tile, programs, partials, max(part_tokens, tile.keys), balanced=True)


def workloads_of(rows: int) -> Mapping[str, float]:
    """Return the workloads, with their weights, on which tiles of `rows` rows are compared."""
    return {16: DECODES, 32: VERIFIES, 64: ALL_QUERIES, 128: CHUNKS}[rows]


def cells(bench: Bench) -> Iterator[Cell]:
    """Yield candidates in turn over all heads and pages, so that a time limit affects all
    equally."""
    if not bench.full:
        run = functools.partial(_measure, bench, TINY_HEADS, 16, TINY, {"3q1s20": 1.0})
        yield Cell("tiny", {"heads": "tiny", "page_tokens": 16, "tile": TINY.tile._asdict()}, run)
        return
    lists = []
    for name, page in (("llama-8b", 64), ("llama-1b", 64), ("llama-8b", 16)):
        shape = HEADS[name]
        labels = {"heads": name, **shape._asdict(), "page_tokens": page}
        candidates = list(tunings(shape, page, bench.device))
        lists.append((labels, shape, page, candidates))
        if page == 64:
            run = functools.partial(_measure_sdpa, bench, shape)
            yield Cell(f"{name} {SDPA}", labels | {"tile": SDPA}, run)
    compiled = functools.partial(_compile, bench, lists)
    yield Cell("compiled", {"heads": "every"}, compiled, timed=False)
    for at in range(max(len(candidates) for *_, candidates in lists)):
        for labels, shape, page, candidates in lists:
            if at < len(candidates):
                yield _cell(bench, labels, shape, page, candidates[at])


def _cell(bench: Bench, labels: Row, shape: GridHeads, page: int, tuning: Tuning) -> Cell:
    tile_labels = {
        "arch": arch_of(bench.device),
        "tile": tuning.tile._asdict(),
        "split_tokens": tuning.split_tokens,
    }
    tile = " ".join(str(int(field)) for field in tuning.tile)
    key = f"{labels['heads']} page {page} tile {tile} split {tuning.split_tokens}"
    names = workloads_of(tuning.tile.rows)
    run = functools.partial(_measure, bench, shape, page, tuning, names)
    return Cell(key, labels | tile_labels, run)


@functools.cache
def _steps(
    shape: GridHeads, page: int, name: str, device: torch.device
) -> tuple[list[StepQueries], Tensor]:
    """Return sets of inputs, and the reference result of the first."""
    queries = workload(name)
    count = input_sets(attention_cost(queries, shape).num_bytes, device)
    steps = make_steps(queries, shape, page, device, count)
    return steps, steps[0].reference()


def _compile(bench: Bench, lists: list[tuple[Row, GridHeads, int, list[Tuning]]]) -> Row:
    """Compile all kernels that the other cells launch, in many processes."""
    with ahead.listed() as kernels:
        for _, shape, page, candidates in lists:
            for tuning in candidates:
                steps, _ = _steps(shape, page, "q1s540", bench.device)
                for call in launches(bench, steps[:1], tuning):
                    call()
    ahead.compile_all(kernels)
    return {"kernels": len(kernels)}


def _measure(
    bench: Bench, shape: GridHeads, page: int, tuning: Tuning, names: Mapping[str, float]
) -> Row:
    """Return the median microseconds of each workload, by its name."""
    median_us = {}
    for name in names:
        steps, expected = _steps(shape, page, name, bench.device)
        calls = launches(bench, steps, tuning)
        if bench.full:
            out = calls[0].keywords["out"].fill_(torch.nan)
            calls[0]()
            error = relative_error(out, expected)
            if not error < MOST_ERROR:
                raise ArithmeticError(f"{name}: relative error {error:.1e}")
        median_us[name] = _median_us(bench, calls)
    return _compared(bench, shape, median_us)


def _measure_sdpa(bench: Bench, shape: GridHeads) -> Row:
    names = dict.fromkeys((*DECODES, *VERIFIES, *CHUNKS))
    inputs = {name: _steps(shape, 64, name, bench.device)[0] for name in names}
    median_us = {
        name: _median_us(bench, peers.sdpa(bench, steps)) for name, steps in inputs.items()
    }
    _SDPA_US[shape] = median_us
    return _compared(bench, shape, median_us)


_SDPA_US: dict[GridHeads, dict[str, float | None]] = {}


def _median_us(bench: Bench, calls: list[Any]) -> float | None:
    timing = time_calls(bench, calls, _SAMPLE_S)
    return None if timing is None else round(timing.median_s * 1e6, 2)


def _compared(bench: Bench, shape: GridHeads, median_us: Mapping[str, float | None]) -> Row:
    """Return the medians with their ratios to the limit and to SDPA."""
    row: Row = {"median_us": dict(median_us), "over_limit": {}, "over_sdpa": {}}
    ceilings, sdpa = load_ceilings(bench.out), _SDPA_US.get(shape, {})
    for name, us in median_us.items():
        if us is None:
            row["status"] = "unmeasured"
        elif ceilings is not None:
            limit_s = attention_cost(workload(name), shape).limit_s(ceilings)
            row["over_limit"][name] = round(us * 1e-6 / limit_s, 2)
        if us is not None and sdpa.get(name) is not None:
            row["over_sdpa"][name] = round(us / sdpa[name], 2)
    return row


def score(median_us: Mapping[str, float | None], weights: Mapping[str, float]) -> float:
    """Return the weighted geometric mean of the times; infinity if one of `weights` is missing."""
    times = {name: median_us.get(name) or math.inf for name in weights}
    total = sum(weights.values()) or 1.0
    return math.exp(sum(w * math.log(times[name]) for name, w in weights.items()) / total)


def best_tiles(rows: Mapping[str, Row]) -> dict[tuple[str, int, int], Row]:
    """Return the best candidate by (heads, page, tile rows) with KV parts of the usual length. A
    tile is dropped if it decodes slower than a taller one, or reads prompts slower than a shorter
    one."""
    best: dict[tuple[str, int, int], Row] = {}
    for row in rows.values():
        if row.get("split_tokens") != MIN_SPLIT_KEYS or "median_us" not in row:
            continue
        key = row["heads"], row["page_tokens"], row["tile"]["rows"]
        weights = workloads_of(key[2])
        mean = score(row["median_us"], weights)
        if mean < math.inf and (key not in best or mean < score(best[key]["median_us"], weights)):
            best[key] = row

    def is_slower(row: Row, other: Row) -> bool:
        kind = DECODES if row["tile"]["rows"] < other["tile"]["rows"] else CHUNKS
        both = {n: kind[n] for n in kind if n in row["median_us"] and n in other["median_us"]}
        return score(row["median_us"], both) > score(other["median_us"], both)

    return {
        key: row
        for key, row in best.items()
        if not any(is_slower(row, other) for k, other in best.items() if k[:2] == key[:2])
    }


def table_of(rows: Mapping[str, Row], shipped: Mapping[str, Any], source: str) -> dict[str, Any]:
    """Return the shipped table with the best tiles. They replace its bf16 and fp16 entries of the
    same arch, head size, page and rows, for every group. Entries without a measurement stay."""

    def key_of(entry: Mapping[str, Any]) -> dict[str, Any]:
        names = ("arch", "head_dim", "page_tokens")
        return {name: entry[name] for name in names} | {"bits": 16, "kv_bits": 16}

    timed = [r for r in rows.values() if "arch" in r and any(r.get("median_us", {}).values())]
    measured = [key_of(row) | {"rows": row["tile"]["rows"]} for row in timed]
    tiles = [t for t in shipped["tiles"] if {n: t[n] for n in measured[0]} not in measured]
    for row in best_tiles(rows).values():
        key = key_of(row)
        same = [t for t in shipped["tiles"] if {n: t[n] for n in key} == key]
        for group in sorted({t["group"] for t in same} | {row["group"]}):
            if group <= row["tile"]["rows"]:
                tiles.append(key | {"group": group} | row["tile"])
    return {"source": f"{source}; the rest: {shipped['source']}", "tiles": tiles}


def write_table(rows: Mapping[str, Row], shipped: Path, source: str, out: Path) -> Path | None:
    """Write the table into the results folder; None if nothing was measured or no table is
    shipped."""
    if not best_tiles(rows) or not shipped.exists():
        return None
    table = table_of(rows, json.loads(shipped.read_text()), source)
    lines = ",\n".join(f"    {json.dumps(tile)}" for tile in table["tiles"])
    path = out / TABLE
    path.write_text(
        f'{{\n  "source": {json.dumps(table["source"])},\n  "tiles": [\n{lines}\n  ]\n}}\n'
    )
    return path
