"""Sections at tiny size: kernels run in the interpreter, and nothing is timed."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from bench.gpu import __main__ as command
from bench.gpu import ceilings, kernels, steps
from bench.gpu.cells import run_cells
from bench.gpu.environment import Bench

pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning:triton.runtime.interpreter")


@pytest.mark.parametrize("section", ["ceilings", "kernels", "sweep"])
def test_everything_is_launched_and_nothing_is_timed(section: str, tmp_path: Path) -> None:
    bench = Bench.open(tmp_path)
    run_cells(section, command.SECTIONS[section].cells(bench), bench.results)
    for row in bench.results.of(section).values():
        is_peer = row.get("implementation") == kernels.VLLM
        assert row["status"].startswith("skipped" if is_peer else "unmeasured"), row


def test_the_kernel_of_the_ceilings_reads_everything() -> None:
    words = torch.randint(-(1 << 31), 1 << 31, (6 * 64,), dtype=torch.int32)
    sums = torch.zeros(2, dtype=torch.int32)
    ceilings.read_kernel[(2,)](words, sums, len(words), TILE=64)
    tiles = words.view(3, 2, 64)  # each program has every other tile
    assert torch.equal(sums, (tiles[0] ^ tiles[1] ^ tiles[2]).amax(dim=1))


def test_a_kernel_that_computes_something_else_is_not_timed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(steps, "MAX_ERROR", 1e-9)
    bench = Bench.open(tmp_path)
    cell = next(cell for cell in kernels.cells(bench) if cell.key.startswith("attention"))
    with pytest.raises(ArithmeticError, match="relative error"):
        cell.run()
