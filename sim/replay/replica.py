"""One engine of a replay: its scheduler, its executor, and the step that it runs."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple, Protocol

import msgspec
import numpy as np

from cbatch.core.scheduler.plan import StepPlan, StepResult
from cbatch.core.scheduler.scheduler import Scheduler
from cbatch.core.scheduler.sequence import Commit, Finished
from sim.replay.intake import Arrival
from sim.replay.metrics import MetricsRecorder
from sim.report.timeline import Observer, TimelineStep
from sim.traces.request import TraceRequest

PROGRESS_STEPS = 512  # between two reports of progress, at least

# What steps emit, int32 [steps, rows], the target's seconds in all, and when each ends.
StepsAhead = tuple[np.ndarray, float, list[float]]


class StepExecutor(Protocol):
    def run(self, plan: StepPlan) -> StepResult: ...

    def run_ahead(self, slots: np.ndarray, most: int, now_s: float, until_s: float) -> StepsAhead:
        """At most so many of the scheduler's `steps_ahead`, up to the first that does not end
        before `until_s`; none, if it cannot tell."""

    def idle(self, seconds: float) -> None:
        """Nothing has run for so long, before the next step."""

    @property
    def host_s(self) -> float:
        """What the loop around the executor took for the last step: not in its result, whose
        durations are those that a real executor measures."""


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
        self._step: tuple[StepPlan, StepResult, float] | None = None  # and when it began
        self._ahead: tuple[np.ndarray, float, StepsAhead] | None = None  # or many, of these slots
        self._ended_s = 0.0  # the last step
        self.num_steps = 0  # that have ended

    @property
    def is_idle(self) -> bool:
        return self._step is None and self._ahead is None

    def begin(self, now_s: float, until_s: float) -> float | None:
        """When the step that begins now will end; None: it has nothing to do. Steps in which
        nothing can happen are one here, up to the first that does not end before `until_s`."""
        if now_s == self._ended_s and not self._observers:
            slots, most = self.scheduler.steps_ahead()
            if most:
                ahead = self._executor.run_ahead(slots, most, now_s, until_s)
                if ahead[2]:
                    self._ahead = slots, now_s, ahead
                    return ahead[2][-1]
        plan = self.scheduler.plan(now_s)
        if plan is None:
            return None
        if now_s > self._ended_s:
            self._executor.idle(now_s - self._ended_s)
        result = self._executor.run(plan)
        self._step = plan, result, now_s
        return now_s + (result.draft_s + result.target_s + self._executor.host_s)

    def end(self, now_s: float) -> EndedStep:
        """The step is committed; nobody has been told."""
        self._ended_s = now_s
        scheduler = self.scheduler
        if self._ahead is not None:
            (slots, started_s, (tokens, target_s, ends_s)), self._ahead = self._ahead, None
            scheduler.skip_steps(tokens, target_s, now_s)
            self.num_steps += len(ends_s)
            ended = scheduler.take_finished()
            return EndedStep(started_s, now_s, ended, tokens.size, slots=slots, ends_s=ends_s)
        assert self._step is not None
        (plan, result, started_s), self._step = self._step, None
        self.num_steps += 1
        commit = scheduler.commit(result, now_s)
        for observer in self._observers:
            observer.step(TimelineStep(started_s, now_s, plan, result, commit, scheduler))
        count = len(commit.tokens)
        return EndedStep(started_s, now_s, commit.finished, count, plan=plan, commit=commit)

    def tell(self, step: EndedStep, now_s: float) -> list[TraceRequest]:
        """Its tokens have come to who asked. Returns the requests that ended with the step."""
        recorder, later_s = self.recorder, now_s - step.ended_s
        if step.plan is not None and step.commit is not None:
            if step.plan.deltas.new_sequences:
                recorder.planned(step.plan, step.started_s)
            recorder.committed(step.plan, step.commit, step.started_s + later_s, now_s)
        else:
            assert step.slots is not None
            ends_s = [end_s + later_s for end_s in step.ends_s] if later_s else step.ends_s
            recorder.skipped(step.slots, step.started_s + later_s, ends_s)
        finished = recorder.finished
        return [finished(e.request_id, len(e.output), now_s) for e in step.finished]


class EndedStep(NamedTuple):
    """What a replica's recorder is to be told of a step, or of some in which nothing happened."""

    started_s: float
    ended_s: float
    finished: Sequence[Finished]
    num_tokens: int
    plan: StepPlan | None = None
    commit: Commit | None = None
    slots: np.ndarray | None = None
    ends_s: list[float] = []


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
