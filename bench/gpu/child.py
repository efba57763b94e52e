"""The process of a part of a run: it measures the cells of one section."""

from __future__ import annotations

import functools
import logging
from collections.abc import Callable, Iterable
from pathlib import Path

from bench.gpu import ceilings, engine, kernels, models, sweep, vllm_engine
from bench.gpu.cells import Cell, Journal, run_cells
from bench.gpu.environment import Bench, describe, device_of, find_mode
from bench.gpu.limits import SMALLER
from bench.gpu.turns import DeviceTurns

CELLS: dict[str, Callable[[Bench], Iterable[Cell]]] = {
    "ceilings": ceilings.cells,
    "engine": engine.cells,
    "vllm": vllm_engine.cells,
    "kernels": kernels.cells,
    "models": models.cells,
    "engine-1b": functools.partial(engine.cells, model=SMALLER),
    "sweep": sweep.cells,
}


def run_child(section: str, out: Path, peers: Path | None) -> int:
    logging.basicConfig(level=logging.INFO, format="%(relativeCreated)d ms %(name)s %(message)s")
    mode, journal = find_mode(), Journal(out / f"{section}.jsonl")
    journal.write(about=describe(mode))
    if section == "correctness":
        from bench.gpu import correctness

        return correctness.run(out)
    bench = Bench(mode, device_of(mode), out, peers)
    run_cells(CELLS[section](bench), journal, DeviceTurns(out))
    return 0
