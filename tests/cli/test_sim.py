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


def test_switches_and_values_with_commas(cbatch: Command, tmp_path: Path) -> None:
    path = tmp_path / "shared.jsonl"
    blocks = {"hash_ids": (1, 2, 3), "hash_block_tokens": 16}
    requests = (
        TraceRequest(arrival_s=i * 1.0, prompt_tokens=48, output_tokens=2, **blocks)
        for i in range(4)
    )
    write_requests(path, requests)
    out = tmp_path / "out.json"
    swept = ("--sweep", "enable-prefix-caching=on,off", "--json", out, "--processes", 1)
    assert cbatch("sim", path, *CONSTANT, *swept).status == 0
    assert [r["prefix_hit_tokens"] for r in json.loads(out.read_bytes())] == [3 * 32, 0]
    with pytest.raises(SystemExit):
        cbatch("sim", path, *CONSTANT, "--sweep")
    refused = cbatch("sim", path, *CONSTANT, "--sweep", "scheduling-policy=fcfs;a,b")
    assert (
        refused.status == 2
        and "--sweep scheduling-policy=a,b: 'a,b' is not allowed; use fcfs" in refused.err
    )


@pytest.mark.parametrize(
    ("argv", "words"),
    [
        (("--sweep", "max-num-seqs"), "'max-num-seqs' is not NAME=VALUES"),
        (("--sweep", "max-num-seqs=2,2"), "has a value twice"),
        (
            ("--sweep", "num-seqs=2,3"),
            "'num-seqs' is not an option of a simulation; did you mean max-num-seqs?; use one of",
        ),
        (("--sweep", "slo=ttft=1,ttft=2"), "'slo' is not an option of a simulation"),
        (
            ("--sweep", "max-num-seqs=2,many"),
            "--sweep max-num-seqs=many: 'many' is not allowed",
        ),
        (("--sweep", "max-num-seqs=2,0"), "--sweep max-num-seqs=0: 0 is not allowed"),
        (
            ("--sweep", "max-num-seqs=2,4", "--sweep", "max-num-seqs=8"),
            "max-num-seqs is given twice",
        ),
        (("--sweep", "max-num-seqs=2,4", "--max-num-seqs", 8), "--max-num-seqs: would be ignored"),
        (
            ("--sweep", "enable-prefix-caching=yes,no"),
            "--sweep enable-prefix-caching=yes: 'yes' is not allowed; use on or off",
        ),
        (("--sweep", "seed=1,2", "--draft", "llama-3.2-1b"), "--draft: would be"),
        (("--sweep", "seed=1,2", "--records", "{out}"), "--records: would be ignored with --sweep"),
        (("--sweep", "seed=1,2", "--processes", 0), "--processes: 0 is not allowed"),
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


def test_an_error_in_another_process_is_reported_unchanged(cbatch: Command, tmp_path: Path) -> None:
    path = tmp_path / "trace.csv"
    path.write_text("arrived_at,num_prefill_tokens,num_decode_tokens\n1,2,3\n2,2,2\n3,x,3\n")
    run = cbatch("sim", path, *CONSTANT, "--sweep", "max-num-seqs=2,3", "--processes", 2)
    assert run.status == 2 and "line 4: num_prefill_tokens: 'x' is not a number" in run.err


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


def test_a_short_trace_of_sessions_has_the_capacity_of_a_long_one(
    cbatch: Command, tmp_path: Path
) -> None:
    """16 slots, 10 ms per step and 10 tokens on average: about 160 requests per second. The
    objective is only on the time between tokens, which a queue does not change."""
    path = tmp_path / "made.jsonl"
    law = ("--arrivals", "poisson:1", "--prompt", "fixed:16", "--output", "uniform:5,15")
    sessions = ("--sessions", 10, "--turns", "fixed:2", "--think", 0.3)
    made = cbatch("trace", "generate", path, *law, "--seed", 3, *sessions)
    assert made.status == 0, made.err
    engine = ("--num-blocks", 4000, "--max-model-len", 500, "--max-num-seqs", 16)
    slo = ("--step-seconds", 0.01, "--slo", "tpot=0.02", "--rate-scales", "60:70")
    run = cbatch("sim", "capacity", path, *engine, *slo)
    (document,) = run.lines[-1]["scenarios"]
    assert document["ends"] == "between" and 128 < document["best"]["arrivals_per_s"] < 176, run.out


def test_a_trace_that_is_much_too_short_is_reported(
    cbatch: Command, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The engine has unlimited slots, and the trace is too short to show a growing queue."""
    monkeypatch.setattr("sim.report.capacity.MAX_REQUESTS", 1000)
    path = tmp_path / "long.jsonl"
    requests = [
        TraceRequest(arrival_s=i * 1e-4, prompt_tokens=4, output_tokens=50) for i in range(900)
    ]
    write_requests(path, requests)
    slots = ("--num-blocks", 9_000, "--max-model-len", 500, "--max-num-seqs", 2_000)
    budget = ("--max-num-batched-tokens", 9_000, "--step-seconds", 0.01, "--slo", "tpot=1")
    run = cbatch("sim", "capacity", path, *slots, *budget, "--rate-scales", "0.5:1")
    words = "too short to distinguish a burst from a steady load"
    assert run.status == 0 and words in run.out, run.out


def test_capacity_of_every_scenario_of_a_sweep(cbatch: Command, slow: Path) -> None:
    swept = ("--sweep", "step-seconds=0.01,0.02", "--processes", 1, "--rate-scales", "2:32")
    level = ("--slo", "ttft=0.3", "--goodput-share", 0.99)
    run = cbatch("sim", "capacity", slow, *ONE_SLOT, *swept, *level)
    assert run.status == 0, run.err
    fast, slow = (scenario["best"]["rate"] for scenario in run.lines[-1]["scenarios"])
    assert fast > 1.5 * slow and "step-seconds 0.02" in run.out


def test_ends_of_the_range_are_reported(cbatch: Command, slow: Path) -> None:
    low = cbatch("sim", "capacity", slow, *SLOT_CONSTANT, "--slo", "tpot=0.001")
    assert low.status == 0 and "even 0.01562 times the rate misses the objectives" in low.out
    high = cbatch(
        "sim", "capacity", slow, *SLOT_CONSTANT, "--slo", "ttft=99", "--rate-scales", "1:4"
    )
    assert high.status == 0 and "capacity: at least 4 times the rate" in high.out
    above = cbatch(
        "sim", "capacity", slow, *SLOT_CONSTANT, "--slo", "ttft=99", "--rate-scales", "3:5"
    )
    tried = above.lines[-1]["scenarios"][0]["tried"]
    assert [one["rate"] for one in tried] == [3, 5], "not the lower end of the range"


@pytest.mark.parametrize(
    ("argv", "words"),
    [
        ((), "--slo: is missing"),
        (("--slo", "ttft=1", "--percentile", 101), "--percentile: 101.0"),
        (("--slo", "ttft=1", "--goodput-share", 1.5), "--goodput-share: 1.5"),
        (("--slo", "ttft=1", "--rate-scales", "2:1"), "--rate-scales: 2.0:1.0"),
        (("--slo", "ttft=1", "--sweep", "rate=1,2"), "'rate' is not an option"),
        (("--slo", "ttft=1", "--acceptance", 0.5), "--acceptance: would be ignored"),
        (("--slo", "ttft=1", "--json", "/no/such/folder/r.json"), "--json: /no/such"),
    ],
)
def test_errors_about_bad_options(
    cbatch: Command, slow: Path, argv: tuple[Any, ...], words: str
) -> None:
    run = cbatch("sim", "capacity", slow, *SLOT_CONSTANT, *argv)
    assert run.status == 2 and words in run.err, run.err


def test_traces_without_a_capacity_report_the_reason(cbatch: Command, tmp_path: Path) -> None:
    at_once = write(tmp_path / "at_once.jsonl", 0.0)
    run = cbatch("sim", "capacity", at_once, *SLOT_CONSTANT, "--slo", "ttft=1")
    assert run.status == 2 and "all arrive at once" in run.err
    too_long = write(tmp_path / "long.jsonl", 0.5, prompt_tokens=600)
    run = cbatch("sim", "capacity", too_long, *SLOT_CONSTANT, "--slo", "ttft=1")
    assert run.status == 2 and "none of its requests can run" in run.err
