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

from bench.load.run.selftest import measure_client, stub_server
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
    tokens = sample(toy, "vllm:generation_tokens_total") - before
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
    run, document, records = bench(*options, *SHORT, "--requests", "8")
    assert run.status == 0 and document["schema"] == "cbatch-sweep"
    assert document["loads"] == [1, 2, 4] and document["knee"]["load"] > 0
    for load, report in zip((1, 2, 4), document["reports"], strict=True):
        assert report["sent"] == 16 and report["peak_in_flight"] == load
        assert report["goodput"]["share"] == 1.0 and "output_tokens_per_s" in report["confidence"]
    assert len(records) == 48 and {record["run"] for record in records} == {0, 1}
    first = tmp_path / "first.json"
    first.write_text(json.dumps(document))
    compared = cbatch("report", "compare", first, first)
    results = compared.lines[-1]["results"]
    assert compared.status == 0 and len(results) == 3
    assert {each["difference"] for r in results for each in r["measures"]} <= {0, None}


def test_the_highest_rate_is_searched_for(bench: Callable[..., Any]) -> None:
    search = ("--find-rate", "--rate", "50", "--slo", "e2e=60", *SHORT, "--requests", "6")
    run, document, _ = bench(*search)
    best = document["capacity"]["best"]
    assert document["schema"] == "cbatch-sweep" and len(document["loads"]) > 1
    assert run.status == (best is None) and (best is None or best["rate"] in document["loads"])


