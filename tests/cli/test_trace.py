"""`cbatch trace` and `cbatch sim` in this process."""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from cbatch.cli.settings import add_flags, read_settings
from cbatch.steplog.recorder import StepRecorder
from sim.cli.scenario import Scenario
from sim.cli.simulation import build
from sim.workload.arrivals import gamma
from sim.workload.generate import generate
from sim.workload.lengths import lognormal, uniform
from sim.workload.options import warn
from sim.workload.traces.reader import Trace, write_requests
from sim.workload.traces.request import TraceRequest
from tests.cli.conftest import Run
from tests.helpers import World, make_config, make_request

Command = Callable[..., Run]
SMALL = ("--num-blocks", 200, "--max-model-len", 500, "--step-seconds", 0.01)


@pytest.fixture
def trace(tmp_path: Path) -> Path:
    path = tmp_path / "trace.jsonl"
    requests = [
        TraceRequest(arrival_s=i * 0.2, prompt_tokens=10 + i, output_tokens=2 + i % 3)
        for i in range(30)
    ]
    write_requests(path, requests)
    return path


def test_show_prints_a_table_a_json_line_and_draws(cbatch: Command, trace: Path) -> None:
    plot = trace.parent / "plots" / "trace.png"
    run = cbatch("trace", "show", trace, "--plot", plot)
    assert run.status == 0 and "requests/s" in run.out
    last = json.loads(run.out.splitlines()[-1])
    assert (last["requests"], last["format"]) == (30, "cbatch-requests")
    assert last["rate_per_s"] == pytest.approx(5.0)
    assert plot.read_bytes()[:4] == b"\x89PNG"


def test_convert_sort_sample_and_scale(cbatch: Command, tmp_path: Path) -> None:
    source = tmp_path / "vidur.csv"
    source.write_text("arrived_at,num_prefill_tokens,num_decode_tokens\n4,10,1\n2,20,2\n8,30,3\n")
    out = tmp_path / "out.jsonl.gz"
    refused = cbatch("trace", "convert", source, out)
    assert refused.status == 2 and "line 3: arrival" in refused.err and not out.exists()
    assert list(tmp_path.iterdir()) == [source], "a partial file is left"
    assert cbatch("trace", "convert", source, out, "--sort").lines[-1]["requests"] == 3
    assert [(r.arrival_s, r.prompt_tokens) for r in Trace(out)] == [(0, 20), (2, 10), (6, 30)]
    half = tmp_path / "half.jsonl"
    assert cbatch("trace", "scale", out, half, "--rate-scale", 2, "--output", 3).status == 0
    assert [(r.arrival_s, r.output_tokens) for r in Trace(half)] == [(0, 6), (1, 3), (3, 9)]
    cut = tmp_path / "cut.jsonl"
    assert cbatch("trace", "sample", half, cut, "--window", "1:", "--requests", 1).status == 0
    assert [(r.arrival_s, r.prompt_tokens) for r in Trace(cut)] == [(0, 10)]


@pytest.mark.parametrize(
    ("argv", "words"),
    [
        (("show", "{trace}", "--seed", 1), "--seed: is not used here"),
        (("sample", "{trace}", "{out}"), "keeps everything"),
        (("scale", "{trace}", "{out}"), "changes nothing"),
        (("scale", "{trace}", "{trace}", "--rate", 2), "the trace itself"),
        (("convert", "{trace}", "{out}/in/nowhere"), "OUT: "),
    ],
)
def test_errors_about_bad_commands(
    cbatch: Command, trace: Path, argv: tuple[Any, ...], words: str
) -> None:
    before = trace.read_bytes()
    places = {"trace": trace, "out": trace.parent / "out.jsonl"}
    run = cbatch("trace", *(str(a).format(**places) for a in argv))
    assert run.status == 2 and words in run.err, run.err
    assert trace.read_bytes() == before and not places["out"].exists()


