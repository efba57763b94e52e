"""Engines for processes of their own: the real scheduler over the simulator's executor, which can
be slow, and can die. Importable by name, so that a factory finds its way there."""

from __future__ import annotations

import gc
import os
import signal
import time
from pathlib import Path
from typing import Any, Literal

import msgspec

from cbatch.core.errors import FieldError
from cbatch.core.plan import StepPlan, StepResult
from cbatch.core.scheduler import Scheduler
from cbatch.engine.loop import StepLoop
from cbatch.engine.process import EngineParts
from cbatch.engine.recorder import Recorder
from sim.executor import SimExecutor
from sim.models import ModelledAcceptance
from tests.helpers import make_config

SIZES = {"num_blocks": 2048, "max_model_tokens": 512, "block_size_tokens": 4, "max_slots": 32}


class MortalExecutor:
    """A step takes `step_s`. It dies in every step with a request whose prompt begins with `poison`
    once that has `at` output tokens or more."""

    def __init__(
        self, inner: SimExecutor, step_s: float, poison: int | None, at: int, death: str
    ) -> None:
        self._inner, self._step_s = inner, step_s
        self._poison, self._at, self._death = poison, at, death
        self._doomed: dict[int, int] = {}  # slot: tokens it may still emit

    def run(self, plan: StepPlan) -> StepResult:
        for admission in plan.deltas.admitted:
            self._doomed.pop(admission.slot, None)
            if admission.tokens[0] == self._poison:
                emitted = len(admission.tokens) - admission.num_prompt_tokens
                self._doomed[admission.slot] = self._at - emitted
        for slot in plan.slots.tolist():
            if self._doomed.get(slot, 1) <= 0:
                self._die()
        time.sleep(self._step_s)
        result = self._inner.run(plan)
        for row, slot in enumerate(plan.slots.tolist()):
            if slot in self._doomed:
                emitted = int(result.row_splits[row + 1] - result.row_splits[row])
                self._doomed[slot] -= emitted
        return result

    def _die(self) -> None:
        if self._death == "exit":
            os._exit(3)
        os.kill(os.getpid(), signal.SIGKILL)

    def reset(self) -> None:
        self._inner.reset()


class SimFactory(msgspec.Struct, frozen=True):
    """`step_s` are real seconds; `poison` is the first prompt token of requests that kill. `once`:
    a file; an engine makes it as it starts, and where it is there none does."""

    lookahead: str = "fixed:3"
    vocab_size: int = 1000
    step_s: float = 0.0
    poison: int | None = None
    poison_at: int = 0
    death: Literal["kill", "exit"] = "kill"
    depth: int = 0
    sizes: dict[str, Any] = {}
    record: str | None = None
    once: str | None = None

    def config(self) -> Any:
        sizes = SIZES | self.sizes
        if self.lookahead != "off":
            sizes.setdefault("draft_context_tokens", sizes["max_model_tokens"])
        return make_config(lookahead=self.lookahead, vocab_size=self.vocab_size, **sizes)

    def executor(self) -> SimExecutor:
        config = self.config()
        return SimExecutor(
            num_blocks=config.num_blocks,
            block_size_tokens=config.block_size_tokens,
            max_slots=config.max_slots,
            vocab_size=config.vocab_size,
            draft_context_tokens=config.draft_context_tokens,
            drafter=config.default_chain,
            acceptance=ModelledAcceptance(0.7),
        )

    def __call__(self) -> EngineParts:
        if self.once is not None:
            Path(self.once).touch(exist_ok=False)
        recorder = None if self.record is None else Recorder(self.record)
        scheduler = Scheduler(self.config(), recorder)
        executor: Any = self.executor()
        if not self.depth:
            death = self.death
            executor = MortalExecutor(executor, self.step_s, self.poison, self.poison_at, death)
        loop = StepLoop(scheduler, executor, clock=time.monotonic, depth=self.depth)
        close = None if recorder is None else recorder.close
        return EngineParts(scheduler, loop, info={"model": "sim"}, close=close)


class FrozenFactory(msgspec.Struct, frozen=True):
    """Writes to `path`, as the engine ends, how many objects its collector passed over."""

    path: str

    def __call__(self) -> EngineParts:
        def close() -> None:
            Path(self.path).write_text(str(gc.get_freeze_count()))

        return SimFactory()()._replace(close=close)


class BrokenFactory(msgspec.Struct, frozen=True):
    """Cannot make an engine, and says so in one of two ways."""

    names_field: bool

    def __call__(self) -> EngineParts:
        if self.names_field:
            raise FieldError("num_blocks", "too few", "give more")
        raise RuntimeError("no such device")
