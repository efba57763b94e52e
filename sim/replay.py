"""A trace through the real scheduler, on a virtual clock.

    arrivals -> scheduler.plan(now) -> executor.run -> now += duration -> scheduler.commit

Nothing here reads a clock or draws a number that does not come from `seed`: the same inputs give
the same report, byte for byte. The loop is serial (overlap depth 0).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Protocol

import msgspec
import numpy as np

from cbatch.core.config import SchedulerConfig
from cbatch.core.errors import RefusedError
from cbatch.core.events import Event
from cbatch.core.plan import StepPlan, StepResult
from cbatch.core.request import Request, SamplingParams
from cbatch.core.scheduler import Scheduler
from sim.records import Recorder
from sim.report import Goodput, Objectives, Record, Refused, Report, Speculation, Spread
from sim.sources import Source
from sim.timeline import Observer, Step
from sim.tokens import mix
from sim.traces.prompts import PromptMaker
from sim.traces.request import TraceRequest

PROGRESS_STEPS = 512  # between two reports of progress


class StepExecutor(Protocol):
    def run(self, plan: StepPlan) -> StepResult: ...

    @property
    def host_s(self) -> float:
        """What the loop around the executor took for the last step: not in its result, whose
        durations are those that a real executor measures."""


class SimRequest(Request, frozen=True, kw_only=True):
    """A request whose prompt is there as an array already."""

    tokens: np.ndarray  # int32, the prompt

    def prompt_array(self) -> np.ndarray:
        return self.tokens


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
        self._source, self._executor, self._seed = source, executor, seed
        self._objectives, self._observers = objectives, observers
        self._scheduler = Scheduler(config, log)
        self._recorder = Recorder(config.max_slots, objectives or Objectives(), on_record)
        self._prompts = PromptMaker()
        self._params: dict[int, SamplingParams] = {}  # by output tokens
        self._refused: list[Refused] = []
        self._num_arrived = 0
        self._first_s: float | None = None

    def run(self, on_progress: Callable[[Progress], None] | None) -> None:
        source, scheduler, recorder = self._source, self._scheduler, self._recorder
        executor = self._executor
        plan_step, run_step, commit_step = scheduler.plan, executor.run, scheduler.commit
        now_s, steps = 0.0, 0
        arrival_s = source.next_arrival_s()
        while True:
            while arrival_s is not None and arrival_s <= now_s:
                self._add(*source.take(), now_s)
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

    def _add(self, index: int, traced: TraceRequest, now_s: float) -> None:
        self._num_arrived += 1
        if self._first_s is None:
            self._first_s = traced.arrival_s
        tokens = self._prompts.prompt(traced)
        count = traced.output_tokens
        params = self._params.get(count)
        if params is None:
            params = self._params[count] = SamplingParams(
                max_tokens=count, temperature=0.0, ignore_eos=True
            )
        name = self._recorder.arrived(index, traced)
        request = SimRequest(
            request_id=name,
            prompt=tuple(tokens.tolist()),
            tokens=tokens,
            params=params,
            seed=mix(self._seed, index),
            priority=traced.priority or 0,
        )
        try:
            self._scheduler.add(request, traced.arrival_s)
        except RefusedError as error:
            self._recorder.refused(name)
            self._refused.append(
                Refused(
                    index=index,
                    prompt_tokens=traced.prompt_tokens,
                    output_tokens=count,
                    reason=str(error),
                )
            )
            self._source.ended(traced, now_s)

    def _observe(self, step: Step) -> None:
        for observer in self._observers:
            observer.step(step)

    def _progress(self, now_s: float, steps: int) -> Progress:
        scheduler, finished = self._scheduler, self._recorder.num_finished
        return Progress(now_s, finished, scheduler.num_running, scheduler.num_waiting, steps)

    def report(self, settings: dict[str, Any]) -> Report:
        recorder, stats = self._recorder, self._scheduler.stats
        gap_s, chunks, tokens = recorder.gaps()
        duration_s = max(recorder.end_s - (self._first_s or 0.0), 0.0)

        def rate(count: float) -> float | None:
            return count / duration_s if duration_s > 0 else None

        return Report(
            kind="simulated",
            settings=settings,
            requests=recorder.num_finished,
            cut_requests=recorder.num_cut,
            refused=tuple(self._refused),
            duration_s=duration_s,
            prompt_tokens=recorder.prompt_tokens,
            output_tokens=recorder.output_tokens,
            requests_per_s=rate(recorder.num_finished),
            prompt_tokens_per_s=rate(recorder.prompt_tokens),
            output_tokens_per_s=rate(recorder.output_tokens),
            ttft_s=Spread.of(np.asarray(recorder.ttft_s)),
            tpot_s=Spread.of(np.asarray(recorder.tpot_s)),
            itl_s=Spread.of(gap_s * chunks / np.maximum(tokens, 1), tokens),
            chunk_gap_s=Spread.of(gap_s, chunks),
            e2e_s=Spread.of(np.asarray(recorder.e2e_s)),
            queue_s=Spread.of(np.asarray(recorder.queue_s)),
            goodput=self._goodput(rate(recorder.num_good)),
            speculation=self._speculation(),
            steps=stats.steps,
            mean_running=rate(recorder.running_s),
            preemptions=stats.preemptions,
            prefix_hit_tokens=stats.prefix_hit_tokens,
        )

    def _goodput(self, requests_per_s: float | None) -> Goodput | None:
        if self._objectives is None or requests_per_s is None:
            return None
        good = self._recorder.num_good
        return Goodput(
            objectives=self._objectives,
            requests=good,
            share=good / self._num_arrived,
            requests_per_s=requests_per_s,
        )

    def _speculation(self) -> Speculation | None:
        stats, recorder = self._scheduler.stats, self._recorder
        if not self._scheduler.state.speculates:
            return None
        drafted, accepted = stats.drafted_tokens, stats.accepted_tokens
        return Speculation(
            drafted_tokens=drafted,
            accepted_tokens=accepted,
            acceptance=accepted / drafted if drafted else None,
            tokens_per_step=stats.emitted_tokens / recorder.row_steps
            if recorder.row_steps
            else None,
        )
