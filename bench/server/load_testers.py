"""`cbatch bench` beside `vllm bench serve`, in turns, on one running server and the same prompts:
`python -m bench.server.load_testers URL --vllm PATH`. Without URL the server is one whose tokens
come at set times (`bench.load.run.stub`), so that what differs is the testers alone.

The other is a program of an environment of its own (its client needs no GPU), and is run as it is.
Both send completions of equal length, greedily, as a closed loop, and divide the tokens of the
answers by the time of the whole run; TPOT is (last chunk - first chunk) / (tokens - 1). vLLM counts
TTFT from before the connection is taken from its pool, cbatch from the scheduled send.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import os
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from bench.load.client.http import Endpoint, HttpClient
from bench.load.client.text import PromptCutter, PromptText, load_text
from bench.load.run.runner import find_model
from bench.load.run.stub import Pace, stub_server
from bench.report import print_report
from cbatch.demo import demo_paths
from sim.traces.request import TraceRequest

OURS, VLLM = "cbatch bench", "vllm bench serve"
AGREE = 0.03
CHARS_A_TOKEN = 3.0


class Figures(NamedTuple):
    output_tokens: int
    output_tokens_per_s: float
    ttft_ms: float  # p50, as the next
    tpot_ms: float


class ToolRun(NamedTuple):
    url: str
    model: str
    tokenizer: Path
    prompts: Path  # .jsonl, an object with a prompt a line
    streams: int
    requests: int
    output_tokens: int
    result: Path  # where the tool writes its JSON


def ours(run: ToolRun) -> Figures:
    command = (
        *(sys.executable, "-m", "cbatch.cli.main", "bench", run.url, "--quiet"),
        *("--prompts", run.prompts, "--output-tokens", run.output_tokens, "--ignore-eos"),
        *("--concurrency", run.streams, "--requests", run.requests, "--warmup", run.streams),
        *("--json", run.result),
    )
    told = _told(OURS, command, run)
    ttft_s, tpot_s = told["ttft_s"]["p50"], told["tpot_s"]["p50"]
    return Figures(told["output_tokens"], told["output_tokens_per_s"], 1e3 * ttft_s, 1e3 * tpot_s)


def theirs(program: str, run: ToolRun) -> Figures:
    command = (
        *(program, "bench", "serve", "--base-url", run.url, "--model", run.model),
        *("--backend", "openai", "--endpoint", "/v1/completions", "--tokenizer", run.tokenizer),
        *("--dataset-name", "custom", "--dataset-path", run.prompts, "--disable-shuffle"),
        *("--skip-chat-template", "--custom-output-len", run.output_tokens, "--ignore-eos"),
        *("--temperature", 0, "--max-concurrency", run.streams, "--num-prompts", run.requests),
        *("--num-warmups", run.streams, "--disable-tqdm", "--save-result"),
        *("--result-dir", run.result.parent, "--result-filename", run.result.name),
    )
    told = _told(VLLM, command, run)
    names = "total_output_tokens", "output_throughput", "median_ttft_ms", "median_tpot_ms"
    return Figures(*(told[name] for name in names))


def _told(name: str, command: Iterable[object], run: ToolRun) -> dict[str, Any]:
    """The tool's document. Raises RuntimeError if it failed."""
    environment = os.environ | {"HF_HUB_OFFLINE": "1"}
    done = subprocess.run(list(map(str, command)), env=environment, capture_output=True, text=True)
    if done.returncode or not run.result.exists():
        raise RuntimeError(f"{name} failed:\n{done.stdout[-2000:]}{done.stderr[-2000:]}")
    told: dict[str, Any] = json.loads(run.result.read_bytes())
    run.result.unlink()
    return told


def write_items(path: Path, items: Iterable[dict[str, Any]]) -> None:
    """As `cbatch bench --prompts` and vLLM read them: an object a line."""
    path.write_text("".join(json.dumps(item) + "\n" for item in items), encoding="utf-8")


