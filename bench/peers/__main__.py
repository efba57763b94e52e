"""Speed compared with other engines, on the same weights: `python -m bench.peers`.

The systems are cbatch with lookahead off and `adaptive`, llama.cpp, vLLM, OpenVINO GenAI, Hugging
Face's `generate` and continuous batching. Each has a process of its own and the same number of
threads. A model is one of the names, a Hugging Face directory or a GGUF file. With `--type`
llama.cpp first quantises it, even if it is quantised already. cbatch, llama.cpp and OpenVINO read a
GGUF file; the others get its weights dequantised to bf16. Otherwise llama.cpp gets the type that
suits it best: f16 if cbatch has bf16, f32 if cbatch has f32. OpenVINO is left out then.

All get the same prompts of one length, decode greedily and generate the same number of tokens.
Systems run in turns within a repeat, in alternating order, and ratios are computed within a repeat.
Before any timing all complete a few prompts, and their tokens are compared.

`value` is the median over the repeats; `least` and `most` are the smallest and largest repeat. The
figures are output tokens per second; output tokens per second after each prompt's first token
(decode, for systems that report steps); prompt tokens per second for 8 prompts of 1024 tokens
(`--prefill`); and seconds until a constructor returns (`--startup`). `to_peer` is the value divided
by the first peer's. `ours_to_it` is the value of cbatch with lookahead off divided by the row's.
`step_p99_to_median` is computed from the times of the decoding steps.

`--limits` adds a system that only multiplies with the weights, or reads them from memory once per
step if that takes longer. Its speed is computed from the times in which torch reads a GiB and
multiplies matrices of 2048 (bf16 or fp32) in the same turn, with as many threads. `of_limit` is the
value divided by that of this system. Attention and KV are not counted, the LM head only for a
prompt's last token. Integer products may be faster, so for quantised models a decoding step counts
as reading alone, which in a batch is too fast to be reached.
"""

from __future__ import annotations

import argparse
import os
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from bench.engine.systems import make_prompts
from bench.failures import Failures
from bench.peers.agree import NEARLY_TIED, NEARLY_TIED_QUANTISED, agreement, reference_logits
from bench.peers.figures import (
    FIGURES,
    OUTPUT,
    PREFILL_PROMPTS,
    PREFILL_TOKENS,
    outputs,
    prefill,
    startups,
)
from bench.peers.files import NAMES, TYPES, ModelFormats
from bench.peers.perplexity import WINDOW_TOKENS, perplexities, windows
from bench.peers.processes import busy, on_cpus
from bench.peers.systems import (
    CBATCH,
    FLAGS,
    LIMITS,
    OPENVINO,
    PACKAGES,
    PEERS,
    Sizes,
    limits,
    make_entrants,
    python_of,
    start_one_by_one,
    started,
)
from bench.plot import save_lines
from bench.report import print_document, print_table
from cbatch.cli.parser import CommandParser
from cbatch.core.request.errors import FieldError
from cbatch.engine.model_files import find_model
from cbatch.engine.packaged import PACKAGED

MEASURED = ("llama-100m", "demo")
COMPARED_SEQUENCES = 4  # sequences of each system whose tokens are compared
_MODELS = f"{', '.join(NAMES)}, a directory or a .gguf file"


def parse(argv: Sequence[str] | None = None) -> argparse.Namespace:
    parser = _parser()
    args = parser.parse_args(argv)
    if args.lookahead[0] != "off":
        parser.error("--lookahead: ratios are relative to off: name it first")
    for name in args.model:
        if name not in NAMES and not Path(name).exists():
            parser.error(f"--model: {name} is not one of {_MODELS}")
        try:
            if name in PACKAGED:
                find_model(name)
        except FieldError as error:
            parser.error(f"--model: {error}")
    if not (args.batch or args.prefill or args.startup or args.perplexity):
        parser.error("--batch: give a batch, or another measurement")
    if args.limits and not (args.batch or args.prefill):
        parser.error("--limits: give --batch or --prefill as well")
    if args.perplexity is not None and not args.perplexity.is_file():
        parser.error(f"--perplexity: {args.perplexity} is not a file")
    if args.cpus and not set(args.cpus) <= os.sched_getaffinity(0):
        allowed = " ".join(map(str, sorted(os.sched_getaffinity(0))))
        parser.error(f"--cpus: name some of {allowed}, which this process may run on")
    if args.threads is None:
        args.threads = len(set(args.cpus)) if args.cpus else os.cpu_count()
    return args


