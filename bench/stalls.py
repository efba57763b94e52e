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

`--plot FILE` draws the 99th percentile of the gaps over prompt tokens per second, a point for
each system. With commands that differ in `--itl-target` it shows the cost of a target.
"""

from __future__ import annotations

import argparse
import http.client
import json
import random
import shlex
import socket
import statistics
import subprocess
import tempfile
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple
from urllib.parse import urlsplit

from rich.progress import track

from bench.report import print_report
from cbatch.cli.parser import CommandParser

_FIRST_TOKENS, _CALM_TOKENS = 50, 100  # per stream: before gaps count, and before prompts arrive
_START_S, _CALL_S = 300.0, 600.0  # time limits: of a server or streams to start, and of a call
_IDS = range(1000, 40_000)  # token ids of the prompts


class Load(NamedTuple):
    streams: int
    prompts: int
    prompt_tokens: int
    every_s: float  # time from one prompt to the next


class Server(NamedTuple):
    host: str
    port: int
    model: str

    def post(self, body: dict[str, Any]) -> tuple[http.client.HTTPConnection, Iterator[bytes]]:
        """Return the connection and the events of a streamed completion. Raises RuntimeError if the
        server answers with an error."""
        connection = http.client.HTTPConnection(self.host, self.port, timeout=_CALL_S)
        common = {"model": self.model, "temperature": 0, "ignore_eos": True, "stream": True}
        headers = {"content-type": "application/json"}
        connection.request("POST", "/v1/completions", json.dumps(common | body), headers)
        answer = connection.getresponse()
        if answer.status != 200:
            raise RuntimeError(f"the server answered {answer.status}: {answer.read(300)!r}")
        return connection, (line for line in answer if line.startswith(b"data: {"))


class Gaps:
    """Gaps between tokens of all streams, each with the time at which it ended."""

    def __init__(self, streams: int) -> None:
        self.counts = [0] * streams  # tokens so far, by stream
        self.gaps: list[tuple[float, float]] = []  # (end of the gap, gap), in seconds
        self.over = threading.Event()

    def read(self, server: Server, index: int) -> None:
        body = {"prompt": f"Story {index}: once upon a time", "max_tokens": 6000}
        connection, events = server.post(body)
        last_s = None
        for _ in events:
            now_s = time.perf_counter()
            self.counts[index] += 1
            if last_s is not None:
                self.gaps.append((now_s, now_s - last_s))
            last_s = now_s
            if self.over.is_set():
                break
        connection.close()

    def wait_for(self, tokens: int) -> None:
        """Wait until every stream has `tokens` tokens. Raises RuntimeError after `_START_S`."""
        end_s = time.perf_counter() + _START_S
        while min(self.counts) < tokens:
            if time.perf_counter() > end_s:
                raise RuntimeError(f"the streams have {self.counts} tokens only")
            time.sleep(0.02)


def measure(server: Server, load: Load, seed: int) -> dict[str, float]:
    """Return the figures of one repeat."""
    gaps, rng = Gaps(load.streams), random.Random(seed)
    streams = [
        threading.Thread(target=gaps.read, args=(server, index), daemon=True)
        for index in range(load.streams)
    ]
    for stream in streams:
        stream.start()
    gaps.wait_for(_FIRST_TOKENS)
    gaps.gaps.clear()
    gaps.wait_for(_CALM_TOKENS)
    begin_s, tokens_before = time.perf_counter(), sum(gaps.counts)
    first_token_s: list[float] = []

    def read_prompt() -> None:
        ids = [rng.choice(_IDS) for _ in range(load.prompt_tokens)]
        connection, events = server.post({"prompt": ids, "max_tokens": 2})
        next(events)
        first_token_s.append(time.perf_counter())
        for _ in events:
            pass
        connection.close()

    prompts = [threading.Thread(target=read_prompt) for _ in range(load.prompts)]
    for prompt in prompts:
        prompt.start()
        time.sleep(load.every_s)
    for prompt in prompts:
        prompt.join()
    if len(first_token_s) < load.prompts:
        raise RuntimeError(f"{len(first_token_s)} of {load.prompts} prompts were answered")
    seconds, tokens = max(first_token_s) - begin_s, sum(gaps.counts) - tokens_before
    gaps.over.set()
    for stream in streams:
        stream.join()
    calm = sorted(gap for end_s, gap in gaps.gaps if end_s < begin_s)
    loaded = sorted(gap for end_s, gap in gaps.gaps if begin_s <= end_s <= max(first_token_s))
    read_tokens = load.prompts * load.prompt_tokens
    return {
        "calm_p50_ms": 1e3 * _quantile(calm, 0.5),
        **{f"p{q}_ms": 1e3 * _quantile(loaded, q / 100) for q in (50, 99)},
        "longest_ms": 1e3 * loaded[-1],
        "prompts_s": seconds,
        "prompt_tokens_per_s": read_tokens / seconds,
        "tokens_per_s": (read_tokens + tokens) / seconds,
    }


def _quantile(values: Sequence[float], share: float) -> float:
    return values[min(int(share * len(values)), len(values) - 1)]


@contextmanager
def served(system: str) -> Iterator[Server]:
    """Yield a system's server. A process started here ends with the context."""
    if system.startswith(("http://", "https://")):
        address = urlsplit(system)
        assert address.hostname is not None
        yield _answering(address.hostname, address.port or 80)
        return
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    with tempfile.TemporaryFile() as output:
        words = shlex.split(system.format(port=port))
        process = subprocess.Popen(words, stdout=output, stderr=subprocess.STDOUT)
        try:
            yield _answering("127.0.0.1", port, process)
        except ChildProcessError as error:
            output.seek(0)
            raise RuntimeError(output.read()[-2000:].decode(errors="replace")) from error
        finally:
            process.terminate()
            process.wait()


def _answering(host: str, port: int, process: subprocess.Popen[bytes] | None = None) -> Server:
    """Wait until the server lists its model. Raises ChildProcessError if its process ends, and
    RuntimeError after `_START_S`."""
    end_s = time.perf_counter() + _START_S
    while time.perf_counter() < end_s:
        if process is not None and process.poll() is not None:
            raise ChildProcessError("the server ended")
        try:
            connection = http.client.HTTPConnection(host, port, timeout=5)
            connection.request("GET", "/v1/models")
            models = json.loads(connection.getresponse().read())["data"]
            return Server(host, port, models[0]["id"])
        except (OSError, http.client.HTTPException, ValueError, LookupError):
            time.sleep(0.2)
    raise RuntimeError(f"{host}:{port} lists no model after {_START_S:.0f} s")


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
    for seed, name, system in track(turns, "measuring", transient=True):
        with served(system) as server:
            figures[name].append(measure(server, load, seed=seed))
    rows: list[dict[str, Any]] = []
    for name, repeats in figures.items():
        row = {key: statistics.median(repeat[key] for repeat in repeats) for key in repeats[0]}
        first = rows[0] if rows else row
        rows.append({"system": name, **row, "longest_to_first": row["longest_ms"]})
        rows[-1]["longest_to_first"] /= first["longest_ms"]
    if args.plot is not None:
        save_plot(args.plot, rows)
    print_report("Gaps while prompts are read", rows, extra={"load": load._asdict()})


if __name__ == "__main__":
    main()
