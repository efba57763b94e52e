"""The runs in a step log: the texts that each engine served, and what its steps did."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import NamedTuple

import msgspec
import numpy as np

from cbatch.core.prices.step_work import StepSample
from cbatch.core.request.request import FinishReason, Request
from cbatch.core.scheduler import events
from cbatch.core.scheduler.plan import StepPlan, StepResult
from cbatch.core.scheduler.sequence import Commit
from cbatch.core.scheduler.slot_counts import SlotCounts
from cbatch.steplog.step_log import AnyEvent, StepLogError, engines_of, read_step_log, replay

Span = tuple[float, float]  # start and end of a step, in seconds
_MOMENT_S = 1e-6


class RecordedText(msgspec.Struct):
    """A request and its output. It arrives when the step begins that could admit it. A text that is
    `cut` was ended by a stop string, by its client, by an error, or by the end of the log. One that
    has not `ended` was open at the end."""

    request: Request
    arrival_s: float
    output: list[int]
    cut: bool = True
    ended: bool = False
    first_s: float = np.nan  # commit of the first token
    last_s: float = np.nan


class DraftedRow(NamedTuple):
    """The drafts of one row of a recorded step, for the output tokens from `position` on."""

    text: RecordedText
    position: int
    planned: int
    drafted: int
    accepted: int


class RecordedRun:
    """The run of one engine, replayed by a scheduler: its `texts` in the order of their arrival,
    the sample and the span of each step, and the `drafts` of its rows. If an event does not follow
    from those before it, the rest is not used, and `damage` has the error."""

    def __init__(self, engine: list[AnyEvent], on_step: Callable[[int], object] = int) -> None:
        """Read the events of an engine. `on_step` gets the number of steps so far."""
        assert isinstance(engine[0], events.Configured)
        self.configured = engine[0]
        self.texts: list[RecordedText] = []
        self.samples: list[StepSample] = []
        self.spans: list[Span] = []
        self.drafts: list[DraftedRow] = []
        self.damage: StepLogError | None = None
        # Times of the first and the last event; None: there is no event.
        times_s = [event.now_s for event in engine if not isinstance(event, events.Configured)]
        self.times_s = (times_s[0], times_s[-1]) if times_s else None
        self._on_step = on_step
        self._by_id: dict[str, RecordedText] = {}
        self._open: set[str] = set()
        self._plans: deque[tuple[float, bool, StepPlan]] = deque()  # with time, and if after idling
        self._counts = SlotCounts(self.configured.config.max_num_seqs)
        self._occupants: dict[int, str] = {}
        self._now_s = self._last_s = 0.0  # times of the event, and of the last commit
        self._begin_s = 0.0  # from then on the next step could run
        self._result: StepResult
        self._idle = True  # since the last plan there was a time without open requests and steps
        try:
            replay(self._noted(engine), on_plan=self._planned, on_commit=self._committed)
        except StepLogError as error:
            self.damage = error

    def _noted(self, engine: list[AnyEvent]) -> Iterator[AnyEvent]:
        for event in engine:
            self._now_s = getattr(event, "now_s", 0.0)
            if isinstance(event, events.Committed):
                self._result = event.result
            yield event
            match event:
                case events.Added(request, now_s, output):
                    if self._plans or (self._idle and not self._open):
                        self._begin_s = now_s  # of the next step, or of the one after it
                    text = RecordedText(request, min(now_s, self._begin_s), list(output))
                    self._by_id[request.request_id] = text
                    self.texts.append(text)
                    self._open.add(request.request_id)
                case events.Cancelled() | events.Failed() | events.TextFinished():
                    self._end(event.request_id, getattr(event, "keep_tokens", None))
                case events.ExecutorReset():
                    self._plans.clear()
            self._idle = self._idle or not (self._open or self._plans)

    def _end(self, request_id: str, keep_tokens: int | None) -> None:
        self._open.discard(request_id)
        if (text := self._by_id.get(request_id)) is not None:
            text.ended = True
            if keep_tokens is not None:
                text.cut = True
                del text.output[max(keep_tokens, 0) :]

    def _planned(self, plan: StepPlan | None) -> None:
        if plan is not None:
            for admission in plan.deltas.new_sequences:
                self._occupants[admission.slot] = admission.request_id
            self._plans.append((self._begin_s, self._idle, plan))
            self._idle = False

    def _committed(self, commit: Commit) -> None:
        planned_s, after_idle, plan = self._plans.popleft()
        self._measure(plan, planned_s, after_idle)
        if plan.num_drafts.any():
            self._note_drafts(plan, commit)
        for row in commit.updates():
            text = self._by_id[row.request_id]
            text.first_s = self._now_s if np.isnan(text.first_s) else text.first_s
            text.last_s = self._now_s
            text.output += row.tokens
        for end in commit.finished:
            self._by_id[end.request_id].ended = True
            if end.request_id in self._open:  # else it was ended from outside
                natural = end.reason in (FinishReason.STOP, FinishReason.LENGTH)
                self._by_id[end.request_id].cut = not natural
                self._open.remove(end.request_id)
        self._last_s = self._now_s
        self._begin_s = self._now_s - _MOMENT_S  # a simulated step may end a rounding error earlier
        self._on_step(len(self.samples))

    def _measure(self, plan: StepPlan, planned_s: float, after_idle: bool) -> None:
        result, counts = self._result, self._counts
        for admission in plan.deltas.new_sequences:
            counts.admit(admission)
        whole_s = 0.0  # not measured
        if not after_idle:
            whole_s = self._now_s - self._last_s
        work = counts.work(plan, result.num_drafted)
        counts.advance(plan, result.num_accepted, np.diff(result.row_splits))
        host_s = max(whole_s - result.draft_s - result.target_s, 0.0)
        self.samples.append(StepSample(work, result.draft_s, result.target_s, host_s))
        self.spans.append((planned_s if after_idle else self._last_s, self._now_s))

    def _note_drafts(self, plan: StepPlan, commit: Commit) -> None:
        names = [self._occupants[slot] for slot in plan.slots.tolist()]
        planned = dict(zip(names, plan.num_drafts.tolist(), strict=True))
        outcomes = zip(commit.num_drafted.tolist(), commit.num_accepted.tolist(), strict=True)
        for owner, outcome in zip(commit.owners, outcomes, strict=True):
            name, params = owner.request.request_id, owner.request.params
            text = self._by_id[name]
            # Others draft by a drafter of their own, or a grammar cuts their drafts.
            free = params.drafter is None and params.structured_outputs is None
            if planned[name] and free:
                self.drafts.append(DraftedRow(text, len(text.output), planned[name], *outcome))


def read_runs(
    path: Path, on_step: Callable[[int], object] = int
) -> tuple[list[RecordedRun], str | None]:
    """Return the run of each engine in a log, and a warning if the log is damaged. Raises
    `StepLogError` if nothing in it is whole."""
    log = read_step_log(path)
    runs, warning, begin = list[RecordedRun](), None, 0
    for engine in engines_of(log.events):
        run = RecordedRun(engine, on_step)
        if run.damage is not None and warning is None:
            line = log.lines[begin + run.damage.event]
            warning = f"{path}, line {line}: {run.damage}; of its engine the rest is not used"
        runs.append(run)
        begin += len(engine)
    return runs, warning or log.warning
