"""Taking in the result of a step: tokens, cuts, KV counts, statistics, and what they set free."""

from __future__ import annotations

import numpy as np

from cbatch.core import lookahead
from cbatch.core.plan import RowStatus, StepResult
from cbatch.core.request import FinishReason
from cbatch.core.sequence import Commit, Flight
from cbatch.core.slots import advance
from cbatch.core.state import SchedulerState

_NON_FINITE = int(RowStatus.NON_FINITE)
_DRAFT_NON_FINITE = int(RowStatus.DRAFT_NON_FINITE)
_ERROR_MESSAGE = "the model's logits were not finite for this request"


class _Step:
    """A committing step: the rows of its plan that are still wanted, and what they returned."""

    def __init__(self, flight: Flight, result: StepResult) -> None:
        plan = flight.plan
        self.owners = flight.owners
        self.rows = flight.rows
        self.plain = flight.plain
        self.slots = plan.slots
        self.query_lens = plan.query_lens
        self.planned_drafts = plan.num_drafts
        self.catch_up = plan.catch_up
        self.wants = plan.wants_logits
        self.num_drafted = result.num_drafted
        self.num_accepted = result.num_accepted
        self.status = result.status
        self.tokens = result.tokens
        self.starts = result.row_splits[:-1]
        self.counts = result.row_splits[1:] - self.starts
        self.cut_tokens = 0
        if flight.void_slots:
            self._drop(np.isin(self.slots, flight.void_slots))

    def _drop(self, void: np.ndarray) -> None:
        live = ~void
        self.tokens = self.tokens[np.repeat(live, self.counts)]
        self.owners = [o for o, alive in zip(self.owners, live.tolist(), strict=True) if alive]
        for name in (
            "slots",
            "query_lens",
            "planned_drafts",
            "catch_up",
            "wants",
            "num_drafted",
            "num_accepted",
            "status",
            "counts",
        ):
            setattr(self, name, getattr(self, name)[live])
        self.starts = np.cumsum(self.counts, dtype=np.int32) - self.counts
        self.rows = self.slots


