"""Measure gaps between tokens of running streams while long prompts are processed: `python -m
bench.stalls`.

    python -m bench.stalls cbatch='cbatch serve smollm2 --port {port}' \\
        vllm='VENV/bin/vllm serve DIR --port {port}' other=http://127.0.0.1:8000

Each system is a command that serves the OpenAI API on `{port}`, or a URL. First `--streams`
requests start. Once each has 100 tokens, `--prompts` prompts of random tokens, new in every repeat,
arrive `--every` seconds apart. Systems run in turns within a repeat. Figures are medians over the
repeats:

- percentiles of the gaps between two tokens of a stream, in ms, before the prompts (`calm`) and
  while these are processed;
- seconds until all prompts have a token;
- tokens of prompts and streams per second in that time;
- `longest_to_first`, the ratio of the longest gap to the first system's.

A system that fails is left out from there on; what was measured before counts.

`--plot FILE` draws the 99th percentile of the gaps over prompt tokens per second, a point for
each system. With commands that differ in `--itl-target` it shows the cost of a target.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import random
import shlex
import socket
import statistics
import subprocess
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from rich.progress import track

from bench.load.client.answer import AnswerReader
from bench.load.client.http import (
    COMPLETIONS,
    CallError,
    Endpoint,
    Failure,
    HttpClient,
    LiveTally,
    TimedCall,
)
from bench.report import Failures, print_report
from cbatch.cli.parser import CommandParser

_FIRST_TOKENS, _CALM_TOKENS = 50, 100  # per stream: before gaps count, and before prompts arrive
_STREAM_TOKENS = 6000
_START_S, _CALL_S = 300.0, 600.0  # time limits: of a server or streams to start, and of a call
_END_S = 30.0  # for a server to end after SIGTERM
_LOADING = 503  # status of a server that still loads its model
_IDS = range(1000, 40_000)  # token ids of the prompts


class Load(NamedTuple):
    streams: int
    prompts: int
    prompt_tokens: int
    every_s: float  # time from one prompt to the next


class Server(NamedTuple):
    endpoint: Endpoint
    model: str


async def measure(server: Server, load: Load, seed: int) -> dict[str, float]:
    """Return the figures of one repeat. Raises RuntimeError if a call fails, or a stream ends."""
    client, rng = HttpClient(server.endpoint, timeout_s=_CALL_S), random.Random(seed)
    common = {"model": server.model, "temperature": 0, "ignore_eos": True, "stream": True}
    # A chunk may have several tokens, where drafts were accepted.
    common["stream_options"] = {"include_usage": True, "continuous_usage_stats": True}

    async def send(call: TimedCall, prompt: str | list[int]) -> None:
        body = json.dumps(common | {"prompt": prompt, "max_tokens": call.max_tokens}).encode()
        reader = AnswerReader(call, LiveTally(), streamed=True)
        await client.call("POST", COMPLETIONS, body, reader)
        if call in streams:
            problem = f"a stream ended after {_num_tokens([call])} tokens"
            raise CallError(Failure.TRUNCATED, problem)

    async def wait_for(tokens: Sequence[int]) -> float:
        async with asyncio.timeout(_START_S):
            while any(call.chunks < n for call, n in zip(streams, tokens, strict=True)):
                await asyncio.sleep(0.02)
        return time.monotonic()

    streams = [TimedCall(i, 0.0, 0, _STREAM_TOKENS) for i in range(load.streams)]
    prompts = [TimedCall(i, 0.0, load.prompt_tokens, 2) for i in range(load.prompts)]
    try:
        async with asyncio.TaskGroup() as group:
            running = [
                group.create_task(send(call, f"Story {call.index}: once upon a time"))
                for call in streams
            ]
            begin_s = await wait_for([_CALM_TOKENS] * load.streams)
            tokens_before, sent = _num_tokens(streams), []
            for call in prompts:
                ids = [rng.choice(_IDS) for _ in range(load.prompt_tokens)]
                sent.append(group.create_task(send(call, ids)))
                await asyncio.sleep(load.every_s)
            await asyncio.gather(*sent)
            tokens = _num_tokens(streams) - tokens_before
            await wait_for([call.chunks + 1 for call in streams])  # the gaps in which they ended
            for task in running:
                task.cancel()
    except* CallError as errors:
        raise RuntimeError(errors.exceptions[0].detail) from None
    finally:
        client.close()
    end_s, times_s = max(call.first_s for call in prompts), [np.array(c.chunk_s) for c in streams]
    ends_s = np.concatenate([each[1:] for each in times_s])
    gaps_s = np.concatenate([np.diff(each) for each in times_s])
    settled = np.concatenate([np.arange(1, len(each)) >= _FIRST_TOKENS for each in times_s])
    calm = np.sort(gaps_s[settled & (ends_s < begin_s)]).tolist()
    loaded = np.sort(gaps_s[(begin_s <= ends_s) & (ends_s - gaps_s <= end_s)]).tolist()
    seconds, read_tokens = end_s - begin_s, load.prompts * load.prompt_tokens
    return {
        "calm_p50_ms": 1e3 * _quantile(calm, 0.5),
        **{f"p{q}_ms": 1e3 * _quantile(loaded, q / 100) for q in (50, 99)},
        "longest_ms": 1e3 * loaded[-1],
        "prompts_s": seconds,
        "prompt_tokens_per_s": read_tokens / seconds,
        "tokens_per_s": (read_tokens + tokens) / seconds,
    }


def _num_tokens(calls: Sequence[TimedCall]) -> int:
    return sum(sum(call.chunk_tokens) for call in calls)


def _quantile(values: Sequence[float], share: float) -> float:
    return values[min(int(share * len(values)), len(values) - 1)]


@contextmanager
def served(system: str) -> Iterator[Server]:
    if system.startswith(("http://", "https://")):
        yield asyncio.run(_answering(Endpoint.of(system), None))
        return
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    with tempfile.TemporaryFile() as output:
        words = shlex.split(system.format(port=port))
        process = subprocess.Popen(words, stdout=output, stderr=subprocess.STDOUT)
        try:
            yield asyncio.run(_answering(Endpoint("127.0.0.1", port, False, ""), process))
        except ChildProcessError as error:
            output.seek(0)
            raise RuntimeError(output.read()[-2000:].decode(errors="replace")) from error
        finally:
            process.terminate()
            try:
                process.wait(_END_S)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()


async def _answering(endpoint: Endpoint, process: subprocess.Popen[bytes] | None) -> Server:
    """Return the server. Wait until `process`, if given, lists its model. Raises ChildProcessError
    if it ends, and RuntimeError if the server refuses, or after `_START_S`."""
    end_s, client = time.perf_counter() + _START_S, HttpClient(endpoint, timeout_s=5.0)
    while True:
        if process is not None and process.poll() is not None:
            raise ChildProcessError("the server ended")
        status, problem = _LOADING, ""
        try:
            status, raw = await client.request("GET", "/v1/models")
            problem = f"GET /v1/models: {status}: {raw[:2000].decode(errors='replace')}"
            if status == 200:
                return Server(endpoint, json.loads(raw)["data"][0]["id"])
        except CallError as error:
            problem = str(error)
        except (ValueError, LookupError, TypeError):
            pass
        finally:
            client.close()
        if process is None or status != _LOADING or time.perf_counter() > end_s:
            raise RuntimeError(problem)
        await asyncio.sleep(0.2)


def save_plot(path: Path, rows: Sequence[dict[str, Any]]) -> None:
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, axis = pyplot.subplots(figsize=(6, 4.2))
    for row in rows:
        axis.plot(row["prompt_tokens_per_s"], row["p99_ms"], "o")
        place = (row["prompt_tokens_per_s"], row["p99_ms"])
        axis.annotate(row["system"], place, textcoords="offset points", xytext=(6, 4))
    axis.set(xlabel="prompt tokens per second", ylabel="p99 gap between tokens, ms", yscale="log")
    axis.margins(0.12)
    figure.savefig(path, dpi=110, bbox_inches="tight")
    pyplot.close(figure)


def parse(argv: Sequence[str] | None = None) -> argparse.Namespace:
    parser = CommandParser(
        prog="python -m bench.stalls",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("systems", nargs="+", metavar="NAME=COMMAND", help="or NAME=URL")
    parser.add_argument("--streams", type=int, default=4)
    parser.add_argument("--prompts", type=int, default=4)
    parser.add_argument("--prompt-tokens", type=int, default=1900)
    parser.add_argument("--every", type=float, default=0.5, help="seconds between prompts")
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--plot", type=Path, metavar="FILE")
    args = parser.parse_args(argv)
    args.named = [system.partition("=")[::2] for system in args.systems]
    if not all(name and target for name, target in args.named):
        parser.error("give each system as NAME=COMMAND or NAME=URL")
    return args


def main(argv: Sequence[str] | None = None) -> None:
    args = parse(argv)
    load = Load(args.streams, args.prompts, args.prompt_tokens, args.every)
    figures: dict[str, list[dict[str, float]]] = {name: [] for name, _ in args.named}
    turns = [(repeat, *named) for repeat in range(args.repeats) for named in args.named]
    failures = Failures()
    for seed, name, system in track(turns, "measuring", transient=True):
        if name not in failures:
            with failures.caught(name), served(system) as server:
                figures[name].append(asyncio.run(measure(server, load, seed)))
    rows: list[dict[str, Any]] = []
    for name, repeats in figures.items():
        if not repeats:
            continue
        row = {key: statistics.median(repeat[key] for repeat in repeats) for key in repeats[0]}
        first = rows[0] if rows else row
        rows.append({"system": name, **row, "longest_to_first": row["longest_ms"]})
        rows[-1]["longest_to_first"] /= first["longest_ms"]
    if rows:
        if args.plot is not None:
            save_plot(args.plot, rows)
        print_report("Gaps while prompts are read", rows, extra={"load": load._asdict()})
    failures.end()


if __name__ == "__main__":
    main()
