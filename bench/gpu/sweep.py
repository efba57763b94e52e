"""Which tile attention should work with: every candidate on a decode, a verification and a chunk,
and the table that follows, in the format of `triton_kernels/attention/tiles.json`.

All queries of a model use one tile, or bits would depend on the length of a query; so an entry is
the tile that is best over the three workloads together: decodes count most.
"""

from __future__ import annotations

import functools
import json
import math
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from bench.gpu.ceilings import load_ceilings
from bench.gpu.cells import Cell, Row
from bench.gpu.limits import (
    CHUNK,
    DECODE,
    HEADS,
    TINY,
    TINY_HEADS,
    VERIFY,
    GridHeads,
    attention_cost,
    workload,
)
from bench.gpu.steps import TINY as TINY_CONFIG
from bench.gpu.steps import Config, candidates, launches, make_steps
from bench.gpu.timing import figures, input_sets, time_calls
from bench.gpu.world import Bench
from triton_kernels.attention import arch_of
from triton_kernels.attention.cases import SPLIT_TOKENS

TABLE = "tiles.json"
# Of their times, in the geometric mean that is made least.
WEIGHTS = {DECODE: 0.5, VERIFY: 0.35, CHUNK: 0.15}
_PAGES = (16, 64)
_SAMPLE_S = 0.06


def cells(bench: Bench) -> Iterator[Cell]:
    """Candidates in turn over all heads and pages, so that none goes without when time is short."""
    if not bench.full:
        yield _cell(bench, "tiny", TINY_HEADS, 16, TINY_CONFIG, TINY[:1])
        return
    lists = {
        (name, page): list(candidates(shape, page))
        for page in _PAGES
        for name, shape in HEADS.items()
    }
    for at in range(max(map(len, lists.values()))):
        for (name, page), configs in lists.items():
            if at < len(configs):
                yield _cell(bench, name, HEADS[name], page, configs[at], tuple(WEIGHTS))


def _cell(
    bench: Bench,
    name: str,
    shape: GridHeads,
    page: int,
    config: Config,
    names: tuple[str, ...],
) -> Cell:
    labels = {
        "heads": name,
        **shape._asdict(),
        "page_tokens": page,
        "arch": arch_of(bench.device),
        "tile": config.tile._asdict(),
        "split_tokens": config.split_tokens,
    }
    tile = " ".join(str(int(field)) for field in config.tile)
    key = f"{name} page {page} tile {tile} split {config.split_tokens}"
    return Cell(key, labels, functools.partial(_measure, bench, shape, page, config, names))


def _measure(
    bench: Bench, shape: GridHeads, page: int, config: Config, names: tuple[str, ...]
) -> Row:
    """Median and fraction of the limit of each workload, by its name."""
    row: Row = {"median_us": {}, "fraction_of_limit": {}}
    for name in names:
        queries = workload(name)
        cost = attention_cost(queries, shape)
        count = 1 if bench.warming else input_sets(cost.num_bytes, bench.device)
        steps = make_steps(queries, shape, page, bench.device, count)
        calls = launches(bench, steps, config)
        found = figures(time_calls(bench, calls, _SAMPLE_S), cost, load_ceilings(bench.out))
        row["median_us"][name] = found["median_us"]
        row["fraction_of_limit"][name] = found["fraction_of_limit"]
        if "status" in found:
            row["status"] = found["status"]
    return row


def score(median_us: Mapping[str, float]) -> float:
    """Weighted geometric mean of the times of `WEIGHTS`; infinite if one is missing."""
    if any(median_us.get(name) is None for name in WEIGHTS):
        return math.inf
    return math.exp(sum(w * math.log(median_us[name]) for name, w in WEIGHTS.items()))


def best_tiles(rows: Mapping[str, Row]) -> list[Row]:
    """The best candidate of each (heads, page); splits other than the shipped one are not in the
    table and do not compete."""
    best: dict[tuple[str, int], Row] = {}
    for row in rows.values():
        if row.get("split_tokens") != SPLIT_TOKENS or score(row.get("median_us", {})) == math.inf:
            continue
        key = row["heads"], row["page_tokens"]
        if key not in best or score(row["median_us"]) < score(best[key]["median_us"]):
            best[key] = row
    return list(best.values())


def table_of(rows: Mapping[str, Row], shipped: Mapping[str, Any], source: str) -> dict[str, Any]:
    """`shipped` with the measured tiles in place of those for the same queries: bf16 and fp16, the
    same arch, width of heads, group and page. An entry that nothing was measured for stays."""
    tiles = list(shipped["tiles"])
    for row in best_tiles(rows):
        names = ("arch", "head_dim", "group", "page_tokens")
        key = {name: row[name] for name in names} | {"bits": 16, "kv_bits": 16}
        tiles = [t for t in tiles if any(t.get(n) != v for n, v in key.items())]
        tiles.append(key | row["tile"])
    return {"source": f"{source}; the rest: {shipped['source']}", "tiles": tiles}


def write_table(rows: Mapping[str, Row], shipped: Path, source: str, out: Path) -> Path | None:
    """The table into the folder of results; None if nothing was measured, or none is shipped."""
    if not best_tiles(rows) or not shipped.exists():
        return None
    table = table_of(rows, json.loads(shipped.read_text()), source)
    lines = ",\n".join(f"    {json.dumps(tile)}" for tile in table["tiles"])
    path = out / TABLE
    path.write_text(
        f'{{\n  "source": {json.dumps(table["source"])},\n  "tiles": [\n{lines}\n  ]\n}}\n'
    )
    return path