class Committer:
    def __init__(self, state: SchedulerState) -> None:
        self.state = state

    def commit(self, result: StepResult) -> Commit:
        state = self.state
        flight = self._take_flight(result)
        if flight.void_slots:
            self._taint_void(flight, result)
        step = _Step(flight, result)
        troubled = np.count_nonzero(step.status) > 0
        if step.plain and not troubled:
            self._advance_plain(step)
        else:
            self._advance(step)
        ended = self._find_ends(step)
        if troubled:
            self._forget_drafts(step)
            self._fail(step)
        if state.config.prefix_cache:
            self._publish(step)
        for row, reason in ended:
            state.end(step.owners[row], reason)
        for slot in flight.held_slots:
            state.free_slot(slot)
        if not step.plain:
            self._return_tails(step)
        if state.doomed:
            for sequence in state.doomed:
                if sequence.slot is not None:
                    state.preempt(sequence)
            state.doomed.clear()
        return self._report(flight, step)

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

    def _advance_plain(self, step: _Step) -> None:
        """Every row decoded one token, as the plan's bounds say already."""
        table, rows = self.state.table, step.rows
        table.tokens[step.slots, table.num_tokens[rows]] = step.tokens
        advance(table.num_tokens, rows, 1)
        advance(table.kv_len, rows, 1)
        if self.state.learns:
            estimate = table.estimate[:, rows]
            table.estimate[:, rows] = lookahead.drift(self.state.config.lookahead, estimate)

    def _advance(self, step: _Step) -> None:
        state, table, rows = self.state, self.state.table, step.rows
        before = table.num_tokens[rows]
        width = table.tokens.shape[1]
        first = np.repeat(step.slots * width + before - step.starts, step.counts)
        table.tokens.reshape(-1)[first + np.arange(len(first))] = step.tokens
        if state.speculates:
            self._advance_draft(step, before - 1)
        # Bounds held `planned_drafts`; `num_accepted` of them are real.
        unaccepted = step.planned_drafts - step.num_accepted
        advance(table.num_tokens, rows, step.counts)
        advance(table.kv_len, rows, step.query_lens - unaccepted)
        advance(table.kv_high, rows, -unaccepted)
        advance(table.known, rows, step.counts - step.wants)
        if state.learns:
            table.estimate[:, rows] = lookahead.observe(
                state.config.lookahead,
                table.estimate[:, rows],
                step.num_drafted,
                step.num_accepted,
            )

    def _advance_draft(self, step: _Step, kv_before: np.ndarray) -> None:
        """How far the draft's KV reaches: to the last draft, or to the first rejected one.

        Drafting k tokens from n known ones writes its positions up to n - 2 + k; of these the
        accepted ones stay valid, so a full acceptance leaves it one position behind.
        """
        table, rows = self.state.table, step.rows
        new = kv_before + np.minimum(step.num_drafted, step.num_accepted + 1)
        if np.count_nonzero(step.num_drafted) < len(new):
            # Drafted nothing: where it was, or further by a slice of a long catch-up.
            sliced = step.catch_up * (step.planned_drafts == 0)
            caught_up = np.minimum(table.draft_kv_len[rows] + sliced, kv_before)
            new = np.where(step.num_drafted > 0, new, caught_up)
        table.draft_kv_len[rows] = new

    def _forget_drafts(self, step: _Step) -> None:
        """The draft's KV of these rows may hold what is not finite: it starts anew."""
        state, table = self.state, self.state.table
        for slot in step.slots[step.status == _DRAFT_NON_FINITE].tolist():
            state.pool.draft_valid[table.block_row(slot)] = False
            table.draft_kv_len[slot] = 0
            table.draft_mark_at[slot] = state.pool.block_size

    def _find_ends(self, step: _Step) -> list[tuple[int, FinishReason]]:
        """Rows that reached a stop id or their last token; cuts both counts at the end."""
        table, rows = self.state.table, step.rows
        candidates = table.num_tokens[rows] >= table.max_total[rows]
        if self._any_stop(step.tokens):
            candidates |= self._saw_stop(step)
        if not np.count_nonzero(candidates):
            return []
        ended = []
        step.counts = step.counts.copy()
        for row in candidates.nonzero()[0].tolist():
            reason = self._cut(step, row)
            if reason is not None:
                ended.append((row, reason))
        return ended

    def _any_stop(self, tokens: np.ndarray) -> bool:
        union = self.state.stop_union
        if len(union) <= 1:  # the usual case: one EOS id; isin costs twenty times as much
            return bool(len(union)) and bool(np.count_nonzero(tokens == union))
        return bool(np.isin(tokens, union).any())

    def _saw_stop(self, step: _Step) -> np.ndarray:
        table, union = self.state.table, self.state.stop_union
        last = table.num_tokens[step.rows]
        saw = np.zeros(len(step.slots), dtype=np.bool_)
        for back in range(1, int(step.counts.max(initial=0)) + 1):
            tokens = table.tokens[step.slots, last - back]
            saw |= np.isin(tokens, union) & (step.counts >= back)
        return saw

    def _cut(self, step: _Step, row: int) -> FinishReason | None:
        table, sequence, slot = self.state.table, step.owners[row], int(step.slots[row])
        total, count = int(table.num_tokens[slot]), int(step.counts[row])
        first = total - count
        reason = None
        end = total
        if total >= sequence.max_total_tokens:
            reason, end = FinishReason.LENGTH, sequence.max_total_tokens
        for position, token in enumerate(table.tokens[slot, first:end].tolist(), start=first):
            if token in sequence.stop_ids and position >= sequence.min_total_tokens:
                reason, end = FinishReason.STOP, position + 1
                break
        if reason is not None:
            step.cut_tokens += total - end
            step.counts[row] = end - first
            table.num_tokens[slot] = end
            table.kv_len[slot] = min(int(table.kv_len[slot]), end - 1)
        return reason

    def _taint_void(self, flight: Flight, result: StepResult) -> None:
        """Rows that ended meanwhile are dropped, but what they wrote may not be finite either."""
        for slot in flight.plan.slots[result.status == _NON_FINITE].tolist():
            if slot in flight.void_slots:
                self.state.pool.taint(self.state.table.block_row(slot))

    def _fail(self, step: _Step) -> None:
        """Their blocks may hold what is not finite: out of the cache, zeroed before reuse."""
        table = self.state.table
        for row in (step.status == _NON_FINITE).nonzero()[0].tolist():
            slot = int(step.slots[row])
            table.kv_len[slot] = 0  # nothing of it is published
            self.state.pool.taint(table.block_row(slot))
            self.state.end(step.owners[row], FinishReason.ERROR, message=_ERROR_MESSAGE)

    def _publish(self, step: _Step) -> None:
        table, rows = self.state.table, step.rows
        complete = (table.kv_len[rows] >= table.publish_at[rows]).nonzero()[0]
        if len(complete):
            self.state.publish(step.slots[complete])

    def _return_tails(self, step: _Step) -> None:
        state, table = self.state, self.state.table
        size = state.pool.block_size
        spare = table.num_blocks[step.rows] * size - table.kv_high[step.rows]
        slots = step.slots[spare >= size]
        if not len(slots):
            return
        used_tokens = np.minimum(table.kv_high[slots], table.max_total[slots])
        used_blocks = -(-used_tokens // size)
        excess = table.num_blocks[slots] - np.maximum(used_blocks, table.floor_blocks[slots])
        tails = (excess > 0).nonzero()[0]
        # A slot that was left in this commit holds no blocks, so it has no tail.
        if len(tails):
            state.return_tails(slots[tails], excess[tails])

    def _report(self, flight: Flight, step: _Step) -> Commit:
        state, stats = self.state, self.state.stats
        stats.steps += 1
        stats.emitted_tokens += len(step.tokens) - step.cut_tokens
        if not step.plain:
            stats.drafted_tokens += int(np.add.reduce(step.num_drafted))
            stats.accepted_tokens += int(np.add.reduce(step.num_accepted))
        finished = tuple(state.finished)
        if finished:
            state.finished = []
        return Commit(
            step_id=flight.plan.step_id,
            owners=step.owners,
            tokens=step.tokens,
            starts=step.starts,
            counts=step.counts,
            num_drafted=step.num_drafted,
            num_accepted=step.num_accepted,
            finished=finished,
        )
