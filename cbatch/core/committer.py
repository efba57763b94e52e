"""Taking in the result of a step: tokens, cuts, KV counts, statistics, and what they set free."""

from __future__ import annotations

import numpy as np

from cbatch.core import lookahead
from cbatch.core.plan import RowStatus, StepResult
from cbatch.core.request import FinishReason
from cbatch.core.sequence import Commit, Flight
from cbatch.core.state import SchedulerState

_NON_FINITE = int(RowStatus.NON_FINITE)
_DRAFT_NON_FINITE = int(RowStatus.DRAFT_NON_FINITE)
_ERROR_MESSAGE = "the model's logits were not finite for this request"


class _Step:
    """One committing step, by row of its live rows."""

    def __init__(self, flight: Flight, result: StepResult) -> None:
        plan = flight.plan
        self.owners = flight.owners
        self.rows = flight.rows
        self.slots = plan.slots
        self.plain = flight.plain
        self.query_lens = plan.query_lens
        self.planned_drafts = plan.num_drafts
        self.catch_up = plan.catch_up
        self.num_drafted = result.num_drafted
        self.num_accepted = result.num_accepted
        self.status = result.status
        self.starts = result.row_splits[:-1]
        self.counts = result.row_splits[1:] - self.starts
        self.wants = plan.wants_logits

    def keep(self, live: np.ndarray) -> None:
        """Drop the rows that are void; `live` is bool [rows]."""
        self.owners = [o for o, alive in zip(self.owners, live.tolist(), strict=True) if alive]
        for name in (
            "slots",
            "query_lens",
            "planned_drafts",
            "catch_up",
            "num_drafted",
            "num_accepted",
            "status",
            "starts",
            "counts",
            "wants",
        ):
            setattr(self, name, getattr(self, name)[live])
        self.rows = self.slots
        self.plain = False


