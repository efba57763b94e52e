"""Speed compared with other engines, on the same weights: `python -m bench.peers`.

The systems are cbatch with lookahead off and `adaptive`, llama.cpp, vLLM, OpenVINO GenAI, and
`transformers`, which is cbatch with the layers of transformers. Each has a process of its own and
the same number of threads. A model is one of the names, a Hugging Face directory or a GGUF file.
With `--type` llama.cpp first quantises it, even if it is quantised already. cbatch, llama.cpp and
OpenVINO read a GGUF file; the others get its weights dequantised to bf16. Otherwise llama.cpp gets
the type that suits it best: f16 if cbatch has bf16, f32 if cbatch has f32. OpenVINO is left out
then.

All get the same prompts of one length, decode greedily and generate the same number of tokens.
Systems run in turns within a repeat, in alternating order, and ratios are computed within a repeat.
Before any timing all complete a few prompts, and their tokens are compared.

`value` is the median over the repeats; `min` and `max` are the smallest and largest repeat. The
figures are output tokens per second; output tokens per second after each prompt's first token
(decode, for systems that report steps); prompt tokens per second for 8 prompts of 1024 tokens
(`--prefill`); and seconds until a constructor returns (`--startup`). `to_peer` is the value divided
by the first peer's. `ours_to_it` is the value of cbatch with lookahead off divided by the row's.
"""

from __future__ import annotations

import argparse
import os
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from bench.peers.figures import (
    FIGURES,
    PREFILL_PROMPTS,
    PREFILL_TOKENS,
    agreement,
    make_prompts,
    outputs,
    prefill,
    startups,
)
from bench.peers.models import (
    FLAGS,
    NAMES,
    OPENVINO,
    PACKAGES,
    PEERS,
    TYPES,
    ModelFormats,
    Sizes,
    make_systems,
    python_of,
    started,
)
from bench.report import Failures, print_document, print_table
from cbatch.cli.parser import CommandParser
from cbatch.core.request.errors import FieldError
from cbatch.engine.model_files import PACKAGED, find_model

COMPARED_SEQUENCES = 4  # sequences of each system whose tokens are compared
_MODELS = f"{', '.join(NAMES)}, a directory or a .gguf file"


def parse(argv: Sequence[str] | None = None) -> argparse.Namespace:
    parser = CommandParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    models = ["llama-100m", "demo"]
    parser.add_argument("--model", nargs="+", default=models, metavar="MODEL", help=_MODELS)
    parser.add_argument("--type", type=str.upper, choices=TYPES, help="type of a GGUF to write")
    parser.add_argument("--batch", type=int, nargs="*", default=[1, 8, 32, 128])
    parser.add_argument("--lookahead", nargs="+", default=["off", "adaptive"], help="off first")
    parser.add_argument("--peer", nargs="*", choices=PEERS, default=PEERS)
    for peer, flag in FLAGS.items():
        parser.add_argument(flag, metavar="PATH", help=f"a Python that has {PACKAGES[peer]}")
    parser.add_argument("--prompt-tokens", type=int, default=64)
    parser.add_argument("--output-tokens", type=int, default=64)
    parser.add_argument("--repeats", type=int, default=3, help="runs of each system")
    parser.add_argument("--prompts", type=int, default=4, help="minimum of prompts per repeat")
    parser.add_argument(
        "--threads", type=int, default=os.cpu_count(), help="of every system (default: processors)"
    )
    parser.add_argument("--prefill", action="store_true", help="also time long prompts")
    parser.add_argument("--startup", action="store_true", help="also time constructors")
    parser.add_argument("--skip-agreement", action="store_true", help="do not compare tokens")
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
    if not (args.batch or args.prefill or args.startup):
        parser.error("--batch: give a batch, or another measurement")
    return args


def compare_tokens(
    model: ModelFormats, args: argparse.Namespace, failures: Failures
) -> list[dict[str, Any]]:
    """Compare the tokens of the systems. Systems with a choice of dtype use float32."""
    tokens = args.prompt_tokens + args.output_tokens
    sizes = Sizes(COMPARED_SEQUENCES, tokens + 1, COMPARED_SEQUENCES * tokens)
    systems = make_systems(model, args, sizes, exact=True)
    if len(systems) == 1:
        return []
    prompts = make_prompts(model, args.prompt_tokens, COMPARED_SEQUENCES)
    return agreement(model, systems, prompts, args.output_tokens, failures)


def time_systems(
    model: ModelFormats, args: argparse.Namespace, failures: Failures
) -> list[dict[str, Any]]:
    tokens = args.prompt_tokens + args.output_tokens
    if args.prefill:
        tokens = max(tokens, PREFILL_TOKENS + 1)
    max_sequences = max(*args.batch, PREFILL_PROMPTS if args.prefill else 1, 1)
    sizes = Sizes(max_sequences, tokens, max(1024, max_sequences * args.prompt_tokens))
    systems, rows = make_systems(model, args, sizes), []
    if args.startup:
        rows += startups(model, systems, args.repeats, failures)
    if not args.batch and not args.prefill:
        return rows
    with started(systems, failures) as workers:
        for batch in args.batch:
            rows += outputs(model, workers, batch, args, failures)
            print(f"{model.name}, batch {batch} measured", flush=True)
        if args.prefill:
            rows += prefill(model, workers, args.repeats, failures)
    return rows


def main(argv: Sequence[str] | None = None) -> None:
    args, failures = parse(argv), Failures()
    rows: list[dict[str, Any]] = []
    compared: list[dict[str, Any]] = []
    for name in args.model:
        failed = Failures()  # systems with this model
        with failures.caught(name), tempfile.TemporaryDirectory() as folder:
            llama = python_of("llama.cpp", args)
            model = ModelFormats(name, args.type, Path(folder), llama=llama, threads=args.threads)
            if not args.skip_agreement:
                compared += compare_tokens(model, args, failed)
            rows += time_systems(model, args, failed)
        failures.words |= {f"{name}, {system}": words for system, words in failed.words.items()}
    title_start = f"peers: {args.prompt_tokens} tokens in, {args.output_tokens} out, greedy; "
    tables = {"greedy tokens compared with cbatch, lookahead off": compared}
    for figure in FIGURES:
        tables[title_start + figure] = [row for row in rows if row["figure"] == figure]
    consoles = [print_table(title, table) for title, table in tables.items() if table]
    if not consoles:
        return failures.end()
    for note in _notes(args, compared, rows):
        consoles[-1].print(note, markup=False)
    settings = {"repeats": args.repeats, "threads": args.threads}
    print_document(consoles[-1], rows, {"agreement": compared} | settings)
    failures.end()


def _notes(
    args: argparse.Namespace, compared: list[dict[str, Any]], rows: list[dict[str, Any]]
) -> list[str]:
    notes = [f"{args.threads} threads each; medians of {args.repeats} repeats"]
    absent = [peer for peer in args.peer if python_of(peer, args) is None]
    notes += [f"{peer} left out: name a Python that has {PACKAGES[peer]}" for peer in absent]
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


if __name__ == "__main__":
    main()
