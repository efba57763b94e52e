"""Draftless speculation of several engines, each compared with itself: `python -m
bench.peers.speculation`.

Every engine completes the same prompts without speculation and with its own: cbatch's default,
llama-cpp-python's prompt lookup, which runs one sequence at a time, and vLLM's ngram. The variants
take turns, in alternating order. `ratio` is the median over the repeats of the tokens per second
with speculation over those without; `min` and `max` are the smallest and largest repeat. `changed`
counts the answers that speculation changed.

cbatch and llama.cpp read a GGUF file, and vLLM its weights dequantised to bf16.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from bench.lookahead import CHATS, make_prompts
from bench.peers.engines import Prompts
from bench.peers.figures import timed_runs
from bench.peers.models import (
    CBATCH,
    FLAGS,
    LLAMA_CPP,
    VLLM,
    ModelFormats,
    Sizes,
    System,
    Worker,
    make_systems,
    started,
)
from bench.report import Failures, print_report, rounded
from cbatch.cli.parser import CommandParser

_LLAMA_DRAFTS = 2  # llama-cpp-python's documentation recommends it for CPUs
_VLLM_NGRAM = {"method": "ngram", "num_speculative_tokens": 5, "prompt_lookup_max": 4}  # its docs


def variants(system: System, batch: int) -> list[System]:
    """Return the system without speculation and with it."""
    if system.name == CBATCH:
        changes: list[dict[str, Any]] = [{"lookahead": "off"}, {"lookahead": "adaptive"}]
    elif system.name == VLLM:
        changes = [{}, {"speculative_config": _VLLM_NGRAM}]
    elif batch > 1:
        return []
    else:
        kept = {name: system.settings[name] for name in ("model", "tokens", "threads")}
        system = system._replace(engine="llama-cpp-python", settings=kept)
        changes = [{"drafts": 0}, {"drafts": _LLAMA_DRAFTS}]
    return [
        system._replace(name=name, settings=system.settings | change)
        for name, change in zip((system.name, f"{system.name}+"), changes, strict=True)
    ]


def measure(
    workers: Sequence[Worker],
    workload: str,
    prompts: Prompts,
    batch: int,
    args: argparse.Namespace,
    failures: Failures,
) -> list[dict[str, Any]]:
    """Return a row per engine."""
    prompts = prompts[: max(args.prompts, batch)]
    timed = timed_runs(workers, prompts, batch, args.output_tokens, args.repeats, failures)
    runs, rows = {system.name: each for system, each in timed}, []
    for name in (n for n in runs if f"{n}+" in runs):
        pairs = list(zip(runs[name], runs[f"{name}+"], strict=True))
        ratios = [plain.seconds / drafted.seconds for plain, drafted in pairs]
        speed = statistics.median(plain.tokens / plain.seconds for plain, _ in pairs)
        answers = zip(pairs[0][0].outputs, pairs[0][1].outputs, strict=True)
        row: dict[str, Any] = {"workload": workload, "batch": batch, "system": name}
        row |= {"tokens_per_s": round(speed, 1), "ratio": rounded(statistics.median(ratios))}
        row |= {"min": rounded(min(ratios)), "max": rounded(max(ratios))}
        rows.append(row | {"changed": sum(a != b for a, b in answers), "answers": len(prompts)})
    return rows


def main(argv: Sequence[str] | None = None) -> None:
    parser = CommandParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--model", default="smollm2")
    parser.add_argument("--workload", nargs="+", choices=CHATS, default=["stories", "renames"])
    parser.add_argument("--batch", type=int, nargs="+", default=[1, 8])
    for peer in (LLAMA_CPP, VLLM):
        parser.add_argument(FLAGS[peer], metavar="PATH", help=f"a Python that has {peer}")
    parser.add_argument("--prompts", type=int, default=8, help="minimum per repeat")
    parser.add_argument("--output-tokens", type=int, default=96)
    parser.add_argument("--repeats", type=int, default=3, help="runs of each variant")
    parser.add_argument("--threads", type=int, default=2, help="of every engine")
    args = parser.parse_args(argv)
    args.peer, args.lookahead = [LLAMA_CPP, VLLM], ["off"]
    failures, rows = Failures(), list[dict[str, Any]]()
    with tempfile.TemporaryDirectory() as folder:
        model = ModelFormats(args.model, None, Path(folder), llama=args.llama, threads=args.threads)
        chats = {name: make_prompts(name, model.source) for name in args.workload}
        longest = max(len(ids) for prompts in chats.values() for ids in prompts)
        tokens = longest + args.output_tokens + 1
        for batch in args.batch:
            systems = make_systems(model, args, Sizes(batch, tokens, max(1024, batch * longest)))
            pairs = [each for system in systems for each in variants(system, batch)]
            with started(pairs, failures) as workers:
                for workload, prompts in chats.items():
                    rows += measure(workers, workload, prompts, batch, args, failures)
                    print(f"{workload}, {batch} in flight measured", file=sys.stderr, flush=True)
    if rows:
        print_report(f"speculation against none, {args.model}", rows)
    failures.end()


if __name__ == "__main__":
    main()
