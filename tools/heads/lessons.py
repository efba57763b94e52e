"""Lessons for a head: texts, or a model's own answers, with the hidden states at each token.

An engine serves many sequences at a time and records their states. A head reads the same states
when it drafts."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from cbatch.core.request.request import SamplingParams
from cbatch.engine.engine import Engine
from cbatch.llm import Batch
from tools.heads.recorder import Recorder

SHARD_TOKENS = 8192  # a file is written once this many tokens are waiting


class Lesson(NamedTuple):
    """A sequence: int32 tokens [n], of which the first `num_given` are never drafted, and bf16
    states [n - 1, layers, hidden_size] of all tokens but the last."""

    tokens: Tensor
    num_given: int
    states: Tensor


class Shards:
    """Lessons in files of a folder, about `SHARD_TOKENS` tokens each. A file appears in one
    operation."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        folder.mkdir(parents=True, exist_ok=True)
        self._waiting: list[Lesson] = []
        self.count = self.tokens = 0
        for lesson in self.read():
            self._add(lesson)

    @property
    def files(self) -> list[Path]:
        return sorted(self.folder.glob("lessons-*.safetensors"))

    def _add(self, lesson: Lesson) -> None:
        self.count += 1
        self.tokens += len(lesson.tokens)

    def record(self, tokens: Tensor, num_prompt: int, states: Tensor) -> None:
        """Add a sequence. If it is a text without an answer, all tokens but the first count."""
        num_given = num_prompt if len(tokens) > num_prompt + 1 else 1
        lesson = Lesson(tokens, num_given, states)
        self._add(lesson)
        self._waiting.append(lesson)
        if sum(len(each.tokens) for each in self._waiting) >= SHARD_TOKENS:
            self.flush()

    def flush(self) -> None:
        if not self._waiting:
            return
        parts, self._waiting = self._waiting, []
        file = self.folder / f"lessons-{len(self.files):05d}.safetensors"
        lens = [len(each.tokens) for each in parts]
        tensors = {
            "tokens": torch.cat([each.tokens for each in parts]),
            "lens": torch.tensor(lens, dtype=torch.int32),
            "num_given": torch.tensor([each.num_given for each in parts], dtype=torch.int32),
            "states": torch.cat([each.states for each in parts]),
        }
        save_file(tensors, file.with_suffix(".part"))
        file.with_suffix(".part").replace(file)

    def read(self) -> Iterator[Lesson]:
        for file in self.files:
            stored = load_file(file)
            lens = stored["lens"].tolist()
            tokens = stored["tokens"].split(lens)
            states = stored["states"].split([n - 1 for n in lens])
            for parts in zip(tokens, stored["num_given"].tolist(), states, strict=True):
                yield Lesson(*parts)


def write_lessons(
    engine: Engine,
    prompts: Sequence[tuple[Sequence[int], SamplingParams]],
    recorder: Recorder,
    shards: Shards,
    seconds: float,
    progress: Callable[[int], None],
) -> None:
    """Serve `prompts` in order. After `seconds` no more prompts start, and running ones finish. The
    recorder must be the drafter of the engine's executor; it writes to the shards."""
    batch: Batch[int] = Batch(engine)
    end, at = time.monotonic() + seconds, 0
    max_waiting = 2 * recorder.table.max_num_seqs
    while True:
        while len(batch.waiting) < max_waiting and at < len(prompts) and time.monotonic() < end:
            tokens, params = prompts[at]
            batch.add(at, list(tokens), params)
            at += 1
        if not batch.waiting:
            break
        batch.take(engine.step())
        progress(shards.count)
    recorder.close()
    shards.flush()
