"""From lessons to a trained head: training, acceptance, model card."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import torch
from torch import Tensor

from cbatch.core.request.errors import FieldError
from cbatch.runtime.model.config import ModelConfig
from tools.heads.eagle_net import EagleNet, EagleShape
from tools.heads.export import load_eagle3, save_eagle3, save_medusa
from tools.heads.head_training import SHARPENING, Acceptance, HeadTraining
from tools.heads.initial_weights import set_initial_weights
from tools.heads.lessons import Lesson, Shards
from tools.heads.medusa_net import MedusaNet
from tools.heads.record_lessons import hidden_layers
from tools.heads.target_parts import TargetParts

HELD_OUT_EVERY, MAX_HELD_OUT = 12, 64  # every 12th lesson is held out; at most 64 are evaluated
MIN_LESSONS = 24  # minimum number of lessons to train a head
CARD = "README.md"
DRAFT_VOCAB = 4096  # default number of ids that an EAGLE-3 head can draft
TITLES = {"eagle3": "An EAGLE-3 head", "medusa": "Medusa heads"}


def train_head(
    model: str | Path,
    shards: Shards,
    folder: Path,
    *,
    kind: str,
    name: str,
    seconds: float,
    draft_vocab: int | None,
    intermediate_size: int | None,
    depth: int,
    with_head: bool,
    steps: int | None = None,
    init: Path | None = None,
) -> Acceptance:
    """Train, or continue from the checkpoint; write the head and its card to `folder`. `init` is an
    EAGLE-3 head to start from. Raises `FieldError` for `init` if it is no head for this model."""
    lessons = list(shards.read())
    if len(lessons) < MIN_LESSONS:
        problem = f"{len(lessons)} answers are too few to learn from and to be tested on"
        raise FieldError("lesson_minutes", problem, f"record {MIN_LESSONS} or more")
    held_out = lessons[::HELD_OUT_EVERY][:MAX_HELD_OUT]
    train_lessons = [lesson for i, lesson in enumerate(lessons) if i % HELD_OUT_EVERY]
    parts = TargetParts.of(model)
    c = parts.config
    layers = hidden_layers(kind, c.num_layers)
    if lessons[0].states.shape[1] < len(layers):
        problem = f"{folder} contains recordings without the layers that {kind} reads"
        raise FieldError("out", problem, "give another folder")
    max_ids = draft_vocab or (c.vocab_size if kind == "medusa" else DRAFT_VOCAB)
    ids, coverage = frequent(train_lessons, min(max_ids, c.vocab_size), c.vocab_size)
    checkpoint = folder / f"training-{kind}.pt"
    net: EagleNet | MedusaNet
    if kind == "medusa":
        net = MedusaNet(parts, ids, heads=depth)
    elif init is not None:
        net = _eagle_from(init, parts, ids)
    else:
        net = EagleNet(_eagle_shape(c, intermediate_size), parts, ids)
        if not checkpoint.exists():
            set_initial_weights(net, train_lessons)
    first = 1 if init is None else 2  # a head to start from has learned several drafts already
    training = HeadTraining(net, parts, checkpoint, steps=depth, first_depth=first)
    training.run(train_lessons, seconds=seconds, max_steps=steps)
    acceptance = training.acceptance(held_out)
    if isinstance(net, MedusaNet):
        save_medusa(net, folder, with_head=with_head)
    else:
        save_eagle3(net, layers[:-1], folder, model=name, drafts=depth, with_head=with_head)
    data = {
        "answers": len(train_lessons),
        "tokens": sum(len(each.tokens) for each in train_lessons),
        "coverage": coverage,
    }
    card = _card(TITLES[kind], name, training, acceptance, data, init)
    (folder / CARD).write_text(card, encoding="utf-8")
    return acceptance


def _eagle_from(init: Path, parts: TargetParts, ids: Tensor) -> EagleNet:
    try:
        return load_eagle3(init, parts, ids)
    except (OSError, ValueError, KeyError, TypeError, RuntimeError) as error:
        problem = f"{init} is not an EAGLE-3 head for this model ({str(error).splitlines()[0]})"
        raise FieldError("init", problem, "name one that tools.heads made for it") from None


def _eagle_shape(c: ModelConfig, intermediate_size: int | None) -> EagleShape:
    return EagleShape(
        hidden_size=c.hidden_size,
        num_layers_read=3,
        num_heads=c.num_heads,
        num_kv_heads=c.num_kv_heads,
        head_dim=c.head_dim,
        intermediate_size=intermediate_size or c.intermediate_size,
        rms_norm_eps=c.rms_norm_eps,
        rope_theta=c.rope.theta,
    )


def frequent(lessons: Sequence[Lesson], count: int, vocab: int) -> tuple[Tensor, float]:
    """Return the most frequent token ids, ascending, and their share of all tokens. Lower ids win
    ties, also among unused ids: tokenizers number early merges first, which are common in all
    texts."""
    drafted = torch.cat([each.tokens[each.num_given :] for each in lessons]).long()
    counts = drafted.bincount(minlength=vocab)
    ids = counts.argsort(descending=True, stable=True)[:count].sort().values
    return ids, float(counts[ids].sum() / counts.sum())


def _card(
    title: str,
    name: str,
    training: HeadTraining,
    acceptance: Acceptance,
    data: dict[str, float],
    init: Path | None,
) -> str:
    start = "" if init is None else f", beginning at the head {init.name}"
    depths = ", ".join(f"{rate:.2f}" for rate in acceptance.by_depth)
    weights = sum(p.numel() for p in training.net.parameters())
    answers, tokens, ids = data["answers"], data["tokens"], len(training.net.draft_ids)
    return f"""# {title} for {name}

Made by `python -m tools.heads`{start}.

- Data: {answers:,} answers of the model itself, {tokens:,} tokens.
- Drafts {ids:,} ids, {data["coverage"]:.1%} of all answered tokens.
- {weights / 1e6:.2f} M weights; {training.step:,} steps on {training.tokens:,} tokens,
  {training.elapsed_s / 60:.0f} minutes. Loss {training.loss:.2f}: cross-entropy to the model's
  distribution among those ids, sharpened (logits times {SHARPENING}), {training.steps} drafts deep.
- Held out, against the model's likeliest token: of drafts number 1, 2, ... that were tried
  {depths} were accepted ({acceptance.trials:,} positions).
  That is {acceptance.tokens_per_step:.2f} tokens per step.
"""
