"""Several replicas behind a router, on one virtual clock.

    arrivals -> router -> inbox of a replica -> its scheduler, at the end of its step -> ...

Each replica has a scheduler, an executor and a pool of its own, and steps of its own length; what
happens at one time happens in this order: steps end (by replica), requests arrive and are routed,
replicas that run no step begin one. One replica gives what `sim.replay` gives.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable, Sequence
from typing import Any

from cbatch.core.config import SchedulerConfig
from cbatch.core.plan import StepPlan, StepResult
from cbatch.core.scheduler import Scheduler
from sim.intake import Arrival, Intake
from sim.outcome import Served, report_of
from sim.records import Recorder
from sim.replay import PROGRESS_STEPS, Progress, StepExecutor
from sim.report import Objectives, Record, Report
from sim.routers import Load, Router
from sim.sources import Source
from sim.traces.request import TraceRequest


def replay_fleet(
    source: Source,
    config: SchedulerConfig,
    executors: Sequence[StepExecutor],
    router: Router,
    *,
    seed: int = 0,
    settings: dict[str, Any] | None = None,
    objectives: Objectives | None = None,
    on_record: Callable[[Record], None] | None = None,
    on_progress: Callable[[Progress], None] | None = None,
) -> Report:
    """As `sim.replay.replay`, with a replica for each executor; `config` is that of each."""
    fleet = _Fleet(source, config, executors, router, seed, objectives, on_record)
    fleet.run(on_progress)
    return fleet.report(objectives, settings or {})


class _Replica:
    """One scheduler, its executor, and the step that it runs, if any."""

    def __init__(
        self, config: SchedulerConfig, executor: StepExecutor, recorder: Recorder, intake: Intake
    ) -> None:
        self.scheduler = Scheduler(config)
        self.recorder = recorder
        self.inbox: list[Arrival] = []
        self._executor, self._intake = executor, intake
        self._step: tuple[StepPlan, StepResult, float] | None = None  # and when it began
        self._ended_s = 0.0  # the last step

    @property
    def is_idle(self) -> bool:
        return self._step is None

    def deliver(self, now_s: float) -> list[Arrival]:
        """Takes in what was routed to it; returns what it refused."""
        arrivals, self.inbox = self.inbox, []
        deliver, scheduler, recorder = self._intake.deliver, self.scheduler, self.recorder
        return [a for a in arrivals if not deliver(a, scheduler, recorder, now_s)]

    def begin(self, now_s: float) -> float | None:
        """When the step that begins now will end; None: it has nothing to do."""
        plan = self.scheduler.plan(now_s)
        if plan is None:
            return None
        if now_s > self._ended_s:
            self._executor.idle(now_s - self._ended_s)
        if plan.deltas.admitted:
            self.recorder.planned(plan, now_s)
        result = self._executor.run(plan)
        self._step = plan, result, now_s
        return now_s + (result.draft_s + result.target_s + self._executor.host_s)

    def end(self, now_s: float) -> list[TraceRequest]:
        """Returns the requests that ended with the step."""
        assert self._step is not None
        (plan, result, started_s), self._step = self._step, None
        self._ended_s = now_s
        commit = self.scheduler.commit(result, now_s)
        self.recorder.committed(plan, commit, started_s, [now_s])
        finished = self.recorder.finished
        return [finished(e.request_id, len(e.output), now_s) for e in commit.finished]


class _Fleet:
    def __init__(
        self,
        source: Source,
        config: SchedulerConfig,
        executors: Sequence[StepExecutor],
        router: Router,
        seed: int,
        objectives: Objectives | None,
        on_record: Callable[[Record], None] | None,
    ) -> None:
        self._source, self._router = source, router
        self._intake = Intake(source, seed)
        self._load = Load(len(executors))
        usual = objectives or Objectives()
        self._replicas = [
            _Replica(
                config, executor, Recorder(config.max_slots, usual, on_record, i), self._intake
            )
            for i, executor in enumerate(executors)
        ]
        self._ends: list[tuple[float, int]] = []  # a heap: when which replica's step ends

    def run(self, on_progress: Callable[[Progress], None] | None) -> None:
        now_s, steps = 0.0, 0
        while True:
            arrival_s = self._source.next_arrival_s()
            coming_s = [] if arrival_s is None else [arrival_s]
            if self._ends:
                coming_s.append(self._ends[0][0])
            if not coming_s:
                break
            now_s = max(now_s, min(coming_s))
            ended = self._end_steps(now_s)
            for i in sorted(ended | self._take_in(now_s, ended)):
                end_s = self._replicas[i].begin(now_s)
                if end_s is None:
                    continue
                heapq.heappush(self._ends, (end_s, i))
                steps += 1
                if on_progress is not None and steps % PROGRESS_STEPS == 0:
                    on_progress(self._progress(now_s, steps))
        if any(replica.scheduler.has_work for replica in self._replicas):
            raise RuntimeError("a scheduler holds requests that it will not run")
        if on_progress is not None:
            on_progress(self._progress(now_s, steps))

    def report(self, objectives: Objectives | None, settings: dict[str, Any]) -> Report:
        served = [Served(replica.scheduler, replica.recorder) for replica in self._replicas]
        return report_of(self._intake, served, objectives, settings, by_replica=True)

    # -- inside

    def _end_steps(self, now_s: float) -> set[int]:
        ended: set[int] = set()
        while self._ends and self._ends[0][0] <= now_s:
            _, i = heapq.heappop(self._ends)
            ended.add(i)
            for request in self._replicas[i].end(now_s):
                self._load.remove(i, request.prompt_tokens)
                self._source.ended(request, now_s)
        return ended

    def _take_in(self, now_s: float, ended: set[int]) -> set[int]:
        """Routes what has arrived, and hands it, with what came during the steps that have ended,
        to the replicas that run none; a refusal may let another request come at once. Returns who
        was given something."""
        given: set[int] = set()
        source, load, replicas = self._source, self._load, self._replicas
        waiting = set(ended)  # an idle replica that was left alone has nothing in its inbox
        while True:
            while (arrival_s := source.next_arrival_s()) is not None and arrival_s <= now_s:
                arrival = self._intake.take()
                i = self._router.route(arrival.request.prompt_array(), load)
                load.add(i, arrival.traced.prompt_tokens)
                replicas[i].inbox.append(arrival)
                waiting.add(i)
            for i in sorted(waiting):
                if replicas[i].inbox and replicas[i].is_idle:
                    given.add(i)
                    for refused in replicas[i].deliver(now_s):
                        load.remove(i, refused.traced.prompt_tokens)
            waiting.clear()
            arrival_s = source.next_arrival_s()
            if arrival_s is None or arrival_s > now_s:
                return given

    def _progress(self, now_s: float, steps: int) -> Progress:
        schedulers = [replica.scheduler for replica in self._replicas]
        return Progress(
            now_s,
            sum(replica.recorder.num_finished for replica in self._replicas),
            sum(scheduler.num_running for scheduler in schedulers),
            sum(s.num_waiting for s in schedulers) + sum(len(r.inbox) for r in self._replicas),
            steps,
        )
