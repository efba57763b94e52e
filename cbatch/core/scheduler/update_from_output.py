"""Commit the result of a step: new tokens, estimates, ends of requests, freed blocks.

`update_from_output` is vLLM's `Scheduler.update_from_output`. In order: the emitted tokens enter
the slot table; the lookahead policy and the cost model observe the step; finished and failed
sequences leave their slots; the slots of cancelled rows and the blocks that no row needs are freed;
sequences whose preemption waited for this step are preempted.
"""

from __future__ import annotations

import numpy as np
from msgspec import structs

from cbatch.core.prices.step_work import StepSample, StepWork
from cbatch.core.request.logprobs import TokenLogprobs
from cbatch.core.request.request import FinishReason
from cbatch.core.scheduler.plan import RowStatus, StepPlan, StepResult
from cbatch.core.scheduler.sequence import Commit
from cbatch.core.scheduler.slot_table import InFlightStep, SlotTable
from cbatch.core.scheduler.state import SchedulerState

_DEVICE_BOUND = 0.8  # least share of the executor in a step's wall time if the device binds
PLAIN_EVERY = 64  # every 64th step without chunks is observed, if the policy has no prices
_NON_FINITE = int(RowStatus.NON_FINITE)
_DRAFT_NON_FINITE = int(RowStatus.DRAFT_NON_FINITE)
_NO_TOKEN = int(RowStatus.NO_TOKEN)
_ERROR_MESSAGE = "the model's logits were not finite for this request"
NO_TOKEN_MESSAGE = (
    "structured_outputs: no token is allowed next; allow the ids that it needs, or simplify it"
)


def update_from_output(state: SchedulerState, result: StepResult, now_s: float) -> Commit:
    """Apply the result of the oldest plan in flight. Raises `ValueError` if it belongs to another
    plan."""
    last_s, state.last_commit_s = state.last_commit_s, now_s
    planned = _pop_planned(state.in_flight, result)
    if planned.cancelled_slots:
        _taint_cancelled(state, planned, result)
    elapsed_s = None if last_s is None else now_s - last_s
    step = CommittedStep(state.table, planned, result, elapsed_s)
    step.following = state.in_flight
    may_end = _may_end(state, planned)

    _append_tokens(state, step)
    state.policy.observe(step)
    learns = step.has_chunks or not (state.policy.priced or result.step_id % PLAIN_EVERY)
    if learns or planned.itl_target_s is not None:
        sample = step.sample()
        if learns:
            state.costs.observe(sample)
        state.chunk_sizes.observe(sample, planned.itl_target_s)

    ended = _find_ends(state, step, may_end)
    if step.has_errors:
        _reset_draft_kv(state, step)
        _end_failed(state, step)
    for row, reason in ended:
        state.end(step.owners[row], reason)

    for slot in planned.slots_to_free:
        state.free_slot(slot)
    if state.pages is not None:
        running = state.decoding + state.prefilling
        slots, owners = np.array(running, dtype=np.intp), state.owners_of(running)
        state.pages.advance_rows(slots, owners, state.in_flight)
    if planned.overlaps or state.in_flight:
        if not planned.tokens.plain:
            _return_tails(state, step)
    elif planned.tokens.total_drafts and len(planned.plan.deltas.append_slots):
        state.return_appended(planned.plan.deltas)
    for sequence in state.pending_preemption:
        if sequence.slot is not None:
            state.preempt(sequence)
    state.pending_preemption.clear()
    return _report(state, step)


def _have_same_kind(step: InFlightStep, other: InFlightStep) -> bool:
    """Return whether both steps have drafts or neither, and the same for chunks."""
    a, b = step.tokens, other.tokens
    return (a.total_drafts > 0, a.num_chunks > 0) == (b.total_drafts > 0, b.num_chunks > 0)


def _pop_planned(in_flight: list[InFlightStep], result: StepResult) -> InFlightStep:
    if not in_flight or in_flight[0].plan.step_id != result.step_id:
        expected = in_flight[0].plan.step_id if in_flight else None
        raise ValueError(f"result of step {result.step_id}, but step {expected} is due")
    generations = in_flight[0].plan.generations
    if result.generations is not generations and not np.array_equal(
        result.generations, generations
    ):
        raise ValueError(f"step {result.step_id}: the result's generations differ from the plan's")
    return in_flight.pop(0)


