"""The step loop: plan, run, commit. At depth 1 a step is planned while the previous step runs in a
thread."""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Callable, Collection
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

import numpy as np

from cbatch.core.scheduler.executor import Executor, OverlappedExecutor, RowError
from cbatch.core.scheduler.plan import StepPlan, StepResult
from cbatch.core.scheduler.scheduler import Scheduler
from cbatch.core.scheduler.sequence import Commit

MAX_CONSECUTIVE_FAULTS = 3
_logger = logging.getLogger(__name__)


class StepLoop:
    """Runs a scheduler's plans: on an `Executor` at depth 0, on an `OverlappedExecutor` at depth 1.

    After a fault the executor is reset, and the scheduler recomputes its requests from their
    tokens. If a single row is at fault (`RowError`), its request ends with an error. After
    `MAX_CONSECUTIVE_FAULTS` without a committed token, the requests that were in all failed steps
    end with an error: a request that always fails must not block others.
    """

    def __init__(
        self,
        scheduler: Scheduler,
        executor: Executor | OverlappedExecutor,
        *,
        clock: Callable[[], float],
        depth: int = 0,
    ) -> None:
        if depth not in (0, 1):
            raise ValueError(f"depth: {depth!r} is not allowed; use 0 (serial) or 1 (overlapped)")
        # Functions of the class: bound methods would refer to this loop, and a dropped engine would
        # keep its gigabytes until the next collection of garbage.
        self._run_step: Callable[[StepLoop, Any], Commit | None]
        if depth == 0 and isinstance(executor, Executor):
            self._run_step = StepLoop._run_serial
        elif depth == 1 and isinstance(executor, OverlappedExecutor):
            self._run_step = StepLoop._run_overlapped
        else:
            verbs = "`submit` and `wait`" if depth else "`run`"
            raise TypeError(f"executor: depth {depth} needs its {verbs}")
        self._scheduler = scheduler
        self._executor = executor
        self._clock = clock
        self._in_flight: StepPlan | None = None  # depth 1: plan of the running step
        self._sequence_of_slot: dict[int, tuple[int, str]] = {}  # by slot: generation, request id
        # Rows of the plan that was reported last: the same array and the same requests until the
        # rows of a step change.
        self._last_rows: tuple[np.ndarray, set[str]] = np.zeros(0, dtype=np.int32), set()
        self._num_faults = 0  # since the last committed token
        self._suspects: set[str] = set()
        self.plan_s = self.commit_s = 0.0  # total seconds in the scheduler's `plan` and `commit`
        self.last: tuple[StepPlan, StepResult, Commit] | None = None  # the last committed step
        # Called with the requests in flight, before a step runs and after its commit. If a step
        # kills this process, the parent process knows the requests of the step.
        self.on_in_flight: Callable[[Collection[str]], None] | None = None

    def step(self) -> Commit | None:
        while True:
            try:
                commit = self._run_step(self, self._executor)
            except _Fault as fault:
                self._recover(fault)
                continue
            if self._num_faults and commit is not None and commit.updates():
                self._num_faults = 0
            return commit

    def _run_serial(self, executor: Executor) -> Commit | None:
        plan = self._plan()
        if plan is None:
            return None
        try:
            result = executor.run(plan)
        except Exception as error:
            raise _Fault(plan, error) from error
        return self._commit(plan, result)

    def _run_overlapped(self, executor: OverlappedExecutor) -> Commit | None:
        plan = self._in_flight or self._submit_next(executor)
        if plan is None:
            return None
        self._in_flight = plan
        self._in_flight = self._submit_next(executor)
        try:
            result = executor.wait()
        except Exception as error:
            raise _Fault(plan, error) from error
        return self._commit(plan, result)

    def _submit_next(self, executor: OverlappedExecutor) -> StepPlan | None:
        plan = self._plan()
        if plan is not None:
            try:
                executor.submit(plan)
            except Exception as error:
                raise _Fault(plan, error) from error
        return plan

    def _plan(self) -> StepPlan | None:
        start_s = self._clock()
        plan = self._scheduler.schedule(start_s)
        self.plan_s += self._clock() - start_s
        if plan is not None:
            for new in plan.deltas.new_sequences:
                self._sequence_of_slot[new.slot] = (new.generation, new.request_id)
            self._report_in_flight(self._in_flight, plan)
        return plan

    def _commit(self, plan: StepPlan, result: StepResult) -> Commit:
        start_s = self._clock()
        commit = self._scheduler.update_from_output(result, start_s)
        self.commit_s += self._clock() - start_s
        self.last = plan, result, commit
        self._report_in_flight(self._in_flight)
        return commit

    def _report_in_flight(self, *plans: StepPlan | None) -> None:
        if self.on_in_flight is None:
            return
        rows = []
        for plan in plans:
            if plan is not None:
                if plan.generations is not self._last_rows[0]:
                    self._last_rows = plan.generations, self._requests_of(plan)
                rows.append(self._last_rows[1])
        same = rows and all(each is rows[0] for each in rows)
        self.on_in_flight(rows[0] if same else set().union(*rows))

    def _recover(self, fault: _Fault) -> None:
        self._in_flight = None
        self._report_in_flight()
        error, guilty = fault.error, ""
        if isinstance(error, RowError):
            generation, request_id = self._sequence_of_slot[error.slot]
            guilty = request_id if generation == error.generation else ""
        self._num_faults += not guilty
        what = f"request {guilty}" if guilty else f"executor fault {self._num_faults}"
        _logger.warning("%s: %r", what, error)
        self._executor.reset()
        self._scheduler.executor_reset(self._clock())
        if guilty:
            self._scheduler.fail(guilty, str(error), self._clock())
            return
        rows = self._requests_of(fault.plan)
        if self._num_faults == 1:
            self._suspects = rows
        else:
            self._suspects = self._suspects & rows or rows
        if self._num_faults < MAX_CONSECUTIVE_FAULTS:
            return
        message = f"the executor failed {self._num_faults} times in a row: {fault.error!r}"
        for request_id in sorted(self._suspects):
            self._scheduler.fail(request_id, message, self._clock())
        self._num_faults = 0

    def _requests_of(self, plan: StepPlan) -> set[str]:
        requests: set[str] = set()
        for slot, planned in zip(plan.slots.tolist(), plan.generations.tolist(), strict=True):
            generation, request_id = self._sequence_of_slot[slot]
            if generation == planned:
                requests.add(request_id)
        return requests


class _Fault(Exception):  # noqa: N818 - it carries the executor's error to `step`
    """The executor raised `error` for `plan`."""

    def __init__(self, plan: StepPlan, error: Exception) -> None:
        super().__init__(repr(error))
        self.plan = plan
        self.error = error


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