def _parser() -> argparse.ArgumentParser:
    parser = CommandParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--model", nargs="+", default=MEASURED, metavar="MODEL", help=_MODELS)
    parser.add_argument("--type", type=str.upper, choices=TYPES, help="type of a GGUF to write")
    parser.add_argument("--batch", type=int, nargs="*", default=[1, 8, 32, 128])
    parser.add_argument("--lookahead", nargs="+", default=["off", "adaptive"], help="off first")
    parser.add_argument("--peer", nargs="*", choices=PEERS, default=PEERS)
    for peer, flag in FLAGS.items():
        text = f"a Python that has {PACKAGES[peer]}"
        parser.add_argument(flag, metavar="PATH", help=text)
    parser.add_argument("--vllm-eager", action="store_true", help="run vLLM without compilation")
    parser.add_argument("--prompt-tokens", type=int, default=64)
    parser.add_argument("--output-tokens", type=int, default=64)
    parser.add_argument("--repeats", type=int, default=3, help="runs of each system")
    parser.add_argument("--prompts", type=int, default=4, help="minimum of prompts per repeat")
    parser.add_argument(
        "--threads", type=int, help="threads of every system (default: number of processors)"
    )
    parser.add_argument("--cpus", type=int, nargs="+", metavar="N", help="processors to run on")
    parser.add_argument(
        "--busy", type=int, default=0, metavar="N", help="busy loops that run at the same time"
    )
    parser.add_argument("--prefill", action="store_true", help="also time long prompts")
    parser.add_argument("--startup", action="store_true", help="also time constructors")
    parser.add_argument("--limits", action="store_true", help="also time the machine")
    parser.add_argument("--perplexity", type=Path, metavar="TEXT", help="also of this text")
    parser.add_argument("--skip-agreement", action="store_true", help="do not compare tokens")
    parser.add_argument("--plot", type=Path, help="write a PNG of the ratios to the first peer")
    return parser


def sizes_of(args: argparse.Namespace) -> Sizes:
    tokens = args.prompt_tokens + args.output_tokens
    if args.prefill:
        tokens = max(tokens, PREFILL_TOKENS + 1)
    max_sequences = max(*args.batch, PREFILL_PROMPTS if args.prefill else 1, 1)
    return Sizes(max_sequences, tokens, max(1024, max_sequences * args.prompt_tokens))


def compare_tokens(
    model: ModelFormats, args: argparse.Namespace, failures: Failures
) -> list[dict[str, Any]]:
    """Compare the tokens of the systems. Systems with a choice of dtype use float32."""
    tokens = args.prompt_tokens + args.output_tokens
    sizes = Sizes(COMPARED_SEQUENCES, tokens, COMPARED_SEQUENCES * tokens)
    entrants = make_entrants(model, args, sizes, exact=True)
    if len(entrants) == 1:
        return []
    real = model.tokenizer is not None
    prompts = make_prompts(model.source, args.prompt_tokens, COMPARED_SEQUENCES, real)
    tie = NEARLY_TIED_QUANTISED if model.quantised else NEARLY_TIED
    logits = reference_logits(model.directory)
    systems = start_one_by_one(entrants, failures)
    return agreement(model.name, systems, prompts, args.output_tokens, logits, failures, tie)


def time_systems(
    model: ModelFormats, args: argparse.Namespace, failures: Failures
) -> list[dict[str, Any]]:
    entrants, rows = make_entrants(model, args, sizes_of(args)), []
    if args.startup:
        with on_cpus(args.cpus), busy(args.busy):
            rows += startups(model, entrants, args.repeats, failures)
    if not args.batch and not args.prefill:
        return rows
    if args.limits:
        entrants.append(limits(model, args.threads))
    with on_cpus(args.cpus), started(entrants, failures) as systems, busy(args.busy):
        for batch in args.batch:
            rows += outputs(model, systems, batch, args, failures)
            print(f"{model.name}, batch {batch} measured", flush=True)
        if args.prefill:
            rows += prefill(model, systems, args, failures)
    return rows


