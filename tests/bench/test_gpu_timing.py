"""The clock of the GPU run, on a fake device: calls state how long they take."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from bench.gpu import timing
from bench.gpu.environment import Bench, RunMode
from bench.gpu.limits import Ceilings, Cost
from bench.gpu.timing import FEWEST_SAMPLES, MOST_SAMPLES, figures, input_sets, time_calls


class FakeCuda:
    """A fake `torch.cuda`. Calls advance `now_s`, unless they are being captured."""

    def __init__(self) -> None:
        self.now_s, self.refusal = 0.0, ""
        self.capturing: list[Callable[[], None]] | None = None
        stream = SimpleNamespace(wait_stream=lambda other: None)
        self.Stream = self.current_stream = lambda: stream
        self.stream, self.synchronize = (lambda stream: nullcontext()), lambda: None

    def Event(self, enable_timing: bool) -> Any:  # noqa: N802 - torch's name
        event = SimpleNamespace(synchronize=lambda: None)
        event.record = lambda: setattr(event, "at_s", self.now_s)
        event.elapsed_time = lambda end: (end.at_s - event.at_s) * 1e3
        return event

    def CUDAGraph(self) -> Any:  # noqa: N802 - torch's name
        graph = SimpleNamespace(calls=[])
        graph.replay = lambda: [call() for call in graph.calls]
        return graph

    def call(self, seconds: float) -> Callable[[], None]:
        def run() -> None:
            if self.capturing is None:
                self.now_s += seconds
            else:
                self.capturing.append(run)

        return run

    @contextmanager
    def graph(self, graph: Any) -> Iterator[None]:
        if self.refusal:
            raise RuntimeError(self.refusal)
        self.capturing = graph.calls
        yield
        self.capturing = None


@pytest.fixture
def cuda(monkeypatch: pytest.MonkeyPatch) -> FakeCuda:
    made = FakeCuda()
    monkeypatch.setattr(timing, "torch", SimpleNamespace(cuda=made))
    return made


@pytest.fixture
def bench(tmp_path: Path) -> Bench:
    return Bench(RunMode.DEVICE, torch.device("cuda"), tmp_path)


def test_launches_are_timed_in_a_graph(bench: Bench, cuda: FakeCuda) -> None:
    measured = time_calls(bench, [cuda.call(10e-6), cuda.call(30e-6)])
    assert measured is not None and measured.samples == MOST_SAMPLES
    assert (measured.low_s, measured.median_s) == pytest.approx((20e-6, 20e-6))
    cuda.refusal = "CUDA error: an illegal memory access was encountered"
    with pytest.raises(RuntimeError, match="illegal memory access"):
        time_calls(bench, [cuda.call(10e-6)])


def test_long_launches_get_fewer_samples(bench: Bench, cuda: FakeCuda) -> None:
    measured = time_calls(bench, [cuda.call(0.5)])
    assert measured is not None and measured.samples == FEWEST_SAMPLES
    assert time_calls(bench._replace(mode=RunMode.LISTED), [cuda.call(1.0)]) is None


def test_inputs_go_round_until_they_do_not_fit(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(timing, "l2_bytes", lambda device: 50 << 20)
    device = torch.device("cuda")
    assert [input_sets(n, device) for n in (1 << 30, 4 << 20, 1)] == [1, 50, 256]


def test_figures_of_a_launch() -> None:
    measured = timing.Timing(2e-6, 1e-6, 3e-6, 7)
    row = figures(measured, Cost(3_000_000, 100), Ceilings(3e12, 1e15))
    assert row["median_us"] == pytest.approx(2.0) and row["limit_us"] == pytest.approx(1.0)
    assert row["fraction_of_limit"] == pytest.approx(0.5) and row["bound"] == "memory"
    assert row["tflop_per_s"] == pytest.approx(100 / 2e-6 / 1e12)
    empty = figures(None, Cost(3_000_000, 100), None)
    assert empty["status"] == "unmeasured" and empty["median_us"] is None and empty["mbytes"] == 3
    assert set(empty) - {"status"} == set(row)
    unheld = figures(measured, Cost(3_000_000, 100), None)
    assert unheld["median_us"] == row["median_us"] and unheld["fraction_of_limit"] is None