def test_the_servers_metrics_are_read_during_the_run(
    bench: Callable[..., Any], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr("bench.load.run.report.SCRAPE_EVERY_S", 0.03)
    table, page = tmp_path / "loads.csv", tmp_path / "page.html"
    files = ("--csv", table, "--page", page)
    run, document, _ = bench("--concurrency", "4", *SHORT, "--requests", "64", *files)
    assert run.status == 0
    (drawn,) = _drawn(page)
    assert (drawn["name"], drawn["report"]) == ("concurrency 4", document)
    assert drawn["points"]["num_requests"] == 64
    tokens = sum(drawn["series"]["output_tokens_per_s"]) * drawn["series"]["length_s"]
    assert tokens == pytest.approx(document["output_tokens"], rel=1e-3)
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


def test_a_measured_run_next_to_its_simulation(
    bench: Callable[..., Any], cbatch: Callable[..., Run], tmp_path: Path
) -> None:
    """A trace at twice its rate, its simulation, their comparison, and a page of both."""
    trace, page = tmp_path / "trace.jsonl", tmp_path / "page.html"
    prompts = tmp_path / "prompts.txt"
    prompts.write_text("abc\nabcdefgh\n")
    requests = [
        TraceRequest(arrival_s=i / 20, prompt_tokens=16, output_tokens=5) for i in range(20)
    ]
    write_requests(trace, requests)
    options = ("--trace", trace, "--rate-scale", "2")
    run, document, records = bench(*options, "--prompts", prompts, "--ignore-eos")
    assert run.status == 0 and document["requests"] == 20 and not document["cut_requests"]
    stamps_s = [record["arrival_s"] for record in records]
    assert stamps_s == pytest.approx([i / 40 for i in range(20)])
    assert {record["output_tokens"] for record in records} == {5}
    assert records[0]["prompt_tokens"] < records[1]["prompt_tokens"] < 16, "the file's prompts"
    simulated, sim_rows = tmp_path / "simulated.json", tmp_path / "simulated.jsonl"
    sizes = ("--num-blocks", "512", "--max-model-len", "600", "--step-seconds", "0.01")
    assert cbatch("sim", trace, *sizes, "--json", simulated, "--records", sim_rows).status == 0
    reports = (simulated, tmp_path / "report.json")
    compared = cbatch("report", "compare", *reports)
    (result,) = compared.lines[-1]["results"]
    assert compared.status == 0 and result["kinds"] == ["simulated", "measured"]
    ttft = {each["name"]: each for each in result["measures"]}["ttft_s.p50"]
    medians_s = [json.loads(path.read_bytes())["ttft_s"]["p50"] for path in reports]
    assert [ttft["a"], ttft["b"]] == pytest.approx(medians_s)
    assert ttft["difference"] == pytest.approx(medians_s[1] / (medians_s[0] or 1) - 1)
    both = ("report", "page", *reports, "--page", page)
    assert cbatch(*both, "--records", sim_rows, tmp_path / "records.jsonl").status == 0
    runs = _drawn(page)
    assert [each["name"] for each in runs] == ["simulated, simulated", "report, measured"]
    for drawn, path in zip(runs, reports, strict=True):
        assert drawn["report"] == json.loads(path.read_bytes())
        assert drawn["points"]["num_requests"] == 20 and len(drawn["points"]["e2e_s"]) == 20
    assert cbatch(*both).status == 0 and [each["points"] for each in _drawn(page)] == [None, None]
    run = cbatch(*both, "--records", sim_rows, trace)
    assert run.status == 2 and "--records: " in run.err
    run = cbatch("report", "compare", prompts, prompts)
    assert run.status == 2 and "is not a report" in run.err


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


@pytest.mark.parametrize(
    ("argv", "words"),
    [
        (("--rate", "3", "--concurrency", "2"), "--concurrency: would be ignored"),
        (("--rate", "-1"), "--rate: '-1' is not allowed"),
        (("--find-rate", "--rate", "1"), "--find-rate: would be ignored"),
        ((*TEXT, "--requests", "2", "--concurrency", "3"), "--requests: 2 for 3 clients"),
        ((*TEXT, "--prompt-tokens", "many"), "--prompt-tokens: 'many' is not known"),
        (("--slo", "ttft"), "--slo"),
        (("--field", "top_k"), "--field"),
    ],
)
def test_bad_options_are_named(
    bench: Callable[..., Any], argv: tuple[str, ...], words: str
) -> None:
    run, document, _ = bench(*argv)
    assert run.status == 2 and words in run.err and document is None


@pytest.mark.parametrize(
    ("url", "words"), [("http://127.0.0.1:9", "not connected"), (None, "is missing")]
)
def test_a_server_that_does_not_answer(
    cbatch: Callable[..., Run], url: str | None, words: str
) -> None:
    run = cbatch("bench", *filter(None, [url]))
    assert run.status == 2 and f"URL: {words}" in run.err


MADE = ("--model", "m", "--quiet", "--requests", "3", "--concurrency", "1", "--output-tokens", "3")


@pytest.fixture
def prompts(tmp_path: Path) -> tuple[str, str]:
    path = tmp_path / "prompts.txt"
    path.write_text("x\n")
    return "--prompts", str(path)


@pytest.mark.parametrize(
    ("status", "message", "remedy"),
    [
        ("429 Too Many Requests", "slow down", "lower --concurrency or --rate"),
        ("400 Bad Request", "Unknown parameter: continuous_usage_stats", "give --final-usage"),
        ("400 Bad Request", "ignore_eos is not permitted", "give --no-ignore-eos"),
    ],
)
def test_a_failed_run_prints_the_reason_first_and_the_remedy(
    cbatch: Callable[..., Run], prompts: tuple[str, str], status: str, message: str, remedy: str
) -> None:
    async def refuse(exchange: Exchange) -> None:
        await exchange.whole(json.dumps({"error": {"message": message}}).encode(), status)

    with scripted(refuse) as server:
        run = cbatch("bench", server.endpoint.url, *prompts, *MADE)
    assert run.status == 1
    code = status[:3]
    first, second, *rest = run.out.splitlines()
    assert first == f"failed: 3 of 3 calls, status {code}: {code}: {message}"
    assert second.startswith("  remedy: ") and remedy in second
    assert not any("time to first token" in line for line in rest), "nothing was measured"


def test_prompts_are_measured_where_a_server_has_no_tokenizer(
    cbatch: Callable[..., Run], tmp_path: Path
) -> None:
    """The first 2,000 characters are 5 tokens by the usage of a short call, so a prompt of 2 tokens
    has 800 characters. Without usage in the run, chunks count as tokens."""

    async def script(exchange: Exchange) -> None:
        if "add_special_tokens" in exchange.body:
            await exchange.whole(b"{}", "404 Not Found")
        elif not exchange.body.get("stream"):
            await exchange.whole(b'{"usage": {"prompt_tokens": 5}}')
        else:
            await exchange.begin()
            await exchange.event(chunk("a", None) + chunk("b", None, reason="stop") + DONE)
            await exchange.event(b"")

    document = tmp_path / "report.json"
    with scripted(script) as server:
        run = cbatch(
            "bench", server.endpoint.url, *MADE, "--prompt-tokens", "2", "--json", document
        )
    report = json.loads(document.read_bytes())
    assert run.status == 0 and not report["errors"] and report["output_tokens"] == 6
    assert {len(body["prompt"]) for body in server.bodies if body.get("stream")} == {800}
    assert report["token_source"] == "chunks" and "each chunk" in "".join(report["warnings"])


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
        row = asyncio.run(measure_client(endpoint, 16, rounds=2))
    assert (row["chunks"], row["failed"], row["processes"]) == (16 * 2 * 200, 0, 1)
    assert row["of_needed"] == pytest.approx(row["chunks_per_s_per_core"] / 5e4, abs=1e-3)
