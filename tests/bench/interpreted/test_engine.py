"""The engine's section at tiny size: kernels of a decoder are replaced by references, graphs by a
device that replays calls."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from bench.gpu import engine
from bench.gpu.environment import Bench, RunMode, find_mode
from cbatch.runtime.gpu import device_steps
from tests.triton_kernels.interpreter import light
from tests.gpu_proofs.interpreted.twins import ReplayingDevice


@pytest.fixture
def device(monkeypatch: pytest.MonkeyPatch) -> Iterator[ReplayingDevice]:
    light.without_overflow_checks(monkeypatch)
    light.use_references(monkeypatch)
    light.use_reference_verdicts(monkeypatch)
    replaying = ReplayingDevice()
    monkeypatch.setattr(device_steps, "device_for", lambda _: replaying)
    engine.simulate_acceptance.cache_clear()
    yield replaying
    engine.simulate_acceptance.cache_clear()


@pytest.fixture
def bench(tmp_path: Path) -> Bench:
    assert find_mode() is RunMode.INTERPRETED
    torch.set_num_threads(1)
    return Bench(RunMode.INTERPRETED, torch.device("cpu"), tmp_path)


def test_every_policy_is_measured_and_no_capture_is_priced(
    bench: Bench, device: ReplayingDevice, monkeypatch: pytest.MonkeyPatch
) -> None:
    priced, profile = [], engine.profile_costs

    def watched(*arguments: Any, **more: Any) -> Any:
        before = set(device.recorded)
        prices = profile(*arguments, **more)
        priced.append((prices, len(before), set(device.recorded) - before))
        return prices

    monkeypatch.setattr(engine, "profile_costs", watched)
    rows = [cell.run() for cell in engine.cells(bench)]
    assert {row["status"] for row in rows} == {"unmeasured"}, "by the clock; it ran"
    drafting = {
        cell.labels["lookahead"]: row["drafts_a_row"] > 0
        for cell, row in zip(engine.cells(bench), rows, strict=True)
        if cell.labels["what"] == engine.STEPS
    }
    drafting.pop("adaptive")  # measured durations decide in it
    assert drafting == {"off": False, "fixed:4": True}
    ((prices, captured, new),) = priced
    assert captured > 20 and not new and prices.target_s
