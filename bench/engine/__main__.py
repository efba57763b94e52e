"""Output tokens per second of the whole engine compared with Hugging Face `generate`, on the same
weights in the same run: `python -m bench.engine [MODEL] [--draft MODEL]`.

Without a model it measures the demo pair on its own prompts. `--shape llama-100m` writes a model of
that shape with random weights and prompts it with random tokens, without a draft: the acceptance of
a random draft model means nothing. `--model-impl own transformers` compares the engine's own
modelling code with transformers'. Every system gets the same prompts, decodes greedily and
generates the same number of tokens. Systems run in alternating order within a repeat, and ratios
are computed within a repeat.
"""

from __future__ import annotations

import argparse
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from bench.engine.shapes import FLAGGED, SHAPES, write_random_model
from bench.engine.systems import (
    EngineRun,
    System,
    build_cbatch,
    build_transformers,
    measure,
    median_speed,
    ratio,
)
from bench.failures import Failures
from bench.report import print_report, rounded
from cbatch.cli.parser import CommandParser
from cbatch.demo import demo_paths


def rows_of(runs: Sequence[tuple[System, list[EngineRun]]], batch: int, dtype: str) -> list[Any]:
    """Return a row for each system: medians, and medians of the ratios within a repeat."""
    by_name = {(system.name, system.lookahead): system_runs for system, system_runs in runs}
    return [
        {
            "system": name,
            "lookahead": lookahead,
            "batch": batch,
            "dtype": dtype,
            "output_tokens_per_s": median_speed(system_runs),
            "mean_accepted_tokens": rounded(speculation and speculation.mean_accepted_tokens),
            "steps_with_drafts": rounded(speculation and speculation.drafting_share),
            "ratio_to_transformers": ratio(system_runs, by_name.get(("transformers", "off"))),
            "ratio_to_off": ratio(system_runs, by_name.get(("cbatch", "off"))),
        }
        for (name, lookahead), system_runs in by_name.items()
        for speculation in [system_runs[-1].speculation]
    ]


def parse(argv: Sequence[str] | None = None) -> argparse.Namespace:
    parser = CommandParser(prog="python -m bench.engine", description=__doc__)
    parser.add_argument("model", nargs="?", type=Path, help="a model directory; default: the demo")
    parser.add_argument("--draft", type=Path, help="the draft's directory")
    parser.add_argument(
        "--shape", choices=sorted(SHAPES | FLAGGED), help="random weights of this shape"
    )
    parser.add_argument("--batch", type=int, nargs="+", default=[1, 8, 32])
    parser.add_argument("--lookahead", nargs="+", default=["off", "fixed:4", "ema"])
    parser.add_argument("--dtype", default="float32", choices=["float32", "bfloat16"])
    parser.add_argument("--numerics", default="auto", choices=["auto", "invariant", "fast"])
    parser.add_argument(
        "--model-impl", nargs="+", default=["auto"], choices=["own", "transformers"]
    )
    parser.add_argument("--overlap", type=int, default=0, choices=[0, 1])
    parser.add_argument("--prompt-tokens", type=int, default=64)
    parser.add_argument("--output-tokens", type=int, default=64)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--prompts", type=int, default=8, help="minimum number per repeat")
    parser.add_argument("--no-peer", action="store_true", help="leave transformers out")
    args = parser.parse_args(argv)
    if args.shape and (args.model or args.draft):
        parser.error("--shape writes its own model: leave out MODEL and --draft")
    return args


def main() -> None:
    args = parse()
    with tempfile.TemporaryDirectory() as folder:
        model, draft = args.model, args.draft
        if args.shape:
            model = write_random_model(args.shape, Path(folder), args.dtype)
        elif model is None:
            model, draft = demo_paths()
        lookaheads = args.lookahead if draft else ["off"]
        built = [
            build_cbatch(model, draft, lookahead, args, model_impl)
            for model_impl in args.model_impl
            for lookahead in lookaheads
        ]
        systems = [system for system, _ in built]
        if not args.no_peer:
            systems.append(build_transformers(model, args.dtype))
        failures = Failures()
        rows: list[dict[str, Any]] = []
        for batch in args.batch:
            runs = measure(systems, model, batch, args, failures, real=not args.shape)
            rows += rows_of(runs, batch, args.dtype)
            print(f"batch {batch} measured", flush=True)
    if not rows:
        failures.end()
    info = built[0][1].info
    print_report(
        f"engine: {args.shape or model.name}, {args.prompt_tokens} tokens in, "
        f"{args.output_tokens} out, greedy",
        rows,
        notes=(
            f"numerics {info.numerics}; {info.batch_invariance}; overlap depth {args.overlap}",
            f"medians of {args.repeats} repeats in alternating order; ratios within a repeat",
        ),
        extra={"numerics": info.numerics, "batch_invariant": info.batch_invariant},
    )
    failures.end()


if __name__ == "__main__":
    main()
