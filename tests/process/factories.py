"""Engines to run in other processes: the real scheduler on the simulator's executor, which can be
slow and can die. Factories are importable by name, so that a process can load them."""

from __future__ import annotations

import gc
import os
import signal
import time
from pathlib import Path
from typing import Any, Literal, cast

import msgspec
import numpy as np
from numpy.typing import NDArray

from cbatch.core.request.errors import FieldError
from cbatch.core.request.request import Request, StructuredOutputs
from cbatch.core.scheduler.plan import StepPlan, StepResult
from cbatch.core.scheduler.scheduler import Scheduler
from cbatch.engine.core import EngineCore
from cbatch.steplog.recorder import StepRecorder
from tests.checking.executor import SimExecutor
from tests.checking.models import ModelledAcceptance
from tests.helpers import make_config

SIZES = {"num_blocks": 2048, "max_model_len": 512, "block_size": 4, "max_num_seqs": 32}


class MortalExecutor:
    """The executor of a `SimFactory`, with real steps, pauses and deaths."""

    def __init__(self, factory: SimFactory) -> None:
        self._factory, self._inner, self._num_steps = factory, factory.executor(), 0
        self.progress = np.zeros(1, dtype=np.int64)
        self.report_progress = self._report if factory.parts > 1 else None
        self._doomed: dict[int, int] = {}  # by slot: tokens that it may still emit

    def check(self, request: Request) -> None:
        self._inner.check(request)

    def run(self, plan: StepPlan) -> StepResult:
        made, pause_file = self._factory, self._factory.pause_file
        self._num_steps += 1
        while pause_file and self._num_steps > 60 and Path(pause_file).exists():
            time.sleep(0.002)
        while made.gather_file and Path(made.gather_file).exists():
            time.sleep(0.002)
        for admission in plan.deltas.new_sequences:
            self._doomed.pop(admission.slot, None)
            if admission.tokens[0] == made.poison:
                emitted = len(admission.tokens) - admission.num_prompt_tokens
                self._doomed[admission.slot] = made.poison_at - emitted
        if any(self._doomed.get(slot, 1) <= 0 for slot in plan.slots.tolist()):
            if made.death == "exit":
                os._exit(3)
            os.kill(os.getpid(), signal.SIGKILL)
        for _ in range(made.parts):
            time.sleep(made.step_s / made.parts)
            self.progress += 1
        result = self._inner.run(plan)
        for row, slot in enumerate(plan.slots.tolist()):
            if slot in self._doomed:
                self._doomed[slot] -= int(result.row_splits[row + 1] - result.row_splits[row])
        return result

    def reset(self) -> None:
        self._inner.reset()

    def _report(self, counter: NDArray[np.int64]) -> None:
        self.progress = counter


class MortalScheduler(Scheduler):
    """A scheduler that dies when a request is added whose prompt begins with `dies_of`. While the
    file `gather_file` exists, no step begins with fewer requests than it says."""

    dies_of: int | None = None
    gather_file: str | None = None

    @property
    def has_work(self) -> bool:
        file = self.gather_file and Path(self.gather_file)
        needed = int(file.read_text()) if file and file.exists() else 0
        return super().has_work and self.num_waiting + self.num_running >= needed

    def add(self, request: Request, now_s: float, output: tuple[int, ...] = ()) -> None:
        if request.prompt[0] == self.dies_of:
            os._exit(3)
        super().add(request, now_s, output)


class DeadlyGrammars:
    """Grammars whose compilation kills the process."""

    def compiled(self, outputs: StructuredOutputs) -> Any:
        os._exit(3)


class SimFactory(msgspec.Struct, frozen=True):
    """Parameters of an engine.

    `step_s` is in real seconds. A request whose prompt begins with `poison` kills the engine in a
    step if it has at least `poison_at` output tokens, with `unreadable` when it is added. `once` is
    a file that the engine creates when it starts; the start fails if the file exists.
    """

    lookahead: str = "fixed:3"
    vocab_size: int = 1000
    step_s: float = 0.0
    poison: int | None = None
    poison_at: int = 0
    unreadable: int | None = None
    parts: int = 1  # of a step; the engine reports progress after each
    death: Literal["kill", "exit"] = "kill"
    depth: int = 0
    sizes: dict[str, Any] = {}
    record: str | None = None
    once: str | None = None
    pause_file: str | None = None  # a file; while it exists, step 60 is the last
    gather_file: str | None = None  # a file; see `MortalScheduler`

    def config(self) -> Any:
        sizes = SIZES | self.sizes
        if self.lookahead != "off":
            sizes.setdefault("draft_context_tokens", sizes["max_model_len"])
        return make_config(lookahead=self.lookahead, vocab_size=self.vocab_size, **sizes)

    def executor(self) -> SimExecutor:
        return SimExecutor.of(self.config(), acceptance=ModelledAcceptance(0.7))

    def __call__(self) -> EngineCore:
        if self.once is not None:
            Path(self.once).touch(exist_ok=False)
        recorder = None if self.record is None else StepRecorder(self.record)
        scheduler = MortalScheduler(self.config(), recorder)
        scheduler.dies_of, scheduler.gather_file = self.unreadable, self.gather_file
        executor: Any = self.executor() if self.depth else MortalExecutor(self)
        core = EngineCore(
            scheduler,
            executor,
            depth=self.depth,
            info={"model": "sim"},
            grammars=cast(Any, DeadlyGrammars()),
        )
        if recorder is not None:
            core.resources.callback(recorder.close)
        return core


class FrozenFactory(msgspec.Struct, frozen=True):
    """A factory whose engine, when it ends, writes the number of objects that its garbage collector
    has frozen to `path`."""

    path: str

    def __call__(self) -> EngineCore:
        def close() -> None:
            Path(self.path).write_text(str(gc.get_freeze_count()))

        core = SimFactory()()
        core.resources.callback(close)
        return core


class BrokenFactory(msgspec.Struct, frozen=True):
    """A factory that fails, with or without the name of a field."""

    names_field: bool

    def __call__(self) -> EngineCore:
        if self.names_field:
            raise FieldError("num_blocks", "too few", "give more")
        raise RuntimeError("no such device")
