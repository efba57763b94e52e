"""An `Engine` without a model: the real scheduler, the simulator's executor, a toy tokenizer."""

from __future__ import annotations

from typing import Any

from cbatch.core.scheduler.scheduler import Scheduler
from cbatch.engine.core import BackgroundKernels, EngineCore
from cbatch.engine.engine import Engine
from cbatch.text import TextTokenizer
from tests.checking.clock import VirtualClock
from tests.checking.executor import SimExecutor
from tests.checking.models import ModelledAcceptance
from tests.helpers import make_config
from tests.text.toy_tokenizers import printable

TOKENIZER = TextTokenizer(printable(), "toy")


def make_engine(
    *,
    lookahead: str = "fixed:3",
    depth: int = 0,
    tokenizer: TextTokenizer | None = TOKENIZER,
    acceptance: float = 0.7,
    faults: Any = None,
    seed: int | None = None,
    clock: VirtualClock | None = None,
    background_kernels: BackgroundKernels | None = None,
    **overrides: Any,
) -> Engine:
    if lookahead != "off":
        overrides.setdefault("draft_context_tokens", overrides.get("max_model_len", 128))
    config = make_config(lookahead=lookahead, vocab_size=TOKENIZER.vocab_size, **overrides)
    clock = clock or VirtualClock()
    executor = SimExecutor.of(
        config, acceptance=ModelledAcceptance(acceptance), clock=clock, faults=faults
    )
    if background_kernels is not None:
        vars(executor)["background_kernels"] = background_kernels
    core = EngineCore(Scheduler(config), executor, clock=clock, depth=depth)
    return Engine(core, tokenizer=tokenizer, seed=seed)
