"""A machine that is busy with other programs: torch's threads in sampling, and their number. Large
tensors lie on huge pages."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
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
    "rejection": {"verification": "rejection"},
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

    def flip(self: SamplingThreads, running: float, now_s: float) -> None:
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


@contextmanager
def measured(running: float, at_s: list[float], monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Replace the clocks: a measurement takes 20 ms, of which the thread runs a share."""
    clock = iter([(0.0, 0.0), (0.02, 0.02 * running)])
    now: list[tuple[float, float]] = []

    def wall() -> float:
        now.append(next(clock))
        return at_s[0] + now[-1][0]

    with monkeypatch.context() as patch:
        patch.setattr(threads.time, "perf_counter", wall)
        patch.setattr(threads.time, "thread_time", lambda: now[-1][1])
        yield
    at_s[0] += 0.02


def settle(
    chosen: SamplingThreads, running: float, seconds: float, at_s: list[float], patch: Any
) -> list[bool]:
    """Return whether each part of `seconds` had a single thread."""
    singles, end_s = [], at_s[0] + seconds
    while at_s[0] < end_s:
        with measured(running, at_s, patch), chosen.limited():
            singles.append(torch.get_num_threads() == 1)
    return singles


def test_waits_for_a_processor_end_and_begin_a_single_thread(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    torch.set_num_threads(2)
    chosen, at_s = SamplingThreads(), [100.0]
    assert not any(settle(chosen, 0.97, 2, at_s, monkeypatch)), "a quiet machine"
    busy = settle(chosen, 0.4, 5, at_s, monkeypatch)
    assert busy[0] is False and all(busy[1:]), "its own processor is busy, too: nothing is tried"
    assert settle(chosen, 0.97, 1, at_s, monkeypatch)[-1] is False, "quiet again"
    assert torch.get_num_threads() == 2


def test_threads_are_tried_less_and_less_often_while_that_fails(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """This thread has a processor, and the other has none: only several threads wait."""
    torch.set_num_threads(3)
    chosen, at_s, singles = SamplingThreads(), [100.0], []
    for _ in range(3000):
        with measured(1.0 if chosen.single else 0.3, at_s, monkeypatch), chosen.limited():
            singles.append(torch.get_num_threads() == 1)
    tries = [i for i, single in enumerate(singles) if not single]
    assert 5 < len(tries) < 20, "a minute"
    gaps = [later - earlier for earlier, later in zip(tries, tries[1:], strict=False)]
    assert gaps[0] < gaps[1] < gaps[2] < gaps[3] <= gaps[-1] < 500, "at most 10 s apart"


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
