"""Output tokens per second through the server compared with `LLM.generate`, on the same requests,
in turns: `python -m bench.server`.

`cbatch serve` runs with its engine as users run it. The client is a process of its own that reads
raw sockets and parses only the last chunk of a stream. Its processor time is reported, since it
shares the cores. The ratio is computed within a repeat; the order alternates.
"""

from __future__ import annotations

import argparse
import statistics
import tempfile
import time
from collections.abc import Sequence
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

from bench.engine.shapes import SHAPES, write_random_model
from bench.engine.systems import make_prompts
from bench.report import print_report
from bench.server.raw_client import in_subprocess, read_tokens
from bench.server.started import started
from cbatch import LLM, SamplingParams
from cbatch.cli.parser import CommandParser
from cbatch.demo import demo_paths

LIMIT = 0.9  # lowest ratio to `LLM.generate`


def serving(model: Path, draft: Path | None, args: Any) -> AbstractContextManager[int]:
    options = [str(model), "--dtype", args.dtype, "--lookahead", args.lookahead, "--max-num-seqs"]
    options += [str(args.streams), "--max-model-len", str(args.prompt_tokens + args.output_tokens)]
    options += ["--no-enable-prefix-caching"]
    options += ["--draft", str(draft)] if draft else []
    options += ["--tokenizer", "none"] if args.shape else []
    return started(options)


def parse(argv: Sequence[str] | None = None) -> argparse.Namespace:
    parser = CommandParser(prog="python -m bench.server", description=__doc__)
    parser.add_argument("--shape", choices=sorted(SHAPES), help="random weights (default: demo)")
    parser.add_argument("--dtype", default="float32", choices=["float32", "bfloat16"])
    parser.add_argument("--lookahead", default="off")
    parser.add_argument("--streams", type=int, default=32)
    parser.add_argument("--prompt-tokens", type=int, default=64)
    parser.add_argument("--output-tokens", type=int, default=64)
    parser.add_argument("--repeats", type=int, default=5)
    return parser.parse_args(argv)


def main(argv: Sequence[str] | None = None) -> None:
    args = parse(argv)
    with tempfile.TemporaryDirectory() as folder:
        if args.shape:
            model, draft = write_random_model(args.shape, Path(folder), args.dtype), None
        else:
            model, draft = demo_paths()
        draft = None if args.lookahead == "off" else draft
        prompts = make_prompts(model, args.prompt_tokens, args.streams, real=not args.shape)
        llm = LLM(
            model,
            draft,
            dtype=args.dtype,
            lookahead=args.lookahead,
            max_num_seqs=args.streams,
            max_model_len=args.prompt_tokens + args.output_tokens,
            enable_prefix_caching=False,
            tokenizer="none",
        )
        params = SamplingParams(temperature=0.0, max_tokens=args.output_tokens, ignore_eos=True)
        total = args.streams * args.output_tokens

        def generate() -> float:
            started_s = time.perf_counter()
            llm.generate(prompts, params)
            return total / (time.perf_counter() - started_s)

        generate_speeds, reads = [], []
        with serving(model, draft, args) as port:
            turns = (
                lambda: reads.append(in_subprocess(read_tokens, port, prompts, args.output_tokens)),
                lambda: generate_speeds.append(generate()),
            )
            for repeat in range(-1, args.repeats):  # the first warms up
                for turn in turns if repeat % 2 == 0 else reversed(turns):
                    turn()
    speeds = [read.tokens / read.seconds for read in reads[1:]]
    ratios = [
        speed / generate_speed
        for speed, generate_speed in zip(speeds, generate_speeds[1:], strict=True)
    ]
    client = statistics.median(read.client_s / read.seconds for read in reads[1:])
    row = {
        "model": args.shape or model.name,
        "streams": args.streams,
        "lookahead": args.lookahead,
        "generate_tokens_per_s": round(statistics.median(generate_speeds[1:]), 1),
        "served_tokens_per_s": round(statistics.median(speeds), 1),
        "ratio": round(statistics.median(ratios), 3),
        "lowest": round(min(ratios), 3),
        "highest": round(max(ratios), 3),
        "limit": LIMIT,
        "chunks": reads[-1].chunks,
        "client_share_of_a_core": round(client, 3),
    }
    print_report(
        f"server over LLM.generate: {args.prompt_tokens} tokens in, {args.output_tokens} out",
        [row],
        notes=(f"medians of {args.repeats} repeats in turns; ratios within a repeat",),
    )


if __name__ == "__main__":
    main()