def test_sim_prints_a_table_and_writes_the_requested_files(cbatch: Command, trace: Path) -> None:
    names = ("records.jsonl", "page.html", "steps.json", "a.json")
    records, page, steps, out = (trace.parent / name for name in names)
    files = ("--records", records, "--page", page, "--perfetto", steps)
    run = cbatch("sim", trace, *SMALL, "--slo", "ttft=0.015", "--json", out, *files)
    assert run.status == 0 and "time to first token" in run.out
    assert "simulated: cost constant, step duration s 0.01" in run.out
    report, last = json.loads(out.read_bytes()), run.lines[-1]
    assert report["requests"] == last["requests"] == 30
    assert report["settings"]["cost"] == "constant" and report["goodput"]["share"] <= 1
    assert report["tpot_s"]["mean"] == pytest.approx(0.01)
    lines = [json.loads(line) for line in records.read_text().splitlines()]
    assert len(lines) == 30 and {"ttft_s", "tpot_s", "e2e_s", "queue_s"} <= set(lines[0])
    events = json.loads(steps.read_text())
    num_steps = sum(event["ph"] == "X" and event["tid"] == 1 for event in events)
    assert num_steps == report["steps"] == last["steps"]
    assert "trace.jsonl, lookahead off" in page.read_text()
    nowhere = cbatch("sim", trace, *SMALL, "--page", trace / "page.html")
    assert nowhere.status == 2 and "--page" in nowhere.err


def test_sim_by_roofline_with_drafts_and_with_clients(cbatch: Command, trace: Path) -> None:
    run = cbatch(
        "sim", trace, "--lookahead", "fixed:3", "--draft", "llama-3.2-1b",
        "--acceptance", 0.8, "--requests", 10,
    )  # fmt: skip
    last = run.lines[-1]
    assert last["requests"] == 10 and last["settings"]["gpu"] == "H100"
    assert last["speculation"]["drafted_tokens"] > 0
    clients = cbatch("sim", trace, "--concurrency", 2, "--think", 0.5, "--gpu", "l40s").lines[-1]
    assert clients["requests"] == 30 and clients["mean_running"] < 2


def test_sim_of_a_fleet(cbatch: Command, trace: Path) -> None:
    records = trace.parent / "records.jsonl"
    more = ("--replicas", 2, "--router", "least-loaded", "--records", records)
    run = cbatch("sim", trace, *SMALL, *more)
    last = run.lines[-1]
    assert run.status == 0 and "replica 1: 15 requests" in run.out
    assert [replica["requests"] for replica in last["replicas"]] == [15, 15]
    assert (last["settings"]["replicas"], last["settings"]["router"]) == (2, "least-loaded")
    served = [json.loads(line)["replica"] for line in records.read_text().splitlines()]
    assert sorted(served) == [0] * 15 + [1] * 15
    swept = cbatch("sim", trace, *SMALL, "--sweep", "replicas=1,2", "--processes", 1)
    assert [row["replicas"] for row in swept.lines[-1]["scenarios"]] == ["1", "2"]


@pytest.mark.parametrize(
    ("argv", "words"),
    [
        (("--acceptance", 0.5), "--acceptance: would be ignored"),
        (("--concurrency", 2, "--rate", 3), "--rate: would be ignored"),
        (("--cost", "/no/file"), "--cost: /no/file is not a cost profile"),
        ((*SMALL, "--lookahead", "ema", "--acceptance", "beta:1"), "--acceptance: 'beta:1'"),
        (("--step-seconds", 0.1), "--num-blocks: is not known"),
        (("--step-seconds", 0), "--step-seconds: 0.0 is not allowed; give positive seconds"),
        (("--lookahead", "fixed:2"), "--draft: is missing"),
        (("--slo", "tft=1"), "--slo: 'tft=1'"),
        (("--gpu", "H1000"), "--gpu: 'H1000' is unknown"),
        (("--model", "gpt-7"), "--model: 'gpt-7'"),
        (("--replicas", 2, "--router", "random"), "--router: 'random' is unknown"),
        (("--step-seconds", 0.1, "--pool", "vllm-0.19"), "the memory of the device is not known"),
        (("--gpu-memory-utilization", 1.5), "--gpu-memory-utilization: 1.5 is not allowed"),
    ],
)
def test_errors_about_bad_options(
    cbatch: Command, trace: Path, argv: tuple[Any, ...], words: str
) -> None:
    run = cbatch("sim", trace, *argv)
    assert run.status == 2 and words in run.err, run.err


