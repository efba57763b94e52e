"""Train the demo pair on the interpreter's own standard library.

    python -m tools.demo_pair.train                  # everything: about two hours on two cores
    python -m tools.demo_pair.train draft evaluate   # some stages, from the files in --work

Every stage can be killed and restarted: it continues from its last checkpoint.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
from pathlib import Path

import torch

from cbatch.cli.parser import CommandParser
from cbatch.demo import demo_paths
from tools.demo_pair.batches import prepare
from tools.demo_pair.card import render
from tools.demo_pair.checkpoint import load_pretrained, save_pretrained
from tools.demo_pair.data import total_bytes
from tools.demo_pair.draft import Distillation, Pretraining
from tools.demo_pair.evaluate import evaluate, folder_bytes
from tools.demo_pair.lessons import Lessons, build_lessons, lesson_prompts
from tools.demo_pair.loop import Training, TrainingBudget
from tools.demo_pair.parallel import Workers
from tools.demo_pair.prompts import choose_prompts
from tools.demo_pair.target import TargetTraining

LESSON_PROMPTS = 8192
# Shares of --draft-minutes: for generating lessons (the data of the distillation) with the target,
# and for pretraining the draft on text. Distillation gets the rest.
LESSON_SHARE = 0.4
TEXT_SHARE = 0.1


class Stages:
    """The stages, which exchange files in the folders `work` and `out`. The constructor prepares
    the tokenizer and the training data, if `work` lacks them."""

    def __init__(self, args: argparse.Namespace) -> None:
        self.args, self.work, self.out = args, args.work, args.out
        self.device = "cuda" if torch.cuda.is_available() else "cpu"
        self.workers = Workers(args.threads if self.device == "cpu" else 1)
        self.tokenizer, self.streams, self.corpus = prepare(args.work, args.seed)

    def write_prompts(self) -> None:
        prompts = json.dumps(choose_prompts(self.corpus.held_out), indent=1, ensure_ascii=False)
        (self.out / "prompts.json").write_text(prompts + "\n", encoding="utf-8")

    def train_target(self) -> None:
        training = TargetTraining(
            self.work, self.streams, self.device, self.args.seed, self.workers
        )
        training.run(TrainingBudget(self.args.target_minutes * 60, self.args.target_steps))
        training.grow()
        self._save("target", training, folder="target")

    def train_draft_text(self) -> None:
        seconds = self.args.draft_minutes * 60 * TEXT_SHARE
        training = self._draft_on_text(TrainingBudget(seconds, self.args.draft_steps))
        self._save("draft-text", training)

    def train_draft(self) -> None:
        seconds, seed = self.args.draft_minutes * 60, self.args.seed
        lesson_file = self.work / "lessons.pt"
        if not lesson_file.exists():
            target = load_pretrained(self.out / "target").to(self.device)
            prompts = lesson_prompts(
                self.tokenizer, self.streams, self.corpus, seed, LESSON_PROMPTS
            )
            lessons = build_lessons(
                target, prompts, self.streams, seconds * LESSON_SHARE, seed, self.workers
            )
            lessons.save(lesson_file)
        lessons = Lessons.load(lesson_file)
        print(f"lessons of {lessons.ids.numel():,} tokens", flush=True)
        # With a budget of 0 s no step runs: this only loads the net that the text stage trained.
        pretrained = self._draft_on_text(TrainingBudget(0.0)).net
        training = Distillation(self.work, lessons, seed, self.workers, pretrained)
        share = 1 - LESSON_SHARE - TEXT_SHARE
        training.run(TrainingBudget(seconds * share, self.args.draft_steps))
        self._save("draft", training, folder="draft")

    def _draft_on_text(self, budget: TrainingBudget) -> Pretraining:
        training = Pretraining(self.work, self.streams, self.device, self.args.seed, self.workers)
        training.run(budget)
        return training

    def _save(self, stage: str, training: Training, folder: str | None = None) -> None:
        if folder is not None:
            save_pretrained(training.net, self.tokenizer, self.out / folder)
        (self.work / f"{stage}.json").write_text(json.dumps(vars(training.progress)))

    def evaluate(self) -> None:
        torch.set_num_threads(self.args.threads)
        folders = self.out / "target", self.out / "draft"
        target, draft = (load_pretrained(folder) for folder in folders)
        report = evaluate(target, draft, self.tokenizer, self.corpus.held_out)
        library = [document for document in self.corpus.train if not document.is_test]
        report["data"] = (
            f"Python {platform.python_version()}: {len(library)} library files, "
            f"{total_bytes(library) / 1e6:.1f} MB, {self.streams.library.numel():,} tokens;\nand "
            f"{self.streams.tests.numel():,} tokens of the library's tests, a fifth of each batch "
            f"until the decay.\nNear-duplicates dropped: {self.corpus.dropped_bytes / 1e6:.2f} MB."
        )
        report["training"] = training_lines(self.args)
        report["machine"] = f"{platform.machine()} CPU, torch {torch.__version__}"
        (self.work / "report.json").write_text(json.dumps(report, indent=1))
        card = render(report, target, draft, folder_bytes(*folders))
        (self.out / "README.md").write_text(card)
        print(json.dumps({"total": report["total"], "costs": report["costs"]}))


STAGES = {
    "tokenizer": Stages.write_prompts,
    "target": Stages.train_target,
    "draft-text": Stages.train_draft_text,
    "draft": Stages.train_draft,
    "evaluate": Stages.evaluate,
}


def parse_args(argv: list[str] | None = None) -> argparse.Namespace:
    parser = CommandParser(description=__doc__.splitlines()[0])
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
        help="output folder of target/, draft/ and README.md",
    )
    parser.add_argument("--target-minutes", type=float, default=90.0)
    parser.add_argument("--target-steps", type=int, help="stop training the target at this step")
    parser.add_argument("--draft-minutes", type=float, default=20.0)
    parser.add_argument("--draft-steps", type=int, help="stop training the draft at this step")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--threads", type=int, default=os.cpu_count())
    args = parser.parse_args(argv)
    if unknown := set(args.stages) - set(STAGES):
        parser.error(f"stages: unknown {', '.join(sorted(unknown))}; use {', '.join(STAGES)}")
    return args


def training_lines(args: argparse.Namespace) -> list[str]:
    """Return the card's lines about the training runs, from their progress files."""
    descriptions = {
        "target": "next-token loss, Muon and AdamW; warm-up, stable, decay",
        "draft-text": "the draft on text alone, next-token loss",
        "draft": "distilled from the target (its likeliest tokens and its argmax), a quarter on "
                 "real text, the rest on the target's own continuations",
    }  # fmt: skip
    lines = []
    for stage, description in descriptions.items():
        file = args.work / f"{stage}.json"
        if file.exists():
            progress = json.loads(file.read_text())
            lines.append(
                f"{stage}: {progress['step']:,} steps, {progress['tokens']:,} tokens, "
                f"{progress['elapsed_s'] / 60:.0f} minutes, seed {args.seed};\n  {description}"
            )
    return lines


def main(argv: list[str] | None = None) -> None:
    args = parse_args(argv)
    for folder in (args.work, args.out):
        folder.mkdir(parents=True, exist_ok=True)
    stages = Stages(args)
    for name, run in STAGES.items():
        if name in args.stages:
            run(stages)


if __name__ == "__main__":
    main()
