"""`cbatch bench` beside the load testers of others, in turns, on one running server and the same
prompts: `python -m bench.clients URL --vllm PATH --guidellm PATH`. Without URL the server is one
whose tokens come at set times (`bench.paced`), so that what differs is the testers alone.

The others are programs of environments of their own, and are run as they are. All send completions
of equal length, greedily, as a closed loop; what one figure is called differs:

- output tokens a second: all divide the tokens of the answers by the time of the whole run.
- TTFT: vLLM counts from before the connection is taken from its pool to the first chunk, cbatch
  from the scheduled send, guidellm from the first write of a request's head.
- TPOT: cbatch and vLLM take (last chunk - first chunk) / (tokens - 1). guidellm calls that its ITL,
  which is read here; its own TPOT has the time to the first token in it.
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
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

from bench.load.http import Endpoint, HttpClient
from bench.load.runner import find_model
from bench.load.text import Prompts, load_text, open_corpus
from bench.paced import MODEL as PACED
from bench.paced import paced_server
from bench.report import print_report
from cbatch.demo import demo_paths
from sim.traces.request import TraceRequest

AGREE = 0.03
NAMES = ("output_tokens_per_s", "ttft_ms", "tpot_ms")


class Figures(NamedTuple):
    output_tokens: int
    output_tokens_per_s: float
    ttft_ms: float  # p50, as the next
    tpot_ms: float


class Run(NamedTuple):
    url: str
    model: str
    tokenizer: Path
    prompts: Path  # .jsonl, an object with a prompt a line
    streams: int
    requests: int
    output_tokens: int
    result: Path  # where the tool writes its JSON


class Tool(NamedTuple):
    name: str
    command: Callable[[Run], Sequence[str | Path | int]]
    read: Callable[[dict[str, Any]], Figures]


def cbatch_command(run: Run) -> list[str | Path | int]:
    return [
        *(sys.executable, "-m", "cbatch.cli.main", "bench", run.url, "--quiet"),
        *("--prompts", run.prompts, "--output-tokens", run.output_tokens, "--ignore-eos"),
        *("--concurrency", run.streams, "--requests", run.requests, "--warmup", run.streams),
        *("--json", run.result),
    ]


def read_cbatch(told: dict[str, Any]) -> Figures:
    ttft_s, tpot_s = told["ttft_s"]["p50"], told["tpot_s"]["p50"]
    return Figures(told["output_tokens"], told["output_tokens_per_s"], 1e3 * ttft_s, 1e3 * tpot_s)


def vllm_command(program: str, run: Run) -> list[str | Path | int]:
    return [
        *(program, "bench", "serve", "--base-url", run.url, "--model", run.model),
        *("--backend", "openai", "--endpoint", "/v1/completions", "--tokenizer", run.tokenizer),
        *("--dataset-name", "custom", "--dataset-path", run.prompts, "--disable-shuffle"),
        *("--skip-chat-template", "--custom-output-len", run.output_tokens, "--ignore-eos"),
        *("--temperature", 0, "--max-concurrency", run.streams, "--num-prompts", run.requests),
        *("--num-warmups", run.streams, "--disable-tqdm", "--save-result"),
        *("--result-dir", run.result.parent, "--result-filename", run.result.name),
    ]


def read_vllm(told: dict[str, Any]) -> Figures:
    return Figures(
        told["total_output_tokens"],
        told["output_throughput"],
        told["median_ttft_ms"],
        told["median_tpot_ms"],
    )


def guidellm_command(program: str, run: Run) -> list[str | Path | int]:
    backend = {
        "kind": "openai_http",
        "target": run.url,
        "request_format": "/v1/completions",
        "max_tokens": run.output_tokens,
        "extras": {"body": {"temperature": 0, "ignore_eos": True}},
    }
    return [
        *(program, "run", "--backend", json.dumps(backend), "--disable-console"),
        *("--profile", f"kind=concurrent,streams={run.streams}"),
        *("--constraint", f"kind=max_requests,count={run.requests}"),
        *("--tokenizer", f"kind=huggingface_auto,model={run.tokenizer}"),
        *("--data", f"kind=json_file,path={run.prompts}"),
        *("--output", f"kind=json,path={run.result}"),
    ]


def read_guidellm(told: dict[str, Any]) -> Figures:
    metrics = told["benchmarks"][0]["metrics"]

    def of(name: str, figure: str) -> float:
        value: float = metrics[name]["successful"][figure]
        return value

    return Figures(
        round(of("output_token_count", "total_sum")),
        of("output_tokens_per_second", "mean"),
        of("time_to_first_token_ms", "median"),
        of("inter_token_latency_ms", "median"),
    )


async def write_prompts(url: str, path: Path, count: int, prompt_tokens: int, seed: int) -> str:
    """Cut from the text that `cbatch bench` cuts its own from. Returns the model's name."""
    client = HttpClient(Endpoint.of(url))
    try:
        model = await find_model(client)
        corpus = await open_corpus(client, model, load_text(None))
    finally:
        client.close()
    prompts = Prompts(corpus, seed, as_ids=False)
    request = TraceRequest(arrival_s=0.0, prompt_tokens=prompt_tokens, output_tokens=1)
    write_items(path, [{"prompt": prompts.prompt(i, request)} for i in range(count)])
    return model


