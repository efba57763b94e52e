"""`cbatch sim --sweep` equals separate runs, and `cbatch sim capacity` reports every rate."""

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
SMALL = ("--num-blocks", 200, "--max-model-len", 500)
CONSTANT = (*SMALL, "--step-seconds", 0.01)


@pytest.fixture
def trace(tmp_path: Path) -> Path:
    path = tmp_path / "trace.jsonl"
    requests = (
        TraceRequest(arrival_s=i * 0.01, prompt_tokens=20 + i, output_tokens=9) for i in range(12)
    )
    write_requests(path, requests)
    return path


def test_rows_equal_separate_runs_with_their_values(cbatch: Command, trace: Path) -> None:
    """Sweep numbers, policies with and without a draft, and a switch, in several processes and in
    one. Each row also runs alone."""
    drafts = ("--draft", "llama-3.2-1b", "--acceptance", 0.6, *SMALL, "--slo", "ttft=0.02")
    sweeps = ("--sweep", "lookahead=off,fixed:3", "--sweep", "max-num-seqs=2,8")
    files = [trace.parent / f"{i}.json" for i in range(2)]
    for file, processes in zip(files, (1, 2), strict=True):
        run = cbatch(
            "sim", trace, *drafts, *sweeps, "--json", file, "--processes", processes
        )  # fmt: skip
        assert run.status == 0, run.err
    assert files[0].read_bytes() == files[1].read_bytes()
    reports = json.loads(files[0].read_bytes())
    rows = run.lines[-1]["scenarios"]
    assert [(row["lookahead"], row["max-num-seqs"]) for row in rows] == [
        ("off", "2"), ("off", "8"), ("fixed:3", "2"), ("fixed:3", "8")
    ]  # fmt: skip
    alone = trace.parent / "alone.json"
    for row, report in zip(rows, reports, strict=True):
        own = drafts if row["lookahead"] != "off" else (*SMALL, "--slo", "ttft=0.02")
        values = ("--lookahead", row["lookahead"], "--max-num-seqs", row["max-num-seqs"])
        assert cbatch("sim", trace, *own, *values, "--json", alone).status == 0
        single = json.loads(alone.read_bytes())
        single["settings"].pop("draft_model"), report["settings"].pop("draft_model")
        assert report == single
        assert row["ttft_p99_s"] == report["ttft_s"]["p99"]
        assert row["goodput_share"] == report["goodput"]["share"]
    ratio = rows[2]["output_tokens_per_s"] / rows[0]["output_tokens_per_s"]
    assert ratio > 1.05 and f"×{ratio:.2f}" in run.out and "×1.00" in run.out


def test_options_of_price_prompts_and_parts_of_a_trace(cbatch: Command, trace: Path) -> None:
    def report(*argv: Any) -> dict[str, Any]:
        run = cbatch("sim", trace, *argv)
        assert run.status == 0, run.err
        assert all(remark in run.out for remark in run.lines[-1]["remarks"])
        return run.lines[-1]

    one = report("--tp", 2, "--price-per-hour", 5, "--requests", 5, "--prompt-share", 0.5)
    assert one["tokens_per_dollar"] == pytest.approx(one["output_tokens_per_s"] * 360)
    assert one["remarks"] == ["only the first 5 requests of the trace are used"]
    two = report("--pool", "vllm-0.19", "--kv-cache-dtype", "fp8", "--requests", 12)
    assert not two["remarks"] and two["tokens_per_dollar"] is None
    shares = [each["settings"]["prompt_share"] for each in (one, two, report(*CONSTANT))]
    assert shares == [0.5, 1.0, 0.8]
    blocks = report("--pool", "vllm-0.19")["settings"]["num_blocks"]
    assert two["settings"]["num_blocks"] == pytest.approx(2 * blocks, abs=1)
    swept = ("--sweep", "prompt-share=1,0.8", "--requests", 5, "--price-per-hour", 1)
    run = cbatch("sim", trace, *CONSTANT, *swept)
    assert "only the first 5 requests" in run.out and "per $" in run.out
    ignored = cbatch("sim", trace, *CONSTANT, "--sampling-filters")
    assert ignored.status == 2 and "--sampling-filters: would be ignored" in ignored.err


