"""Build the demo pair from the interpreter's own standard library.

    python -m cbatch.demo.train                     # everything: about two hours on two cores
    python -m cbatch.demo.train draft evaluate      # some stages, from what is in --work

Every stage can be killed and started again: it goes on from its last checkpoint.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
from pathlib import Path

import torch
from tokenizers import Tokenizer

from cbatch.demo import demo_paths
from cbatch.demo.batches import Streams, prepare
from cbatch.demo.card import render
from cbatch.demo.checkpoint import load_pretrained, save_pretrained
from cbatch.demo.data import Corpus, total_bytes
from cbatch.demo.draft import distil_draft, pretrain_draft
from cbatch.demo.evaluate import evaluate, folder_bytes
from cbatch.demo.lessons import Lessons, build_lessons, lesson_prompts
from cbatch.demo.loop import Budget, Progress
from cbatch.demo.parallel import Workers
from cbatch.demo.prompts import choose_prompts
from cbatch.demo.target import train_target

STAGES = ("tokenizer", "target", "draft-text", "draft", "evaluate")
# Shares of the draft's time: the target writes lessons, the draft learns text, distillation.
LESSON_PROMPTS = 8192
LESSON_SHARE = 0.4
TEXT_SHARE = 0.1


def parse_args(argv: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument(
        "stages",
        nargs="*",
        default=list(STAGES),
        metavar="stage",
        help=f"any of {', '.join(STAGES)}; default all",
    )
    parser.add_argument(
        "--work", type=Path, default=Path("build/demo"), help="checkpoints and packed data"
    )
    parser.add_argument(
        "--out",
        type=Path,
        default=demo_paths()[0].parent,
        help="folder that gets target/, draft/ and README.md",
    )
    parser.add_argument("--target-minutes", type=float, default=90.0)
    parser.add_argument("--target-steps", type=int, help="end the target earlier, at this step")
    parser.add_argument("--draft-minutes", type=float, default=20.0)
    parser.add_argument("--draft-steps", type=int, help="end the draft earlier, at this step")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--threads", type=int, default=os.cpu_count())
    args = parser.parse_args(argv)
    if unknown := set(args.stages) - set(STAGES):
        parser.error(f"stages: unknown {', '.join(sorted(unknown))}; use {', '.join(STAGES)}")
    return args


def save_progress(work: Path, stage: str, progress: Progress) -> None:
    (work / f"{stage}.json").write_text(json.dumps(vars(progress)))


def run_target(
    args: argparse.Namespace, tokenizer: Tokenizer, streams: Streams, device: str, workers: Workers
) -> None:
    budget = Budget(args.target_minutes * 60, args.target_steps)
    net, progress = train_target(args.work, streams, budget, args.seed, device, workers)
    save_pretrained(net, tokenizer, args.out / "target")
    save_progress(args.work, "target", progress)


def run_draft_text(
    args: argparse.Namespace, streams: Streams, device: str, workers: Workers
) -> None:
    budget = Budget(args.draft_minutes * 60 * TEXT_SHARE, args.draft_steps)
    _, progress = pretrain_draft(args.work, streams, budget, args.seed, device, workers)
    save_progress(args.work, "draft-text", progress)


def run_draft(
    args: argparse.Namespace,
    tokenizer: Tokenizer,
    streams: Streams,
    corpus: Corpus,
    device: str,
    workers: Workers,
) -> None:
    target = load_pretrained(args.out / "target").to(device)
    seconds = args.draft_minutes * 60
    lesson_file = args.work / "lessons.pt"
    if not lesson_file.exists():
        prompts = lesson_prompts(tokenizer, streams, corpus, args.seed, LESSON_PROMPTS)
        lessons = build_lessons(
            target, prompts, streams, seconds * LESSON_SHARE, args.seed, workers
        )
        lessons.save(lesson_file)
    lessons = Lessons.load(lesson_file)
    print(f"lessons of {lessons.ids.numel():,} tokens", flush=True)
    # No step is left in this budget: it only loads what the text stage trained.
    spent = Budget(0.0)
    start_from, _ = pretrain_draft(args.work, streams, spent, args.seed, device, workers)
    budget = Budget(seconds * (1 - LESSON_SHARE - TEXT_SHARE), args.draft_steps)
    net, progress = distil_draft(args.work, lessons, budget, args.seed, workers, start_from)
    save_pretrained(net, tokenizer, args.out / "draft")
    save_progress(args.work, "draft", progress)


def training_lines(args: argparse.Namespace) -> list[str]:
    """What the card says of the runs, from the progress files that they left."""
    what = {
        "target": "next-token loss, Muon and AdamW; warm-up, stable, decay",
        "draft-text": "the draft on text alone, next-token loss",
        "draft": "distilled from the target (its likeliest tokens and its argmax), a quarter on "
                 "real text, the rest on the target's own continuations",
    }  # fmt: skip
    lines = []
    for stage, description in what.items():
        file = args.work / f"{stage}.json"
        if file.exists():
            spent = json.loads(file.read_text())
            lines.append(
                f"{stage}: {spent['step']:,} steps, {spent['tokens']:,} tokens, "
                f"{spent['elapsed_s'] / 60:.0f} minutes, seed {args.seed};\n  {description}"
            )
    return lines


def run_evaluate(
    args: argparse.Namespace, tokenizer: Tokenizer, streams: Streams, corpus: Corpus
) -> None:
    torch.set_num_threads(args.threads)
    folders = args.out / "target", args.out / "draft"
    target, draft = (load_pretrained(folder) for folder in folders)
    report = evaluate(target, draft, tokenizer, corpus.held_out)
    library = [document for document in corpus.train if not document.is_test]
    report["data"] = (
        f"Python {platform.python_version()}: {len(library)} library files, "
        f"{total_bytes(library) / 1e6:.1f} MB, {streams.library.numel():,} tokens;\nand "
        f"{streams.tests.numel():,} tokens of the library's tests, a fifth of each batch until "
        f"the decay.\nNear-duplicates dropped: {corpus.dropped_bytes / 1e6:.2f} MB."
    )
    report["training"] = training_lines(args)
    report["machine"] = f"{platform.machine()} CPU, torch {torch.__version__}"
    (args.work / "report.json").write_text(json.dumps(report, indent=1))
    card = render(report, target, draft, folder_bytes(*folders))
    (args.out / "README.md").write_text(card)
    print(json.dumps({"total": report["total"], "costs": report["costs"]}))


def main(argv: list[str] | None = None) -> None:
    args = parse_args(argv)
    for folder in (args.work, args.out):
        folder.mkdir(parents=True, exist_ok=True)
    device = "cuda" if torch.cuda.is_available() else "cpu"
    workers = Workers(args.threads if device == "cpu" else 1)
    tokenizer, streams, corpus = prepare(args.work, args.seed)
    if "tokenizer" in args.stages:
        prompts = json.dumps(choose_prompts(corpus.held_out), indent=1, ensure_ascii=False)
        (args.out / "prompts.json").write_text(prompts + "\n", encoding="utf-8")
    if "target" in args.stages:
        run_target(args, tokenizer, streams, device, workers)
    if "draft-text" in args.stages:
        run_draft_text(args, streams, device, workers)
    if "draft" in args.stages:
        run_draft(args, tokenizer, streams, corpus, device, workers)
    if "evaluate" in args.stages:
        run_evaluate(args, tokenizer, streams, corpus)


if __name__ == "__main__":
    main()
