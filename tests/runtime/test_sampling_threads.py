"""A machine that is busy with other programs: torch's threads in sampling, and their number. Large
tensors lie on huge pages."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from cbatch.runtime.compiled import threads
from cbatch.runtime.compiled.threads import SamplingThreads, num_threads, sampling_threads
from tests.runtime.engines import Run, make_request, run_engine, tiny_model

ROOT = Path(__file__).parents[2]
VOCAB = 20_011  # of several rows: long enough that torch splits operations, and no whole vectors
SAMPLED: dict[str, dict[str, Any]] = {
    "rejection": {"verification": "rejection", "top_k": 50},
    "coupled": {"verification": "coupled", "top_p": 0.9},
    "filtered": {"min_p": 0.01, "top_p": 0.8},
    "penalties": {"frequency_penalty": 0.7, "repetition_penalty": 1.2, "logprobs": 3},
    "greedy": {"temperature": 0.0, "logit_bias": {5: 2.0}},
}


@pytest.fixture(autouse=True)
def torch_threads() -> Iterator[None]:
    before = torch.get_num_threads()
    yield
    torch.set_num_threads(before)


def run(models: Any, lookahead: str, depth: int) -> Run:
    requests = [
        make_request(name, range(5 + i, 12 + i), **{"temperature": 0.9, "max_tokens": 14} | params)
        for i, (name, params) in enumerate(SAMPLED.items())
    ]
    return run_engine(requests, *models, lookahead=lookahead, depth=depth)


@pytest.mark.parametrize("lookahead, depth", [("off", 0), ("fixed:3", 0), ("fixed:3", 1)])
def test_tokens_do_not_depend_on_threads_that_come_and_go(
    lookahead: str, depth: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    models = tiny_model(vocab_size=VOCAB), tiny_model(vocab_size=VOCAB, noise=0.1)
    torch.set_num_threads(1)
    expected = run(models, lookahead, depth)
    monkeypatch.setattr(threads, "MEASURED_S", 0.0)
    changes: list[int] = []

    def flip(self: SamplingThreads, row_s: float, now_s: float) -> None:
        self.single = len(changes) % 3 == 1
        changes.append(num_threads())

    monkeypatch.setattr(SamplingThreads, "decide", flip)
    for count in (2, 3):
        torch.set_num_threads(count)
        again = run(models, lookahead, depth)
        assert again.outputs == expected.outputs
        assert len(changes) > 10 and set(changes) == {count}, "kernels keep their threads"
        changes.clear()
    sampling_threads.single = False


class Clock:
    """Replaces the clock: a context takes `several_s` or `one_s`, by its number of threads."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.now_s = 100.0
        monkeypatch.setattr(threads.time, "perf_counter", lambda: self.now_s)

    def run(
        self, chosen: SamplingThreads, several_s: float, one_s: float, seconds: float
    ) -> list[bool]:
        """Return whether each context of `seconds` had a single thread."""
        singles, end_s = [], self.now_s + seconds
        while self.now_s < end_s:
            with chosen.limited(rows=8):
                singles.append(torch.get_num_threads() == 1)
                self.now_s += one_s if singles[-1] else several_s
        return singles


def test_the_faster_number_of_threads_is_used(monkeypatch: pytest.MonkeyPatch) -> None:
    torch.set_num_threads(2)
    chosen, clock = SamplingThreads(), Clock(monkeypatch)
    quiet = clock.run(chosen, 0.02, 0.03, 60)
    assert sum(quiet) / len(quiet) < 0.02, "a quiet machine"
    busy = clock.run(chosen, 0.2, 0.06, 60)
    assert busy[0] is False and all(busy[2:8]), "tried as soon as sampling is slower"
    assert sum(busy) / len(busy) > 0.97
    assert clock.run(chosen, 0.02, 0.06, 10)[-1] is False, "quiet again"
    assert torch.get_num_threads() == 2


def test_threads_are_tried_less_and_less_often_while_that_fails(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    torch.set_num_threads(3)
    singles = Clock(monkeypatch).run(SamplingThreads(), 0.02, 0.03, 60)
    tries = [i for i, single in enumerate(singles) if single]
    assert 5 < len(tries) < 20, "a minute"
    gaps = [later - earlier for earlier, later in zip(tries, tries[1:], strict=False)]
    assert gaps[0] < gaps[1] < gaps[2] < gaps[3] <= gaps[-1] < 500, "at most 10 s apart"


def test_a_machine_that_stays_slower_is_usual_after_a_failed_try(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    torch.set_num_threads(2)
    chosen, clock = SamplingThreads(), Clock(monkeypatch)
    clock.run(chosen, 0.02, 0.03, 10)
    assert sum(clock.run(chosen, 0.06, 0.09, 60)) < 20, "in a minute"


@pytest.mark.parametrize(
    "given, expected",
    [
        ({}, "1000"),
        ({"GOMP_SPINCOUNT": "5"}, "5"),
        ({"OMP_WAIT_POLICY": "active"}, "None"),
    ],
)
def test_torchs_threads_do_not_spin_for_long(given: dict[str, str], expected: str) -> None:
    """The variable is set before torch is imported, whichever module of ours comes first."""
    unset = {k: v for k, v in os.environ.items() if not k.startswith(("OMP_", "GOMP_"))}
    for module in ("cbatch.engine.info", "cbatch.runtime.cpu.executor"):  # the first imports torch
        code = f"import {module}, os; print(os.environ.get('GOMP_SPINCOUNT'))"
        done = subprocess.run(
            [sys.executable, "-c", code],
            env=unset | given,
            capture_output=True,
            text=True,
            cwd=ROOT,
        )
        assert done.stdout.strip() == expected, done.stderr


# --- memory ---------------------------------------------------------------------------------------

_SETTING = Path("/sys/kernel/mm/transparent_hugepage/enabled")
_PROGRAM = """
import cbatch.runtime, torch
x = torch.ones(64 << 20, dtype=torch.uint8)
lines = open("/proc/self/smaps_rollup").read().splitlines()
print(next(line.split()[1] for line in lines if line.startswith("AnonHugePages")))
"""


def test_weights_get_huge_pages() -> None:
    if not _SETTING.exists() or "[madvise]" not in _SETTING.read_text():
        pytest.skip("the kernel does not grant huge pages on request (madvise)")
    process = subprocess.run(
        [sys.executable, "-c", _PROGRAM], capture_output=True, text=True, check=True
    )
    assert int(process.stdout) >= 32 << 10, "KiB of huge pages under a tensor of 64 MiB"
