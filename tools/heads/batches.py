"""Batches of lessons with similar lengths, padded to the longest of a batch."""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from tools.heads.lessons import Lesson


class LessonBatch(NamedTuple):
    tokens: Tensor  # int64 [B, L]
    states: Tensor  # bf16 [B, L - 1, layers, hidden]
    to_predict: Tensor  # bool [B, L]: False for tokens of the prompt and padding


def batch_of(lessons: Sequence[Lesson]) -> LessonBatch:
    tokens = pad_sequence([each.tokens.long() for each in lessons], batch_first=True)
    states = pad_sequence([each.states for each in lessons], batch_first=True)
    at = torch.arange(tokens.shape[1])
    first = torch.tensor([each.num_given for each in lessons])[:, None]
    lens = torch.tensor([len(each.tokens) for each in lessons])[:, None]
    return LessonBatch(tokens, states, (at >= first) & (at < lens))


def batches(lessons: Sequence[Lesson], tokens: int, seed: int) -> Iterator[list[Lesson]]:
    """Yield all lessons once, in batches of at most `tokens` tokens including padding."""
    rng = random.Random(seed)
    order = sorted(lessons, key=lambda lesson: len(lesson.tokens) + rng.random() * 32)
    groups: list[list[Lesson]] = [[]]
    for lesson in order:
        longest = max(len(each.tokens) for each in (*groups[-1], lesson))
        if groups[-1] and longest * (len(groups[-1]) + 1) > tokens:
            groups.append([])
        groups[-1].append(lesson)
    rng.shuffle(groups)
    yield from (group for group in groups if group)
