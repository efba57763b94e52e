"""`cbatch bench` and `vllm bench serve` at once on one running server, with half the streams each:
`python -m bench.clients_at_once URL --vllm PATH`.

Beside `bench.clients`, which lets them take turns, this is for a machine that is never quiet: what
disturbs the server disturbs both alike. Both send the same prompts in the same order, of lengths
that differ, so that streams do not end together. Counted is the time in which both were past their
first round and neither had sent its last; tokens of an answer are spread evenly over its time.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from bench.clients import Run, vllm_command, write_items, write_prompts
from bench.load.bodies import BodySettings, Item
from bench.load.http import Endpoint
from bench.load.runner import Load, Runner, Settings
from bench.report import print_report
from cbatch.demo import demo_paths
from sim.traces.request import TraceRequest

BEGINS = b"Starting main benchmark run"
RESAMPLES = 2000


class Seen(NamedTuple):
    """Of all requests of a client, in seconds on the monotonic clock (float64 [requests])."""

    start_s: np.ndarray
    first_s: np.ndarray
    end_s: np.ndarray
    tokens: np.ndarray

    @property
    def ttft_ms(self) -> np.ndarray:
        return (self.first_s - self.start_s) * 1e3

    @property
    def tpot_ms(self) -> np.ndarray:
        return (self.end_s - self.first_s) / (self.tokens - 1) * 1e3

    def within(self, low_s: float, high_s: float) -> Seen:
        """Those sent then."""
        kept = (low_s <= self.start_s) & (self.start_s < high_s)
        return Seen(*(values[kept] for values in self))

    def tokens_per_s(self, low_s: float, high_s: float) -> float:
        inside_s = np.minimum(self.end_s, high_s) - np.maximum(self.start_s, low_s)
        shares = np.maximum(inside_s, 0) / (self.end_s - self.start_s)
        return float((shares * self.tokens).sum() / (high_s - low_s))


async def at_once(program: str, run: Run, items: Sequence[Item], duration_s: float) -> list[Seen]:
    """Ours, then theirs. Raises RuntimeError if one failed."""
    command = [str(word) for word in (*vllm_command(program, run), "--save-detailed")]
    told = {"HF_HUB_OFFLINE": "1", "PYTHONUNBUFFERED": "1"}
    process = await asyncio.create_subprocess_exec(
        *command,
        env=os.environ | told,
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.STDOUT,
    )
    assert process.stdout is not None
    said = b""
    try:
        async for line in process.stdout:
            said += line
            if BEGINS in line:
                ours = await _ours(run, items, duration_s)
                break
        rest, _ = await process.communicate()
    except BaseException:
        process.kill()
        raise
    if process.returncode or not run.result.exists():
        raise RuntimeError(f"vllm failed:\n{(said + rest).decode(errors='replace')[-2000:]}")
    return [ours, _theirs(json.loads(run.result.read_bytes()))]


async def _ours(run: Run, items: Sequence[Item], duration_s: float) -> Seen:
    bodies = BodySettings(
        model=run.model,
        chat=False,
        streamed=True,
        fields={"temperature": 0},
        ignore_eos=True,
        items=tuple(items),
    )
    settings = Settings(
        endpoint=Endpoint.of(run.url), bodies=bodies, duration_s=duration_s, again=True
    )
    request = TraceRequest(arrival_s=0.0, prompt_tokens=1, output_tokens=1)  # the items say more
    runner = Runner(settings, lambda *_: [request] * len(items), stop=asyncio.Event())
    (found,) = await runner.runs(Load(concurrency=run.streams))
    failed = [call.error for call in found.calls if call.error is not None]
    if failed:
        raise RuntimeError(f"cbatch bench failed: {failed[0]}")
    zero_s = found.parts[0].start_s
    rows = [(c.sent_s, c.first_s, c.end_s, c.output_tokens) for c in found.calls]
    sent_s, first_s, end_s, tokens = np.array(rows).T
    return Seen(sent_s + zero_s, first_s + zero_s, end_s + zero_s, tokens)


def _theirs(told: dict[str, Any]) -> Seen:
    """Its stamps are of `time.perf_counter`, which is the monotonic clock on Linux."""
    if told["failed"]:
        raise RuntimeError(f"{told['failed']} calls of vllm failed")
    start_s = np.array(told["start_times"])
    first_s = start_s + np.array(told["ttfts"])
    end_s = first_s + np.array([sum(gaps) for gaps in told["itls"]])
    return Seen(start_s, first_s, end_s, np.array(told["output_lens"], np.float64))


def rows_of(streams: int, ours: Seen, theirs: Seen, seed: int = 0) -> list[dict[str, Any]]:
    """`streams` of each. Ratios are of medians, ours over theirs, with 95 % bootstrap intervals.
    Raises RuntimeError if the two hardly met."""
    clients = (ours, theirs)
    low_s = max(float(np.sort(each.end_s)[:streams][-1]) for each in clients)
    high_s = min(float(each.start_s.max()) for each in clients)
    kept = [each.within(low_s, high_s) for each in clients]
    if high_s <= low_s or min(len(each.start_s) for each in kept) < 10:
        raise RuntimeError(f"hardly ran at once ({high_s - low_s:.0f} s): give more --seconds")
    rng = np.random.default_rng(seed)
    speeds = [each.tokens_per_s(low_s, high_s) for each in clients]
    rows: list[dict[str, Any]] = [
        {
            "streams": 2 * streams,
            "figure": "output_tokens_per_s",
            "ours": round(speeds[0], 1),
            "theirs": round(speeds[1], 1),
            "ratio": round(speeds[0] / speeds[1], 3),
            "low": None,
            "high": None,
            "requests": sum(len(each.start_s) for each in kept),
        }
    ]
    for name in ("ttft_ms", "tpot_ms"):
        a, b = (getattr(each, name) for each in kept)
        medians = [np.median(rng.choice(v, (RESAMPLES, len(v))), axis=1) for v in (a, b)]
        low, high = np.quantile(medians[0] / medians[1], (0.025, 0.975))
        rows.append(
            {
                "streams": 2 * streams,
                "figure": f"{name}_p50",
                "ours": round(float(np.median(a)), 2),
                "theirs": round(float(np.median(b)), 2),
                "ratio": round(float(np.median(a) / np.median(b)), 3),
                "low": round(float(low), 3),
                "high": round(float(high), 3),
                "requests": len(a) + len(b),
            }
        )
    return rows


def draw_lengths(path: Path, mean_tokens: int, seed: int = 0) -> list[Item]:
    """Gives each prompt of the file an output length, half to one and a half times the mean."""
    rng = np.random.default_rng(seed)
    prompts = [json.loads(line)["prompt"] for line in path.read_text("utf-8").splitlines()]
    lengths = rng.integers(mean_tokens // 2, mean_tokens * 3 // 2, len(prompts), endpoint=True)
    pairs = list(zip(prompts, lengths.tolist(), strict=True))
    write_items(path, [{"prompt": prompt, "output_tokens": length} for prompt, length in pairs])
    return [Item(prompt=prompt, fields={"max_tokens": length}) for prompt, length in pairs]


def parse(argv: Sequence[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument("url", metavar="URL", help="of a server without a prefix cache")
    parser.add_argument("--vllm", metavar="PATH", default="vllm", help="the program")
    parser.add_argument("--tokenizer", type=Path, default=demo_paths()[0], help="for it")
    parser.add_argument("--streams", type=int, nargs="+", default=[2, 8, 32], help="even numbers")
    parser.add_argument("--seconds", type=float, default=45.0, help="of ours")
    parser.add_argument("--requests", type=int, default=200, help="of theirs, to last as long")
    parser.add_argument("--prompt-tokens", type=int, default=128)
    parser.add_argument("--output-tokens", type=int, default=64, help="on average")
    return parser.parse_args(argv)


def main(argv: Sequence[str] | None = None) -> None:
    args = parse(argv)
    rows: list[dict[str, Any]] = []
    with tempfile.TemporaryDirectory() as folder:
        prompts, result = Path(folder) / "prompts.jsonl", Path(folder) / "result.json"
        url = Endpoint.of(args.url).url
        writing = write_prompts(url, prompts, args.requests, args.prompt_tokens, seed=1)
        model = asyncio.run(writing)
        items = draw_lengths(prompts, args.output_tokens)
        for streams in args.streams:
            half = streams // 2
            # -1: as long as the file says
            run = Run(url, model, args.tokenizer, prompts, half, args.requests, -1, result)
            ours, theirs = asyncio.run(at_once(args.vllm, run, items, args.seconds))
            rows += rows_of(half, ours, theirs)
    print_report(
        f"cbatch bench and vllm bench serve at once: {args.prompt_tokens} tokens in, "
        f"{args.output_tokens} out on average",
        rows,
        notes=("ratio: ours over theirs; low, high: its 95 % interval, by bootstrap",),
    )


if __name__ == "__main__":
    main()
