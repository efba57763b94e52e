"""Output tokens a second beside other engines, on the same weights: `python -m bench.peers`.

Ours with lookahead off and `goodput`, Hugging Face's `generate` and continuous batching, and
llama.cpp (with llama-cpp-python and gguf installed), on the demo's target and on random weights of
the 100 M shape. All get the same prompts of one length, greedy, and generate exactly as many
tokens; systems take turns within a repeat, in an order that turns round, and ratios are taken
within it. llama.cpp has the weights in the type it likes best: f16 beside our bf16, f32 beside f32.
"""

from __future__ import annotations

import argparse
import json
import statistics
import tempfile
from collections.abc import Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch

from bench.engine import System, build_cbatch, build_transformers, make_prompts, measure
from bench.peers.llama_cpp_peer import build_llama_cpp
from bench.peers.transformers_peer import build_continuous
from bench.report import print_report, rounded
from bench.shapes import write_random_model
from cbatch.demo import demo_paths

OURS, LLAMA_CPP = "cbatch", "llama.cpp"
MODELS = {"llama-100m": "bfloat16", "demo": "float32"}
# What the off and the best of ours should reach of llama.cpp, by model and batch.
GOALS = {
    ("llama-100m", 1): (0.9, None),
    ("llama-100m", 8): (1.15, None),
    ("llama-100m", 32): (1.25, None),
    ("demo", 1): (0.6, 1.0),
    ("demo", 8): (None, 1.2),
    ("demo", 32): (None, 1.5),
}


def parse(argv: Sequence[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--model", nargs="+", choices=MODELS, default=list(MODELS))
    parser.add_argument("--batch", type=int, nargs="+", default=[1, 8, 32, 128])
    parser.add_argument("--lookahead", nargs="+", default=["off", "goodput"])
    parser.add_argument(
        "--peer",
        nargs="+",
        choices=["generate", "continuous", "llama.cpp"],
        default=["generate", "continuous", "llama.cpp"],
    )
    parser.add_argument("--prompt-tokens", type=int, default=64)
    parser.add_argument("--output-tokens", type=int, default=64)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--prompts", type=int, default=4, help="at least so many a repeat")
    parser.add_argument("--plot", type=Path, help="write a PNG of the ratios")
    args = parser.parse_args(argv)
    args.numerics, args.overlap = "auto", 0
    return args


def build(name: str, folder: Path, args: Any) -> tuple[Path, list[System], list[str]]:
    """The model's directory, its systems, and what could not be had."""
    dtype = args.dtype = MODELS[name]
    draft: Path | None
    if name == "demo":
        model, draft = demo_paths()
    else:
        model, draft = write_random_model(name, folder, dtype), None
    lookaheads = args.lookahead if draft else ["off"]
    systems = [build_cbatch(model, draft, lookahead, args)[0] for lookahead in lookaheads]
    missing = []
    if "generate" in args.peer:
        systems.append(build_transformers(model, dtype))
    if "continuous" in args.peer:
        systems.append(build_continuous(model, dtype))
    if "llama.cpp" in args.peer and find_spec("llama_cpp") and find_spec("gguf"):
        kept = "float16" if dtype == "bfloat16" else dtype
        tokens = args.prompt_tokens + args.output_tokens
        threads = torch.get_num_threads()
        systems.append(
            build_llama_cpp(
                model, folder, kept, most=max(args.batch), tokens=tokens, threads=threads
            )
        )
    elif "llama.cpp" in args.peer:
        missing.append("llama.cpp left out: pip install llama-cpp-python gguf")
    return model, systems, missing


def rows_of(
    name: str, batch: int, systems: list[System], speeds: list[list[float]]
) -> list[dict[str, Any]]:
    """A row a system: its median, and medians of the ratios to the others within a repeat."""
    ours = next(speed for s, speed in zip(systems, speeds, strict=True) if s.name == OURS)
    llama = [speed for s, speed in zip(systems, speeds, strict=True) if s.name == LLAMA_CPP]
    rows = []
    for system, speed in zip(systems, speeds, strict=True):
        to_llama = _ratio(speed, llama[0]) if llama else None
        goals = GOALS.get((name, batch), (None, None)) if system.name == OURS else (None, None)
        rows.append(
            {
                "model": name,
                "batch": batch,
                "system": system.name,
                "lookahead": system.lookahead,
                "output_tokens_per_s": round(statistics.median(speed), 1),
                "cbatch_off_to_it": rounded(_ratio(ours, speed)),
                "to_llama_cpp": rounded(to_llama),
                "goal": goals[0] if system.lookahead == "off" else goals[1],
            }
        )
    return rows


def _ratio(of: list[float], to: list[float]) -> float:
    return statistics.median(a / b for a, b in zip(of, to, strict=True))


def main(argv: Sequence[str] | None = None) -> None:
    args = parse(argv)
    rows: list[dict[str, Any]] = []
    notes: list[str] = []
    with tempfile.TemporaryDirectory() as folder:
        for name in args.model:
            model, systems, missing = build(name, Path(folder), args)
            notes += [note for note in missing if note not in notes]
            vocab_size = json.loads((model / "config.json").read_text())["vocab_size"]
            for batch in args.batch:
                count = -(-max(batch, args.prompts) // batch) * batch
                prompts = make_prompts(model, args.prompt_tokens, count, real=name == "demo")
                assert max(map(max, prompts)) < vocab_size
                runs = measure(systems, prompts, batch, args)
                speeds = [[run.tokens / run.seconds for run in each] for each in runs]
                rows += rows_of(name, batch, systems, speeds)
                print(f"{name}, batch {batch} measured", flush=True)
    if args.plot is not None:
        _plot(args.plot, rows)
    print_report(
        f"peers: {args.prompt_tokens} tokens in, {args.output_tokens} out, greedy",
        rows,
        notes=(
            *notes,
            f"{torch.get_num_threads()} threads each; medians of {args.repeats} repeats",
        ),
    )


def _plot(path: Path, rows: list[dict[str, Any]]) -> None:
    from bench.plot import save_lines

    panels: dict[str, dict[str, list[tuple[float, float]]]] = {}
    for row in rows:
        if row["system"] == OURS and row["lookahead"] == "off":
            continue
        name = f"{row['system']} {row['lookahead']}" if row["system"] == OURS else row["system"]
        ratio = 1 / row["cbatch_off_to_it"]
        panels.setdefault(row["model"], {}).setdefault(name, []).append((row["batch"], ratio))
    save_lines(path, panels, x_label="batch", y_label="tokens/s over cbatch, lookahead off")


if __name__ == "__main__":
    main()
