"""The interface of executors, which run the scheduler's plans."""

from __future__ import annotations

from typing import Protocol, runtime_checkable

import numpy as np
from numpy.typing import NDArray

from cbatch.core.scheduler.plan import StepPlan, StepResult


@runtime_checkable
class Executor(Protocol):
    """Runs one step at a time. After any `Exception` the loop calls `reset`."""

    def run(self, plan: StepPlan) -> StepResult: ...

    def reset(self) -> None:
        """Forget every sequence and the KV cache; the next plan has the whole state."""


@runtime_checkable
class WatchedExecutor(Executor, Protocol):
    """An executor that shows a watcher whether a long step still computes."""

    def report_progress(self, counter: NDArray[np.int64]) -> None:
        """Count up `counter` [1] from now on, at least once for each layer of a step."""


@runtime_checkable
class OverlappedExecutor(Protocol):
    """Takes a second plan while one runs. `wait` returns results in the order of `submit`, or
    raises that step's error. `reset` also drops the steps in flight."""

    def submit(self, plan: StepPlan) -> None: ...

    def wait(self) -> StepResult: ...

    def reset(self) -> None: ...
