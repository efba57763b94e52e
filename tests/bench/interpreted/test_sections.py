"""Correctness, kernels and sweep at tiny size: what runs on a GPU runs here, but for the clock."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import triton
import triton.language as tl  # noqa: F401 - the interpreter looks for it here

from bench.gpu import (
    correct_attention,
    correct_laws,
    correct_rows,
    correct_sampling,
    correctness,
    kernels,
    sweep,
)
from bench.gpu.cells import Journal, Row, run_cells
from bench.gpu.laws import MarkovChain
from bench.gpu.steps import StepQueries
from bench.gpu.world import Bench, World, find_world
from triton_kernels.noise import device as noise_device
from triton_kernels.verification import kernel as verify_logits

pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning:triton.runtime.interpreter")


@pytest.fixture
def bench(tmp_path: Path) -> Bench:
    assert find_world() is World.INTERPRETED
    torch.set_num_threads(1)
    return Bench(World.INTERPRETED, torch.device("cpu"), tmp_path, None, lambda: 1.0)


def rows(section: Any, bench: Bench, only: str = "") -> dict[str, Row]:
    """Of the cells whose key begins with `only`."""
    cells = [cell for cell in section.cells(bench) if cell.key.startswith(only)]
    journal = Journal(bench.out / "section.jsonl")
    run_cells(cells, journal, bench.left_s)
    assert len(journal.rows) == len(cells) > 0
    return journal.rows


def test_correct_kernels_pass_every_cell(bench: Bench) -> None:
    found = rows(correctness, bench)
    states = {key: row["status"] for key, row in found.items()}
    sanitizers = [key for key in states if "compute-sanitizer" in key]
    assert {states.pop(key) for key in sanitizers} == {"unmeasured"}
    assert set(states.values()) == {"ok"}, states
    assert len(states) >= 15 and all(row.get("tried", 1) > 0 for row in found.values())


def test_sequences_are_the_same_in_groups_and_together(bench: Bench) -> None:
    chain, tiling = MarkovChain.make(5, seed=17), correct_sampling.tiling_of(bench)
    mode, at = correct_laws.REJECTION, torch.arange(16)
    whole = correct_laws.decode(chain, mode, 2, at, tiling)
    parts = [correct_laws.decode(chain, mode, 2, part, tiling) for part in at.split(8)]
    for field, pieces in zip(whole, zip(*parts, strict=True), strict=True):
        assert np.array_equal(field, np.concatenate(pieces))


def test_every_kernel_is_launched_and_none_is_timed(bench: Bench) -> None:
    found = rows(kernels, bench)
    ours = [row for row in found.values() if row["implementation"] == kernels.OURS]
    assert {row["status"] for row in ours} == {"unmeasured"}
    assert all(row["median_us"] is None and row["mbytes"] > 0 for row in ours)
    assert len(ours) > 8
    peers = [row["status"] for row in found.values() if row["implementation"] != kernels.OURS]
    assert peers and all(status.startswith(("unmeasured", "skipped")) for status in peers)
    swept = rows(sweep, bench._replace(out=bench.out / "sweep"))
    assert [row["median_us"] for row in swept.values()] == [{"3q1s20": None}]


def test_a_wrong_scale_is_seen(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    right = StepQueries.run
    monkeypatch.setattr(
        StepQueries,
        "run",
        lambda self, *rest, **more: right(self._replace(q=self.q * 1.1), *rest, **more),
    )
    found = rows(correct_attention, bench, "attention bfloat16 page 16")
    assert [row["status"] for row in found.values()] == ["wrong"]


@pytest.mark.parametrize("case", ["decode == verify", "cuts"])
def test_splits_that_follow_the_query_are_seen(
    bench: Bench, monkeypatch: pytest.MonkeyPatch, case: str
) -> None:
    """Broken variant: keys are split otherwise where there are other queries."""
    planned, whole = StepQueries.work, {"decode == verify": 6, "cuts": 9}[case]

    def shifting(self: StepQueries, config: Any, **options: Any) -> Any:
        length = 16 if len(self.q) == whole else 32
        return planned(self, config._replace(split_tokens=length), **options)

    monkeypatch.setattr(StepQueries, "work", shifting)
    found = rows(correct_attention, bench, f"attention {case}")
    assert [row["status"] for row in found.values()] == ["wrong"]


@triton.jit
def other_exponential(words):
    return noise_device.uniform(words)


CERTAIN = "verify vocabulary 300, filters, shaped, certain"


@triton.jit
def always(threshold, p):
    return p >= 0.0


@pytest.mark.parametrize(
    ("module", "name", "broken", "section", "cell"),
    [
        (noise_device, "exponential", other_exponential, correct_rows, "noise"),
        (verify_logits, "_accepts", always, correct_sampling, CERTAIN),
    ],
)
def test_broken_kernels_are_seen(
    bench: Bench,
    monkeypatch: pytest.MonkeyPatch,
    module: object,
    name: str,
    broken: object,
    section: Any,
    cell: str,
) -> None:
    monkeypatch.setattr(module, name, broken)
    assert "wrong" in {row["status"] for row in rows(section, bench, cell).values()}


def test_a_peer_that_computes_something_else_is_not_timed(
    bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(kernels, "_MOST_ERROR", 1e-9)
    found = rows(kernels, bench, "attention 3q1s20 cbatch")
    assert [row["status"].split(":")[1] for row in found.values()] == [" ArithmeticError"]
