"""Output tokens a second of every lookahead policy at every load: `python -m bench.lookahead`.

The demo pair serves two workloads of prompts (`fresh`: heads of functions it has not seen; `edit`:
a function followed by the start of a renamed copy) and their half-and-half mix, at a constant
number of requests in flight. Policies take turns within a repeat, in an order that turns round, on
the same prompts; ratios are taken within a repeat. The best fixed k is chosen afterwards, by the
median, from 0 (off) to 8: nobody could have configured a better constant.

Requests are greedy and end after a given number of tokens, so every policy emits the same tokens.
Speeds are of the steady state: all slots full, requests ending at different times.
"""

from __future__ import annotations

import argparse
import gc
import itertools
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
from rich.progress import Progress

from bench.plot import save_lines
from bench.report import print_report, rounded
from cbatch import EngineOptions, SamplingParams, load_engine
from cbatch.demo import demo_paths, demo_prompts, edit_prompts
from cbatch.outputs import Speculation
from cbatch.stepwise import Engine
from cbatch.text import load_tokenizer

WORKLOADS = ("fresh", "edit", "mix")
FIXED = tuple(f"fixed:{k}" for k in range(1, 9))
POLICIES = ("off", *FIXED, "ema", "goodput")
_CONSTANTS = ("off", *FIXED)  # what the best fixed k is chosen from
_MOST_PROMPT_TOKENS = 256
_MOST_FOLLOWING = 64

Prompts = list[list[int]]


class Run(msgspec.Struct):
    tokens: int
    seconds: float
    speculation: Speculation

    @property
    def tokens_per_s(self) -> float:
        return self.tokens / self.seconds


class Job(msgspec.Struct, frozen=True):
    prompt: list[int]
    output_tokens: int


def serve(engine: Engine, jobs: list[Job], concurrency: int) -> Run:
    """`concurrency` jobs at a time: one that ends makes room for the next. Tokens are counted from
    when all of the first have begun to answer until a slot would stay empty; the rest is dropped.
    """
    waiting = iter(jobs)
    total, tokens, begun = Speculation(), 0, set()
    started_s: float | None = None

    def admit(count: int) -> int:
        admitted = list(itertools.islice(waiting, count))
        for job in admitted:
            params = SamplingParams(temperature=0.0, max_tokens=job.output_tokens, ignore_eos=True)
            engine.add(job.prompt, params)
        return len(admitted)

    admit(concurrency)
    while True:
        outputs = engine.step()
        begun.update(output.request_id for output in outputs)
        if started_s is not None:
            tokens += sum(len(output.token_ids) for output in outputs)
        elif len(begun) >= concurrency:
            started_s = time.perf_counter()
        ended = [output.finished for output in outputs if output.finished is not None]
        for finished in ended:
            total.merge(finished.speculation)
        if started_s is not None and admit(len(ended)) < len(ended):
            break
        if started_s is None:
            admit(len(ended))
    seconds = time.perf_counter() - started_s
    for request_id in begun:
        engine.cancel(request_id)
    while engine.has_work:
        engine.step()
    return Run(tokens, seconds, total)


def make_jobs(prompts: Prompts, concurrency: int, output_tokens: int) -> list[Job]:
    """Outputs of half to one and a half times `output_tokens`, so that requests do not end in lock
    step; the first `concurrency` are somewhere in theirs already."""
    rng = np.random.default_rng(0)
    lengths = rng.uniform(0.5, 1.5, len(prompts)) * output_tokens
    lengths[:concurrency] *= rng.random(min(concurrency, len(prompts)))
    return [
        Job(prompt, max(2, round(length)))
        for prompt, length in zip(prompts, lengths.tolist(), strict=True)
    ]