@pytest.mark.parametrize(
    ("argv", "words"),
    [
        (("--sweep", "max-num-seqs"), "'max-num-seqs' is not NAME=VALUES"),
        (("--sweep", "max-num-seqs=2,2"), "has a value twice"),
        (
            ("--sweep", "num-seqs=2,3"),
            "'num-seqs' is not an option of a simulation; did you mean max-num-seqs?; use one of",
        ),
        (
            ("--sweep", "max-num-seqs=2,many"),
            "--sweep max-num-seqs=many: 'many' is not allowed",
        ),
        (("--sweep", "max-num-seqs=2,4", "--max-num-seqs", 8), "--max-num-seqs: would be ignored"),
        (
            ("--sweep", "enable-prefix-caching=yes,no"),
            "--sweep enable-prefix-caching=yes: 'yes' is not allowed; use on or off",
        ),
        (("--sweep", "seed=1,2", "--records", "{out}"), "--records: would be ignored with --sweep"),
        (("--processes", 2), "--processes: would be ignored without --sweep"),
    ],
)
def test_bad_sweeps_are_rejected_before_anything_runs(
    cbatch: Command, trace: Path, argv: tuple[Any, ...], words: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def never(*args: Any, **more: Any) -> None:
        raise AssertionError("it ran")

    monkeypatch.setattr("sim.cli.simulation.replay", never)
    out = trace.parent / "out"
    run = cbatch("sim", trace, *CONSTANT, *(str(a).format(out=out) for a in argv))
    assert run.status == 2 and words in run.err, run.err
    assert not out.exists()


ONE_SLOT = ("--num-blocks", 200, "--max-model-len", 500, "--max-num-seqs", 1)
SLOT_CONSTANT = (*ONE_SLOT, "--step-seconds", 0.01)


def write(path: Path, gap_s: float, prompt_tokens: int = 9) -> Path:
    requests = (
        TraceRequest(arrival_s=i * gap_s, prompt_tokens=prompt_tokens, output_tokens=5)
        for i in range(40)
    )
    write_requests(path, requests)
    return path


@pytest.fixture
def slow(tmp_path: Path) -> Path:
    return write(tmp_path / "trace.jsonl", 0.5)


def test_the_capacity_and_all_rates_are_reported(cbatch: Command, slow: Path) -> None:
    """Service takes 50 ms every 0.5 s: the capacity is 10 times the rate."""
    out = slow.parent / "capacity.json"
    run = cbatch("sim", "capacity", slow, *SLOT_CONSTANT, "--slo", "ttft=0.05", "--json", out)
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


def test_ends_of_the_range_are_reported(cbatch: Command, slow: Path) -> None:
    low = cbatch("sim", "capacity", slow, *SLOT_CONSTANT, "--slo", "tpot=0.001")
    assert low.status == 0 and "even 0.01562 times the rate misses the objectives" in low.out
    high = cbatch(
        "sim", "capacity", slow, *SLOT_CONSTANT, "--slo", "ttft=99", "--rate-scales", "1:4"
    )
    assert high.status == 0 and "capacity: at least 4 times the rate" in high.out
    swept = (*ONE_SLOT, "--sweep", "step-seconds=0.01,0.02", "--processes", 1)
    above = cbatch("sim", "capacity", slow, *swept, "--slo", "ttft=99", "--rate-scales", "3:5")
    tried = [each["tried"] for each in above.lines[-1]["scenarios"]]
    rates = [[one["rate"] for one in each] for each in tried]
    assert rates == [[3, 5]] * 2, "not the lower end of the range"


@pytest.mark.parametrize(
    ("argv", "words"),
    [
        ((), "--slo: is missing"),
        (("--slo", "ttft=1", "--percentile", 101), "--percentile: 101.0"),
        (("--slo", "ttft=1", "--rate-scales", "2:1"), "--rate-scales: 2.0:1.0"),
        (("--slo", "ttft=1", "--sweep", "rate=1,2"), "'rate' is not an option"),
        (("--slo", "ttft=1", "--json", "/no/such/folder/r.json"), "--json: /no/such"),
    ],
)
def test_errors_about_bad_options(
    cbatch: Command, slow: Path, argv: tuple[Any, ...], words: str
) -> None:
    run = cbatch("sim", "capacity", slow, *SLOT_CONSTANT, *argv)
    assert run.status == 2 and words in run.err, run.err
