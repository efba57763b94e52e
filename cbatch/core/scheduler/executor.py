"""The interface of executors, which run the scheduler's plans."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Protocol, runtime_checkable

import numpy as np
from numpy.typing import NDArray

from cbatch.core.request.request import Request
from cbatch.core.scheduler.plan import StepPlan, StepResult


class RowError(Exception):
    """The sequence of `generation` in `slot` cannot be run. Other rows are not at fault."""

    def __init__(self, slot: int, generation: int, error: Exception) -> None:
        super().__init__(str(error))
        self.slot, self.generation = slot, generation


@contextmanager
def errors_of_row(slot: int, generation: int) -> Iterator[None]:
    """Raise a `RowError` in place of any `Exception`."""
    try:
        yield
    except Exception as error:
        raise RowError(slot, generation, error) from error


@runtime_checkable
class Executor(Protocol):
    """Runs one step at a time. After any `Exception` the loop calls `reset`. After a `RowError` it
    also ends that row's request."""

    def check(self, request: Request) -> None:
        """Raise `FieldError` for a request that cannot be run here. It is called once, with valid
        parameters, before the scheduler gets the request."""

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
    raises that step's error. `reset` also drops the steps in flight. Otherwise as `Executor`."""

    def check(self, request: Request) -> None: ...

    def submit(self, plan: StepPlan) -> None: ...

    def wait(self) -> StepResult: ...

    def reset(self) -> None: ...
