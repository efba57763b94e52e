"""The run in a step log: its texts, the durations of its steps, and the outcomes of its drafts."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import msgspec
import numpy as np
from msgspec.structs import replace

from cbatch.core.prices.step_work import StepSample
from cbatch.core.request.errors import FieldError
from cbatch.core.request.request import FinishReason, Request
from cbatch.core.scheduler import events
from cbatch.core.scheduler.plan import StepPlan
from cbatch.core.scheduler.sequence import Commit
from cbatch.core.scheduler.slot_counts import SlotCounts
from cbatch.steplog.step_log import AnyEvent, StepLogError, engines_of, read_step_log, replay
from sim.advise.speed import Span
from sim.workload.tokens import VOCAB_SIZE
from sim.workload.traces.request import TraceRequest
from sim.workload.traces.step_log import is_step_log

REMEDY = "record a run with cbatch serve --record FILE"
# Not replayed: they do not matter to a scheduler, need a grammar, or are settings of a scenario.
_DROPPED: dict[str, Any] = {"structured_outputs": None, "logprobs": None, "prompt_logprobs": None}
_DROPPED |= {"stop": (), "drafter": None, "max_lookahead": None}


class RecordedText(msgspec.Struct):
    """A request and its output. A text that is `cut` was ended by a stop string, by its client, by
    an error, or by the end of the log; its request then ends at that length."""

    request: Request
    arrival_s: float
    output: list[int]
    cut: bool = True
    first_s: float = np.nan  # commit of the first token
    last_s: float = np.nan

    def finish(self, name: str) -> None:
        """Give the request another id, and the parameters with which it is replayed."""
        params = replace(self.request.params, **_DROPPED)
        if self.cut:
            limits = {"max_tokens": len(self.output), "min_tokens": 0}
            params = replace(params, **limits, ignore_eos=True, stop_token_ids=())
        self.request = replace(self.request, request_id=name, params=params)

    @property
    def traced(self) -> TraceRequest:
        lengths = {"prompt_tokens": len(self.request.prompt), "output_tokens": len(self.output)}
        return TraceRequest(arrival_s=self.arrival_s, **lengths)


class DraftedRow(NamedTuple):
    """The drafts of one row of a recorded step, for the output tokens from `position` on."""

    text: RecordedText
    position: int
    planned: int
    drafted: int
    accepted: int


class Recording(NamedTuple):
    """A recorded run. The name of a text, its request's id, is its number by arrival."""

    engine: events.Configured
    texts: dict[str, RecordedText]
    samples: list[StepSample]
    spans: list[Span]  # of the steps of `samples`
    drafts: list[DraftedRow]
    warnings: list[str]

    def figures(self) -> dict[str, float | None]:
        texts = self.texts.values()
        timed = [text for text in texts if text.first_s <= text.last_s]
        return figures(
            sum(len(text.output) for text in texts),
            max((text.last_s for text in timed), default=0.0),
            [text.first_s - text.arrival_s for text in timed],
            [(t.last_s - t.first_s) / (len(t.output) - 1) for t in timed if len(t.output) > 1],
        )


def figures(
    tokens: int, duration_s: float, ttft_s: Sequence[float], tpot_s: Sequence[float]
) -> dict[str, float | None]:
    """Return the figures of a run, recorded or simulated; None if there is no measurement."""
    cuts = [
        float(np.percentile(values, 95)) if len(values) else None for values in (tpot_s, ttft_s)
    ]
    rate = tokens / duration_s if duration_s > 0 else None
    return {"tokens_per_s": rate, "tpot_p95_s": cuts[0], "ttft_p95_s": cuts[1]}


def read_run(path: Path, on_step: Callable[[int], None] = lambda steps: None) -> Recording:
    """Read the longest run in a log. `on_step` gets the number of steps so far. Raises
    `FieldError`."""
    if not is_step_log(path):
        raise FieldError("LOG", f"{path} is not a step log, and has no texts", REMEDY)
    try:
        log = read_step_log(path)
        engines = list(engines_of(log.events)) or [[]]
    except StepLogError as error:
        raise FieldError("LOG", str(error), REMEDY) from error
    at = max(range(len(engines)), key=lambda i: len(engines[i]))
    engine, reader = engines[at], _Reader(on_step)
    texts = reader.read(engine) if engine else []
    if not texts:
        raise FieldError("LOG", f"{path} has no request with output", REMEDY)
    assert isinstance(engine[0], events.Configured)
    if engine[0].config.vocab_size >= VOCAB_SIZE:
        raise FieldError("LOG", f"{path} is of a simulation, and has no texts", REMEDY)
    for number, text in enumerate(texts):
        text.finish(str(number))
    warnings = [] if log.warning is None else [log.warning]
    if reader.damage is not None:
        line = log.lines[sum(map(len, engines[:at])) + reader.damage.event]
        warnings = [f"{path}, line {line}: {reader.damage}; the rest is not used"]
    if len(engines) > 1:
        warnings.append(f"of {len(engines)} runs in the log, only the longest is used")
    named = {text.request.request_id: text for text in texts}
    drafts = [row for row in reader.drafts if row.text.request.request_id in named]
    return Recording(engine[0], named, reader.samples, reader.spans, drafts, warnings)


