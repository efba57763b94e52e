"""What a head learns from: texts, or a model's own answers, with what the model held at each token.

Both are served by an engine, many at a time, and recorded as they go: what the model computes for
its answer is what the head will read."""

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

SHARD_TOKENS = 8192


class Lesson(NamedTuple):
    """A sequence: int32 tokens [n], the first `num_given` of which nobody drafts, and states bf16
    [n - 1, layers, hidden_size] of all but the last."""

    tokens: Tensor
    num_given: int
    states: Tensor


class Shards:
    """Lessons in files of a folder, some thousand tokens each; whole or not there."""

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
        """Of a text, which has no answer, all counts."""
        given = num_prompt if len(tokens) > num_prompt + 1 else 1
        lesson = Lesson(tokens, given, states)
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
        held = {
            "tokens": torch.cat([each.tokens for each in parts]),
            "lens": torch.tensor(lens, dtype=torch.int32),
            "num_given": torch.tensor([each.num_given for each in parts], dtype=torch.int32),
            "states": torch.cat([each.states for each in parts]),
        }
        save_file(held, file.with_suffix(".part"))
        file.with_suffix(".part").replace(file)

    def read(self) -> Iterator[Lesson]:
        for file in self.files:
            held = load_file(file)
            lens = held["lens"].tolist()
            tokens = held["tokens"].split(lens)
            states = held["states"].split([n - 1 for n in lens])
            for each in zip(tokens, held["num_given"].tolist(), states, strict=True):
                yield Lesson(*each)


def write_lessons(
    engine: Engine,
    prompts: Sequence[tuple[Sequence[int], SamplingParams]],
    recorder: Recorder,
    shards: Shards,
    seconds: float,
    progress: Callable[[int], None],
) -> None:
    """Serves `prompts` in order until all are answered, or no more are begun after `seconds`. The
    engine's executor has the recorder, which writes to the shards, for its drafter."""
    batch: Batch[int] = Batch(engine)
    end, at = time.monotonic() + seconds, 0
    most = 2 * recorder.table.max_slots
    while True:
        while len(batch.waiting) < most and at < len(prompts) and time.monotonic() < end:
            tokens, params = prompts[at]
            batch.add(at, list(tokens), params)
            at += 1
        if not batch.waiting:
            break
        batch.take(engine.step())
        progress(shards.count)
    recorder.close()
    shards.flush()
