"""Lessons for the draft: text, and the target's predictions at each of its positions."""

from __future__ import annotations

import random
import time
from dataclasses import dataclass
from pathlib import Path

import torch
from tokenizers import Tokenizer
from torch import Tensor

from tools.demo_pair.batches import Streams, draw, windows
from tools.demo_pair.data import Corpus
from tools.demo_pair.nets import Llama
from tools.demo_pair.parallel import Workers
from tools.demo_pair.prompts import function_heads
from tools.demo_pair.sample import decode

CONTEXT_TOKENS = 256
PROMPT_TOKENS = 96
LESSON_ROWS = 64  # rows per batch
TOP_TOKENS = 64  # the target's likeliest tokens, stored for each position


@dataclass
class Lessons:
    """Rows of text with the target's predictions.

    `ids` is [row, context + 1]. `top_ids` and `top_logits` are [row, context, 64], the target's
    likeliest tokens after each position. They are stored because running the target again costs
    more than training the draft.
    """

    ids: Tensor
    top_ids: Tensor
    top_logits: Tensor

    @classmethod
    def join(cls, parts: list[Lessons]) -> Lessons:
        return cls(
            torch.cat([part.ids for part in parts]),
            torch.cat([part.top_ids for part in parts]),
            torch.cat([part.top_logits for part in parts]),
        )

    def save(self, path: Path) -> None:
        torch.save(vars(self), path)

    @classmethod
    def load(cls, path: Path) -> Lessons:
        return cls(**torch.load(path))


def lesson_prompts(
    tokenizer: Tokenizer, streams: Streams, corpus: Corpus, seed: int, count: int
) -> list[list[int]]:
    """Return training prompts: half function heads, half library windows, at most 96 tokens
    each."""
    heads = [h for d in corpus.train if not d.is_test for h in function_heads(d)]
    random.Random(seed).shuffle(heads)
    encoded = [e.ids[-PROMPT_TOKENS:] for e in tokenizer.encode_batch(heads[: count // 2])]
    generator = torch.Generator().manual_seed(seed)
    cuts = windows(streams.library, count - len(encoded), PROMPT_TOKENS, generator)
    return encoded + cuts.tolist()


@torch.inference_mode()
def read_lesson(target: Llama, rows: Tensor) -> Lessons:
    """Return the target's predictions on given rows [n, context + 1]."""
    top = target(rows[:, :-1]).topk(TOP_TOKENS)
    return Lessons(rows.int().cpu(), top.indices.short().cpu(), top.values.half().cpu())


@torch.inference_mode()
def write_lesson(target: Llama, prompts: list[list[int]], temperature: float, seed: int) -> Lessons:
    """Cut the prompts to the length of the shortest; let the target continue them to full rows."""
    shortest = min(len(prompt) for prompt in prompts)
    ids = torch.tensor([prompt[-shortest:] for prompt in prompts], device=target.cos.device)
    pad = torch.zeros(len(ids), dtype=torch.long, device=ids.device)
    new_tokens = CONTEXT_TOKENS + 1 - shortest
    rows, top_ids, top_logits = [ids], [], []
    for logits, chosen in decode(target, ids, pad, new_tokens, temperature, seed):
        top = logits.topk(TOP_TOKENS)
        rows.append(chosen)
        top_ids.append(top.indices.short())
        top_logits.append(top.values.half())
    return Lessons(
        torch.cat(rows, dim=1).int().cpu(),
        torch.cat(top_ids, dim=1).cpu(),
        torch.cat(top_logits, dim=1).cpu(),
    )


def build_lessons(
    target: Llama,
    prompts: list[list[int]],
    streams: Streams,
    seconds: float,
    seed: int,
    workers: Workers,
) -> Lessons:
    """Make lessons in batches of 64 rows for `seconds` (at least one batch per worker).

    Of every four batches, two are greedy continuations, one is sampled at temperature 0.8 and one
    is real text.
    """
    order = sorted(range(len(prompts)), key=lambda i: len(prompts[i]))
    batches = [order[i : i + LESSON_ROWS] for i in range(0, len(order), LESSON_ROWS)]
    random.Random(seed).shuffle(batches)
    deadline = time.perf_counter() + seconds

    def lesson(index: int) -> Lessons | None:
        if index >= workers.count and time.perf_counter() > deadline:
            return None
        print(f"lesson {index} of {len(batches)}", flush=True)
        if index % 4 == 3:
            real = draw(streams, index, seed + 2, LESSON_ROWS, CONTEXT_TOKENS + 1, False)
            return read_lesson(target, real.to(target.cos.device))
        chosen = [prompts[i] for i in batches[index]]
        return write_lesson(target, chosen, 0.8 if index % 4 == 2 else 0.0, seed + index)

    parts = workers.map(lesson, range(len(batches)))
    return Lessons.join([part for part in parts if part is not None])