def run_as_recorded(path: Path, *argv: str) -> tuple[int, float | None]:
    """Return the settings of the simulated engine that no option sets."""
    parser = argparse.ArgumentParser()
    add_flags(parser, Scenario)
    args = parser.parse_args([str(path), "--step-seconds", "0.01", *argv])
    config = build(read_settings(Scenario, args).values).config
    return config.decode_reserve_tokens, config.ageing_per_s


def test_a_step_log_supplies_its_engines_settings(cbatch: Command, tmp_path: Path) -> None:
    """Without a size on the command line, the log's size applies. With `--gpu` the pool is the
    device's."""
    path = tmp_path / "steps.jsonl"
    rules = {"queue_policy": "shortest", "ageing_per_s": 7.0, "decode_reserve_tokens": 3}
    config = make_config(max_num_seqs=3, enable_prefix_caching=False, **rules)
    with StepRecorder(path) as log:
        world = World(config, log=log)
        for i in range(4):
            world.add(make_request(f"r{i}", 9, seed=i, max_tokens=30))
        world.run()
    constant = ("--step-seconds", 0.01)

    def settings(*argv: Any) -> dict[str, Any]:
        run = cbatch("sim", path, *argv)
        assert run.status == 0, run.err
        return run.lines[-1]["settings"]

    values = settings(*constant)
    fields = ("num_blocks", "block_size", "max_num_seqs", "max_model_len")
    for field in (*fields, "max_num_batched_tokens", "queue_policy", "enable_prefix_caching"):
        assert values[field] == getattr(config, field), field
    assert len(values["as_recorded"]) == 9
    changed = settings(
        *constant, "--max-num-seqs", 2, "--enable-prefix-caching", "--scheduling-policy", "fcfs"
    )
    assert [changed[f] for f in ("max_num_seqs", "enable_prefix_caching", "queue_policy")] == [
        2,
        True,
        "fcfs",
    ]
    assert "max_num_seqs" not in changed["as_recorded"] and "num_blocks" in changed["as_recorded"]
    on_device = settings("--gpu", "L4", "--model", "llama-3.2-1b")
    assert on_device["num_blocks"] > 10_000 and on_device["max_num_seqs"] == 3
    for argv in ((), ("--model", "llama-3.2-1b"), ("--tp", 2)):
        run = cbatch("sim", path, *argv)
        assert run.status == 2 and "--cost: is missing: a step log" in run.err, run.err
    run = cbatch("sim", "capacity", path, "--slo", "ttft=1")
    assert run.status == 2 and "--gpu" in run.err and "H100" not in run.out + run.err
    assert run_as_recorded(path) == (3, 7.0)
    assert run_as_recorded(path, "--scheduling-policy", "fcfs") == (3, None)


