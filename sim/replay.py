"""A trace through the real scheduler, on a virtual clock.

    arrivals -> scheduler.plan(now) -> executor.run -> now += duration -> scheduler.commit

Nothing here reads a clock or draws a number that does not come from `seed`: the same inputs give
the same report, byte for byte. The loop is serial (overlap depth 0).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Protocol

import msgspec

from cbatch.core.config import SchedulerConfig
from cbatch.core.events import Event
from cbatch.core.plan import StepPlan, StepResult
from cbatch.core.scheduler import Scheduler
from sim.intake import Intake
from sim.outcome import Served, report_of
from sim.records import Recorder
from sim.report import Objectives, Record, Report
from sim.sources import Source
from sim.timeline import Observer, Step

PROGRESS_STEPS = 512  # between two reports of progress


class StepExecutor(Protocol):
    def run(self, plan: StepPlan) -> StepResult: ...

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
        self._intake = Intake(source, seed)
        self._scheduler = Scheduler(config, log)
        self._recorder = Recorder(config.max_slots, objectives or Objectives(), on_record)

    def run(self, on_progress: Callable[[Progress], None] | None) -> None:
        source, scheduler, recorder = self._source, self._scheduler, self._recorder
        intake, executor = self._intake, self._executor
        plan_step, run_step, commit_step = scheduler.plan, executor.run, scheduler.commit
        now_s, steps = 0.0, 0
        arrival_s = source.next_arrival_s()
        while True:
            while arrival_s is not None and arrival_s <= now_s:
                intake.deliver(intake.take(), scheduler, recorder, now_s)
                arrival_s = source.next_arrival_s()
            plan = plan_step(now_s)
            if plan is None:
                if arrival_s is None:
                    break
                now_s = arrival_s
                continue
            if plan.deltas.admitted:
                recorder.planned(plan, now_s)
            result = run_step(plan)
            started_s = now_s
            now_s += result.draft_s + result.target_s + executor.host_s
            commit = commit_step(result, now_s)
            recorder.committed(plan, commit, started_s, now_s)
            if self._observers:
                self._observe(Step(started_s, now_s, plan, result, commit, scheduler))
            if commit.finished:
                for end in commit.finished:
                    request = recorder.finished(end.request_id, len(end.output), now_s)
                    source.ended(request, now_s)
                arrival_s = source.next_arrival_s()
            steps += 1
            if on_progress is not None and steps % PROGRESS_STEPS == 0:
                on_progress(self._progress(now_s, steps))
        if scheduler.has_work:
            raise RuntimeError("the scheduler holds requests that it will not run")
        if on_progress is not None:
            on_progress(self._progress(now_s, steps))

    def _observe(self, step: Step) -> None:
        for observer in self._observers:
            observer.step(step)

    def _progress(self, now_s: float, steps: int) -> Progress:
        scheduler, finished = self._scheduler, self._recorder.num_finished
        return Progress(now_s, finished, scheduler.num_running, scheduler.num_waiting, steps)

    def report(self, settings: dict[str, Any]) -> Report:
        served = [Served(self._scheduler, self._recorder)]
        return report_of(self._intake, served, self._objectives, settings)
