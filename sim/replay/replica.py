"""One engine of a replay: its scheduler, its executor, and the step that it runs."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple, Protocol

import msgspec

from cbatch.core.scheduler.plan import StepPlan, StepResult
from cbatch.core.scheduler.scheduler import Scheduler
from cbatch.core.scheduler.sequence import Commit
from sim.replay.intake import Arrival
from sim.replay.metrics import MetricsRecorder
from sim.report.timeline import Observer, TimelineStep
from sim.workload.traces.request import TraceRequest

PROGRESS_STEPS = 512  # least number of steps between two reports of progress


class StepExecutor(Protocol):
    def run(self, plan: StepPlan) -> StepResult: ...

    def idle(self, seconds: float) -> None:
        """Note that no step ran for `seconds` before the next one."""

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
        self._step: tuple[StepPlan, StepResult, float] | None = None  # with the time it began
        self._ended_s = 0.0  # end of the last step
        self.num_steps = 0  # finished steps

    @property
    def is_idle(self) -> bool:
        return self._step is None

    def begin(self, now_s: float) -> float | None:
        """Begin a step. Return the time at which it will end, or None if no request can run."""
        plan = self.scheduler.schedule(now_s)
        if plan is None:
            return None
        if now_s > self._ended_s:
            self._executor.idle(now_s - self._ended_s)
        result = self._executor.run(plan)
        self._step = plan, result, now_s
        return now_s + (result.draft_s + result.target_s + self._executor.host_s)

    def end(self, now_s: float) -> EndedStep:
        """Commit the step. The recorder is informed later, by `tell`."""
        self._ended_s = now_s
        assert self._step is not None
        (plan, result, started_s), self._step = self._step, None
        self.num_steps += 1
        commit = self.scheduler.update_from_output(result, now_s)
        for observer in self._observers:
            observer.step(TimelineStep(started_s, now_s, plan, result, commit, self.scheduler))
        return EndedStep(started_s, now_s, plan, commit)

    def tell(self, step: EndedStep, now_s: float) -> list[TraceRequest]:
        """Record that the step's tokens reached the client at `now_s`. Return the requests that
        ended with the step."""
        recorder, later_s = self.recorder, now_s - step.ended_s
        if step.plan.deltas.new_sequences:
            recorder.planned(step.plan, step.started_s)
        recorder.committed(step.plan, step.commit, step.started_s + later_s, now_s)
        finished = recorder.finished
        return [finished(e.request_id, len(e.output), now_s) for e in step.commit.finished]


class EndedStep(NamedTuple):
    """A committed step, until its tokens have reached the client."""

    started_s: float
    ended_s: float
    plan: StepPlan
    commit: Commit


def num_steps(replicas: Sequence[ReplayedEngine]) -> int:
    return sum(replica.num_steps for replica in replicas)


def progress_of(replicas: Sequence[ReplayedEngine], now_s: float) -> Progress:
    schedulers = [replica.scheduler for replica in replicas]
    return Progress(
        now_s,
        sum(replica.recorder.num_finished for replica in replicas),
        sum(scheduler.num_running for scheduler in schedulers),
        sum(s.num_waiting for s in schedulers) + sum(len(r.inbox) for r in replicas),
        num_steps(replicas),
    )
