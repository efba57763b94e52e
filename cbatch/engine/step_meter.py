"""Measuring steps: what each was made of, from the plans alone, and how long it took.

Composition is a few numbers for each slot, kept as plans come. They are plain numbers in lists, and
so are their sums: up to some two hundred rows that is faster than arrays, whose every operation
costs as much as dozens of additions.
"""

from __future__ import annotations

import time
from collections.abc import Callable

import numpy as np

from cbatch.core.prices.step_work import IDLE_LEFT, StepSample, StepWork
from cbatch.core.scheduler.plan import NewSequence, StepPlan, StepResult
from cbatch.engine.loop import Executor


class StepMeter:
    """An executor, and the sample of its last step: made up or an engine's, every step whose price
    somebody wants to know runs through here."""

    def __init__(
        self, executor: Executor, max_slots: int, clock: Callable[[], float] = time.perf_counter
    ) -> None:
        self._executor, self._clock = executor, clock
        self._counts = SlotCounts(max_slots)
        self.last: StepSample
        self.own_s = 0.0  # that looking at it took

    def run(self, plan: StepPlan) -> StepResult:
        result = self._executor.run(plan)
        started_s = self._clock()
        for admission in plan.deltas.new_sequences:
            self._counts.admit(admission)
        work = self._counts.work(plan, result.num_drafted)
        self._counts.advance(plan, result.num_accepted, np.diff(result.row_splits))
        self.last = StepSample(work, result.draft_s, result.target_s)
        self.own_s = self._clock() - started_s
        return result

    def idle(self, seconds: float) -> None:
        """Nothing has run for so long."""
        self._counts.idle(seconds)

    def num_tokens(self, slot: int) -> int:
        """Known of the slot's request, after the last step."""
        return self._counts.num_tokens[slot]

    def reset(self) -> None:
        self._executor.reset()


class SlotCounts:
    """By slot: how many tokens of its request are known, and how many of these are not in KV."""

    def __init__(self, max_slots: int) -> None:
        self.num_tokens = [0] * max_slots
        self.num_uncomputed = [0] * max_slots
        self._since_prefill = 0  # steps that have come after the last chunk
        self._idle_s = 0.0

    def admit(self, admission: NewSequence) -> None:
        self.num_tokens[admission.slot] = len(admission.tokens)
        self.num_uncomputed[admission.slot] = len(admission.tokens) - admission.kv_len_tokens

    def idle(self, seconds: float) -> None:
        """Nothing has run for so long."""
        self._idle_s = seconds

    def known(self, slots: list[int]) -> list[int]:
        """How many tokens each of them knows."""
        return [self.num_tokens[slot] for slot in slots]

    def work(self, plan: StepPlan, num_drafts: np.ndarray) -> StepWork:
        """Composition of the next step, in which the rows draft `num_drafts` of what was planned. A
        row decodes if one of its known tokens is not in KV."""
        slots, query = plan.slots.tolist(), plan.query_lens
        known, uncomputed = self.known(slots), [self.num_uncomputed[slot] for slot in slots]
        rows = len(slots)
        work = StepWork(rows=rows, admitted=len(plan.deltas.new_sequences))
        work.decode_rows = uncomputed.count(1)
        self._count_step(work)
        work.ingested_tokens = sum(plan.catch_up.tolist())
        drafts = any(num_drafts.tolist())
        if work.decode_rows == rows and not drafts:
            work.target_tokens = work.logit_tokens = rows
            work.decode_pairs = work.context_tokens = _read(work, known)
            return work
        if num_drafts is not plan.num_drafts:
            query = query - plan.num_drafts + num_drafts
        work.logit_tokens = sum(plan.wants_logits.tolist())
        if not drafts and uncomputed[: work.decode_rows].count(1) == work.decode_rows:
            _add_rows(work, known, uncomputed, query.tolist())
            return work
        pending = np.array(uncomputed)
        kv_len = np.array(known) - pending
        context = kv_len + query
        if drafts:
            work.draft_depth = max(num_drafts.tolist())
            work.draft_tokens = sum(num_drafts.tolist())
            work.draft_context_tokens = sum(kv_len[num_drafts > 0].tolist())
            work.logit_tokens += work.draft_tokens
        work.target_tokens = sum(query.tolist())
        # Row i's queries see kv_len + 1, ..., kv_len + query positions: of long chunks more than
        # int32 holds.
        pairs = query * kv_len + query.astype(np.int64) * (query + 1) // 2
        work.context_tokens = sum(context.tolist())
        if work.decode_rows == rows:
            work.decode_pairs = sum(pairs.tolist())
            _read(work, context.tolist())
            return work
        decodes, read_tokens = pending == 1, 0
        if work.decode_rows:
            work.decode_pairs = sum(pairs[decodes].tolist())
            read_tokens = _read(work, context[decodes].tolist())
        work.prefill_tokens = work.target_tokens - sum(query[decodes].tolist())
        work.prefill_context_tokens = work.context_tokens - read_tokens
        work.prefill_pairs = sum(pairs.tolist()) - work.decode_pairs
        return work

    def advance(self, plan: StepPlan, accepted: np.ndarray, emitted: np.ndarray) -> None:
        """A chunk moves its tokens into KV; a decode those it emitted, so that one stays to do."""
        computed = plan.query_lens
        if accepted is not plan.num_drafts:
            computed = computed - plan.num_drafts + accepted
        rows = zip(plan.slots.tolist(), emitted.tolist(), computed.tolist(), strict=True)
        for slot, new, moved in rows:
            self.num_tokens[slot] += new
            self.num_uncomputed[slot] += new - moved

    def _count_step(self, work: StepWork) -> None:
        """What the step has of those before it."""
        self._since_prefill = self._since_prefill + 1 if work.decode_rows == work.rows else 0
        work.steps_since_prefill, work.idle_s = self._since_prefill, self._idle_s
        self._idle_s *= IDLE_LEFT


def _add_rows(work: StepWork, known: list[int], uncomputed: list[int], query: list[int]) -> None:
    """Decodes of one token each, as many as `work` has, and chunks behind them, which are few."""
    decodes = work.target_tokens = work.decode_rows
    if decodes:
        work.decode_pairs = work.context_tokens = _read(work, known[:decodes])
    for row in range(decodes, len(known)):
        kv_len, tokens = known[row] - uncomputed[row], query[row]
        work.prefill_tokens += tokens
        work.prefill_context_tokens += kv_len + tokens
        work.prefill_pairs += tokens * kv_len + tokens * (tokens + 1) // 2
    work.target_tokens += work.prefill_tokens
    work.context_tokens += work.prefill_context_tokens


def _read(work: StepWork, read: list[int]) -> int:
    """All that decoding rows read."""
    work.decode_longest_tokens = max(read)
    work.decode_shortest_tokens = min(read)
    return sum(read)