class CommittedStep:
    """The rows of a plan that are still running, and their results. A lookahead policy sees it as
    `policy.DraftedStep`."""

    def __init__(
        self, table: SlotTable, planned: InFlightStep, result: StepResult, elapsed_s: float | None
    ) -> None:
        """`elapsed_s`: seconds since the last commit, or None if the engine was idle meanwhile."""
        self._table, self._planned, self.elapsed_s = table, planned, elapsed_s
        self.following: list[InFlightStep] = []  # launched in `elapsed_s`, if any
        self.plan, self.result = planned.plan, result
        self.owners, self.rows = planned.owners, planned.rows
        if planned.cancelled_slots:
            runs = table.trues.copy()  # by slot; `np.isin` would take ten times as long
            runs[planned.cancelled_slots] = False
            self._keep_rows(runs[planned.plan.slots])
        self.slots, self.tokens = self.plan.slots, self.result.tokens
        self.num_drafted, self.num_accepted = self.result.num_drafted, self.result.num_accepted
        self.evidence = self.result.expected_accepted
        # Counting bytes is ten times as fast as numpy on an array this short.
        self.has_errors = result.status.tobytes().count(RowStatus.OK) < len(result.status)
        tokens = planned.tokens
        self.has_chunks = tokens.num_chunks > 0
        self.total_caught_up = tokens.total_catch_up
        self.drafter_idle = not (tokens.total_drafts or tokens.total_catch_up)
        self.total_planned = tokens.total_drafts
        # The executor nearly always drafts as planned, and the sums of the plan are known.
        self.total_drafted, self.all_drafted = self.total_planned, tokens.all_draft
        if self.total_drafted and self.num_drafted.tobytes() != tokens.num_drafts.tobytes():
            self.total_drafted = int(np.add.reduce(self.num_drafted))
            self.all_drafted = bool(np.count_nonzero(self.num_drafted) == len(self.num_drafted))
        self.cut_tokens = 0
        # Without drafts a row emits at most one token, so it is enough to compare the total.
        self.one_token_per_row = not self.total_drafted and len(self.tokens) == len(self.slots)
        if self.one_token_per_row:
            self.counts = table.ones[: len(self.slots)]
        else:
            splits = self.result.row_splits
            self.counts = splits[1:] - splits[:-1]

    def _keep_rows(self, live: np.ndarray) -> None:
        result, splits = self.result, self.result.row_splits
        counts = splits[1:] - splits[:-1]
        self.owners = [o for o, alive in zip(self.owners, live.tolist(), strict=True) if alive]
        columns = "slots", "query_lens", "num_drafts", "catch_up", "wants_logits"
        self.plan = structs.replace(self.plan, **_rows(self.plan, columns, live))
        splits = np.zeros_like(splits[: 1 + len(self.owners)])
        np.add.accumulate(counts[live], out=splits[1:])
        columns = "num_drafted", "num_accepted", "status", "draft_kv_lens", "expected_accepted"
        self.result = structs.replace(
            result,
            tokens=result.tokens[live.repeat(counts)],
            row_splits=splits,
            **_rows(result, columns, live),
        )
        self.rows = self.plan.slots.astype(np.intp)

    def sample(self) -> StepSample:
        """Return the composition of the step and its duration: the wall time since the previous
        commit, because planning, launches and detokenization take part of a small model's step.
        Without a previous commit, or if the executor measured more, use its measurement. With
        another step in flight, the host has launched that one in this time. If it is of another
        kind, and the host takes longer than the device, the duration is not measured. Call it once
        the step's tokens are in the table."""
        plan, result = self.plan, self.result
        draft_s, target_s, hidden_s = result.draft_s, result.target_s, 0.0
        if self.elapsed_s is not None:
            device_s = result.draft_s + target_s
            wall_s = max(self.elapsed_s, device_s)
            host_binds = self._planned.overlaps and device_s < _DEVICE_BOUND * wall_s
            if host_binds:
                hidden_s, draft_s = draft_s, 0.0
            is_measured = not host_binds or all(
                _have_same_kind(self._planned, other) for other in self.following
            )
            target_s = wall_s - draft_s if is_measured else 0.0
        table = self._table
        kv_len = table.num_tokens[self.rows] - table.num_uncomputed_tokens[self.rows]
        work = StepWork.decoding(len(self.slots), int(np.add.reduce(kv_len, dtype=np.int64)))
        if self.has_chunks or not (self.drafter_idle and self.one_token_per_row):
            query_lens = plan.query_lens.astype(np.int64)
            work.decode_pairs = int(kv_len @ query_lens)
            if self.has_chunks:
                self._count_chunks(work, kv_len, query_lens)
            unused = int(np.add.reduce(plan.num_drafts)) - self.total_drafted
            work.target_tokens = int(np.add.reduce(query_lens)) - unused
            work.logit_tokens = int(np.count_nonzero(plan.wants_logits)) + self.total_drafted
            work.draft_depth = int(np.maximum.reduce(self.num_drafted, initial=0))
            work.draft_tokens = self.total_drafted
            work.ingested_tokens = int(np.add.reduce(plan.catch_up))
        return StepSample(work, draft_s, target_s, hidden_s=hidden_s)

    def _count_chunks(self, work: StepWork, kv_len: np.ndarray, query_lens: np.ndarray) -> None:
        """Count the chunks of the step apart from its decoding rows: the rows that computed more
        than a token and its drafts, or did not want logits."""
        chunks = (query_lens > 1 + self.plan.num_drafts) | ~self.plan.wants_logits
        kv_len, query_lens = kv_len[chunks], query_lens[chunks]
        work.decode_rows -= len(query_lens)
        work.prefill_tokens = int(np.add.reduce(query_lens))
        work.prefill_context_tokens = int(np.add.reduce(kv_len, dtype=np.int64))
        work.decode_pairs -= int(kv_len @ query_lens)
        work.prefill_pairs = int(kv_len @ query_lens - query_lens @ (query_lens - 1) // 2)


def _rows(
    struct: StepPlan | StepResult, columns: tuple[str, ...], live: np.ndarray
) -> dict[str, np.ndarray | None]:
    arrays = ((name, getattr(struct, name)) for name in columns)
    return {name: None if array is None else array[live] for name, array in arrays}


# ---- tokens -------------------------------------------------------------------------------------


def _append_tokens(state: SchedulerState, step: CommittedStep) -> None:
    table, rows = state.table, step.rows
    num_known = table.num_tokens[rows]
    positions = table.row_start[rows] + num_known
    if not step.one_token_per_row:
        positions = (positions - step.result.row_splits[:-1]).repeat(step.counts)
        positions += np.arange(len(step.tokens))
    table.flat_tokens[positions] = step.tokens
    table.num_tokens[rows] = num_known + step.counts
    if step.has_chunks:
        # A row adds its query without rejected drafts to KV; a decoding row emits equally many.
        computed = step.plan.query_lens - step.plan.num_drafts + step.num_accepted
        table.num_uncomputed_tokens[rows] += step.counts - computed
    if state.has_draft_kv and not (step.drafter_idle and step.result.draft_kv_lens is None):
        advance_draft_kv(table, step)


def advance_draft_kv(table: SlotTable, step: CommittedStep) -> None:
    """Update the length of each row's draft KV.

    To draft k tokens after n known tokens, the draft model writes positions up to n - 2 + k. KV of
    accepted drafts stays valid: after a full acceptance one position is missing, otherwise none.
    """
    rows, plan = step.rows, step.plan
    if step.result.draft_kv_lens is not None:  # set if drafters other than the model drafted
        table.draft_kv[rows] = step.result.draft_kv_lens
        return
    drafted = step.num_drafted
    kv_lens = table.num_tokens[rows] - table.num_uncomputed_tokens[rows]
    draft_kv = kv_lens - (drafted == step.num_accepted)
    if not step.all_drafted:
        # A row without drafts keeps its draft KV, extended by a slice of a long catch-up.
        sliced = plan.catch_up * (plan.num_drafts == 0)
        before = kv_lens - (plan.query_lens - plan.num_drafts)
        kept = np.minimum(table.draft_kv[rows] + sliced, before)
        draft_kv = np.where(drafted > 0, draft_kv, kept)
    table.draft_kv[rows] = draft_kv


# ---- ends ---------------------------------------------------------------------------------------


def _may_end(state: SchedulerState, planned: InFlightStep) -> bool:
    max_emitted = 1 + min(planned.tokens.total_drafts, state.policy.max_depth)
    batch = state.cached_batch
    return batch is None or batch.may_end(state.table, max_emitted)


def _find_ends(
    state: SchedulerState, step: CommittedStep, may_end: bool
) -> list[tuple[int, FinishReason]]:
    """Return rows that ended, with reasons; cut `step.counts` and the table after the end."""
    table, stop_rows = state.table, _stop_rows(state.stop_union, step)
    if not (may_end or stop_rows is not None):
        return []
    candidates = table.num_tokens[step.rows] >= table.max_total[step.rows]
    if stop_rows is not None:
        candidates[stop_rows] = True
    rows_to_cut = candidates.nonzero()[0].tolist()
    if not rows_to_cut:
        return []
    step.counts = step.counts.copy()
    reasons = [(row, _cut_after_end(table, step, row)) for row in rows_to_cut]
    return [(row, reason) for row, reason in reasons if reason is not None]


def _stop_rows(union: np.ndarray, step: CommittedStep) -> np.ndarray | None:
    """Return the rows that emitted an id of `union`, the stop ids of all running sequences."""
    if len(union):
        # Usually the only stop id is EOS; `isin` would take twenty times as long.
        stops = step.tokens == union if len(union) == 1 else np.isin(step.tokens, union)
        if np.count_nonzero(stops):
            return np.arange(len(step.slots)).repeat(step.counts)[stops]
    return None


def _cut_after_end(table: SlotTable, step: CommittedStep, row: int) -> FinishReason | None:
    """Cut the row's tokens after its end, and return the reason; None if it did not end."""
    sequence, slot = step.owners[row], step.slots.item(row)
    total, count = table.num_tokens.item(slot), step.counts.item(row)
    first, end, reason = total - count, total, None
    if total >= sequence.max_total_tokens:
        reason, end = FinishReason.LENGTH, sequence.max_total_tokens
    new = table.tokens[slot, first:end].tolist() if sequence.stop_ids else ()
    for position, token in enumerate(new, start=first):
        if token in sequence.stop_ids and position >= sequence.min_total_tokens:
            reason, end = FinishReason.STOP, position + 1
            break
    if end < total:
        step.cut_tokens += total - end
        step.counts[row] = end - first
        table.num_tokens[slot] = end  # `num_uncomputed_tokens` stays 1
        table.draft_kv[slot] = min(table.draft_kv.item(slot), table.kv_len(slot))
    return reason


# ---- failures -----------------------------------------------------------------------------------


def _taint_cancelled(state: SchedulerState, planned: InFlightStep, result: StepResult) -> None:
    """Taint the blocks of cancelled slots to which this step wrote non-finite values."""
    for row in (result.status == _NON_FINITE).nonzero()[0].tolist():
        slot = planned.plan.slots.item(row)
        if slot in planned.cancelled_slots:
            state.taint(slot, planned.owners[row].root)


def _reset_draft_kv(state: SchedulerState, step: CommittedStep) -> None:
    for slot in step.slots[step.result.status == _DRAFT_NON_FINITE].tolist():
        state.pool.draft_valid[state.block_row(slot)] = False
        state.table.draft_kv[slot] = 0


def _end_failed(state: SchedulerState, step: CommittedStep) -> None:
    """End requests whose logits were not finite, or left no token to sample, with an error."""
    table, status = state.table, step.result.status
    for row in ((status == _NON_FINITE) | (status == _NO_TOKEN)).nonzero()[0].tolist():
        slot, message = int(step.slots[row]), NO_TOKEN_MESSAGE
        table.num_cached_tokens[slot] = table.num_tokens[slot] + 1  # so that nothing is cached
        table.draft_kv[slot] = 0  # so that no block's draft KV counts as valid
        if status[row] == _NON_FINITE:
            message = _ERROR_MESSAGE
            state.taint(slot, step.owners[row].root)
        state.end(step.owners[row], FinishReason.ERROR, message=message)


# ---- blocks and the report ----------------------------------------------------------------------


def _return_tails(state: SchedulerState, step: CommittedStep) -> None:
    """Free reserved blocks that neither the known tokens nor the plan in flight need."""
    table, rows, size = state.table, step.rows, state.pool.block_size
    capacity = table.capacity[rows]
    # A slot that a request left in this commit has no blocks, and a negative `spare`.
    spare = capacity - np.maximum(table.num_tokens[rows] - 1, table.reserved_tokens[rows])
    tails = (spare >= size).nonzero()[0]
    if not len(tails):
        return
    slots = step.slots[tails].astype(np.intp)
    needed = table.num_tokens - table.num_uncomputed_tokens
    for planned in state.in_flight:
        needed[planned.rows] += planned.plan.query_lens
    used = np.minimum(needed[slots], table.max_total[slots])
    counts = (capacity[tails] - np.maximum(used, table.reserved_tokens[slots])) // size
    nonempty = (counts > 0).nonzero()[0]
    if len(nonempty):
        state.return_tails(slots[nonempty], counts[nonempty])


def _report(state: SchedulerState, step: CommittedStep) -> Commit:
    stats, result = state.stats, step.result
    stats.steps += 1
    stats.emitted_tokens += len(step.tokens) - step.cut_tokens
    stats.draft_s += result.draft_s
    stats.target_s += result.target_s
    if step.total_drafted:
        stats.drafted_tokens += step.total_drafted
        if step.has_chunks or step.has_errors:
            stats.accepted_tokens += int(np.add.reduce(step.num_accepted))
        else:  # no sum is needed: each row emitted its accepted drafts and one more token
            stats.accepted_tokens += len(step.tokens) - len(step.owners)
    return Commit(
        step_id=result.step_id,
        owners=step.owners,
        tokens=step.tokens,
        row_splits=result.row_splits,
        counts=step.counts,
        num_drafted=result.num_drafted,
        num_accepted=result.num_accepted,
        finished=state.take_finished(),
        logprobs=_logprobs(step) if result.logprobs else (),
    )


def _logprobs(step: CommittedStep) -> tuple[tuple[str, TokenLogprobs], ...]:
    owners = dict(zip(step.slots.tolist(), step.owners, strict=True))
    return tuple(
        (owners[entry.slot].request.request_id, entry)
        for entry in step.result.logprobs
        if entry.slot in owners
    )
