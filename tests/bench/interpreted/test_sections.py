"""Sections at tiny size: everything that runs on a GPU runs here, except the clock."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from bench.gpu import ceilings, kernels, sweep
from bench.gpu.cells import Journal, Row, run_cells
from bench.gpu.environment import Bench, RunMode, find_mode
from bench.gpu.turns import DeviceTurns

pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning:triton.runtime.interpreter")


@pytest.fixture
def bench(tmp_path: Path) -> Bench:
    assert find_mode() is RunMode.INTERPRETED
    torch.set_num_threads(1)
    return Bench(RunMode.INTERPRETED, torch.device("cpu"), tmp_path)


def rows(section: Any, bench: Bench, only: str = "") -> dict[str, Row]:
    """Return the rows of the cells whose key begins with `only`."""
    cells = [cell for cell in section.cells(bench) if cell.key.startswith(only)]
    journal = Journal(bench.out / "section.jsonl")
    run_cells(cells, journal, DeviceTurns(bench.out))
    assert len(journal.rows) == len(cells) > 0
    return journal.rows


def test_every_kernel_is_launched_and_none_is_timed(bench: Bench) -> None:
    all_rows = rows(kernels, bench)
    own = [row for row in all_rows.values() if row.get("implementation") == kernels.CBATCH]
    assert {row["status"] for row in own} == {"unmeasured"}
    assert all(row["median_us"] is None and row["mbytes"] > 0 for row in own)
    assert {row["kernel"] for row in own} > {"attention", "verify rejection", "sample", "product"}
    peers = [
        row["status"] for row in all_rows.values() if row.get("implementation") != kernels.CBATCH
    ]
    assert peers and all(status.startswith(("unmeasured", "skipped")) for status in peers)
    swept = rows(sweep, bench._replace(out=bench.out / "sweep"))
    assert [row["median_us"] for row in swept.values()] == [{"3q1s20": None}]


def test_kernels_of_the_ceilings_read_and_copy_everything(bench: Bench) -> None:
    assert {row["status"] for row in rows(ceilings, bench).values()} == {"unmeasured"}
    words = torch.randint(-(1 << 31), 1 << 31, (6 * 64,), dtype=torch.int32)
    copied, sums = torch.zeros_like(words), torch.zeros(2, dtype=torch.int32)
    ceilings.copy_kernel[(4,)](words, copied, len(words), TILE=64)
    assert torch.equal(copied, words)
    ceilings.read_kernel[(2,)](words, sums, len(words), TILE=64)
    tiles = words.view(3, 2, 64)  # each program has every other tile
    expected = (tiles[0] ^ tiles[1] ^ tiles[2]).amax(dim=1)
    assert torch.equal(sums, expected)


def test_a_kernel_that_computes_something_else_is_not_timed(
    bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(kernels, "MOST_ERROR", 1e-9)
    failed = rows(kernels, bench, "attention 3q1s20 cbatch")
    assert [row["status"].split(":")[1] for row in failed.values()] == [" ArithmeticError"]
