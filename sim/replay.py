"""A trace through the real scheduler, on a virtual clock.

    arrivals -> scheduler.plan(now) -> executor.run -> now += duration -> scheduler.commit

Nothing here reads a clock or draws a number that does not come from `seed`: the same inputs give
the same report, byte for byte. The loop is serial (overlap depth 0).

Most steps are like the one before: where nobody watches each of them, one plan stands for as many
as nothing comes between (`Scheduler.quiet_steps`). The report does not depend on it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Protocol

import msgspec

from cbatch.core.config import SchedulerConfig
from cbatch.core.events import Event
from cbatch.core.plan import QuietSteps, StepPlan, StepResult
from cbatch.core.scheduler import Scheduler
from cbatch.core.sequence import Commit
from sim.intake import Intake
from sim.outcome import Served, report_of
from sim.records import Recorder
from sim.report import Objectives, Record, Report
from sim.sources import Source
from sim.timeline import Observer, Step

PROGRESS_STEPS = 512  # between two reports of progress


class StepExecutor(Protocol):
    def run(self, plan: StepPlan) -> StepResult: ...

    def foresee(self, quiet: QuietSteps, now_s: float, until_s: float | None) -> list[float]:
        """When the coming steps will end: of the quiet ones those that begin before `until_s`
        (None: all), and the first in any case. The next plan must stand for exactly these."""

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


def replay(
    source: Source,
    config: SchedulerConfig,
    executor: StepExecutor,
    *,
    seed: int = 0,
    settings: dict[str, Any] | None = None,
    objectives: Objectives | None = None,
    on_record: Callable[[Record], None] | None = None,
    on_progress: Callable[[Progress], None] | None = None,
    observers: Sequence[Observer] = (),
    log: Callable[[Event], None] | None = None,
) -> Report:
    """Serve everything that `source` brings. A request that can never run is reported as refused,
    and the others go on. `settings` are for the report; `objectives` also decide its goodput."""
    run = _Replay(source, config, executor, seed, objectives, on_record, observers, log)
    run.run(on_progress)
    return run.report(settings or {})


class _Replay:
    def __init__(
        self,
        source: Source,
        config: SchedulerConfig,
        executor: StepExecutor,
        seed: int,
        objectives: Objectives | None,
        on_record: Callable[[Record], None] | None,
        observers: Sequence[Observer],
        log: Callable[[Event], None] | None,
    ) -> None:
        self._source, self._executor = source, executor
        self._objectives, self._observers = objectives, observers
        self._watched = bool(observers) or log is not None  # step by step
        self._intake = Intake(source, seed)
        self._scheduler = Scheduler(config, log)
        self._recorder = Recorder(config.max_slots, objectives or Objectives(), on_record)
        self._ended_s = 0.0  # the last step

    def run(self, on_progress: Callable[[Progress], None] | None) -> None:
        source, scheduler, intake = self._source, self._scheduler, self._intake
        now_s, steps, told = 0.0, 0, 0
        arrival_s = source.next_arrival_s()
        while True:
            while arrival_s is not None and arrival_s <= now_s:
                intake.deliver(intake.take(), scheduler, self._recorder, now_s)
                arrival_s = source.next_arrival_s()
            commit, ends_s = self._step(now_s, arrival_s)
            if commit is None:
                if arrival_s is None:
                    break
                now_s = arrival_s
                continue
            now_s = ends_s[-1]
            if commit.finished:
                for end in commit.finished:
                    request = self._recorder.finished(end.request_id, len(end.output), now_s)
                    source.ended(request, now_s)
                arrival_s = source.next_arrival_s()
            steps += len(ends_s)
            if on_progress is not None and steps >= told + PROGRESS_STEPS:
                told = steps - steps % PROGRESS_STEPS
                on_progress(self._progress(now_s, steps))
        if scheduler.has_work:
            raise RuntimeError("the scheduler holds requests that it will not run")
        if on_progress is not None:
            on_progress(self._progress(now_s, steps))

    def _step(self, now_s: float, arrival_s: float | None) -> tuple[Commit | None, list[float]]:
        """The next step, or where nobody watches each of them, as many quiet ones as begin before
        the next arrival. Returns when they ended, too; no commit where there is nothing to do."""
        scheduler, executor = self._scheduler, self._executor
        quiet = None if self._watched else scheduler.quiet_steps()
        ends_s = [] if quiet is None else executor.foresee(quiet, now_s, arrival_s)
        plan = scheduler.plan(now_s, len(ends_s) or 1)
        if plan is None:
            return None, ends_s
        if plan.deltas.admitted:
            self._recorder.planned(plan, now_s)
        if now_s > self._ended_s:
            executor.idle(now_s - self._ended_s)
        result = executor.run(plan)
        if not ends_s:
            ends_s = [now_s + (result.draft_s + result.target_s + executor.host_s)]
        self._ended_s = ends_s[-1]
        commit = scheduler.commit(result, ends_s[-1])
        self._recorder.committed(plan, commit, now_s, ends_s)
        for observer in self._observers:
            observer.step(Step(now_s, ends_s[-1], plan, result, commit, scheduler))
        return commit, ends_s

    def _progress(self, now_s: float, steps: int) -> Progress:
        scheduler, finished = self._scheduler, self._recorder.num_finished
        return Progress(now_s, finished, scheduler.num_running, scheduler.num_waiting, steps)

    def report(self, settings: dict[str, Any]) -> Report:
        served = [Served(self._scheduler, self._recorder)]
        return report_of(self._intake, served, self._objectives, settings)
