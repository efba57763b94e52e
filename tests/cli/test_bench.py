"""`cbatch bench` and `cbatch report` from the command line, against servers with a toy engine."""

from __future__ import annotations

import asyncio
import csv
import json
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from bench.load.run.refusals import TRIAL_TOKENS

from bench.load.run.drive import drive
from bench.load.run.selftest import make_plan, measure_client, stub_server
from cbatch import LLM
from cbatch.cli.main import main
from cbatch.demo import demo_paths
from sim.workload.traces.reader import write_requests
from sim.workload.traces.request import TraceRequest
from tests.bench.load.scripted import DONE, Exchange, answer_well, chunk, scripted
from tests.cli.conftest import Run
from tests.server.http_client import Client, sample, serving, wait_until
from tests.toy_engine import make_engine

ROOT = Path(__file__).parent.parent.parent
SIZES: dict[str, Any] = {"num_blocks": 512, "max_model_len": 600, "block_size": 8}


@pytest.fixture(scope="module")
def toy() -> Iterator[Client]:
    with serving(make_engine(max_num_seqs=8, **SIZES)) as client:
        yield client


@pytest.fixture
def bench(
    cbatch: Callable[..., Run], toy: Client, tmp_path: Path
) -> Callable[..., tuple[Run, Any, list[Any]]]:
    """Return a function that runs a load and returns the run, its JSON document and its records."""
    document, records = tmp_path / "report.json", tmp_path / "records.jsonl"

    def run(*argv: Any) -> tuple[Run, Any, list[Any]]:
        url = f"http://127.0.0.1:{toy.port}"
        done = cbatch("bench", url, "--json", document, "--records", records, *argv)
        if not document.exists():
            return done, None, []
        rows = [json.loads(line) for line in records.read_text().splitlines()]
        return done, json.loads(document.read_bytes()), rows

    return run


TEXT = ("--text", str(ROOT / "sim/cli/replay_command.py"))
SHORT = (*TEXT, "--prompt-tokens", "20", "--output-tokens", "uniform:3:12", "--requests", "24")


@pytest.mark.parametrize(
    "options",
    [
        ("--concurrency", "4"),
        ("--concurrency", "4", "--final-usage"),
        ("--concurrency", "3", "--no-stream"),
        ("--rate", "200", "--arrivals", "gamma:2"),
    ],
)
def test_figures_are_what_the_server_counts(
    bench: Callable[..., Any], toy: Client, options: tuple[str, ...]
) -> None:
    before = sample(toy, "vllm:generation_tokens_total")
    run, document, records = bench(*options, *SHORT)
    assert run.status == 0, run.err
    tokens = sample(toy, "vllm:generation_tokens_total") - before - TRIAL_TOKENS
    assert document["output_tokens"] == tokens == document["server"]["output_tokens"]
    assert tokens == sum(record["output_tokens"] for record in records)
    assert document["prompt_tokens"] == 24 * 20  # as requested: cut from the server's own tokens
    assert document["requests"] == document["sent"] == len(records) == 24
    assert document["output_tokens_per_s"] == pytest.approx(tokens / document["duration_s"])
    assert not document["errors"] and not document["cut_requests"]
    assert document["server"]["acceptance"] > 0
    assert run.lines[-1]["output_tokens"] == tokens
    streamed = "--no-stream" not in options
    assert (document["tpot_s"]["count"] > 0) == streamed == (document["chunks"] > 0)
    by_chunk = streamed and "--final-usage" not in options
    assert document["token_source"] == ("per chunk usage" if by_chunk else "usage")


def test_a_sweep_with_repeats_and_a_comparison(
    bench: Callable[..., Any], cbatch: Callable[..., Run], tmp_path: Path
) -> None:
    options = ("--concurrency", "1,2,4", "--repeats", "2", "--warmup", "3", "--slo", "e2e=60")
    run, document, records = bench(*options, *SHORT, "--requests", "12")
    assert run.status == 0 and document["schema"] == "cbatch-sweep"
    assert document["loads"] == [1, 2, 4] and document["knee"]["load"] > 0
    for load, report in zip((1, 2, 4), document["reports"], strict=True):
        assert report["sent"] == 24 and report["peak_in_flight"] == load
        assert report["goodput"]["share"] == 1.0 and "output_tokens_per_s" in report["confidence"]
    assert len(records) == 72 and {record["run"] for record in records} == {0, 1}
    first = tmp_path / "first.json"
    first.write_text(json.dumps(document))
    compared = cbatch("report", "compare", first, first)
    results = compared.lines[-1]["results"]
    assert compared.status == 0 and len(results) == 3
    assert {each["difference"] for r in results for each in r["measures"]} <= {0, None}