class _Reader:
    """Replays the events of one engine, and collects what its steps did."""

    def __init__(self, on_step: Callable[[int], None]) -> None:
        self.samples: list[StepSample] = []
        self.spans: list[Span] = []
        self.drafts: list[DraftedRow] = []
        self._on_step, self._texts = on_step, dict[str, RecordedText]()
        self._open: set[str] = set()
        self._plans: deque[tuple[float, bool, StepPlan]] = deque()  # with time, and if after idling
        self._counts, self._occupants = SlotCounts(0), dict[int, str]()
        self._now_s = self._last_s = 0.0  # times of the event, and of the last commit
        self.damage: StepLogError | None = None
        self._idle = True  # since the last plan there was a time without open requests and steps

    def read(self, engine: list[AnyEvent]) -> list[RecordedText]:
        """Return the texts in order of arrival, the first at 0."""
        slots = engine[0].config.max_num_seqs
        self._counts = SlotCounts(slots)
        try:
            replay(self._noted(engine), on_plan=self._planned, on_commit=self._committed)
        except StepLogError as error:
            self.damage = error
        texts = [text for text in self._texts.values() if text.output]
        first_s = min((text.arrival_s for text in texts), default=0.0)
        for text in texts:
            text.arrival_s, text.first_s, text.last_s = (
                at_s - first_s for at_s in (text.arrival_s, text.first_s, text.last_s)
            )
        self.spans = [(start_s - first_s, end_s - first_s) for start_s, end_s in self.spans]
        return sorted(texts, key=lambda text: text.arrival_s)

    def _noted(self, engine: list[AnyEvent]) -> Iterator[AnyEvent]:
        for event in engine:
            self._now_s = getattr(event, "now_s", 0.0)
            match event:
                case events.Added(request, now_s, output):
                    text = RecordedText(request, now_s, list(output))
                    self._texts[request.request_id] = text
                    self._open.add(request.request_id)
                case events.Cancelled() | events.Failed() | events.TextFinished():
                    self._open.discard(event.request_id)
                    if isinstance(event, events.TextFinished) and event.request_id in self._texts:
                        text = self._texts[event.request_id]
                        text.cut = True
                        del text.output[max(event.keep_tokens, 0) :]
                case events.ExecutorReset():
                    self._plans.clear()
                case events.Committed(result):
                    self._result = result
            yield event
            self._idle = self._idle or not (self._open or self._plans)

    def _planned(self, plan: StepPlan | None) -> None:
        if plan is not None:
            for admission in plan.deltas.new_sequences:
                self._occupants[admission.slot] = admission.request_id
            self._plans.append((self._now_s, self._idle, plan))
            self._idle = False

    def _committed(self, commit: Commit) -> None:
        planned_s, after_idle, plan = self._plans.popleft()
        self._measure(plan, planned_s, after_idle)
        if plan.num_drafts.any():
            self._note_drafts(plan, commit)
        for row in commit.updates():
            text = self._texts[row.request_id]
            text.first_s = self._now_s if np.isnan(text.first_s) else text.first_s
            text.last_s = self._now_s
            text.output += row.tokens
        for end in commit.finished:
            if end.request_id in self._open:  # else it was ended from outside
                natural = end.reason in (FinishReason.STOP, FinishReason.LENGTH)
                self._texts[end.request_id].cut = not natural
                self._open.remove(end.request_id)
        self._last_s = self._now_s
        self._on_step(len(self.samples))

    def _measure(self, plan: StepPlan, planned_s: float, after_idle: bool) -> None:
        result, counts = self._result, self._counts
        for admission in plan.deltas.new_sequences:
            counts.admit(admission)
        whole_s = 0.0  # not measured
        if not after_idle:
            whole_s = self._now_s - self._last_s
        elif self.samples:
            counts.idle(planned_s - self._last_s)
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
            text = self._texts[name]
            # Others draft by a drafter of their own, or a grammar cuts their drafts.
            if planned[name] and params.drafter is params.structured_outputs is None:
                self.drafts.append(DraftedRow(text, len(text.output), planned[name], *outcome))
