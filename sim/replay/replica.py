"""One engine of a replay, with its running step."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import msgspec

from cbatch.core.scheduler.plan import StepPlan, StepResult
from cbatch.core.scheduler.scheduler import Scheduler
from sim.replay.intake import Arrival
from sim.replay.metrics import MetricsRecorder
from sim.report.timeline import Observer, TimelineStep
from sim.workload.traces.request import TraceRequest


class StepExecutor(Protocol):
    def run(self, plan: StepPlan) -> StepResult: ...

    def idle(self, seconds: float) -> None:
        """Record that no step ran for `seconds` before the next step."""

    @property
    def host_s(self) -> float:
        """Return the host seconds of the loop around the executor for the last step. The result
        does not contain them: its durations are those that a real executor measures."""


class Progress(msgspec.Struct, frozen=True):
    now_s: float
    finished: int
    running: int
    waiting: int
    steps: int


class ReplayedEngine:
    """One scheduler, its executor, and the step that it runs, if any."""

    def __init__(
        self,
        scheduler: Scheduler,
        executor: StepExecutor,
        recorder: MetricsRecorder,
        observers: Sequence[Observer],
    ) -> None:
        self.scheduler, self.recorder = scheduler, recorder
        self.inbox: list[Arrival] = []
        self._executor, self._observers = executor, observers
        self._step: tuple[StepPlan, StepResult, float] | None = None  # plan, result, start time
        self._ended_s = 0.0  # end of the last step
        self._num_running = 0  # since then, or since the present step began
        self.num_steps = 0  # finished steps

    @property
    def is_idle(self) -> bool:
        return self._step is None

    def begin(self, now_s: float) -> float | None:
        """Begin a step. Return the time at which it will end, or None if no request can run."""
        plan = self.scheduler.schedule(now_s)
        if plan is None:
            return None
        self.recorder.running_s += self._num_running * (now_s - self._ended_s)
        self._num_running = self.scheduler.num_running
        if now_s > self._ended_s:
            self._executor.idle(now_s - self._ended_s)
        result = self._executor.run(plan)
        self._step = plan, result, now_s
        return now_s + (result.draft_s + result.target_s + self._executor.host_s)

    def end(self, now_s: float) -> list[TraceRequest]:
        """Commit and record the step. Return the requests that ended with it."""
        self._ended_s = now_s
        assert self._step is not None
        (plan, result, started_s), self._step = self._step, None
        self.num_steps += 1
        self.recorder.running_s += self._num_running * (now_s - started_s)
        commit = self.scheduler.update_from_output(result, now_s)
        self._num_running = self.scheduler.num_running
        for observer in self._observers:
            observer.step(TimelineStep(started_s, now_s, plan, result, commit, self.scheduler))
        if plan.deltas.new_sequences:
            self.recorder.planned(plan, started_s)
        self.recorder.committed(plan, commit, now_s)
        finished = self.recorder.finished
        return [finished(e.request_id, len(e.output), now_s) for e in commit.finished]