def measure_perplexity(
    model: ModelFormats, args: argparse.Namespace, failures: Failures
) -> list[dict[str, Any]]:
    entrants = make_entrants(model, args, Sizes(1, WINDOW_TOKENS + 1, WINDOW_TOKENS))
    return perplexities(model, entrants, windows(model, args.perplexity), failures)


def main(argv: Sequence[str] | None = None) -> None:
    args = parse(argv)
    rows: list[dict[str, Any]] = []
    compared: list[dict[str, Any]] = []
    accuracy: list[dict[str, Any]] = []
    failures = Failures()
    for name in args.model:
        failed = Failures()  # systems with this model
        with failures.caught(name), tempfile.TemporaryDirectory() as folder:
            llama = python_of("llama.cpp", args)
            model = ModelFormats(name, args.type, Path(folder), llama=llama, threads=args.threads)
            if not args.skip_agreement:
                compared += compare_tokens(model, args, failed)
            rows += time_systems(model, args, failed)
            if args.perplexity is not None:
                accuracy += measure_perplexity(model, args, failed)
        failures.words |= {f"{name}, {system}": words for system, words in failed.words.items()}
    if args.plot is not None:
        _plot(args.plot, rows)
    title_start = f"peers: {args.prompt_tokens} tokens in, {args.output_tokens} out, greedy; "
    tables = [
        ("greedy tokens compared with cbatch, lookahead off", compared),
        ("perplexity", accuracy),
    ]
    tables += [(title_start + figure, rows_of_figure(figure, rows)) for figure in FIGURES]
    consoles = [print_table(title, table) for title, table in tables if table]
    if not consoles:
        return failures.end()
    console = consoles[-1]
    for note in _notes(args, compared, rows):
        console.print(note, markup=False)
    settings = {key: getattr(args, key) for key in ("repeats", "threads", "cpus", "busy")}
    print_document(console, rows, {"agreement": compared, "perplexity": accuracy} | settings)
    failures.end()


def rows_of_figure(figure: str, rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return the rows of one figure, without its name and without empty columns."""
    figure_rows = [row for row in rows if row["figure"] == figure]
    columns = {key for row in figure_rows for key, value in row.items() if value is not None} - {
        "figure"
    }
    return [{key: value for key, value in row.items() if key in columns} for row in figure_rows]


def _notes(
    args: argparse.Namespace, compared: list[dict[str, Any]], rows: list[dict[str, Any]]
) -> list[str]:
    notes = [f"{args.threads} threads each; medians of {args.repeats} repeats"]
    if args.cpus is not None:
        notes.append(f"all on processors {', '.join(map(str, args.cpus))}")
    if args.busy:
        notes.append(f"{args.busy} busy loops at the same time")
    absent = [peer for peer in args.peer if python_of(peer, args) is None]
    for peer, flag in FLAGS.items():
        if peer in absent:
            notes.append(f"{peer} left out: name a Python that has it by {flag}")
    timed = {row["model"] for row in rows}
    left_out = timed - {row["model"] for row in rows if row["system"] == OPENVINO}
    if OPENVINO in args.peer and OPENVINO not in absent and left_out:
        notes.append(f"openvino reads only GGUF files; left out: {', '.join(sorted(left_out))}")
    if args.skip_agreement:
        notes.append("agreement of the systems was not checked")
    disagreeing = [f"{row['system']} on {row['model']}" for row in compared if not row["agrees"]]
    if disagreeing:
        notes.append(f"computes another model, its figures mean nothing: {', '.join(disagreeing)}")
    return notes


def _plot(path: Path, rows: list[dict[str, Any]]) -> None:
    panels: dict[str, dict[str, list[tuple[float, float]]]] = {}
    for row in rows:
        if row["figure"] == OUTPUT and row["to_peer"] is not None:
            lookahead = f" {row['lookahead']}" if row["system"] == CBATCH else ""
            line = panels.setdefault(row["model"], {})
            point = row["batch"], row["to_peer"]
            line.setdefault(row["system"] + lookahead, []).append(point)
    if panels:
        first = next(row["system"] for row in rows if row["system"] not in (CBATCH, LIMITS))
        label = f"tokens/s over {first}"
        save_lines(path, panels, x_label="batch", y_label=label, highlight=f"{CBATCH} off")


if __name__ == "__main__":
    main()
