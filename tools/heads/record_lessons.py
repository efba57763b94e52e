"""Lessons for a head: hidden states of a model at the tokens of its own answers to prompts."""

from __future__ import annotations

import time
from collections.abc import Sequence
from pathlib import Path

from cbatch.core.request.errors import FieldError
from cbatch.core.request.request import SamplingParams
from cbatch.core.scheduler.config import SchedulerConfig
from cbatch.core.scheduler.scheduler import Scheduler
from cbatch.engine.core import EngineCore
from cbatch.engine.engine import Engine
from cbatch.runtime.cpu.decoder import load_model
from cbatch.runtime.cpu.executor import TorchExecutor
from tools.heads.lessons import Shards, write_lessons
from tools.heads.recorder import Recorder

SLOTS, BLOCK_TOKENS, STEP_TOKENS = 48, 16, 1024  # sizes of the engine that records lessons
REPORT_EVERY_S = 30.0

Prompt = tuple[Sequence[int], SamplingParams]


def hidden_layers(kind: str, num_layers: int) -> tuple[int, ...]:
    """Return the layers whose states are recorded: the three that an EAGLE-3 head reads, as in the
    paper, and the last, from which the target's logits follow and which Medusa heads read."""
    if kind == "medusa":
        return (num_layers,)
    if num_layers < 6:
        raise FieldError("model", f"{num_layers} layers are too few to read three", "take another")
    return 2, num_layers // 2, num_layers - 3, num_layers


def record(
    model: str | Path,
    prompts: Sequence[Prompt],
    folder: Path,
    seconds: float,
    kind: str = "eagle3",
) -> Shards:
    """Record lessons from the model's own answers, or return the lessons of a complete earlier
    run."""
    shards, done = Shards(folder), folder / "done"
    if done.exists():
        return shards
    target = load_model(model)
    c = target.config
    longest = max((len(tokens) + params.max_tokens for tokens, params in prompts), default=1)
    config = SchedulerConfig(
        num_blocks=SLOTS * -(-longest // BLOCK_TOKENS),
        block_size=BLOCK_TOKENS,
        max_num_seqs=SLOTS,
        max_model_len=min(longest, c.max_position_tokens),
        vocab_size=c.vocab_size,
        max_num_batched_tokens=STEP_TOKENS,
        eos_ids=c.eos_token_ids,
        enable_prefix_caching=False,
    )
    recorder = Recorder(hidden_layers(kind, c.num_layers), shards.record)
    executor = TorchExecutor(
        target,
        num_blocks=config.num_blocks,
        block_size=BLOCK_TOKENS,
        max_num_seqs=SLOTS,
        drafter=recorder,
    )
    reported_s = time.monotonic()

    def progress(answered: int) -> None:
        nonlocal reported_s
        if time.monotonic() - reported_s > REPORT_EVERY_S:
            reported_s = time.monotonic()
            print(f"{answered} of {len(prompts)} answers, {shards.tokens:,} tokens", flush=True)

    # An interrupted run continues after the prompts whose answers are recorded.
    remaining = prompts[shards.count :]
    engine = Engine(EngineCore(Scheduler(config), executor))
    write_lessons(engine, remaining, recorder, shards, seconds, progress)
    done.touch()
    return shards
