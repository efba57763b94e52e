"""`cbatch sim --sweep`: every row equals a separate run with its values."""

from __future__ import annotations

import json
import pickle
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from cbatch.core.request.errors import FieldError, RefusedError
from sim.workload.traces.reader import write_requests
from sim.workload.traces.request import TraceError, TraceRequest
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
        (("--sweep", "max-num-seqs=2,,3"), "is not NAME=VALUES"),
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
        (("--sweep", "rate=1,-2"), "--sweep rate=-2: -2.0 is not allowed"),
        (("--sweep", "concurrency=1,2", "--rate", 2), "--rate: would be ignored"),
        (("--sweep", "lookahead=off,sometimes"), "--sweep lookahead=sometimes: 'sometimes'"),
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


@pytest.mark.parametrize(
    "error",
    [
        FieldError("field", "is wrong", "mend it"),
        RefusedError("prompt", "too long", "cut it"),
        TraceError("file.csv", 7, "prompt", "has 0 tokens", "fix the row"),
    ],
)
def test_errors_are_pickled_completely(error: FieldError) -> None:
    again = pickle.loads(pickle.dumps(error))
    assert (type(again), str(again), vars(again)) == (type(error), str(error), vars(error))
