"""What is measured while a replay runs: a few numbers a request, and every gap between tokens.

A run of steps in which the same rows decode one token each has one gap a step for all of them, and
costs one append; whatever else happens is looked at row by row. Memory grows by some 60 bytes a
request and 16 a step.
"""

from __future__ import annotations

import math
from array import array
from collections.abc import Callable, Sequence
from operator import sub

import numpy as np

from cbatch.core.plan import StepPlan
from cbatch.core.sequence import Commit
from sim.report import Objectives, Record
from sim.traces.request import TraceRequest

_SERIES = ("ttft_s", "tpot_s", "e2e_s", "queue_s", "_gap_s", "_gap_chunks", "_gap_tokens")
_COUNTS = (
    "num_finished",
    "num_good",
    "num_cut",
    "prompt_tokens",
    "output_tokens",
    "row_steps",
    "running_s",
)


class _Open:
    """A request that has not ended."""

    __slots__ = (
        "first_s",
        "hit_tokens",
        "index",
        "last_s",
        "preemptions",
        "queue_s",
        "request",
        "slot",
    )

    def __init__(self, index: int, request: TraceRequest) -> None:
        self.index = index
        self.request = request
        self.queue_s: float | None = None  # None: not admitted yet
        self.first_s = math.nan
        self.last_s: float | None = None  # of its last token, as of the moment it lost its slot
        self.hit_tokens = 0
        self.preemptions = 0
        self.slot: int | None = None  # the latest that it had


