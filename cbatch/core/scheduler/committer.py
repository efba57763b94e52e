"""Taking in the result of a step: tokens, cuts, KV counts, statistics, and what they set free."""

from __future__ import annotations

import numpy as np

from cbatch.core.request.logprobs import TokenLogprobs
from cbatch.core.request.request import FinishReason
from cbatch.core.scheduler.committed_step import CommittedStep
from cbatch.core.scheduler.decode_batch import Flight
from cbatch.core.scheduler.plan import RowStatus, StepResult
from cbatch.core.scheduler.sequence import Commit
from cbatch.core.scheduler.slot_table import advance
from cbatch.core.scheduler.state import SchedulerState
from cbatch.core.scheduler.step_costs import PLAIN_EVERY

_NON_FINITE = int(RowStatus.NON_FINITE)
_DRAFT_NON_FINITE = int(RowStatus.DRAFT_NON_FINITE)
_NO_TOKEN = int(RowStatus.NO_TOKEN)
_NO_ROWS = np.zeros(0, dtype=np.intp)
_ERROR_MESSAGE = "the model's logits were not finite for this request"
NO_TOKEN_MESSAGE = (
    "structured_outputs: no token may follow; allow the ids that it needs, or make it simpler"
)


class Committer:
    def __init__(self, state: SchedulerState) -> None:
        self.state = state

    def commit(self, result: StepResult, now_s: float) -> Commit:
        state = self.state
        last_s, state.last_commit_s = state.last_commit_s, now_s
        flight = self._take_flight(result)
        if flight.void_slots:
            self._taint_void(flight, result)
        elapsed_s = None if last_s is None else now_s - last_s
        step = CommittedStep(state.table, flight, result, elapsed_s)
        may_end = state.may_end(flight.tokens.total_drafts)
        self._advance(step)
        state.policy.observe(step)
        if step.has_chunks or not result.step_id % PLAIN_EVERY or flight.itl_target_s is not None:
            self._observe_costs(step, flight.itl_target_s)
        ended = self._find_ends(step, may_end) if may_end or len(state.stop_union) else []
        if step.has_errors:
            self._forget_drafts(step)
            self._fail(step)
        for row, reason in ended:
            state.end(step.owners[row], reason)
        for slot in flight.held_slots:
            state.free_slot(slot)
        if flight.overlaps or state.flights:
            if not flight.tokens.plain:
                self._return_tails(step)
        elif flight.tokens.total_drafts and len(flight.plan.deltas.append_slots):
            state.return_appended(flight.plan.deltas)
        for sequence in state.pending_preemption:
            if sequence.slot is not None:
                state.preempt(sequence)
        state.pending_preemption.clear()
        return self._report(step)

    # ---- one step -----------------------------------------------------------------------------

    def _take_flight(self, result: StepResult) -> Flight:
        flights = self.state.flights
        if not flights or flights[0].plan.step_id != result.step_id:
            expected = flights[0].plan.step_id if flights else None
            raise ValueError(f"result of step {result.step_id}, but step {expected} is due")
        plan = flights[0].plan
        if result.generations is not plan.generations and not np.array_equal(
            result.generations, plan.generations
        ):
            raise ValueError(f"step {result.step_id}: the result's generations are not the plan's")
        return flights.pop(0)

    def _observe_costs(self, step: CommittedStep, itl_target_s: float | None) -> None:
        costs, sample = self.state.step_costs, step.sample()
        seconds, tokens = sample.draft_s + sample.target_s, sample.work.target_tokens
        costs.observe(tokens, step.num_pairs(), seconds, has_prompts=step.has_chunks)
        if itl_target_s is not None:
            costs.observe_target(itl_target_s, seconds)

    def _advance(self, step: CommittedStep) -> None:
        state, table, rows = self.state, self.state.table, step.rows
        known = table.num_tokens[rows]
        where = table.row_start[rows] + known
        if not step.one_each:
            where = (where - step.result.row_splits[:-1]).repeat(step.counts)
            where += np.arange(len(step.tokens))
        table.flat_tokens[where] = step.tokens
        table.num_tokens[rows] = known + step.counts
        if step.has_chunks:
            # A chunk moves `query_lens` tokens into KV and adds what it emitted; a decode, as many
            # as it emitted, so that one stays to do.
            moved = step.plan.query_lens - step.plan.num_drafts + step.num_accepted
            advance(table.num_uncomputed_tokens, rows, step.counts - moved)
        if state.has_draft_kv and not (step.undrafted and step.result.draft_kv_lens is None):
            self._advance_draft(step)

    def _advance_draft(self, step: CommittedStep) -> None:
        """How far the draft's KV goes now.

        Drafting k tokens from n known ones writes the draft's positions up to n - 2 + k, and the
        accepted ones stay valid: after a full acceptance one is missing, otherwise none.
        """
        table, rows, plan = self.state.table, step.rows, step.plan
        if step.result.draft_kv_lens is not None:  # others drafted, too
            table.draft_kv[rows] = step.result.draft_kv_lens
            return
        drafted = step.result.num_drafted
        kv_lens = table.num_tokens[rows] - table.num_uncomputed_tokens[rows]
        reach = kv_lens - (drafted == step.result.num_accepted)
        if not step.all_drafted:
            # Drafted nothing: where it was, or further by a slice of a long catch-up.
            sliced = plan.catch_up * (plan.num_drafts == 0)
            before = kv_lens - (plan.query_lens - plan.num_drafts)
            reach = np.where(drafted > 0, reach, np.minimum(table.draft_kv[rows] + sliced, before))
        table.draft_kv[rows] = reach

    def _forget_drafts(self, step: CommittedStep) -> None:
        """The draft's KV of these rows may hold what is not finite: it starts anew."""
        state, table = self.state, self.state.table
        for slot in step.slots[step.result.status == _DRAFT_NON_FINITE].tolist():
            state.pool.draft_valid[state.block_row(slot)] = False
            table.draft_kv[slot] = 0

    def _find_ends(self, step: CommittedStep, may_end: bool) -> list[tuple[int, FinishReason]]:
        """Rows that reached a stop id or their last token; cuts both counts at the end."""
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
        """Rows with a token that is a stop id of some sequence; one may be there more than once."""
        union = self.state.stop_union
        if not len(union):
            return _NO_ROWS
        # The usual case is one EOS id; isin costs twenty times as much.
        stops = step.tokens == union if len(union) == 1 else np.isin(step.tokens, union)
        if not np.count_nonzero(stops):
            return _NO_ROWS
        return np.arange(len(step.slots)).repeat(step.counts)[stops]

    def _cut(self, step: CommittedStep, row: int) -> FinishReason | None:
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
            table.num_tokens[slot] = end  # and one of them stays out of KV
            table.draft_kv[slot] = min(table.draft_kv.item(slot), table.kv_len(slot))
        return reason

    def _taint_void(self, flight: Flight, result: StepResult) -> None:
        """Rows that ended meanwhile are dropped, but what they wrote may not be finite either."""
        for slot in flight.plan.slots[result.status == _NON_FINITE].tolist():
            if slot in flight.void_slots:
                self.state.pool.taint(self.state.block_row(slot))

    def _fail(self, step: CommittedStep) -> None:
        """Blocks that may hold what is not finite: out of the cache, zeroed before reuse."""
        table, status = self.state.table, step.result.status
        for row in ((status == _NON_FINITE) | (status == _NO_TOKEN)).nonzero()[0].tolist():
            slot, message = int(step.slots[row]), NO_TOKEN_MESSAGE
            table.num_cached_tokens[slot] = table.num_tokens[slot]  # nothing of it is cached
            table.draft_kv[slot] = 0  # nor does its draft's KV count
            if status[row] == _NON_FINITE:
                message = _ERROR_MESSAGE
                self.state.pool.taint(self.state.block_row(slot))
            self.state.end(step.owners[row], FinishReason.ERROR, message=message)

    def _return_tails(self, step: CommittedStep) -> None:
        """Give back whole blocks beyond what the known tokens and the plan in flight need."""
        state, table, rows = self.state, self.state.table, step.rows
        size, flights = state.pool.block_size, state.flights
        capacity = table.capacity[rows]
        # A slot that was left in this commit holds no blocks: its spare is negative.
        spare = capacity - np.maximum(table.num_tokens[rows] - 1, table.reserved_tokens[rows])
        tails = (spare >= size).nonzero()[0]
        if not len(tails):
            return
        slots = step.slots[tails].astype(np.intp)
        needed = table.num_tokens - table.num_uncomputed_tokens
        for flight in flights:
            needed[flight.rows] += flight.plan.query_lens
        used = np.minimum(needed[slots], table.max_total[slots])
        counts = (capacity[tails] - np.maximum(used, table.reserved_tokens[slots])) // size
        some = (counts > 0).nonzero()[0]
        if len(some):
            state.return_tails(slots[some], counts[some])

    def _report(self, step: CommittedStep) -> Commit:
        state, stats, result = self.state, self.state.stats, step.result
        stats.steps += 1
        stats.emitted_tokens += len(step.tokens) - step.cut_tokens
        stats.draft_s += result.draft_s
        stats.target_s += result.target_s
        if step.total_drafted:
            stats.drafted_tokens += step.total_drafted
            if step.has_chunks or step.has_errors:
                stats.accepted_tokens += int(np.add.reduce(step.num_accepted))
            else:  # every row emitted one more than it accepted: to sum up costs 3 % of the step
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
        """Those of rows that are still wanted, under the names of their requests."""
        names = {
            slot: owner.request.request_id
            for slot, owner in zip(step.slots.tolist(), step.owners, strict=True)
        }
        logprobs = step.result.logprobs
        return tuple((names[entry.slot], entry) for entry in logprobs if entry.slot in names)
