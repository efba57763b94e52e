"""`cbatch sim capacity` from a command line."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from sim.workload.traces.reader import write_requests
from sim.workload.traces.request import TraceRequest
from tests.cli.conftest import Run

Command = Callable[..., Run]
ONE_SLOT = ("--num-blocks", 200, "--max-model-len", 500, "--max-num-seqs", 1)
CONSTANT = (*ONE_SLOT, "--step-seconds", 0.01)


def write(path: Path, gap_s: float, prompt_tokens: int = 9) -> Path:
    requests = (
        TraceRequest(arrival_s=i * gap_s, prompt_tokens=prompt_tokens, output_tokens=5)
        for i in range(40)
    )
    write_requests(path, requests)
    return path


@pytest.fixture
def trace(tmp_path: Path) -> Path:
    return write(tmp_path / "trace.jsonl", 0.5)


def test_the_capacity_and_all_rates_are_reported(cbatch: Command, trace: Path) -> None:
    """Service takes 50 ms every 0.5 s: the capacity is 10 times the rate."""
    out = trace.parent / "capacity.json"
    run = cbatch("sim", "capacity", trace, *CONSTANT, "--slo", "ttft=0.05", "--json", out)
    assert run.status == 0, run.err
    (scenario,) = json.loads(out.read_bytes())
    assert run.lines[-1] == {"scenarios": [scenario]}
    assert scenario["best"]["rate"] * 1.02 >= 10 and scenario["best"]["rate"] <= 10 * 1.01
    assert scenario["best"]["arrivals_per_s"] == pytest.approx(scenario["best"]["rate"] * 2)
    assert f"capacity: {scenario['best']['rate']:.4g} times the rate" in run.out
    assert scenario["best"]["rounds"] == 8 and "so it was replayed 8 times" in run.out
    table = run.out.rpartition("{")[0]
    assert len(re.findall(r"meets *\n", table)) == sum(one["meets"] for one in scenario["tried"])
    assert len(re.findall(r"fails *\n", table)) == sum(
        not one["meets"] for one in scenario["tried"]
    )
    assert scenario["settings"]["max_num_seqs"] == 1 and scenario["level"]["percentile"] == 99


SESSIONS = ("--turns", "fixed:3", "--think", 0.3)


@pytest.mark.parametrize(
    ("counts", "more"), [((25, 600), ("--requests",)), ((10, 100), (*SESSIONS, "--sessions"))]
)
def test_capacity_does_not_depend_on_the_length_of_the_trace(
    cbatch: Command, tmp_path: Path, counts: tuple[int, ...], more: tuple[Any, ...]
) -> None:
    """16 slots, 10 ms per step and 40 tokens on average: about 40 requests per second. The
    objective is only on the time between tokens, which a queue does not change."""
    engine = ("--num-blocks", 4000, "--max-model-len", 500, "--max-num-seqs", 16)
    engine += ("--rate-scales", "8:48")
    law = ("--arrivals", "poisson:1", "--prompt", "fixed:16", "--output", "uniform:20,60")
    rates = []
    for count in counts:
        path = tmp_path / f"{count}.jsonl"
        made = cbatch("trace", "generate", path, *law, "--seed", 3, *more, count)
        assert made.status == 0, made.err
        slo = ("--step-seconds", 0.01, "--slo", "tpot=0.02")
        run = cbatch("sim", "capacity", path, *engine, *slo)
        (document,) = run.lines[-1]["scenarios"]
        assert document["ends"] == "between", run.out
        rates.append(document["best"]["arrivals_per_s"])
    assert all(32 < per_s < 44 for per_s in rates) and max(rates) < 1.15 * min(rates), rates


def test_a_trace_that_is_much_too_short_is_reported(cbatch: Command, tmp_path: Path) -> None:
    """The engine has unlimited slots, and the trace is too short to show a growing queue."""
    path = tmp_path / "long.jsonl"
    requests = [
        TraceRequest(arrival_s=i * 1e-5, prompt_tokens=4, output_tokens=50) for i in range(9000)
    ]
    write_requests(path, requests)
    slots = ("--num-blocks", 90_000, "--max-model-len", 500, "--max-num-seqs", 20_000)
    budget = ("--max-num-batched-tokens", 90_000, "--step-seconds", 0.01, "--slo", "tpot=1")
    run = cbatch("sim", "capacity", path, *slots, *budget, "--rate-scales", "0.5:1")
    assert run.status == 0 and "too short to distinguish a burst from a steady load" in run.out, (
        run.out
    )


def test_capacity_of_every_scenario_of_a_sweep(cbatch: Command, trace: Path) -> None:
    swept = ("--sweep", "step-seconds=0.01,0.02", "--processes", 1)
    run = cbatch(
        "sim", "capacity", trace, *ONE_SLOT, *swept, "--slo", "ttft=0.3", "--goodput-share", 0.99
    )  # fmt: skip
    assert run.status == 0, run.err
    fast, slow = (scenario["best"]["rate"] for scenario in run.lines[-1]["scenarios"])
    assert fast > 1.5 * slow and "step-seconds 0.02" in run.out


def test_ends_of_the_range_are_reported(cbatch: Command, trace: Path) -> None:
    low = cbatch("sim", "capacity", trace, *CONSTANT, "--slo", "tpot=0.001")
    assert low.status == 0 and "even 0.01562 times the rate misses the objectives" in low.out
    high = cbatch("sim", "capacity", trace, *CONSTANT, "--slo", "ttft=99", "--rate-scales", "1:4")
    assert high.status == 0 and "capacity: at least 4 times the rate" in high.out
    above = cbatch("sim", "capacity", trace, *CONSTANT, "--slo", "ttft=99", "--rate-scales", "3:5")
    tried = above.lines[-1]["scenarios"][0]["tried"]
    assert [one["rate"] for one in tried] == [3, 5], "not the lower end of the range"


@pytest.mark.parametrize(
    ("argv", "words"),
    [
        ((), "--slo: is missing"),
        (("--slo", "ttft=1", "--percentile", 101), "--percentile: 101.0"),
        (("--slo", "ttft=1", "--percentile", 0), "--percentile: 0.0"),
        (("--slo", "ttft=1", "--percentile", "nan"), "--percentile: nan"),
        (("--slo", "ttft=1", "--goodput-share", 0), "--goodput-share: 0.0"),
        (("--slo", "ttft=1", "--goodput-share", 1.5), "--goodput-share: 1.5"),
        (("--slo", "ttft=1", "--rate-scales", "0:1"), "--rate-scales: 0.0:1.0"),
        (("--slo", "ttft=1", "--rate-scales", "2:1"), "--rate-scales: 2.0:1.0"),
        (("--slo", "ttft=1", "--sweep", "rate=1,2"), "'rate' is not an option"),
        (("--slo", "ttft=1", "--sweep", "concurrency=1,2"), "'concurrency' is not an option"),
        (("--slo", "ttft=1", "--processes", 2), "--processes: would be ignored"),
        (("--slo", "ttft=1", "--acceptance", 0.5), "--acceptance: would be ignored"),
        (("--slo", "ttft=1", "--json", "/no/such/folder/r.json"), "--json: /no/such"),
    ],
)
def test_errors_about_bad_options(
    cbatch: Command, trace: Path, argv: tuple[Any, ...], words: str
) -> None:
    run = cbatch("sim", "capacity", trace, *CONSTANT, *argv)
    assert run.status == 2 and words in run.err, run.err


def test_traces_without_a_capacity_report_the_reason(cbatch: Command, tmp_path: Path) -> None:
    at_once = write(tmp_path / "at_once.jsonl", 0.0)
    run = cbatch("sim", "capacity", at_once, *CONSTANT, "--slo", "ttft=1")
    assert run.status == 2 and "all arrive at once" in run.err
    too_long = write(tmp_path / "long.jsonl", 0.5, prompt_tokens=600)
    run = cbatch("sim", "capacity", too_long, *CONSTANT, "--slo", "ttft=1")
    assert run.status == 2 and "none of its requests can run" in run.err