class Committer:
    def __init__(self, state: SchedulerState) -> None:
        self.state = state

    def commit(self, result: StepResult) -> Commit:
        state = self.state
        flight = self._take_flight(result)
        step = _Step(flight, result)
        if flight.void_slots:
            step.keep(~np.isin(step.slots, flight.void_slots))
        failed = step.status == _NON_FINITE
        any_failed = bool(failed.any())
        if step.plain and not any_failed:
            self._advance_plain(step, result.tokens)
            if state.speculates:
                self._drift(step)
        else:
            self._advance(step, result.tokens)
        ended = self._find_ends(step, result.tokens)
        if any_failed:
            self._fail(step, failed)
            ended = [(row, reason) for row, reason in ended if not failed[row]]
        if state.config.prefix_cache:
            self._publish(step)
        for row, reason in ended:
            state.end(step.owners[row], reason)
        for slot in flight.held_slots:
            state.free_slot(slot)
        if not step.plain:
            self._return_tails(step)
        for sequence in state.doomed:
            if sequence.slot is not None:
                state.preempt(sequence)
        state.doomed.clear()
        return self._report(flight, step, result)

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

    def _advance_plain(self, step: _Step, tokens: np.ndarray) -> None:
        """Every row decoded one token, as the plan's bounds say already."""
        table, rows = self.state.table, step.rows
        table.tokens[step.slots, table.num_tokens[rows]] = tokens
        table.num_tokens[rows] += 1
        table.kv_len[rows] += 1

    def _advance(self, step: _Step, tokens: np.ndarray) -> None:
        state, table, rows = self.state, self.state.table, step.rows
        before = table.num_tokens[rows]
        total = int(step.counts.sum())
        ramp = np.arange(total) - np.repeat(np.cumsum(step.counts) - step.counts, step.counts)
        source = np.repeat(step.starts, step.counts) + ramp
        owners = np.repeat(step.slots, step.counts)
        table.tokens[owners, np.repeat(before, step.counts) + ramp] = tokens[source]
        table.num_tokens[rows] += step.counts
        # Bounds held `planned` drafts; `num_accepted` of them are real.
        table.kv_len[rows] += step.query_lens - step.planned_drafts + step.num_accepted
        table.kv_low[rows] += step.num_accepted
        table.kv_high[rows] += step.num_accepted - step.planned_drafts
        table.known[rows] += step.counts - step.wants
        if state.speculates:
            self._observe(step, before)

    def _drift(self, step: _Step) -> None:
        """Nobody drafted: every estimate moves a little towards the prior."""
        table, rows = self.state.table, step.rows
        table.accepted[rows], table.trials[rows] = lookahead.drift(
            self.state.config.lookahead, table.accepted[rows], table.trials[rows]
        )

    def _observe(self, step: _Step, tokens_before: np.ndarray) -> None:
        """Acceptance statistics, and how far the draft's KV reaches now."""
        state, table, rows = self.state, self.state.table, step.rows
        table.accepted[rows], table.trials[rows] = lookahead.observe(
            state.config.lookahead,
            table.accepted[rows],
            table.trials[rows],
            step.num_drafted,
            step.num_accepted,
        )
        old = table.draft_kv_len[rows]
        drafted = step.num_drafted > 0
        new = np.where(drafted, tokens_before - 1 + step.num_drafted, old)
        slices = (step.planned_drafts == 0) & (step.catch_up > 0)
        new = np.minimum(np.where(slices, old + step.catch_up, new), table.kv_len[rows])
        bad = step.status == _DRAFT_NON_FINITE
        if bad.any():
            new[bad] = 0
            for slot in step.slots[bad].tolist():
                state.pool.draft_valid[table.block_row(slot)] = False
        table.draft_kv_len[rows] = new
        if state.config.prefix_cache:
            size = state.pool.block_size
            first, last = old // size, new // size
            for row in np.flatnonzero(last > first).tolist():
                blocks = table.blocks[step.slots[row], first[row] : last[row]]
                state.pool.draft_valid[blocks] = True

    def _find_ends(self, step: _Step, tokens: np.ndarray) -> list[tuple[int, FinishReason]]:
        """Rows that reached a stop id or their last token; cuts both counts at the end."""
        table, rows = self.state.table, step.rows
        candidates = table.num_tokens[rows] >= table.max_total[rows]
        if self._any_stop(tokens):
            candidates |= self._saw_stop(step)
        if not candidates.any():
            return []
        ended = []
        step.counts = step.counts.copy()
        for row in np.flatnonzero(candidates).tolist():
            reason = self._cut(step, row)
            if reason is not None:
                ended.append((row, reason))
        return ended

    def _any_stop(self, tokens: np.ndarray) -> bool:
        union = self.state.stop_union
        if len(union) <= 1:  # the usual case: one EOS id; isin costs twenty times as much
            return len(union) == 1 and bool((tokens == union[0]).any())
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
            step.counts[row] = end - first
            table.num_tokens[slot] = end
            table.kv_len[slot] = min(int(table.kv_len[slot]), end - 1)
        return reason

    def _fail(self, step: _Step, failed: np.ndarray) -> None:
        """Their blocks may hold what is not finite: out of the cache, zeroed before reuse."""
        for row in np.flatnonzero(failed).tolist():
            slot = int(step.slots[row])
            self.state.pool.taint(self.state.table.block_row(slot))
            self.state.end(step.owners[row], FinishReason.ERROR, message=_ERROR_MESSAGE)

    def _publish(self, step: _Step) -> None:
        state, table = self.state, self.state.table
        full = table.kv_len[step.rows] // state.pool.block_size
        crossing = full > table.ready_blocks[step.rows]
        if crossing.any():
            for row in np.flatnonzero(crossing).tolist():
                slot = int(step.slots[row])
                if state.owners[slot] is step.owners[row]:
                    state.publish(slot, int(full[row]))

    def _return_tails(self, step: _Step) -> None:
        state, table = self.state, self.state.table
        slots, block_size = step.slots, state.pool.block_size
        used = -(-np.minimum(table.kv_high[slots], table.max_total[slots]) // block_size)
        excess = table.num_blocks[slots] - np.maximum(used, table.floor_blocks[slots])
        tails = np.flatnonzero(excess > 0)
        # A slot that was left in this commit holds no blocks, so it has no tail.
        if len(tails):
            state.return_tails(slots[tails], excess[tails])

    def _report(self, flight: Flight, step: _Step, result: StepResult) -> Commit:
        state, stats = self.state, self.state.stats
        stats.steps += 1
        stats.emitted_tokens += len(step.owners) if step.plain else int(step.counts.sum())
        if not step.plain:
            stats.drafted_tokens += int(step.num_drafted.sum())
            stats.accepted_tokens += int(step.num_accepted.sum())
        finished = tuple(state.finished)
        if finished:
            state.finished = []
        return Commit(
            step_id=flight.plan.step_id,
            owners=step.owners,
            tokens=result.tokens,
            starts=step.starts,
            counts=step.counts,
            num_drafted=step.num_drafted,
            num_accepted=step.num_accepted,
            finished=finished,
        )
