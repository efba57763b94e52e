"""One engine of a replay, with its running step; and the base class of replay loops."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple, Protocol

import msgspec

from cbatch.core.scheduler.plan import StepPlan, StepResult
from cbatch.core.scheduler.scheduler import Scheduler
from cbatch.core.scheduler.sequence import Commit
from sim.replay.intake import Arrival, Intake
from sim.replay.metrics import MetricsRecorder
from sim.replay.routers import ReplicaLoad, Router
from sim.report.timeline import Observer, TimelineStep
from sim.workload.sources import Source
from sim.workload.traces.request import TraceRequest

PROGRESS_STEPS = 512  # minimum number of steps between two reports of progress


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

    def end(self, now_s: float) -> EndedStep:
        """Commit the step. The recorder is informed later, by `record_step`."""
        self._ended_s = now_s
        assert self._step is not None
        (plan, result, started_s), self._step = self._step, None
        self.num_steps += 1
        self.recorder.running_s += self._num_running * (now_s - started_s)
        commit = self.scheduler.update_from_output(result, now_s)
        self._num_running = self.scheduler.num_running
        for observer in self._observers:
            observer.step(TimelineStep(started_s, now_s, plan, result, commit, self.scheduler))
        return EndedStep(started_s, now_s, plan, commit)

    def record_step(self, step: EndedStep, now_s: float) -> list[TraceRequest]:
        """Record that the step's tokens reached the client at `now_s`. Return the requests that
        ended with the step."""
        recorder = self.recorder
        if step.plan.deltas.new_sequences:
            recorder.planned(step.plan, step.started_s)
        recorder.committed(step.plan, step.commit, now_s)
        finished = recorder.finished
        return [finished(e.request_id, len(e.output), now_s) for e in step.commit.finished]


class EndedStep(NamedTuple):
    """A committed step whose tokens may not have reached the client yet."""

    started_s: float
    ended_s: float
    plan: StepPlan
    commit: Commit


class ReplayLoop:
    """Common parts of the loops of a replay: deliveries, ends of requests, and progress."""

    def __init__(
        self,
        source: Source,
        intake: Intake,
        replicas: Sequence[ReplayedEngine],
        router: Router,
        on_progress: Callable[[Progress], None] | None,
    ) -> None:
        self._source, self._intake, self._router = source, intake, router
        self._replicas, self._on_progress = replicas, on_progress
        self._load = ReplicaLoad(len(replicas))
        self._report_steps = PROGRESS_STEPS  # number of steps at the next report of progress

    def _deliver(self, i: int, now_s: float) -> None:
        """Give a replica, which runs no step, the requests of its inbox."""
        replica = self._replicas[i]
        arrivals, replica.inbox = replica.inbox, []
        for arrival in arrivals:
            if not self._intake.deliver(arrival, replica.scheduler, replica.recorder, now_s):
                self._load.remove(i, arrival.traced.prompt_tokens)

    def _reached_client(self, i: int, step: EndedStep, now_s: float) -> None:
        for request in self._replicas[i].record_step(step, now_s):
            self._load.remove(i, request.prompt_tokens)
            self._source.ended(request, now_s)

    def _report(self, now_s: float, *, is_last: bool = False) -> None:
        """Report progress if it is due, or if `is_last`."""
        if self._on_progress is None:
            return
        steps = sum(replica.num_steps for replica in self._replicas)
        if steps < self._report_steps and not is_last:
            return
        self._report_steps = steps + PROGRESS_STEPS
        schedulers = [replica.scheduler for replica in self._replicas]
        inboxes = sum(len(replica.inbox) for replica in self._replicas)
        self._on_progress(
            Progress(
                now_s=now_s,
                finished=sum(replica.recorder.num_finished for replica in self._replicas),
                running=sum(scheduler.num_running for scheduler in schedulers),
                waiting=sum(scheduler.num_waiting for scheduler in schedulers) + inboxes,
                steps=steps,
            )
        )

    def _finish(self, now_s: float) -> None:
        """Report progress at the end. Raises RuntimeError if a scheduler still holds requests."""
        if any(replica.scheduler.has_work for replica in self._replicas):
            raise RuntimeError("a scheduler holds requests that it will not run")
        self._report(now_s, is_last=True)
