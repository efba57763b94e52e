"""The process of a section: it measures the section's cells."""

from __future__ import annotations

import functools
import logging
from collections.abc import Callable, Iterable
from pathlib import Path

from bench.gpu import ceilings, correctness, engine, kernels, models, sweep, vllm_engine
from bench.gpu.cells import Cell, run_cells
from bench.gpu.environment import Bench, describe
from bench.gpu.limits import SMALLER

CELLS: dict[str, Callable[[Bench], Iterable[Cell]]] = {
    "ceilings": ceilings.cells,
    "engine": engine.cells,
    "vllm": vllm_engine.cells,
    "kernels": kernels.cells,
    "models": models.cells,
    "engine-1b": functools.partial(engine.cells, model=SMALLER),
    "sweep": sweep.cells,
}


def run_child(section: str, out: Path, peers: Path | None, commit: str | None) -> None:
    logging.basicConfig(level=logging.INFO, format="%(relativeCreated)d ms %(name)s %(message)s")
    bench = Bench.open(out, peers)
    if not bench.full:
        from triton_kernels.build import interpreter

        interpreter.repair()
    facts = describe(bench) | ({"commit": commit} if commit else {})
    bench.results.about = facts | bench.results.about
    if section == "correctness":
        correctness.run(bench)
    else:
        run_cells(section, CELLS[section](bench), bench.results)
    if section == "sweep":
        sweep.write_table(bench)
