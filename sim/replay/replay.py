"""Replay of a trace through the real scheduler, or several with a router, on one virtual clock.

    arrivals -> router -> inbox of a replica, until its step ends
             -> `Scheduler.schedule` -> executor.run -> now += duration -> `update_from_output`

Each replica has a scheduler, an executor and a pool of its own, and its steps have their own
durations. Events at the same time have this order: steps end (by replica), requests arrive and are
routed, idle replicas begin a step. Loops are serial (overlap depth 0).

No code here reads a clock, and all random numbers derive from `seed`: equal inputs give equal
reports, byte for byte.
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Callable, Sequence
from typing import Any

from cbatch.core.scheduler.config import SchedulerConfig
from cbatch.core.scheduler.events import Event
from cbatch.core.scheduler.scheduler import Scheduler
from sim.replay.intake import Intake, MakeRequest
from sim.replay.metrics import MetricsRecorder
from sim.replay.outcome import report_of
from sim.replay.replica import Progress, ReplayedEngine, StepExecutor
from sim.replay.routers import ReplicaLoad, RoundRobin, Router
from sim.report.report import Objectives, Record, Report
from sim.report.timeline import Observer
from sim.workload.sources import Source

PROGRESS_STEPS = 512  # minimum number of steps between two reports of progress


def replay(
    source: Source,
    config: SchedulerConfig,
    *executors: StepExecutor,
    router: Router | None = None,
    seed: int = 0,
    settings: dict[str, Any] | None = None,
    objectives: Objectives | None = None,
    on_record: Callable[[Record], None] | None = None,
    on_progress: Callable[[Progress], None] | None = None,
    observers: Sequence[Observer] = (),
    log: Callable[[Event], None] | None = None,
    make_request: MakeRequest | None = None,
) -> Report:
    """Serve all requests of `source` and return the report. A request that can never run is
    reported as refused, and the others continue. `settings` go into the report; `objectives` decide
    its goodput.

    With a `router` there is one replica per executor, each with `config`, and the report lists
    them. `observers` and `log` need a single executor. Requests of `make_request` replace synthetic
    ones; their ids are their numbers in the trace."""
    if len(executors) != 1 and (router is None or observers or log is not None):
        raise ValueError("executors: several need a router, and no observer of one engine")
    intake, usual = Intake(source, seed, make_request), objectives or Objectives()
    replicas = [
        ReplayedEngine(
            Scheduler(config, log),
            executor,
            MetricsRecorder(config.max_num_seqs, usual, on_record, None if router is None else i),
            observers,
        )
        for i, executor in enumerate(executors)
    ]
    _Loop(source, intake, replicas, router or RoundRobin(), on_progress).run()
    return report_of(intake, replicas, objectives, settings or {}, by_replica=router is not None)


class _Loop:
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

    def run(self) -> None:
        """Serve all requests. Raises RuntimeError if a scheduler still holds requests."""
        ends: list[tuple[float, int]] = []  # a heap: (end of a step, replica)
        replicas, now_s = self._replicas, 0.0
        next_s = self._next_s(ends)
        while next_s < math.inf:
            now_s = max(now_s, next_s)
            free = self._end_steps(ends, now_s)
            arrival_s = self._source.next_arrival_s()
            arrives = arrival_s is not None and arrival_s <= now_s
            if arrives or any([replicas[i].inbox for i in free]):
                free |= self._take_in(now_s, free)
            next_s = self._next_s(ends)
            for i in sorted(free):
                end_s = replicas[i].begin(now_s)
                if end_s is not None:
                    heapq.heappush(ends, (end_s, i))
                    next_s = min(next_s, end_s)
            self._report(now_s)
        if any(replica.scheduler.has_work for replica in replicas):
            raise RuntimeError("a scheduler holds requests that it will not run")
        self._report(now_s, is_last=True)

    def _next_s(self, ends: list[tuple[float, int]]) -> float:
        """Return the time of the next event, not counting steps that begin now."""
        end_s = ends[0][0] if ends else math.inf
        arrival_s = self._source.next_arrival_s()
        return end_s if arrival_s is None or end_s < arrival_s else arrival_s

    def _end_steps(self, ends: list[tuple[float, int]], now_s: float) -> set[int]:
        """End all steps that are due; return their replicas."""
        ended: set[int] = set()
        while ends and ends[0][0] <= now_s:
            _, i = heapq.heappop(ends)
            ended.add(i)
            for request in self._replicas[i].end(now_s):
                self._load.remove(i, request.prompt_tokens)
                self._source.ended(request, now_s)
        return ended

    def _take_in(self, now_s: float, ended: set[int]) -> set[int]:
        """Route all due arrivals to inboxes. Deliver the inboxes of replicas without a running
        step; return the replicas that got requests. A refusal may cause another arrival at once."""
        served: set[int] = set()
        source, load, replicas = self._source, self._load, self._replicas
        waiting = set(ended)  # other idle replicas have empty inboxes
        while True:
            while (arrival_s := source.next_arrival_s()) is not None and arrival_s <= now_s:
                arrival = self._intake.take()
                i = self._router.route(arrival.request.prompt_array(), load)
                load.add(i, arrival.traced.prompt_tokens)
                replicas[i].inbox.append(arrival)
                waiting.add(i)
            for i in sorted(waiting):
                if replicas[i].inbox and replicas[i].is_idle:
                    served.add(i)
                    self._deliver(i, now_s)
            waiting.clear()
            arrival_s = source.next_arrival_s()
            if arrival_s is None or arrival_s > now_s:
                return served

    def _deliver(self, i: int, now_s: float) -> None:
        """Give a replica, which runs no step, the requests of its inbox."""
        replica = self._replicas[i]
        arrivals, replica.inbox = replica.inbox, []
        for arrival in arrivals:
            if not self._intake.deliver(arrival, replica.scheduler, replica.recorder, now_s):
                self._load.remove(i, arrival.traced.prompt_tokens)

    def _report(self, now_s: float, *, is_last: bool = False) -> None:
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