class Recorder:
    """Told of every request, plan and commit, in order."""

    def __init__(
        self,
        max_slots: int,
        objectives: Objectives,
        on_record: Callable[[Record], None] | None = None,
        replica: int | None = None,
    ) -> None:
        self._replica = replica
        self._objectives = objectives
        self._on_record = on_record
        self._open: dict[str, _Open] = {}
        self._occupants: list[_Open | None] = [None] * max_slots
        self._last_s: list[float | None] = [None] * max_slots  # of the last token of its request
        self._steady: StepPlan | None = None  # all of its rows had their last token at _steady_s
        self._steady_s = 0.0
        self.ttft_s, self.tpot_s, self.e2e_s, self.queue_s = (array("d") for _ in range(4))
        self._gap_s, self._gap_chunks, self._gap_tokens = array("d"), array("q"), array("q")
        self.num_finished = self.num_good = self.num_cut = 0
        self.prompt_tokens = self.output_tokens = 0
        self.row_steps = 0  # rows that emitted, over all steps
        self.running_s = 0.0  # integral of the running requests over time
        self.end_s = 0.0

    @classmethod
    def total(cls, recorders: Sequence[Recorder]) -> Recorder:
        """What all of them have measured together; not for recording more."""
        if len(recorders) == 1:
            return recorders[0]
        total = cls(0, Objectives())
        for one in recorders:
            for name in _SERIES:
                getattr(total, name).extend(getattr(one, name))
            for name in _COUNTS:
                setattr(total, name, getattr(total, name) + getattr(one, name))
            total.end_s = max(total.end_s, one.end_s)
        return total

    def arrived(self, index: int, request: TraceRequest) -> str:
        """Returns the request's id."""
        name = str(index)
        self._open[name] = _Open(index, request)
        return name

    def refused(self, name: str) -> None:
        del self._open[name]

    def planned(self, plan: StepPlan, now_s: float) -> None:
        for admission in plan.deltas.admitted:
            slot, opened = admission.slot, self._open[admission.request_id]
            if self._steady is not None:
                self._settle(self._steady)
            self._vacate(slot)
            if opened.slot is not None:  # it was preempted, and nobody has its old slot yet
                self._vacate(opened.slot)
            opened.slot = slot
            self._occupants[slot] = opened
            self._last_s[slot] = opened.last_s
            if opened.queue_s is None:
                opened.queue_s = now_s - opened.request.arrival_s
                opened.hit_tokens = admission.kv_len_tokens
            else:
                opened.preemptions += 1

    def committed(
        self, plan: StepPlan, commit: Commit, started_s: float, ends_s: list[float]
    ) -> None:
        """`ends_s` has one time for each step of the plan."""
        rows, steady = len(plan.slots), self._steady
        lasted_s = list(map(sub, ends_s, [started_s, *ends_s]))
        running_s = self.running_s
        for step_s in lasted_s:
            running_s += rows * step_s
        self.running_s = running_s
        if not (
            steady is not None
            and plan.slots is steady.slots
            and plan.query_lens is steady.query_lens
        ):
            if steady is not None:
                self._settle(steady)
            if steady is not None and self._all_of(steady, plan, commit):
                self._steady = plan
            else:
                self._rows(plan, commit, ends_s[0])
                del lasted_s[0]
                started_s = self._steady_s
        if lasted_s:
            if started_s != self._steady_s:  # the step did not begin where the one before ended
                lasted_s[0] = ends_s[0] - self._steady_s
            self._gap_s.fromlist(lasted_s)
            self._gap_chunks.fromlist([rows] * len(lasted_s))
            self._gap_tokens.fromlist([rows] * len(lasted_s))
            self.row_steps += rows * len(lasted_s)
            self._steady_s = ends_s[-1]

    def finished(self, name: str, num_tokens: int, now_s: float) -> TraceRequest:
        """It ended with `num_tokens` of output, the last of them now."""
        opened = self._open.pop(name)
        request = opened.request
        assert opened.queue_s is not None
        ttft_s, e2e_s = opened.first_s - request.arrival_s, now_s - request.arrival_s
        tpot_s = (now_s - opened.first_s) / (num_tokens - 1) if num_tokens > 1 else None
        self.ttft_s.append(ttft_s)
        self.e2e_s.append(e2e_s)
        self.queue_s.append(opened.queue_s)
        if tpot_s is not None:
            self.tpot_s.append(tpot_s)
        self.num_finished += 1
        self.num_cut += num_tokens < request.output_tokens
        self.num_good += self._meets(request, ttft_s, tpot_s, e2e_s)
        self.prompt_tokens += request.prompt_tokens
        self.output_tokens += num_tokens
        self.end_s = now_s
        if self._on_record is not None:
            self._on_record(
                Record(
                    index=opened.index,
                    arrival_s=request.arrival_s,
                    prompt_tokens=request.prompt_tokens,
                    output_tokens=num_tokens,
                    queue_s=opened.queue_s,
                    ttft_s=ttft_s,
                    tpot_s=tpot_s,
                    e2e_s=e2e_s,
                    prefix_hit_tokens=opened.hit_tokens,
                    preemptions=opened.preemptions,
                    session=request.session,
                    replica=self._replica,
                )
            )
        return request

    def gaps(self) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """Seconds between tokens that came at different times (float64), how many requests waited
        so long (int64), and how many tokens came after it in all (int64)."""
        chunks, tokens = np.asarray(self._gap_chunks), np.asarray(self._gap_tokens)
        return np.asarray(self._gap_s), chunks, tokens

    # -- inside

    def _vacate(self, slot: int) -> None:
        leaver = self._occupants[slot]
        if leaver is not None:
            leaver.last_s, leaver.slot = self._last_s[slot], None
            self._occupants[slot] = None

    def _settle(self, steady: StepPlan) -> None:
        for slot in steady.slots.tolist():
            self._last_s[slot] = self._steady_s
        self._steady = None

    @staticmethod
    def _all_of(steady: StepPlan, plan: StepPlan, commit: Commit) -> bool:
        """Whether in each step of `plan` rows of `steady`, and no others, emit one token each."""
        return (
            len(commit.tokens) == len(plan.slots) * plan.num_steps
            and commit.counts.tolist().count(plan.num_steps) == len(plan.slots)
            and set(plan.slots.tolist()) <= set(steady.slots.tolist())
            and not any(plan.num_drafts.tolist())
        )

    def _rows(self, plan: StepPlan, commit: Commit, now_s: float) -> None:
        """The first step of the plan, row by row; the others have its rows."""
        counts = commit.counts if plan.num_steps == 1 else plan.query_lens
        gaps_s: list[float] = []
        tokens: list[int] = []
        last_s, emitting = self._last_s, 0
        for slot, count in zip(plan.slots.tolist(), counts.tolist(), strict=True):
            if not count:
                continue
            emitting += 1
            before_s, last_s[slot] = last_s[slot], now_s
            if before_s is not None:
                gaps_s.append(now_s - before_s)
                tokens.append(count)
            else:  # tokens that come together with the first one have no gap of their own
                opened = self._occupants[slot]
                assert opened is not None
                opened.first_s = now_s
        self.row_steps += emitting
        self._gap_s.fromlist(gaps_s)
        self._gap_chunks.fromlist([1] * len(gaps_s))
        self._gap_tokens.fromlist(tokens)
        one_each = len(commit.tokens) == emitting * plan.num_steps
        if emitting == len(counts) and one_each and not any(plan.num_drafts.tolist()):
            self._steady, self._steady_s = plan, now_s

    def _meets(
        self, request: TraceRequest, ttft_s: float, tpot_s: float | None, e2e_s: float
    ) -> bool:
        """With one token there is no time per token, and nothing to miss."""
        usual = self._objectives
        return (
            _within(ttft_s, request.ttft_slo_s, usual.ttft_s)
            and _within(tpot_s, request.tpot_slo_s, usual.tpot_s)
            and _within(e2e_s, request.e2e_slo_s, usual.e2e_s)
        )


def _within(value_s: float | None, own_s: float | None, usual_s: float | None) -> bool:
    most_s = usual_s if own_s is None else own_s
    return value_s is None or most_s is None or value_s <= most_s