@pytest.fixture(scope="module")
def calibration(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return the file that `cbatch calibrate` writes for a few steps of the demo pair."""
    from cbatch.cli.main import main

    path = tmp_path_factory.mktemp("calibration") / "cost.json"
    sizes = ["--max-num-seqs", "2", "--num-blocks", "80", "--max-model-len", "160"]
    few = ["--seconds", "3", "--lookahead", "fixed"]  # `adaptive` needs prices
    assert main(["calibrate", "--out", str(path), *few, *sizes]) == 0
    return path


def test_sim_by_calibration(cbatch: Command, trace: Path, calibration: Path) -> None:
    document = json.loads(calibration.read_bytes())
    assert document["engine"]["max_num_seqs"] == document["max_rows"] == 2
    assert document["held_out"]["steps"] > 0 and document["profile"] is None
    run = cbatch("sim", trace, "--cost", calibration, "--lookahead", "adaptive", "--requests", 4)
    last = run.lines[-1]
    settings = last["settings"]
    assert (settings["cost"], settings["num_blocks"], settings["max_num_seqs"]) == (
        "calibrated",
        80,
        2,
    )
    assert last["speculation"]["drafted_tokens"] > 0
    wide = cbatch("sim", trace, "--cost", calibration, "--max-num-seqs", 64)
    assert wide.status == 0 and "--max-num-seqs: larger steps than 2 were not" in wide.err


LAWS = ("--arrivals", "gamma:5,2", "--prompt", "lognormal:90,0.5,400", "--output", "uniform:2,9")
CERTAIN = ("--arrivals", "constant:5", "--prompt", "fixed:9", "--output", "fixed:2")


def test_requests_are_made_written_and_served(cbatch: Command, tmp_path: Path) -> None:
    outs = [tmp_path / name for name in ("a.jsonl", "b.jsonl", "c.jsonl.gz")]
    for out, seed in zip(outs, (3, 3, 4), strict=True):
        run = cbatch("trace", "generate", out, *LAWS, "--requests", 50, "--seed", seed)
        assert run.status == 0 and run.lines[-1]["requests"] == 50
    assert outs[0].read_bytes() == outs[1].read_bytes()
    lengths = lognormal(90, 0.5, high=400), uniform(2, 9)
    made = generate(lambda rng: gamma(5, 2, rng), *lengths, requests=50, seed=3)
    assert list(Trace(outs[0])) == list(made) != list(Trace(outs[2]))
    assert cbatch("sim", outs[2], *SMALL).lines[-1]["requests"] == 50


@pytest.mark.parametrize(
    ("argv", "words"),
    [
        ((*LAWS,), "--requests: or --sessions is needed, not both"),
        ((*LAWS, "--requests", 5, "--turns", "fixed:2"), "--turns: would be ignored"),
        ((*CERTAIN, "--requests", 5, "--seed", 1), "--seed: is not used here"),
        ((*CERTAIN, "--requests", 5, "--output", "zipf:1"), "--output: 'zipf:1' is not known"),
    ],
)
def test_errors_about_what_cannot_be_generated(
    cbatch: Command, tmp_path: Path, argv: tuple[Any, ...], words: str
) -> None:
    run = cbatch("trace", "generate", tmp_path / "out.jsonl", *argv)
    assert run.status == 2 and words in run.err, run.err
    assert not list(tmp_path.iterdir())


# --- lengths, arrivals and rates ------------------------------------------------------------------


@pytest.fixture
def four_per_s(tmp_path: Path) -> Path:
    """Write a trace of four requests a second."""
    path = tmp_path / "trace.jsonl"
    requests = (TraceRequest(arrival_s=i / 4, prompt_tokens=9, output_tokens=2) for i in range(41))
    write_requests(path, requests)
    return path


def arrivals(cbatch: Command, four_per_s: Path, *more: Any) -> tuple[float, Run]:
    """Return the time of the last arrival in seconds, and the run."""
    records = four_per_s.parent / "records.jsonl"
    run = cbatch("sim", four_per_s, *SMALL, "--records", records, *more)
    assert run.status == 0, run.err
    lines = records.read_text().splitlines()
    return max(float(line.partition('"arrival_s":')[2].partition(",")[0]) for line in lines), run


def test_a_rate_is_in_requests_a_second(cbatch: Command, four_per_s: Path) -> None:
    for more, last_s, scale in (
        ((), 10, None),
        (("--rate-scale", 2), 5, 2),
        (("--rate", 8), 5, 2),
        (("--rate", 2), 20, 0.5),
        (("--rate", 8, "--requests", 21), 2.5, 2),
    ):
        warn.cache_clear()
        reached_s, run = arrivals(cbatch, four_per_s, *more)
        assert reached_s == pytest.approx(last_s), more
        assert run.lines[-1]["settings"]["rate_scale"] == scale
        said = "is in requests per second; the trace has 4. To give a multiple of"
        assert (said in run.err) == ("--rate" in more), run.err
