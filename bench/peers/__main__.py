"""Output tokens a second beside other engines, on the same weights: `python -m bench.peers`.

Ours with lookahead off and `goodput`, Hugging Face's `generate` and continuous batching, and
llama.cpp (with llama-cpp-python and gguf installed), on the demo's target and on random weights of
the 100 M shape. All get the same prompts of one length, greedy, and generate exactly as many
tokens; systems take turns within a repeat, in an order that turns round, and ratios are taken
within it. llama.cpp has the weights in the type it likes best: f16 beside our bf16, f32 beside f32.
Before anything is timed all complete a few prompts in float32, and their tokens are compared.
"""

from __future__ import annotations

import argparse
import tempfile
from collections.abc import Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch

from bench.engine.shapes import write_random_model
from bench.engine.systems import (
    EngineRun,
    System,
    build_cbatch,
    build_transformers,
    make_prompts,
    measure,
    median_speed,
    ratio,
)
from bench.peers.agree import agreement, reference_logits
from bench.peers.llama_cpp_peer import build_llama_cpp
from bench.peers.transformers_peer import build_continuous
from bench.report import print_report, print_table
from cbatch.demo import demo_paths

OURS, LLAMA_CPP = "cbatch", "llama.cpp"
PEERS = ("generate", "continuous", LLAMA_CPP)
MODELS = {"llama-100m": "bfloat16", "demo": "float32", "llama-1m": "float32"}
MEASURED = ("llama-100m", "demo")
COMPARED_SEQUENCES = 4
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
    parser.add_argument("--model", nargs="+", choices=MODELS, default=MEASURED)
    parser.add_argument("--batch", type=int, nargs="+", default=[1, 8, 32, 128])
    parser.add_argument("--lookahead", nargs="+", default=["off", "goodput"], help="off is first")
    parser.add_argument("--peer", nargs="*", choices=PEERS, default=PEERS)
    parser.add_argument("--prompt-tokens", type=int, default=64)
    parser.add_argument("--output-tokens", type=int, default=64)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--prompts", type=int, default=4, help="at least so many a repeat")
    parser.add_argument("--plot", type=Path, help="write a PNG of the ratios")
    args = parser.parse_args(argv)
    if args.lookahead[0] != "off":
        parser.error("--lookahead: ratios are to off: name it first")
    args.numerics, args.overlap = "auto", 0
    return args


def locate(name: str, folder: Path) -> tuple[Path, Path | None]:
    """The model and its draft, if it has one."""
    if name == "demo":
        return demo_paths()
    return write_random_model(name, folder, MODELS[name]), None


def build(
    model: Path, draft: Path | None, folder: Path, args: argparse.Namespace, *, exact: bool = False
) -> list[System]:
    """Ours with lookahead off first, then the others that were asked for and are installed; with
    `exact` whatever has a type of its own computes in `args.dtype`."""
    lookaheads = args.lookahead if draft else ["off"]
    systems = [build_cbatch(model, draft, lookahead, args)[0] for lookahead in lookaheads]
    most, tokens = max(args.batch), args.prompt_tokens + args.output_tokens
    if "generate" in args.peer:
        systems.append(build_transformers(model, args.dtype))
    if "continuous" in args.peer:
        systems.append(build_continuous(model, args.dtype, most=most, tokens=tokens))
    if LLAMA_CPP in args.peer and has_llama_cpp():
        kept = "float16" if args.dtype == "bfloat16" else args.dtype
        sizes = {"most": most, "tokens": tokens, "threads": torch.get_num_threads()}
        systems.append(build_llama_cpp(model, folder, kept, exact_kv=exact, **sizes))
    return systems


def has_llama_cpp() -> bool:
    return all(find_spec(package) is not None for package in ("llama_cpp", "gguf"))


def compare(
    name: str, model: Path, draft: Path | None, folder: Path, args: argparse.Namespace
) -> list[dict[str, Any]]:
    """Rows of `bench.peers.agree`, in float32."""
    changed = {"dtype": "float32", "batch": [COMPARED_SEQUENCES]}
    few = argparse.Namespace(**vars(args) | changed)
    prompts = make_prompts(model, args.prompt_tokens, COMPARED_SEQUENCES, real=name == "demo")
    systems = build(model, draft, folder, few, exact=True)
    return agreement(name, systems, prompts, args.output_tokens, reference_logits(model))


def rows_of(
    name: str, batch: int, systems: list[System], runs: list[list[EngineRun]]
) -> list[dict[str, Any]]:
    """A row a system: its median, and medians of the ratios to the others within a repeat."""
    first = {s.name: found for s, found in reversed(list(zip(systems, runs, strict=True)))}
    rows = []
    for system, found in zip(systems, runs, strict=True):
        goals = GOALS.get((name, batch), (None, None)) if system.name == OURS else (None, None)
        rows.append(
            {
                "model": name,
                "batch": batch,
                "system": system.name,
                "lookahead": system.lookahead,
                "output_tokens_per_s": median_speed(found),
                "cbatch_off_to_it": ratio(first[OURS], found),
                "to_llama_cpp": ratio(found, first.get(LLAMA_CPP)),
                "goal": goals[0] if system.lookahead == "off" else goals[1],
            }
        )
    return rows


def time_them(
    name: str, model: Path, draft: Path | None, folder: Path, args: argparse.Namespace
) -> list[dict[str, Any]]:
    args = argparse.Namespace(**vars(args) | {"dtype": MODELS[name]})
    systems = build(model, draft, folder, args)
    rows: list[dict[str, Any]] = []
    for batch in args.batch:
        runs = measure(systems, model, batch, args, real=name == "demo")
        rows += rows_of(name, batch, systems, runs)
        print(f"{name}, batch {batch} measured", flush=True)
    return rows


def main(argv: Sequence[str] | None = None) -> None:
    args = parse(argv)
    rows: list[dict[str, Any]] = []
    compared: list[dict[str, Any]] = []
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary)
        for name in args.model:
            model, draft = locate(name, folder)
            compared += compare(name, model, draft, folder, args)
            rows += time_them(name, model, draft, folder, args)
    if args.plot is not None:
        _plot(args.plot, rows)
    if compared:
        print_table("greedy tokens in float32 beside cbatch, lookahead off", compared)
    print_report(
        f"peers: {args.prompt_tokens} tokens in, {args.output_tokens} out, greedy",
        rows,
        notes=_notes(args, compared),
        extra={"agreement": compared, "repeats": args.repeats},
    )


def _notes(args: argparse.Namespace, compared: list[dict[str, Any]]) -> list[str]:
    notes = [f"{torch.get_num_threads()} threads each; medians of {args.repeats} repeats"]
    if LLAMA_CPP in args.peer and not has_llama_cpp():
        notes.append("llama.cpp left out: pip install llama-cpp-python gguf (or .[peers])")
    wrong = [f"{row['system']} on {row['model']}" for row in compared if not row["agrees"]]
    if wrong:
        notes.append(f"computes another model, its figures mean nothing: {', '.join(wrong)}")
    return notes


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
