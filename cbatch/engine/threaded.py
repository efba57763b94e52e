"""A worker thread around an executor, so that planning overlaps with the running step."""

from __future__ import annotations

from collections import deque
from concurrent.futures import Future, ThreadPoolExecutor

from cbatch.core.scheduler.executor import Executor
from cbatch.core.scheduler.plan import StepPlan, StepResult


class VoidedStepError(RuntimeError):
    """The step was not run: an earlier step failed and the executor has not been reset since."""


class ThreadedExecutor:
    """Runs plans in a thread: `submit` plans, then `wait` for their results in the same order.

    After a step fails, later steps are not run: their `wait` raises `VoidedStepError`, until
    `reset()` or a plan whose deltas reset every slot.
    """

    def __init__(self, executor: Executor) -> None:
        self.executor, self.check = executor, executor.check
        self._worker = ThreadPoolExecutor(max_workers=1, thread_name_prefix="cbatch-step")
        self._pending: deque[Future[StepResult]] = deque()
        self._failed = False  # used by the worker thread only

    def submit(self, plan: StepPlan) -> None:
        self._pending.append(self._worker.submit(self._run, plan))

    def wait(self) -> StepResult:
        """Return the result of the oldest pending step; raise what the executor raised."""
        if not self._pending:
            raise RuntimeError("wait: no step was submitted; call submit(plan) first")
        return self._pending.popleft().result()

    @property
    def num_pending(self) -> int:
        return len(self._pending)

    def reset(self) -> None:
        """Drop the results of pending steps, wait for the last of them, reset the executor."""
        self._pending.clear()
        self._worker.submit(self._reset).result()

    def close(self) -> None:
        """End the worker thread after the pending steps. Idempotent."""
        self._worker.shutdown(wait=True)

    def _reset(self) -> None:
        self.executor.reset()
        self._failed = False

    def _run(self, plan: StepPlan) -> StepResult:
        if self._failed and not plan.deltas.reset:
            raise VoidedStepError(f"step {plan.step_id} follows a failed step and was not run")
        self._failed = True  # until the step succeeds
        result = self.executor.run(plan)
        self._failed = False
        return result