def test_the_servers_metrics_are_read_during_the_run(
    bench: Callable[..., Any], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr("bench.load.run.scrape.SCRAPE_EVERY_S", 0.01)
    table = tmp_path / "loads.csv"
    run, document, _ = bench("--concurrency", "4", *SHORT, "--requests", "96", "--csv", table)
    assert run.status == 0
    looks = document["server_over_time"]
    assert len(looks) > 2
    stamps_s = [each["at_s"] for each in looks]
    assert stamps_s == sorted(stamps_s) and stamps_s[0] > -0.1
    assert stamps_s[-1] <= document["duration_s"] + 0.1
    tokens = [each["output_tokens"] for each in looks]
    assert tokens == sorted(tokens) and 0 < tokens[-1] <= document["output_tokens"]
    assert max(each["running"] for each in looks) > 0
    with table.open(newline="") as file:
        (row,) = csv.DictReader(file)
    assert row["concurrency"] == "4" and row["rate_per_s"] == ""
    assert float(row["ttft_s.p50"]) == document["ttft_s"]["p50"]
    assert int(row["server.output_tokens"]) == document["output_tokens"]


def test_a_search_for_the_highest_rate(bench: Callable[..., Any], tmp_path: Path) -> None:
    """No rate meets such a short time: the search ends at the lower end of its range, and reports
    it."""
    options = ("--find-rate", "--rate", "6400", "--slo", "ttft=1e-6", "--goodput-share", "0.5")
    run, document, _ = bench(*options, *SHORT, "--requests", "4")
    assert run.status == 1 and "even 100 requests/s miss" in run.out
    assert document["capacity"]["ends"] == run.lines[-1]["capacity"]["ends"] == "lowest fails"
    rates = [each["rate"] for each in document["capacity"]["tried"]]
    assert rates == [6400 / 2**i for i in range(7)] == document["loads"][::-1]


def test_a_measured_run_next_to_a_simulated_one(
    bench: Callable[..., Any], cbatch: Callable[..., Run], tmp_path: Path
) -> None:
    trace = tmp_path / "trace.jsonl"
    rows = [{"arrival_s": i / 20, "prompt_tokens": 16, "output_tokens": 5} for i in range(30)]
    header = {"format": "cbatch-requests", "version": 1}
    trace.write_text("\n".join(json.dumps(row) for row in (header, *rows)))
    run, document, records = bench("--trace", trace, "--rate-scale", "2", *TEXT)
    assert run.status == 0 and document["requests"] == 30
    stamps_s = [record["arrival_s"] for record in records]
    assert stamps_s == pytest.approx([i / 40 for i in range(30)])
    simulated = tmp_path / "simulated.json"
    sizes = ("--num-blocks", "512", "--max-model-len", "600", "--step-seconds", "0.01")
    assert cbatch("sim", trace, *sizes, "--json", simulated).status == 0
    measured = tmp_path / "report.json"
    compared = cbatch("report", "compare", simulated, measured)
    assert compared.status == 0 and compared.lines[-1]["results"][0]["kinds"] == [
        "simulated",
        "measured",
    ]
    values = {each["name"]: each for each in compared.lines[-1]["results"][0]["measures"]}
    ttft = values["time to first token, ms, p50"]
    medians_s = json.loads(simulated.read_bytes())["ttft_s"]["p50"], document["ttft_s"]["p50"]
    assert (ttft["a"], ttft["b"]) == pytest.approx([1e3 * (each or 0) for each in medians_s])
    assert ttft["difference"] == pytest.approx(medians_s[1] / (medians_s[0] or 1) - 1)


def test_a_page_of_measured_loads_and_one_next_to_their_simulation(
    bench: Callable[..., Any], cbatch: Callable[..., Run], tmp_path: Path
) -> None:
    page = tmp_path / "page.html"
    run, document, _ = bench("--concurrency", "2,4", *SHORT, "--page", page)
    assert run.status == 0
    runs = _drawn(page)
    assert [each["name"] for each in runs] == ["concurrency 2", "concurrency 4"]
    assert [each["report"] for each in runs] == document["reports"]
    for drawn in runs:
        series, report = drawn["series"], drawn["report"]
        assert drawn["points"]["num_requests"] == 24
        assert drawn["quantiles"]["ttft_s"][100] == pytest.approx(report["ttft_s"]["p50"], rel=1e-5)
        tokens = sum(series["output_tokens_per_s"]) * series["length_s"]
        assert tokens == pytest.approx(report["output_tokens"], rel=1e-3)
    trace = tmp_path / "trace.jsonl"
    rows = [{"arrival_s": i / 40, "prompt_tokens": 16, "output_tokens": 5} for i in range(20)]
    header = {"format": "cbatch-requests", "version": 1}
    trace.write_text("\n".join(json.dumps(row) for row in (header, *rows)))
    assert bench("--trace", trace, *TEXT)[0].status == 0
    simulated, sim_rows = tmp_path / "simulated.json", tmp_path / "told.jsonl"
    sizes = ("--num-blocks", "512", "--max-model-len", "600", "--step-seconds", "0.01")
    assert cbatch("sim", trace, *sizes, "--json", simulated, "--records", sim_rows).status == 0
    reports = (tmp_path / "report.json", simulated)
    both = ("report", "page", *reports, "--page", page)
    assert cbatch(*both, "--records", tmp_path / "records.jsonl", sim_rows).status == 0
    runs = _drawn(page)
    assert [each["name"] for each in runs] == ["report, measured", "simulated, simulated"]
    for drawn, path in zip(runs, reports, strict=True):
        assert drawn["report"] == json.loads(path.read_bytes())
        assert drawn["points"]["num_requests"] == 20 and len(drawn["points"]["e2e_s"]) == 20
        cut = drawn["report"]["e2e_s"]["p50"]
        assert drawn["quantiles"]["e2e_s"][100] == pytest.approx(cut, rel=1e-5)
    assert cbatch(*both).status == 0 and [each["points"] for each in _drawn(page)] == [None, None]
    for records in ((sim_rows,), (sim_rows, trace), (sim_rows, tmp_path / "nowhere")):
        run = cbatch(*both, "--records", *records)
        assert run.status == 2 and "--records: " in run.err


def _drawn(page: Path) -> list[dict[str, Any]]:
    line = next(x for x in page.read_text().splitlines() if x.startswith("const DATA = "))
    runs: list[dict[str, Any]] = json.loads(line.removeprefix("const DATA = ")[:-1])["runs"]
    return runs


def test_conversations_over_two_processes(bench: Callable[..., Any], tmp_path: Path) -> None:
    text = tmp_path / "text.txt"
    text.write_text("the quick brown fox jumps over the lazy dog " * 99)
    words = ("--text", text, "--turns", "3", "--prompt-tokens", "10", "--output-tokens", "4")
    run, document, records = bench(
        "--processes", "2", "--concurrency", "4", "--requests", "6", "--system-tokens", "16", *words
    )
    assert run.status == 0 and document["client"]["processes"] == 2
    assert sorted(record["index"] for record in records) == list(range(18))
    turns: dict[str, list[Any]] = {}
    for record in sorted(records, key=lambda record: record["index"]):
        turns.setdefault(record["session"], []).append(record)
    assert len(turns) == 6
    for session in turns.values():
        prompts = [record["prompt_tokens"] for record in session]
        assert prompts == sorted(prompts) and prompts[0] < prompts[1] < prompts[2]
        for before, after in zip(session, session[1:], strict=False):
            assert after["sent_s"] >= before["arrival_s"] + before["e2e_s"]
    assert document["prefix_hit_tokens"] > 0


def test_a_file_of_prompts_and_calls_that_fail(bench: Callable[..., Any], tmp_path: Path) -> None:
    prompts = tmp_path / "prompts.jsonl"
    lines = [{"prompt": "abc", "max_tokens": 4}, {"prompt": "x" * 700}, {"prompt": "d", "n": 1}]
    prompts.write_text("\n".join(map(json.dumps, lines)))
    options = ("--prompts", prompts, "--requests", "30", "--concurrency", "3")
    run, document, records = bench(*options, "--output-tokens", "6")
    assert run.status == 1, "a third of the calls failed"
    assert document["errors"] == {"status 400": 10} and len(document["refused"]) == 10
    lengths = {
        record["index"] % 3: record["output_tokens"] for record in records if "error" not in record
    }
    assert set(lengths) == {0, 2} and lengths[0] <= 4 and lengths[2] <= 6
    assert bench(*options, "--max-errors", "0.5")[0].status == 0


def test_a_file_of_prompts_at_the_times_of_a_trace(
    bench: Callable[..., Any], tmp_path: Path
) -> None:
    """Only the arrivals and output lengths of the trace are used, not its prompts."""
    trace, prompts = tmp_path / "trace.jsonl", tmp_path / "prompts.txt"
    requests = [
        TraceRequest(arrival_s=i / 50, prompt_tokens=99, output_tokens=3 + i) for i in range(6)
    ]
    write_requests(trace, requests)
    prompts.write_text("abc\nabcdefgh\n")
    run, _, records = bench("--trace", trace, "--prompts", prompts, "--ignore-eos")
    assert run.status == 0, run.err
    records.sort(key=lambda record: record["index"])
    assert [record["output_tokens"] for record in records] == [3, 4, 5, 6, 7, 8]
    assert [record["arrival_s"] for record in records] == pytest.approx([i / 50 for i in range(6)])
    short, long = (record["prompt_tokens"] for record in records[:2])
    assert short < long < 99 and [r["prompt_tokens"] for r in records] == [short, long] * 3


@pytest.mark.parametrize(
    ("argv", "words"),
    [
        (("--rate", "3", "--concurrency", "2"), "--concurrency: would be ignored"),
        (("--arrivals", "poisson"), "--arrivals: would be ignored"),
        (("--rate", "-1"), "--rate: '-1' is not allowed"),
        (("--find-rate", "--slo", "ttft=1"), "--find-rate: would be ignored"),
        (("--find-rate", "--rate", "1"), "--find-rate: would be ignored"),
        (("--find-rate", "--rate", "1,2", "--slo", "ttft=1"), "--rate: has several"),
        (("--goodput-share", "0.9"), "--goodput-share: would be ignored"),
        ((*TEXT, "--requests", "2", "--concurrency", "3"), "--requests: 2 for 3 clients"),
        ((*TEXT, "--prompt-tokens", "many"), "--prompt-tokens: 'many' is not known"),
        (("--prompts", "demo", "--turns", "2"), "--prompts: would be ignored"),
        (("--slo", "ttft"), "--slo"),
        (("--field", "top_k"), "--field"),
    ],
)
def test_bad_options_are_named(
    bench: Callable[..., Any], argv: tuple[str, ...], words: str
) -> None:
    run, document, _ = bench(*argv)
    assert run.status == 2 and words in run.err and document is None


def test_an_unreachable_server(cbatch: Callable[..., Run]) -> None:
    run = cbatch("bench", "http://127.0.0.1:9")
    assert run.status == 2 and "URL: not connected" in run.err
    run = cbatch("bench")
    assert run.status == 2 and "URL: is missing" in run.err
    run = cbatch("report", "compare", ROOT / "pyproject.toml", ROOT / "pyproject.toml")
    assert run.status == 2 and "is not a report" in run.err


MADE = ("--model", "m", "--quiet", "--requests", "3", "--concurrency", "1", "--output-tokens", "3")


@pytest.fixture
def prompts(tmp_path: Path) -> tuple[str, str]:
    path = tmp_path / "prompts.txt"
    path.write_text("x\n")
    return "--prompts", str(path)


def test_fields_that_the_server_rejects_are_dropped_with_one_warning(
    cbatch: Callable[..., Run], prompts: tuple[str, str], tmp_path: Path
) -> None:
    async def strict(exchange: Exchange) -> None:
        if "continuous_usage_stats" in exchange.body.get("stream_options", {}):
            error = b'{"error": {"message": "Unknown parameter: continuous_usage_stats"}}'
            await exchange.whole(error, "400 Bad Request")
        else:
            await answer_well(exchange)

    document = tmp_path / "report.json"
    with scripted(strict) as server:
        run = cbatch("bench", server.endpoint.url, *prompts, *MADE, "--json", document)
    assert run.status == 0, run.err
    assert run.err.count("left out, since the server rejects it") == 1
    report = json.loads(document.read_bytes())
    assert report["requests"] == 3 and not report["errors"]
    assert report["settings"]["left_out"] == ["continuous_usage_stats"]


def test_a_failed_run_prints_the_reason_first_and_the_remedy(
    cbatch: Callable[..., Run], prompts: tuple[str, str]
) -> None:
    async def busy(exchange: Exchange) -> None:
        await exchange.whole(b'{"error": {"message": "slow down"}}', "429 Too Many Requests")

    with scripted(busy) as server:
        run = cbatch("bench", server.endpoint.url, *prompts, *MADE)
    assert run.status == 1
    first, second, *rest = run.out.splitlines()
    assert first == "failed: 3 of 3 calls, status 429: 429: slow down"
    assert second.startswith("  remedy: ") and "--rate" in second
    assert not any("time to first token" in line for line in rest), "nothing was measured"


def test_a_server_without_usage_is_measured_by_its_chunks(
    cbatch: Callable[..., Run], prompts: tuple[str, str], tmp_path: Path
) -> None:
    async def uncounted(exchange: Exchange) -> None:
        await exchange.begin()
        for number in range(4):
            await exchange.event(chunk("a", None, reason="stop" if number == 3 else None))
        await exchange.event(DONE)
        await exchange.event(b"")

    document = tmp_path / "report.json"
    with scripted(uncounted) as server:
        run = cbatch("bench", server.endpoint.url, *prompts, *MADE, "--json", document)
    report = json.loads(document.read_bytes())
    assert run.status == 0 and not report["errors"] and report["output_tokens"] == 12
    assert report["token_source"] == "chunks"
    assert any("each chunk" in warning for warning in report["warnings"])


def test_results_are_shown_before_files_are_written(
    cbatch: Callable[..., Run], prompts: tuple[str, str]
) -> None:
    with scripted(answer_well) as server:
        run = cbatch("bench", server.endpoint.url, *prompts, *MADE, "--json", "/dev/full")
    assert run.status != 0 and "cannot be written" in run.err and "No space" in run.err
    assert "time to first token" in run.out


def test_an_interruption_prints_what_was_measured(toy: Client, tmp_path: Path) -> None:
    document = tmp_path / "report.json"
    command = [sys.executable, "-m", "cbatch.cli.main", "bench", f"http://127.0.0.1:{toy.port}"]
    options = [*TEXT, "--duration", "600", "--concurrency", "2", "--json", str(document)]
    begun = answered(toy)
    with subprocess.Popen(
        [*command, *options, "--prompt-tokens", "8", "--output-tokens", "4", "--quiet"],
        cwd=ROOT,
        stdout=subprocess.PIPE,
        text=True,
    ) as process:
        wait_until(lambda: answered(toy) > begun + 2)
        process.send_signal(signal.SIGINT)
        out, _ = process.communicate(timeout=60)
    assert process.returncode == 130
    report = json.loads(out.splitlines()[-1])
    assert report["interrupted"] and report["requests"] > 0 and report["unfinished"] <= 2
    assert report["sent"] == report["requests"] + report["unfinished"]
    assert json.loads(document.read_bytes())["requests"] == report["requests"]


def answered(toy: Client) -> float:
    return sample(toy, "vllm:request_success_total", finished_reason="length")


def test_the_self_test() -> None:
    with stub_server() as endpoint:
        row = asyncio.run(measure_client(endpoint, 32, rounds=3))
        assert row["chunks"] == 32 * 3 * 200 and row["failed"] == 0
        assert row["of_needed"] == pytest.approx(row["chunks_per_s_per_core"] / 50_000, abs=1e-3)
        row = asyncio.run(measure_client(endpoint, 32, processes=2, rounds=3))
        assert (row["chunks"], row["failed"], row["processes"]) == (32 * 3 * 200, 0, 2)
        plan = make_plan(endpoint, 4, 2)

        async def run() -> Any:
            loop_s = asyncio.get_running_loop().time()
            return await drive(plan, start_s=loop_s, stop=asyncio.Event())

        part = asyncio.run(run())
        assert [call.output_tokens for call in part.calls] == [200] * 8


@pytest.mark.slow
def test_the_demo_server(tmp_path: Path) -> None:
    """The report has the server's own counters, and some drafts are accepted."""
    engine = LLM(*demo_paths(), lookahead="ema:4", max_num_seqs=8).engine
    path = tmp_path / "report.json"
    with serving(engine) as client:
        url = f"http://127.0.0.1:{client.port}"
        options = ("--concurrency", "4", "--requests", "12", "--json", str(path), "--quiet")
        assert main(["bench", url, "--prompts", "demo", *options]) == 0
    report = json.loads(path.read_bytes())
    assert report["requests"] == 12 and report["server"]["output_tokens"] == report["output_tokens"]
    assert report["server"]["acceptance"] > 0.3 and report["tokens_per_chunk"] > 1
    accepted = report["server"]["accepted_by_position"]
    assert sum(accepted) == report["server"]["accepted_tokens"] and accepted[0] >= accepted[-1]