def make_prompts(workload: str, model: Path, count: int) -> Prompts:
    """`count` prompts, the shipped ones in turn; in a mix every other one is of each kind."""
    tokenizer = load_tokenizer(model)
    kinds = {"fresh": demo_prompts(), "edit": edit_prompts()}
    texts = [kinds[workload]] if workload in kinds else list(kinds.values())
    pools = [[list(tokenizer.encode(t))[-_MOST_PROMPT_TOKENS:] for t in part] for part in texts]
    return [
        pools[i % len(pools)][i // len(pools) % len(pools[i % len(pools)])] for i in range(count)
    ]


def measure(
    engines: dict[str, Engine],
    prompts: Prompts,
    concurrency: int,
    args: argparse.Namespace,
    advance: Callable[[], None],
) -> dict[str, list[Run]]:
    """Runs by policy, one a repeat."""
    jobs = make_jobs(prompts, concurrency, args.output_tokens)
    for engine in engines.values():
        serve(engine, make_jobs(prompts, concurrency, 8), concurrency)
    runs: dict[str, list[Run]] = {policy: [] for policy in engines}
    gc.collect()
    for repeat in range(args.repeats):
        order = list(engines)
        for policy in order if repeat % 2 == 0 else reversed(order):
            run = serve(engines[policy], jobs, concurrency)
            runs[policy].append(run)
            advance()
    return runs


def rows_of(workload: str, batch: int, runs: dict[str, list[Run]]) -> list[dict[str, Any]]:
    """A row a policy: the median speed, half the width of its 95 % interval, and paired ratios."""
    speeds = {policy: np.array([r.tokens_per_s for r in found]) for policy, found in runs.items()}
    constants = [policy for policy in _CONSTANTS if policy in speeds]
    best = max(constants, key=lambda policy: float(np.median(speeds[policy])), default=None)
    rows = []
    for policy, speed in speeds.items():
        last = runs[policy][-1]
        to_off = speed / speeds["off"] if "off" in speeds else None
        rows.append(
            {
                "workload": workload,
                "batch": batch,
                "policy": policy,
                "output_tokens_per_s": round(float(np.median(speed)), 1),
                "ci95": _half_width(speed),
                "ratio_to_best_fixed": _median(speed / speeds[best]) if best else None,
                "ratio_to_off": _median(to_off),
                "ratio_to_off_low95": _low95(to_off),
                "steps_with_drafts": rounded(last.speculation.drafting_share),
                "mean_accepted_tokens": rounded(last.speculation.mean_accepted_tokens),
                "best_fixed": best,
            }
        )
    return rows


# Two-sided 95 % quantiles of Student's t by degrees of freedom; beyond the table the normal one.
_T95 = (12.706, 4.303, 3.182, 2.776, 2.571, 2.447, 2.365, 2.306, 2.262, 2.228, 2.201, 2.179)


def _half_width(values: np.ndarray) -> float | None:
    """Half the width of the 95 % interval of the mean (Student's t); None for a single value."""
    if len(values) < 2:
        return None
    degrees = len(values) - 1
    quantile = _T95[degrees - 1] if degrees <= len(_T95) else 1.96
    return rounded(float(quantile * values.std(ddof=1) / np.sqrt(len(values))))


def _low95(ratios: np.ndarray | None) -> float | None:
    """Lower end of the 95 % interval of the mean ratio."""
    half = None if ratios is None else _half_width(ratios)
    return None if half is None or ratios is None else rounded(float(ratios.mean()) - half)


def _median(values: np.ndarray | None) -> float | None:
    return None if values is None else rounded(float(np.median(values)))


def parse(argv: Sequence[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--workload", nargs="+", choices=WORKLOADS, default=list(WORKLOADS))
    parser.add_argument("--batch", type=int, nargs="+", default=[1, 2, 4, 8, 16, 32, 64, 128])
    parser.add_argument("--policy", nargs="+", default=list(POLICIES))
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--output-tokens", type=int, default=64)
    parser.add_argument("--prompts", type=int, default=8, help="that follow the first, at least")
    parser.add_argument("--dtype", default="auto", choices=["auto", "float32", "bfloat16"])
    parser.add_argument("--plot", type=Path, default=Path("build/lookahead.png"))
    return parser.parse_args(argv)


def build(policy: str, args: argparse.Namespace) -> Engine:
    most_tokens = _MOST_PROMPT_TOKENS + 3 * args.output_tokens // 2
    options = EngineOptions(
        lookahead=policy,
        dtype=args.dtype,
        max_slots=max(args.batch),
        max_model_tokens=most_tokens,
        num_blocks=max(args.batch) * -(-most_tokens // 16),
        prefix_cache=False,  # the same prompts come again in every run
        tokenizer="none",
    )
    return load_engine(*demo_paths(), options)[0]


def main() -> None:
    args = parse()
    model = demo_paths()[0]
    engines = {policy: build(policy, args) for policy in args.policy}
    rows: list[dict[str, Any]] = []
    with Progress() as progress:
        total = len(args.workload) * len(args.batch) * args.repeats * len(engines)
        task = progress.add_task("measuring", total=total)
        for workload in args.workload:
            for batch in args.batch:
                following = max(args.prompts, min(batch, _MOST_FOLLOWING))
                prompts = make_prompts(workload, model, batch + following)
                runs = measure(engines, prompts, batch, args, lambda: progress.advance(task))
                rows += rows_of(workload, batch, runs)
    series = {
        workload: {
            policy: [
                (row["batch"], row["ratio_to_off"])
                for row in rows
                if row["workload"] == workload and row["policy"] == policy
            ]
            for policy in args.policy
        }
        for workload in args.workload
    }
    save_lines(
        args.plot,
        series,
        x_label="requests in flight",
        y_label="tokens/s over lookahead off",
        highlight="goodput",
    )
    print_report(
        f"lookahead policies: demo pair, {args.output_tokens} tokens out, greedy",
        rows,
        notes=(
            f"medians of {args.repeats} repeats in alternating order; ratios within a repeat",
            f"plot: {args.plot}",
        ),
    )


if __name__ == "__main__":
    main()
