"""The measurements of a replay: a few numbers per request, and every gap between tokens.

If the same rows as before decode one token each, the step has one gap for all rows and costs one
append. All other steps are processed row by row. Memory grows by some 60 bytes a request and 24
bytes a step.
"""

from __future__ import annotations

import math
from array import array
from collections.abc import Callable, Sequence

import msgspec
import numpy as np

from cbatch.core.scheduler.plan import StepPlan
from cbatch.core.scheduler.sequence import Commit
from sim.report.report import Objectives, Record
from sim.workload.traces.request import TraceRequest


class _OpenRequest(msgspec.Struct, gc=False):
    index: int
    request: TraceRequest
    queue_s: float | None = None  # None: not admitted yet
    first_s: float = math.nan
    last_s: float | None = None  # time of its last token before it lost its slot
    hit_tokens: int = 0
    preemptions: int = 0
    slot: int | None = None  # its latest slot


class MetricsRecorder:
    """Recorder of one scheduler's requests; it must be called for every request, plan and commit,
    in order."""

    def __init__(
        self,
        max_num_seqs: int,
        objectives: Objectives,
        on_record: Callable[[Record], None] | None = None,
        replica: int | None = None,
    ) -> None:
        self._replica = replica
        self._objectives = objectives
        self._on_record = on_record
        self._open: dict[str, _OpenRequest] = {}
        self._occupants: list[_OpenRequest | None] = [None] * max_num_seqs
        self._last_s: list[float | None] = [None] * max_num_seqs  # by slot: time of its last token
        # Slots whose last token came at `_steady_s`; `_last_s` is out of date for them.
        self._steady: np.ndarray | None = None
        self._steady_s = 0.0
        self.ttft_s, self.tpot_s, self.e2e_s, self.queue_s = (array("d") for _ in range(4))
        self.arrival_s = array("d")  # of finished requests
        self._gap_s, self._gap_chunks, self._gap_tokens = array("d"), array("q"), array("q")
        self.num_finished = self.num_good = self.num_cut = 0  # good: all objectives met
        self.prompt_tokens = self.hit_tokens = self.output_tokens = 0  # of finished requests
        self.row_steps = 0  # rows that emitted, over all steps
        self.running_s = 0.0  # time that requests held a slot, of all together
        self.end_s = 0.0

    @classmethod
    def total(cls, recorders: Sequence[MetricsRecorder]) -> MetricsRecorder:
        """Return the sum of several recorders' measurements; it cannot record more."""
        if len(recorders) == 1:
            return recorders[0]
        total = cls(0, Objectives())
        for part in recorders:
            for name, value in list(vars(total).items()):
                if isinstance(value, array):
                    value.extend(getattr(part, name))
                elif isinstance(value, int | float):
                    setattr(total, name, value + getattr(part, name))
        total.end_s = max(part.end_s for part in recorders)
        return total

    def arrived(self, index: int, request: TraceRequest) -> None:
        self._open[str(index)] = _OpenRequest(index, request)

    def refused(self, name: str) -> None:
        del self._open[name]

    def planned(self, plan: StepPlan, now_s: float) -> None:
        for admission in plan.deltas.new_sequences:
            slot, opened = admission.slot, self._open[admission.request_id]
            self._settle()
            self._vacate(slot)
            if opened.slot is not None:  # it was preempted, and no other request took its old slot
                self._vacate(opened.slot)
            opened.slot = slot
            self._occupants[slot] = opened
            self._last_s[slot] = opened.last_s
            if opened.queue_s is None:
                opened.queue_s = now_s - opened.request.arrival_s
                opened.hit_tokens = admission.kv_len_tokens
            else:
                opened.preemptions += 1

    def committed(self, plan: StepPlan, commit: Commit, end_s: float) -> None:
        counts = commit.counts.tolist()
        rows = len(counts)
        one_each = (
            len(commit.tokens) == rows
            and counts.count(1) == rows
            and not any(plan.num_drafts.tolist())
        )
        if not one_each:
            self._settle()
            self._rows(plan.slots, counts, end_s)
            return
        if self._stay_steady(plan.slots):
            self._gap_s.append(end_s - self._steady_s)
            self._gap_chunks.append(rows)
            self._gap_tokens.append(rows)
            self.row_steps += rows
        else:
            self._rows(plan.slots, counts, end_s)
        self._steady, self._steady_s = plan.slots, end_s

    def finished(self, name: str, num_tokens: int, now_s: float) -> TraceRequest:
        """Record a request's end at `now_s`, with `num_tokens` output tokens. Return it."""
        opened = self._open.pop(name)
        request = opened.request
        assert opened.queue_s is not None
        ttft_s, e2e_s = opened.first_s - request.arrival_s, now_s - request.arrival_s
        tpot_s = (now_s - opened.first_s) / (num_tokens - 1) if num_tokens > 1 else None
        self.arrival_s.append(request.arrival_s)
        self.ttft_s.append(ttft_s)
        self.e2e_s.append(e2e_s)
        self.queue_s.append(opened.queue_s)
        if tpot_s is not None:
            self.tpot_s.append(tpot_s)
        self.num_finished += 1
        self.num_cut += num_tokens < request.output_tokens
        self.num_good += self._meets(request, ttft_s, tpot_s, e2e_s)
        self.prompt_tokens += request.prompt_tokens
        self.hit_tokens += opened.hit_tokens
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
        """Return gaps between tokens that came at different times, in seconds (float64); how many
        requests had each gap (int64); and the sum of their tokens after the gap (int64)."""
        chunks, tokens = np.asarray(self._gap_chunks), np.asarray(self._gap_tokens)
        return np.asarray(self._gap_s), chunks, tokens

    # -- inside

    def _vacate(self, slot: int) -> None:
        opened = self._occupants[slot]
        if opened is not None:
            opened.last_s, opened.slot = self._last_s[slot], None
            self._occupants[slot] = None

    def _settle(self) -> None:
        if self._steady is not None:
            for slot in self._steady.tolist():
                self._last_s[slot] = self._steady_s
            self._steady = None

    def _stay_steady(self, slots: np.ndarray) -> bool:
        """Return True if the steady rows include all `slots`; only these remain steady."""
        steady = self._steady
        if steady is not None and slots is not steady:
            self._settle()
            if set(slots.tolist()) <= set(steady.tolist()):
                self._steady = slots
        return self._steady is not None

    def _rows(self, slots: np.ndarray, counts: list[int], now_s: float) -> None:
        gaps_s: list[float] = []
        tokens: list[int] = []
        last_s, emitting = self._last_s, 0
        for slot, count in zip(slots.tolist(), counts, strict=True):
            if not count:
                continue
            emitting += 1
            previous_s, last_s[slot] = last_s[slot], now_s
            if previous_s is not None:
                gaps_s.append(now_s - previous_s)
                tokens.append(count)
            else:  # tokens that come together with the first one have no gap of their own
                opened = self._occupants[slot]
                assert opened is not None
                opened.first_s = now_s
        self.row_steps += emitting
        self._gap_s.fromlist(gaps_s)
        self._gap_chunks.fromlist([1] * len(gaps_s))
        self._gap_tokens.fromlist(tokens)

    def _meets(
        self, request: TraceRequest, ttft_s: float, tpot_s: float | None, e2e_s: float
    ) -> bool:
        """Return True if all objectives are met. A request with one token has no TPOT to check."""
        defaults = self._objectives
        return (
            _within(ttft_s, request.ttft_slo_s, defaults.ttft_s)
            and _within(tpot_s, request.tpot_slo_s, defaults.tpot_s)
            and _within(e2e_s, request.e2e_slo_s, defaults.e2e_s)
        )


def _within(value_s: float | None, request_limit_s: float | None, default_s: float | None) -> bool:
    limit_s = default_s if request_limit_s is None else request_limit_s
    return value_s is None or limit_s is None or value_s <= limit_s
