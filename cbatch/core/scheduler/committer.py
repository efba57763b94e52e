"""Commit of a step's result: new tokens, ends of requests, KV lengths, statistics, freed blocks."""

from __future__ import annotations

import numpy as np

from cbatch.core.prices.step_costs import PLAIN_EVERY
from cbatch.core.request.logprobs import TokenLogprobs
from cbatch.core.request.request import FinishReason
from cbatch.core.scheduler.committed_step import CommittedStep
from cbatch.core.scheduler.decode_batch import InFlightStep
from cbatch.core.scheduler.plan import RowStatus, StepResult
from cbatch.core.scheduler.sequence import Commit
from cbatch.core.scheduler.slot_table import advance
from cbatch.core.scheduler.state import SchedulerState

_NON_FINITE = int(RowStatus.NON_FINITE)
_DRAFT_NON_FINITE = int(RowStatus.DRAFT_NON_FINITE)
_NO_TOKEN = int(RowStatus.NO_TOKEN)
_NO_ROWS = np.zeros(0, dtype=np.intp)
_ERROR_MESSAGE = "the model's logits were not finite for this request"
NO_TOKEN_MESSAGE = (
    "structured_outputs: no token is allowed next; allow the ids that it needs, or simplify it"
)


class Committer:
    """Updates the scheduler's state from the results of steps (vLLM's `update_from_output`)."""

    def __init__(self, state: SchedulerState) -> None:
        self.state = state

    def commit(self, result: StepResult, now_s: float) -> Commit:
        """Apply the result of the oldest plan in flight. Raises `ValueError` if it belongs to
        another plan."""
        state = self.state
        last_s, state.last_commit_s = state.last_commit_s, now_s
        planned = self._pop_planned(result)
        if planned.cancelled_slots:
            self._taint_cancelled(planned, result)
        elapsed_s = None if last_s is None else now_s - last_s
        step = CommittedStep(state.table, planned, result, elapsed_s)
        may_end = state.may_end(planned.tokens.total_drafts)
        self._advance(step)
        state.policy.observe(step)
        if step.has_chunks or not result.step_id % PLAIN_EVERY or planned.itl_target_s is not None:
            self._observe_costs(step, planned.itl_target_s)
        ended = self._find_ends(step, may_end) if may_end or len(state.stop_union) else []
        if step.has_errors:
            self._reset_draft_kv(step)
            self._end_failed(step)
        for row, reason in ended:
            state.end(step.owners[row], reason)
        for slot in planned.slots_to_free:
            state.free_slot(slot)
        if planned.overlaps or state.in_flight:
            if not planned.tokens.plain:
                self._return_tails(step)
        elif planned.tokens.total_drafts and len(planned.plan.deltas.append_slots):
            state.return_appended(planned.plan.deltas)
        for sequence in state.pending_preemption:
            if sequence.slot is not None:
                state.preempt(sequence)
        state.pending_preemption.clear()
        return self._report(step)

    # ---- one step -----------------------------------------------------------------------------

    def _pop_planned(self, result: StepResult) -> InFlightStep:
        in_flight = self.state.in_flight
        if not in_flight or in_flight[0].plan.step_id != result.step_id:
            expected = in_flight[0].plan.step_id if in_flight else None
            raise ValueError(f"result of step {result.step_id}, but step {expected} is due")
        plan = in_flight[0].plan
        if result.generations is not plan.generations and not np.array_equal(
            result.generations, plan.generations
        ):
            raise ValueError(
                f"step {result.step_id}: the result's generations differ from the plan's"
            )
        return in_flight.pop(0)

    def _observe_costs(self, step: CommittedStep, itl_target_s: float | None) -> None:
        costs, sample = self.state.step_costs, step.sample()
        seconds, tokens = sample.draft_s + sample.target_s, sample.work.target_tokens
        costs.observe(tokens, step.num_pairs(), seconds, has_prompts=step.has_chunks)
        if itl_target_s is not None:
            costs.observe_target(itl_target_s, seconds)

    def _advance(self, step: CommittedStep) -> None:
        """Append the emitted tokens to the slot table, and update its counts."""
        state, table, rows = self.state, self.state.table, step.rows
        num_known = table.num_tokens[rows]
        positions = table.row_start[rows] + num_known
        if not step.one_token_per_row:
            positions = (positions - step.result.row_splits[:-1]).repeat(step.counts)
            positions += np.arange(len(step.tokens))
        table.flat_tokens[positions] = step.tokens
        table.num_tokens[rows] = num_known + step.counts
        if step.has_chunks:
            # A row computes its query without the rejected drafts. A decoding row emits as many.
            computed = step.plan.query_lens - step.plan.num_drafts + step.num_accepted
            advance(table.num_uncomputed_tokens, rows, step.counts - computed)
        if state.has_draft_kv and not (step.drafter_idle and step.result.draft_kv_lens is None):
            self._advance_draft(step)

    def _advance_draft(self, step: CommittedStep) -> None:
        """Update the length of each row's draft KV.

        To draft k tokens after n known ones, the draft model writes positions up to n - 2 + k. The
        accepted ones stay valid: after a full acceptance one position is missing, otherwise none.
        """
        table, rows, plan = self.state.table, step.rows, step.plan
        if step.result.draft_kv_lens is not None:  # set if drafters other than the model drafted
            table.draft_kv[rows] = step.result.draft_kv_lens
            return
        drafted = step.result.num_drafted
        kv_lens = table.num_tokens[rows] - table.num_uncomputed_tokens[rows]
        draft_kv = kv_lens - (drafted == step.result.num_accepted)
        if not step.all_drafted:
            # A row without drafts keeps its draft KV, extended by a slice of a long catch-up.
            sliced = plan.catch_up * (plan.num_drafts == 0)
            before = kv_lens - (plan.query_lens - plan.num_drafts)
            kept = np.minimum(table.draft_kv[rows] + sliced, before)
            draft_kv = np.where(drafted > 0, draft_kv, kept)
        table.draft_kv[rows] = draft_kv

    def _reset_draft_kv(self, step: CommittedStep) -> None:
        """Discard the draft KV of rows whose draft logits were not finite."""
        state, table = self.state, self.state.table
        for slot in step.slots[step.result.status == _DRAFT_NON_FINITE].tolist():
            state.pool.draft_valid[state.block_row(slot)] = False
            table.draft_kv[slot] = 0

    def _find_ends(self, step: CommittedStep, may_end: bool) -> list[tuple[int, FinishReason]]:
        """Return rows that ended, with reasons; cut `step.counts` and the table after the end."""
        table, stop_rows = self.state.table, self._find_stops(step)
        if not (may_end or len(stop_rows)):
            return []
        candidates = table.num_tokens[step.rows] >= table.max_total[step.rows]
        candidates[stop_rows] = True
        rows_to_cut = candidates.nonzero()[0].tolist()
        if not rows_to_cut:
            return []
        step.counts = step.counts.copy()
        reasons = [(row, self._cut(step, row)) for row in rows_to_cut]
        return [(row, reason) for row, reason in reasons if reason is not None]

    def _find_stops(self, step: CommittedStep) -> np.ndarray:
        """Return the rows that emitted a stop id of any running sequence, with repeats."""
        union = self.state.stop_union
        if not len(union):
            return _NO_ROWS
        # Usually the only stop id is EOS; `isin` would take twenty times as long.
        stops = step.tokens == union if len(union) == 1 else np.isin(step.tokens, union)
        if not np.count_nonzero(stops):
            return _NO_ROWS
        return np.arange(len(step.slots)).repeat(step.counts)[stops]

    def _cut(self, step: CommittedStep, row: int) -> FinishReason | None:
        """Cut the row's tokens after its end, and return the reason; None if it did not end."""
        table, sequence, slot = self.state.table, step.owners[row], step.slots.item(row)
        total, count = table.num_tokens.item(slot), step.counts.item(row)
        first = total - count
        reason = None
        end = total
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

    def _taint_cancelled(self, planned: InFlightStep, result: StepResult) -> None:
        """Taint the blocks of cancelled slots to which this step wrote non-finite values."""
        for slot in planned.plan.slots[result.status == _NON_FINITE].tolist():
            if slot in planned.cancelled_slots:
                self.state.pool.taint(self.state.block_row(slot))

    def _end_failed(self, step: CommittedStep) -> None:
        """End requests whose logits were not finite, or left no token to sample, with an error."""
        table, status = self.state.table, step.result.status
        for row in ((status == _NON_FINITE) | (status == _NO_TOKEN)).nonzero()[0].tolist():
            slot, message = int(step.slots[row]), NO_TOKEN_MESSAGE
            table.num_cached_tokens[slot] = table.num_tokens[slot]  # so that no block is cached
            table.draft_kv[slot] = 0  # so that no block's draft KV counts as valid
            if status[row] == _NON_FINITE:
                message = _ERROR_MESSAGE
                self.state.pool.taint(self.state.block_row(slot))
            self.state.end(step.owners[row], FinishReason.ERROR, message=message)

    def _return_tails(self, step: CommittedStep) -> None:
        """Free reserved blocks that neither the known tokens nor the plan in flight need."""
        state, table, rows = self.state, self.state.table, step.rows
        size, in_flight = state.pool.block_size, state.in_flight
        capacity = table.capacity[rows]
        # A slot that a request left in this commit has no blocks, and a negative `spare`.
        spare = capacity - np.maximum(table.num_tokens[rows] - 1, table.reserved_tokens[rows])
        tails = (spare >= size).nonzero()[0]
        if not len(tails):
            return
        slots = step.slots[tails].astype(np.intp)
        needed = table.num_tokens - table.num_uncomputed_tokens
        for planned in in_flight:
            needed[planned.rows] += planned.plan.query_lens
        used = np.minimum(needed[slots], table.max_total[slots])
        counts = (capacity[tails] - np.maximum(used, table.reserved_tokens[slots])) // size
        nonempty = (counts > 0).nonzero()[0]
        if len(nonempty):
            state.return_tails(slots[nonempty], counts[nonempty])

    def _report(self, step: CommittedStep) -> Commit:
        """Update the statistics, and return what the step added."""
        state, stats, result = self.state, self.state.stats, step.result
        stats.steps += 1
        stats.emitted_tokens += len(step.tokens) - step.cut_tokens
        stats.draft_s += result.draft_s
        stats.target_s += result.target_s
        if step.total_drafted:
            stats.drafted_tokens += step.total_drafted
            if step.has_chunks or step.has_errors:
                stats.accepted_tokens += int(np.add.reduce(step.num_accepted))
            else:  # each row emitted one more token than it accepted, so that no sum is needed
                stats.accepted_tokens += len(step.tokens) - len(step.owners)
        finished = tuple(state.finished)
        if finished:
            state.finished = []
        return Commit(
            step_id=result.step_id,
            owners=step.owners,
            tokens=step.tokens,
            row_splits=result.row_splits,
            counts=step.counts,
            num_drafted=result.num_drafted,
            num_accepted=result.num_accepted,
            finished=finished,
            logprobs=self._logprobs(step) if result.logprobs else (),
        )

    @staticmethod
    def _logprobs(step: CommittedStep) -> tuple[tuple[str, TokenLogprobs], ...]:
        """Return log probabilities by request id, without those of cancelled rows."""
        request_ids = {
            slot: owner.request.request_id
            for slot, owner in zip(step.slots.tolist(), step.owners, strict=True)
        }
        logprobs = step.result.logprobs
        return tuple(
            (request_ids[entry.slot], entry) for entry in logprobs if entry.slot in request_ids
        )
