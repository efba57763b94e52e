"""Kernels, sweep and ceilings at tiny size, in the interpreter: everything runs but the clock."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from bench.gpu import inputs, kernels, sweep, timing
from bench.gpu.cells import Bench
from triton_kernels.attention import Heads

pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning:triton.runtime.interpreter")
HEADS = Heads(kv_heads=1, group=2, head_dim=16)


@pytest.fixture(autouse=True)
def tiny(monkeypatch: pytest.MonkeyPatch) -> None:
    def call_once(calls: Any, *_: Any) -> list[float]:
        calls[0]()
        return [1e-3, 1e-3, 1e-3]

    for module, names in (
        (kernels, {"ATTENTION": ("q5_2q1s33",), "LLAMA_8B_HEADS": HEADS, "VOCAB": 2048}),
        (kernels, {"LOGITS": ("recorded",), "STEPS": ((1, 1), (1, 0)), "PRODUCT_ROWS": (3,)}),
        (kernels, {"WIDTH": 64, "INTERMEDIATE": 96, "compile_all": lambda _: {}}),
        (timing, {"BYTES": 1 << 16, "EDGE": 16, "PROGRAMS": 2}),
        (sweep, {"HEADS": dict.fromkeys(timing.HEADS, HEADS), "resident_programs": lambda *_: 4}),
        (sweep, {"CANDIDATES": {64: [(16, 16, 4, 2, 3, False)], 16: []}}),
        (sweep, {"WORKLOADS": {16: {"3q1s20": 1.0}}}),
    ):
        for name, value in names.items():
            monkeypatch.setattr(module, name, value)
    for module in (kernels, timing, sweep):
        monkeypatch.setattr(module, "time_calls", call_once)


@pytest.mark.parametrize("section", [timing, kernels, sweep])
def test_every_cell_is_measured(section: Any, tmp_path: Path) -> None:
    bench = Bench(tmp_path)
    bench.measure("s", section.cells(bench))
    rows = bench.of("s").values()
    assert len(rows) >= 2
    for row in rows:
        is_peer = row.get("implementation") in (kernels.VLLM, kernels.SDPA)
        assert row["status"] == "ok" or is_peer and row["status"].startswith("skipped"), row


def test_the_kernel_of_the_ceilings_reads_everything() -> None:
    words = torch.randint(-(1 << 31), 1 << 31, (6 * 64,), dtype=torch.int32)
    sums = torch.zeros(2, dtype=torch.int32)
    timing.read_kernel[(2,)](words, sums, len(words), TILE=64)
    tiles = words.view(3, 2, 64)  # each program has every other tile
    assert torch.equal(sums, (tiles[0] ^ tiles[1] ^ tiles[2]).amax(dim=1))


def test_a_kernel_that_computes_something_else_is_not_timed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(inputs, "MAX_ERROR", 1e-9)
    cells = kernels.cells(Bench(tmp_path))
    cell = next(cell for cell in cells if cell.key.startswith("attention"))
    with pytest.raises(ArithmeticError, match="relative error"):
        cell.run()
