"""The clock of the GPU run, on a device that is made up: it takes the time that calls say."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from bench.gpu import timing
from bench.gpu.limits import Ceilings, Cost
from bench.gpu.timing import FEWEST_SAMPLES, MOST_SAMPLES, figures, input_sets, time_calls
from bench.gpu.world import Bench, World


class FakeCuda:
    """Stands for `torch.cuda`. Calls advance `now_s`, unless they are being captured."""

    def __init__(self, refusal: str | None = None) -> None:
        self.now_s, self.refusal = 0.0, refusal
        self.capturing: list[Callable[[], None]] | None = None
        cuda = self

        class Event:
            def __init__(self, enable_timing: bool) -> None:
                assert enable_timing

            def record(self) -> None:
                self.at_s = cuda.now_s

            def synchronize(self) -> None:
                assert self.at_s == cuda.now_s

            def elapsed_time(self, end: Any) -> float:
                return (end.at_s - self.at_s) * 1e3

        class CUDAGraph:
            def replay(self) -> None:
                for call in self.calls:
                    call()

        stream = SimpleNamespace(wait_stream=lambda other: None)
        self.Event, self.CUDAGraph = Event, CUDAGraph
        self.Stream = self.current_stream = lambda: stream
        self.synchronize = lambda: None

    def call(self, seconds: float) -> Callable[[], None]:
        def run() -> None:
            if self.capturing is None:
                self.now_s += seconds
            else:
                self.capturing.append(run)

        return run

    @contextmanager
    def stream(self, stream: Any) -> Iterator[None]:
        yield

    @contextmanager
    def graph(self, graph: Any) -> Iterator[None]:
        if self.refusal:
            raise RuntimeError(self.refusal)
        self.capturing = graph.calls = []
        try:
            yield
        finally:
            self.capturing = None


@pytest.fixture
def bench(tmp_path: Path) -> Bench:
    return Bench(World.DEVICE, torch.device("cuda"), tmp_path, None, lambda: 100.0)


def fake(monkeypatch: pytest.MonkeyPatch, refusal: str | None = None) -> FakeCuda:
    cuda = FakeCuda(refusal)
    monkeypatch.setattr(timing, "torch", SimpleNamespace(cuda=cuda))
    return cuda


def test_a_launch_is_timed_in_a_graph(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    cuda = fake(monkeypatch)
    found = time_calls(bench, [cuda.call(10e-6), cuda.call(30e-6)])
    assert found is not None and found.method == "graph"
    assert found.median_s == pytest.approx(20e-6)
    assert found.low_s == pytest.approx(20e-6) and found.samples == MOST_SAMPLES


def test_long_launches_get_fewer_samples(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    cuda = fake(monkeypatch)
    found = time_calls(bench, [cuda.call(0.5)])
    assert found is not None and found.samples == FEWEST_SAMPLES
    spent_s = cuda.now_s
    found = time_calls(bench._replace(left_s=lambda: 0.0), [cuda.call(0.01)])
    assert found is not None and found.samples == FEWEST_SAMPLES and cuda.now_s - spent_s < 0.2


def test_what_cannot_be_captured_is_timed_as_it_is(
    bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    cuda = fake(monkeypatch, "CUDA error: operation not permitted when stream is capturing")
    found = time_calls(bench, [cuda.call(10e-6)])
    assert found is not None and found.method == "eager"
    assert found.median_s == pytest.approx(10e-6)


def test_a_fault_is_not_taken_for_a_refusal(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    cuda = fake(monkeypatch, "CUDA error: an illegal memory access was encountered")
    with pytest.raises(RuntimeError, match="illegal memory access"):
        time_calls(bench, [cuda.call(10e-6)])


def test_warming_only_calls(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    cuda = fake(monkeypatch)
    assert time_calls(bench._replace(warming=True), [cuda.call(1.0)] * 3) is None
    assert cuda.now_s == 3.0


def test_inputs_go_round_until_they_do_not_fit(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(timing, "l2_bytes", lambda device: 50 << 20)
    device = torch.device("cuda")
    assert input_sets(1 << 30, device) == 1
    assert input_sets(4 << 20, device) == 50
    assert input_sets(1, device) == 64


def test_figures_of_a_launch() -> None:
    found = timing.Timing(2e-6, 1e-6, 3e-6, 7, "graph")
    row = figures(found, Cost(3_000_000, 100), Ceilings(3e12, 1e15))
    assert row["median_us"] == pytest.approx(2.0) and row["limit_us"] == pytest.approx(1.0)
    assert row["fraction_of_limit"] == pytest.approx(0.5) and row["bound"] == "memory"
    assert row["tflop_per_s"] == pytest.approx(100 / 2e-6 / 1e12)
    empty = figures(None, Cost(3_000_000, 100), None)
    assert empty["status"] == "unmeasured" and empty["median_us"] is None and empty["mbytes"] == 3
    assert set(empty) - {"status"} == set(row)
    unheld = figures(found, Cost(3_000_000, 100), None)
    assert unheld["median_us"] == row["median_us"] and unheld["fraction_of_limit"] is None
