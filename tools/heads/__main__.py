"""Train a head that drafts for a model: `python -m tools.heads MODEL --out DIR`."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch

from cbatch.cli.main import main
from cbatch.cli.output import print_line
from cbatch.cli.parser import CommandParser
from cbatch.core.request.errors import FieldError
from cbatch.core.request.request import SamplingParams
from cbatch.engine.model_files import chat_template_of, find_model, tokenizer_of
from tools.heads.questions import ask_itself
from tools.heads.record_lessons import record
from tools.heads.train_head import train_head

_TEXT_TOKENS = 256  # tokens per piece of a text that is read
_QUESTIONS = 2000  # default number of questions that the model asks itself
_TEMPERATURES = (0.0, 0.0, 0.0, 0.8, 0.8)  # of answers, in rotation


def make_parser() -> argparse.ArgumentParser:
    parser = CommandParser(
        prog="python -m tools.heads",
        description="The model answers prompts (or reads texts) in large batches, and its hidden "
        "states are recorded. A head learns from them to predict the next tokens. An interrupted "
        "run continues from its last checkpoint. Give the head to --draft.",
    )
    parser.add_argument("model", metavar="MODEL", help="directory, GGUF file or a packaged name")
    parser.add_argument("--out", type=Path, required=True, metavar="DIR", help="for the head")
    parser.add_argument(
        "--kind", default="eagle3", choices=["eagle3", "medusa"], help="of the head"
    )
    parser.add_argument(
        "--prompts",
        type=Path,
        metavar="FILE",
        help="prompts to answer: lines of text or JSON ({prompt} or {messages}); texts are asked "
        "by the model's chat template, where it has one (default: questions that it asks itself)",
    )
    parser.add_argument(
        "--questions",
        type=int,
        metavar="N",
        help="that it asks itself, where no prompts and no texts are given; OUT/questions.jsonl "
        f"has them (default: {_QUESTIONS})",
    )
    parser.add_argument(
        "--text", type=Path, nargs="+", default=[], metavar="FILE", help="texts to read instead"
    )
    parser.add_argument("--answer-tokens", type=int, default=200, metavar="N")
    parser.add_argument("--lesson-minutes", type=float, default=20.0, help="for the answers")
    parser.add_argument("--minutes", type=float, default=40.0, help="for the training")
    parser.add_argument("--steps", type=int, help="stop the training at this step")
    parser.add_argument(
        "--draft-vocab",
        type=int,
        metavar="N",
        help="ids that it may draft (default: 4096; of medusa all, since vLLM reads no fewer)",
    )
    parser.add_argument("--intermediate-size", type=int, help="of its MLP (default: the model's)")
    parser.add_argument(
        "--init",
        type=Path,
        metavar="HEAD",
        help="an EAGLE-3 head for this model to start from (default: a linear fit)",
    )
    parser.add_argument("--depth", type=int, default=3, help="drafts in a row that it learns")
    parser.add_argument(
        "--share-head",
        action="store_true",
        help="leave the model's own head out of the file: it is smaller, and other engines want it",
    )
    parser.add_argument("--threads", type=int, help="CPU threads (default: as available)")
    parser.set_defaults(run=run)
    return parser


def run(args: argparse.Namespace) -> int:
    counts = ("questions", "answer_tokens", "lesson_minutes", "minutes", "draft_vocab", "depth")
    for field in counts:
        value = getattr(args, field)
        if value is not None and value <= 0:
            raise FieldError(field, f"{getattr(args, field)!r} is not allowed", "give more than 0")
    if args.questions is not None and (args.prompts is not None or args.text):
        raise FieldError("questions", "prompts or texts are given instead", "leave one out")
    if args.init is not None and args.kind != "eagle3":
        raise FieldError("init", "Medusa heads begin at the model itself", "leave it out")
    if args.init is not None and args.intermediate_size is not None:
        raise FieldError("intermediate_size", "the head of --init has its own", "leave one out")
    if args.threads:
        torch.set_num_threads(args.threads)
    model = find_model(args.model)
    args.out.mkdir(parents=True, exist_ok=True)
    prompts = list(_prompts(args, model))
    if not prompts:
        raise FieldError("prompts", "nothing to answer, nothing to read", "give lines, or texts")
    seconds = args.lesson_minutes * 60
    shards = record(model, prompts, args.out / "lessons", seconds, args.kind)
    scores = train_head(
        model,
        shards,
        args.out,
        kind=args.kind,
        name=str(args.model),
        seconds=args.minutes * 60,
        draft_vocab=args.draft_vocab,
        intermediate_size=args.intermediate_size,
        depth=args.depth,
        with_head=not args.share_head,
        steps=args.steps,
        init=args.init,
    )
    depths = ", ".join(f"{rate:.2f}" for rate in scores.by_depth)
    per_step = f"{scores.tokens_per_step:.2f} tokens per step"
    print(f"held out: {depths} of drafts accepted by depth; {per_step}")
    print_line({"by_depth": scores.by_depth, "tokens_per_step": scores.tokens_per_step})
    return 0


def _prompts(args: argparse.Namespace, model: str | Path) -> Iterator[tuple[list[int], Any]]:
    """Yield the token ids of each prompt or piece of text, and its sampling parameters."""
    tokenizer = tokenizer_of(model)
    for file in args.text:
        ids = tokenizer.encode(_read(file, "text"))
        for at in range(0, len(ids), _TEXT_TOKENS):
            yield ids[at : at + _TEXT_TOKENS], SamplingParams(max_tokens=1)
    if args.text and args.prompts is None:
        return
    file = args.prompts or _own_questions(args, model)
    for number, line in enumerate(filter(str.strip, _read(file, "prompts").splitlines())):
        text, is_rendered = _prompt_text(line, model, file, number)
        temperature = _TEMPERATURES[number % len(_TEMPERATURES)]
        params = SamplingParams(max_tokens=args.answer_tokens, temperature=temperature)
        yield tokenizer.encode(text, add_special_tokens=not is_rendered), params


def _own_questions(args: argparse.Namespace, model: str | Path) -> Path:
    file: Path = args.out / "questions.jsonl"
    if not file.exists():
        texts = ask_itself(model, args.questions or _QUESTIONS, progress=True)
        questions: list[dict[str, Any]] = [{"prompt": text} for text in texts]
        if chat_template_of(model) is not None:
            questions = [{"messages": [{"role": "user", "content": text}]} for text in questions]
        file.write_text(
            "".join(json.dumps(question) + "\n" for question in questions), encoding="utf-8"
        )
    return file


def _read(file: Path, field: str) -> str:
    try:
        return file.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise FieldError(field, f"{file} cannot be read ({error})", "name a text file") from None


def _prompt_text(line: str, model: str | Path, file: Path, number: int) -> tuple[str, bool]:
    """Return the text of a prompt, and whether a chat template has rendered it."""
    prompt: Any = line
    if line.lstrip().startswith("{"):
        try:
            entry = json.loads(line)
            prompt = entry["messages"] if "messages" in entry else entry["prompt"]
        except (ValueError, KeyError) as error:
            problem = f"{file}, line {number + 1}: {error!r}"
            raise FieldError("prompts", problem, "give text, {prompt} or {messages}") from None
        if isinstance(prompt, str):
            return prompt, False
    template = chat_template_of(model)
    if isinstance(prompt, str):
        if template is None:
            return prompt, False
        prompt = [{"role": "user", "content": prompt}]
    if template is None:
        raise FieldError("prompts", "this model has no chat template", "give {prompt}")
    return template.render(prompt), True


if __name__ == "__main__":
    sys.exit(main(parser_of=lambda _: make_parser()))