def write_prompts(path: Path, count: int, prompt_tokens: int) -> None:
    """Cut from the text that `cbatch bench` cuts its own from, of about so many tokens."""
    prompts = PromptCutter(PromptText(load_text(None), CHARS_A_TOKEN), seed=1, as_ids=False)
    request = TraceRequest(arrival_s=0.0, prompt_tokens=prompt_tokens, output_tokens=1)
    write_items(path, [{"prompt": prompts.prompt(i, request)} for i in range(count)])


async def model_of(url: str) -> str:
    with contextlib.closing(HttpClient(Endpoint.of(url))) as client:
        return await find_model(client)


def rows_of(streams: int, found: dict[str, list[Figures]]) -> list[dict[str, Any]]:
    """Medians over repeats, and of ours over the tool's within a repeat; none for ours itself."""
    names = {
        "output_tokens_per_s": "ours_tokens_per_s",
        "ttft_ms": "ours_ttft",
        "tpot_ms": "ours_tpot",
    }
    rows = []
    for tool, runs in found.items():
        row: dict[str, Any] = {"streams": streams, "tool": tool}
        for name in names:
            row[name] = round(statistics.median(getattr(each, name) for each in runs), 2)
        for name, told in names.items():
            pairs = zip(found[OURS], runs, strict=True) if tool != OURS else ()
            ratios = [getattr(a, name) / getattr(b, name) for a, b in pairs]
            row[told] = round(statistics.median(ratios), 3) if ratios else None
        rows.append(row)
    return rows


def compare(program: str | None, run: ToolRun, repeats: int) -> list[dict[str, Any]]:
    """Raises RuntimeError if not every token came."""
    found: dict[str, list[Figures]] = {OURS: []} | ({VLLM: []} if program else {})
    for repeat in range(repeats):
        for tool in found if repeat % 2 == 0 else reversed(found):
            figures = ours(run) if tool == OURS else theirs(str(program), run)
            due = run.requests * run.output_tokens
            if figures.output_tokens != due:
                raise RuntimeError(f"{tool} counted {figures.output_tokens} tokens, {due} were due")
            found[tool].append(figures)
            print(f"{run.streams} streams, {tool}: {figures}", file=sys.stderr, flush=True)
    return rows_of(run.streams, found)


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument("url", nargs="?", help="of a server without a prefix cache")
    parser.add_argument("--vllm", metavar="PATH", help="the program `vllm`")
    parser.add_argument("--tokenizer", type=Path, default=demo_paths()[0], help="for it")
    parser.add_argument("--streams", type=int, nargs="+", default=[1, 8, 32, 128])
    parser.add_argument("--rounds", type=int, default=8, help="requests of a stream")
    parser.add_argument("--requests", type=int, default=64, help="of a run, at least")
    parser.add_argument("--prompt-tokens", type=int, default=128, help="about")
    parser.add_argument("--output-tokens", type=int, default=64)
    parser.add_argument("--repeats", type=int, default=3)
    args = parser.parse_args(argv)
    rows: list[dict[str, Any]] = []
    with contextlib.ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        url = args.url or stack.enter_context(stub_server(Pace())).url
        url, prompts = Endpoint.of(url).url, folder / "prompts.jsonl"
        most = max(args.requests, args.rounds * max(args.streams))
        write_prompts(prompts, most, args.prompt_tokens)
        model = asyncio.run(model_of(url))
        for streams in args.streams:
            requests = max(args.requests, args.rounds * streams)
            sizes = streams, requests, args.output_tokens, folder / "result.json"
            run = ToolRun(url, model, args.tokenizer, prompts, *sizes)
            rows += compare(args.vllm, run, args.repeats)
    print_report(
        f"load testers: {args.prompt_tokens} tokens in, {args.output_tokens} out",
        rows,
        notes=(
            f"medians of {args.repeats} repeats in turns, latencies p50; ours_*: cbatch bench over",
            f"this tool within a repeat; they should agree within {AGREE:.0%}",
        ),
    )


if __name__ == "__main__":
    main()
