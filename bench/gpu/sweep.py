"""The search for attention tiles, for when tiles change: candidates for each kind of query, and the
table that follows, in the format of `triton_kernels/attention/tiles.json`.

Tiles of 16 or 32 rows are for decodes and verifications, tiles of 128 for chunks of prompts. Tiles
of 64 rows serve queries of every length under batch-invariant numerics.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from bench.gpu.cells import Bench, Cell, Row
from bench.gpu.inputs import check, launches, make_step
from bench.gpu.timing import HEADS, attention_cost, input_sets, time_calls, workload
from cbatch.runtime.gpu.attention import MIN_SPLIT_KEYS, Tuning
from triton_kernels.attention import Heads, Tile, arch_of, balanced_partials, resident_programs

_TILES = Path(__file__).parents[2] / "triton_kernels" / "attention" / "tiles.json"
# Weights of the workloads in the geometric mean that the search minimises, by rows of a tile.
WORKLOADS = {
    16: {"64q1s540": 3.0, "q1s540": 2.0, "64q1s4k": 2.0, "8q1s4k": 1.0, "128q1s540": 1.0},
    32: {"64q5s540": 3.0, "64q1s540": 2.0, "q1s540": 1.0, "64q1s4k": 1.0},
    64: {"64q1s4k": 3.0, "64q5s540": 2.0, "64q1s540": 2.0, "q2k": 1.0, "q2ks8k": 1.0},
    128: {"q2k": 2.0, "q2ks8k": 1.0},
}
_SAMPLE_S = 0.04  # sampling time of a workload
_SUBJECTS = (("llama-8b", 64), ("llama-1b", 64), ("llama-8b", 16))  # heads, tokens of a page
# Candidates by tokens of a page: rows, keys, num_warps, num_stages, programs, descriptors.
CANDIDATES = {
    64: [
        *((16, 64, 4, 3, n, d) for n, d in ((3, True), (5, True), (3, False))),
        *((16, 64, 2, 3, 3, True), (16, 32, 4, 4, 4, True), (16, 32, 2, 4, 8, True)),
        *((32, 64, 4, 3, 2, True), (32, 32, 4, 3, 4, True), (32, 32, 4, 4, 3, False)),
        *((64, 64, 4, 3, 2, True), (64, 32, 4, 3, 3, True), (64, 64, 4, 3, 2, False)),
        *((128, 64, 8, n, 1, True) for n in (3, 4)),
        *((128, 64, 4, 3, 2, True), (128, 32, 8, 4, 1, True), (128, 64, 8, 3, 1, False)),
    ],
    16: [(16, 16, 1, 6, 6, True), (16, 16, 2, 6, 4, True), (16, 64, 4, 3, 3, False)],
}


def cells(bench: Bench) -> Iterator[Cell]:
    """Yield candidates in turn over all heads and pages, so that a time limit affects all
    equally."""
    for at in range(max(map(len, CANDIDATES.values()))):
        for name, page in _SUBJECTS:
            if at < len(CANDIDATES[page]):
                heads, tile = HEADS[name], Tile(*CANDIDATES[page][at])
                labels = {"heads": name, **heads._asdict(), "page_tokens": page}
                labels |= {"arch": arch_of(bench.device), "tile": tile._asdict()}
                run = partial(measure, bench, heads, page, tile)
                yield Cell(f"{name} page {page} tile {tuple(tile)}", labels, run)


def measure(bench: Bench, heads: Heads, page: int, tile: Tile) -> Row:
    programs = resident_programs(tile, bench.device)
    split = max(MIN_SPLIT_KEYS, tile.keys)
    tuning = Tuning(tile, programs, balanced_partials(programs, heads), split, balanced=True)
    median_us = {}
    for name in WORKLOADS[tile.rows]:
        queries = workload(name)
        count = input_sets(bench, attention_cost(queries, heads).num_bytes)
        steps = [make_step(queries, heads, page, bench.device, seed) for seed in range(count)]
        calls = launches(steps, tuning)
        check(calls[0])
        median_us[name] = time_calls(calls, _SAMPLE_S)[0] * 1e6
    return {"median_us": median_us}


def best_tiles(rows: Iterable[Row]) -> list[Row]:
    """Return the candidates with the least weighted geometric mean for their heads, pages and
    rows."""

    def score(row: Row) -> float:
        weights = WORKLOADS[row["tile"]["rows"]]
        return sum(w * math.log(row["median_us"][name]) for name, w in weights.items())

    by_use: dict[Any, list[Row]] = {}
    for row in rows:
        if row["status"] == "ok":
            use = row["heads"], row["page_tokens"], row["tile"]["rows"]
            by_use.setdefault(use, []).append(row)
    return [min(candidates, key=score) for candidates in by_use.values()]


def table_of(best: Iterable[Row], tiles: Sequence[Row]) -> list[Row]:
    """Return `tiles` with the best ones, which replace bf16 and fp16 entries of the same arch, head
    size, page and rows, for every group."""
    for row in best:
        key = {name: row[name] for name in ("arch", "head_dim", "page_tokens")}
        key |= {"bits": 16, "kv_bits": 16}
        same, num_rows = [t for t in tiles if t.items() >= key.items()], row["tile"]["rows"]
        tiles = [t for t in tiles if t not in same or t["rows"] != num_rows]
        groups = sorted({tile["group"] for tile in same} | {row["group"]})
        tiles += [key | {"group": n} | row["tile"] for n in groups if n <= num_rows]
    return list(tiles)


def write_table(bench: Bench) -> None:
    shipped, about = json.loads(_TILES.read_text()), bench.about
    if best := best_tiles(bench.of("sweep").values()):
        source = f"swept on {about['device']}, {about['date']}, commit {about['commit']}"
        source = json.dumps(f"{source}; the rest: {shipped['source']}")
        tiles = table_of(best, shipped["tiles"])
        lines = ",\n".join(f"    {json.dumps(tile)}" for tile in tiles)
        text = f'{{\n  "source": {source},\n  "tiles": [\n{lines}\n  ]\n}}\n'
        (bench.out / _TILES.name).write_text(text)