def write_items(path: Path, items: Iterable[dict[str, Any]]) -> None:
    """As `cbatch bench --prompts` and the others read them: an object a line."""
    path.write_text("".join(json.dumps(item) + "\n" for item in items), encoding="utf-8")


def measure(tool: Tool, run: Run) -> Figures:
    """Raises RuntimeError if it failed, or not every token came."""
    command = [str(word) for word in tool.command(run)]
    environment = os.environ | {"HF_HUB_OFFLINE": "1"}
    done = subprocess.run(command, env=environment, capture_output=True, text=True)
    if done.returncode or not run.result.exists():
        raise RuntimeError(f"{tool.name} failed:\n{done.stdout[-2000:]}{done.stderr[-2000:]}")
    figures = tool.read(json.loads(run.result.read_bytes()))
    run.result.unlink()
    due = run.requests * run.output_tokens
    if figures.output_tokens != due:
        raise RuntimeError(f"{tool.name} counted {figures.output_tokens} tokens, {due} were due")
    return figures


def row_of(
    streams: int, tool: str, found: Sequence[Figures], ours: Sequence[Figures]
) -> dict[str, Any]:
    """Medians over repeats, and of ours over the tool's within a repeat; none for ours itself."""
    row: dict[str, Any] = {"streams": streams, "tool": tool}
    for name in NAMES:
        row[name] = round(statistics.median(getattr(each, name) for each in found), 2)
    for name, told in zip(NAMES, ("ours_tokens_per_s", "ours_ttft", "ours_tpot"), strict=True):
        pairs = zip(ours, found, strict=True)
        ratios = [getattr(a, name) / getattr(b, name) for a, b in pairs if a is not b]
        row[told] = round(statistics.median(ratios), 3) if ratios else None
    return row


def compare(tools: Sequence[Tool], run: Run, repeats: int) -> list[dict[str, Any]]:
    found: dict[str, list[Figures]] = {tool.name: [] for tool in tools}
    for repeat in range(repeats):
        for tool in tools if repeat % 2 == 0 else tools[::-1]:
            figures = measure(tool, run)
            found[tool.name].append(figures)
            print(f"{run.streams} streams, {tool.name}: {figures}", file=sys.stderr, flush=True)
    ours = found[tools[0].name]
    return [row_of(run.streams, tool.name, found[tool.name], ours) for tool in tools]


def parse(argv: Sequence[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument("url", nargs="?", help="of a server without a prefix cache")
    parser.add_argument("--vllm", metavar="PATH", help="the program `vllm`")
    parser.add_argument("--guidellm", metavar="PATH", help="the program `guidellm`")
    parser.add_argument("--tokenizer", type=Path, default=demo_paths()[0], help="for them")
    parser.add_argument("--streams", type=int, nargs="+", default=[1, 8, 32, 128])
    parser.add_argument("--rounds", type=int, default=8, help="requests of a stream")
    parser.add_argument("--requests", type=int, default=64, help="of a run, at least")
    parser.add_argument("--prompt-tokens", type=int, default=128)
    parser.add_argument("--output-tokens", type=int, default=64)
    parser.add_argument("--repeats", type=int, default=3)
    return parser.parse_args(argv)


def main(argv: Sequence[str] | None = None) -> None:
    args = parse(argv)
    tools = [Tool("cbatch bench", cbatch_command, read_cbatch)]
    if args.vllm:
        tools.append(Tool("vllm bench serve", partial(vllm_command, args.vllm), read_vllm))
    if args.guidellm:
        tools.append(Tool("guidellm", partial(guidellm_command, args.guidellm), read_guidellm))
    rows: list[dict[str, Any]] = []
    with contextlib.ExitStack() as stack:
        folder = stack.enter_context(tempfile.TemporaryDirectory())
        prompts = Path(folder) / "prompts.jsonl"
        most = max(args.requests, args.rounds * max(args.streams))
        if args.url is None:
            url, model = stack.enter_context(paced_server()), PACED
            write_items(prompts, [{"prompt": "what is asked does not matter"}] * most)
        else:
            url = Endpoint.of(args.url).url
            model = asyncio.run(write_prompts(url, prompts, most, args.prompt_tokens, seed=1))
        for streams in args.streams:
            run = Run(
                url=url,
                model=model,
                tokenizer=args.tokenizer,
                prompts=prompts,
                streams=streams,
                requests=max(args.requests, args.rounds * streams),
                output_tokens=args.output_tokens,
                result=Path(folder) / "result.json",
            )
            rows += compare(tools, run, args.repeats)
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
