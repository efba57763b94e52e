"""Taking in the result of a step: tokens, cuts, KV counts, statistics, and what they set free."""

from __future__ import annotations

import numpy as np
from msgspec import structs

from cbatch.core import lookahead
from cbatch.core.controller import LookaheadController, StepCost
from cbatch.core.cost import StepLoad
from cbatch.core.plan import RowStatus, ShadowEvidence, StepResult, TokenLogprobs
from cbatch.core.request import FinishReason
from cbatch.core.sequence import Commit, Drafts, Flight, Reservation
from cbatch.core.slots import ONE, advance
from cbatch.core.state import SchedulerState

_OK = int(RowStatus.OK)
_NON_FINITE = int(RowStatus.NON_FINITE)
_DRAFT_NON_FINITE = int(RowStatus.DRAFT_NON_FINITE)
_NO_TOKEN = int(RowStatus.NO_TOKEN)
_ERROR_MESSAGE = "the model's logits were not finite for this request"
NO_TOKEN_MESSAGE = (
    "structured_outputs: no token may follow; allow the ids that it needs, or make it simpler"
)


class _Step:
    """A committing step: the rows of its plan that are still wanted, and what they returned."""

    def __init__(self, flight: Flight, result: StepResult) -> None:
        self.plan, self.result = flight.plan, result
        self.owners, self.rows = flight.owners, flight.rows
        self.cut_tokens = 0
        if flight.void_slots:
            self._drop(~np.isin(flight.plan.slots, flight.void_slots))
        self.slots = self.plan.slots
        if flight.plain:
            self.drafts = flight.drafts
        else:
            # What was drafted is nearly always what was planned, which has been summed up already.
            drafted = self.result.num_drafted
            as_planned = drafted.tobytes() == flight.drafts.num_drafts.tobytes()
            self.drafts = flight.drafts if as_planned else Drafts.of(drafted)
        # Without drafts no row emits more than that, so their sum tells.
        num_steps, tokens = self.plan.num_steps, len(self.result.tokens)
        self.one_each = not self.drafts.total and tokens == len(self.slots) * num_steps
        if self.one_each and flight.plain:
            self.counts = self.plan.query_lens
            if num_steps > 1:
                self.counts = self.counts * num_steps
        else:
            splits = self.result.row_splits
            self.counts = splits[1:] - splits[:-1]

    def _drop(self, live: np.ndarray) -> None:
        plan, result = self.plan, self.result
        counts = np.diff(result.row_splits)
        self.owners = [o for o, alive in zip(self.owners, live.tolist(), strict=True) if alive]
        self.plan = structs.replace(
            plan,
            slots=plan.slots[live],
            query_lens=plan.query_lens[live],
            num_drafts=plan.num_drafts[live],
            catch_up=plan.catch_up[live],
            wants_logits=plan.wants_logits[live],
        )
        self.result = structs.replace(
            result,
            tokens=result.tokens[np.repeat(live, counts)],
            row_splits=np.concatenate([[0], np.cumsum(counts[live])]).astype(np.int32),
            num_drafted=result.num_drafted[live],
            num_accepted=result.num_accepted[live],
            status=result.status[live],
            draft_kv_lens=_rows(result.draft_kv_lens, live),
            expected_accepted=_rows(result.expected_accepted, live),
        )
        self.rows = self.plan.slots


def _rows(column: np.ndarray | None, live: np.ndarray) -> np.ndarray | None:
    return None if column is None else column[live]


def _host_s(result: StepResult, elapsed_s: float | None) -> float:
    """What a step took besides what the executor measured: planning, text, whoever drives the loop.
    If that is longer than the step itself, the caller was doing something else."""
    measured_s = result.draft_s + result.target_s
    host_s = 0.0 if elapsed_s is None else elapsed_s - measured_s
    return host_s if 0.0 < host_s < measured_s else 0.0


class Committer:
    def __init__(self, state: SchedulerState) -> None:
        self.state = state

    def commit(self, result: StepResult, now_s: float) -> Commit:
        state = self.state
        last_s, state.last_commit_s = state.last_commit_s, now_s
        flight = self._take_flight(result)
        if flight.void_slots:
            self._taint_void(flight, result)
        step = _Step(flight, result)
        # As bytes: for an array that short, numpy takes ten times as long.
        troubled = result.status.tobytes().count(_OK) < len(result.status)
        self._advance(step, has_chunks=flight.has_chunks, plain=flight.plain and not troubled)
        controller = state.controller
        drafted = step.drafts.total > 0
        if controller is not None and not controller.rests(
            num_rows=len(step.slots), drafted=drafted
        ):
            self._teach(controller, step, None if last_s is None else now_s - last_s)
        if result.shadow is not None:
            self._overhear(result.shadow, flight)
        ended = []
        if flight.may_end or len(state.stop_union):
            ended = self._find_ends(step, flight.may_end)
        if troubled:
            self._forget_drafts(step)
            self._fail(step)
        for row, reason in ended:
            state.end(step.owners[row], reason)
        for slot in flight.held_slots:
            state.free_slot(slot)
        if not flight.plain:
            someone_left = bool(ended) or troubled or bool(flight.void_slots)
            if flight.reservation is None or state.flights or someone_left:
                self._return_tails(step)
            elif len(flight.reservation.slots):
                self._return_unused(flight.reservation)
        if state.doomed:
            for sequence in state.doomed:
                if sequence.slot is not None:
                    state.preempt(sequence)
            state.doomed.clear()
        return self._report(step, flight, troubled)

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

    def _advance(self, step: _Step, *, has_chunks: bool, plain: bool) -> None:
        state, table, rows = self.state, self.state.table, step.rows
        plan, result = step.plan, step.result
        known = table.num_tokens[rows]
        where = table.row_start[rows] + known
        if not step.one_each:
            where = (where - result.row_splits[:-1]).repeat(step.counts)
            where += np.arange(len(result.tokens))
        elif plan.num_steps > 1:
            where = (where[:, None] + np.arange(plan.num_steps)).ravel()
        table.flat_tokens[where] = result.tokens
        table.num_tokens[rows] = known + step.counts
        if has_chunks:
            # A chunk moves `query_lens` tokens into KV and adds what it emitted; a decode, as many
            # as it emitted, so that one stays to do.
            moved = plan.query_lens - plan.num_drafts + result.num_accepted
            advance(table.todo, rows, step.counts - moved)
        if state.has_draft_kv:
            if plain:
                advance(table.draft_lag, rows, ONE)
            else:
                self._advance_draft(step)
        if state.learns:
            self._observe(step, plain=plain)

    def _observe(self, step: _Step, *, plain: bool) -> None:
        config, estimates, rows = self.state.config.lookahead, self.state.table.estimate, step.rows
        estimate = estimates[:, rows]
        if plain:
            estimates[:, rows] = lookahead.drift(config, estimate)
            return
        result = step.result
        estimates[:, rows] = lookahead.observe(
            config, estimate, result.num_drafted, result.num_accepted, result.expected_accepted
        )

    def _teach(self, controller: LookaheadController, step: _Step, elapsed_s: float | None) -> None:
        """What was drafted, accepted and paid. `elapsed_s`: since the previous commit, if there was
        work ever since."""
        result, cost = step.result, None
        if controller.wants_prices(drafted=step.drafts.total > 0):
            target_s = result.target_s + _host_s(result, elapsed_s)
            cost = StepCost(self._load(step), result.draft_s, target_s)
        controller.learn(
            step.rows, result.num_drafted, result.num_accepted, cost, result.expected_accepted
        )

    def _load(self, step: _Step) -> StepLoad:
        table, rows, plan = self.state.table, step.rows, step.plan
        unused = int(np.add.reduce(plan.num_drafts)) - step.drafts.total
        return StepLoad(
            rows=len(step.slots),
            target_tokens=int(np.add.reduce(plan.query_lens)) - unused,
            logit_tokens=int(np.count_nonzero(plan.wants_logits)) + step.drafts.total,
            context_tokens=int(np.add.reduce(table.num_tokens[rows])),
            depth=int(np.maximum.reduce(step.result.num_drafted, initial=0)),
            draft_tokens=step.drafts.total,
            ingested_tokens=int(np.add.reduce(plan.catch_up)),
        )

    def _overhear(self, shadow: ShadowEvidence, flight: Flight) -> None:
        """How drafters would have done that did not draft."""
        state, slots = self.state, flight.plan.slots[shadow.rows]
        live = ~np.isin(slots, flight.void_slots)
        slots, trials, hits = slots[live], shadow.trials[live], shadow.hits[live]
        if state.controller is not None:
            state.controller.overhear(slots, trials, hits)
        elif state.learns:
            estimate = state.table.estimate
            config = state.config.lookahead
            estimate[:, slots] = lookahead.overhear(config, estimate[:, slots], trials, hits)

    def _advance_draft(self, step: _Step) -> None:
        """How far the draft's KV is behind now.

        Drafting k tokens from n known ones writes the draft's positions up to n - 2 + k, and the
        accepted ones stay valid: after a full acceptance one is missing, otherwise none.
        """
        table, rows, plan = self.state.table, step.rows, step.plan
        if step.result.draft_kv_lens is not None:  # others drafted, too
            kv_lens = table.num_tokens[rows] - table.todo[rows]
            table.draft_lag[rows] = kv_lens - step.result.draft_kv_lens
            return
        drafted = step.result.num_drafted
        lag = drafted == step.result.num_accepted
        if not step.drafts.by_all:
            # Drafted nothing: further behind, less a slice of a long catch-up.
            sliced = plan.catch_up * (plan.num_drafts == 0)
            behind = np.maximum(table.draft_lag[rows] - sliced, 0)
            behind += plan.query_lens - plan.num_drafts
            lag = np.where(drafted > 0, lag, behind)
        table.draft_lag[rows] = lag

    def _forget_drafts(self, step: _Step) -> None:
        """The draft's KV of these rows may hold what is not finite: it starts anew."""
        state, table = self.state, self.state.table
        for slot in step.slots[step.result.status == _DRAFT_NON_FINITE].tolist():
            state.pool.draft_valid[state.block_row(slot)] = False
            table.draft_lag[slot] = table.kv_len(slot)

    def _find_ends(self, step: _Step, may_end: bool) -> list[tuple[int, FinishReason]]:
        """Rows that reached a stop id or their last token; cuts both counts at the end."""
        table, rows = self.state.table, step.rows
        saw_stop = self._any_stop(step.result.tokens)
        if not (may_end or saw_stop):
            return []
        candidates = table.num_tokens[rows] >= table.max_total[rows]
        if saw_stop:
            candidates |= self._saw_stop(step)
        rows_to_cut = candidates.nonzero()[0].tolist()
        if not rows_to_cut:
            return []
        ended = []
        step.counts = step.counts.copy()
        for row in rows_to_cut:
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
            table.draft_lag[slot] = max(0, table.draft_lag.item(slot) - (total - end))
        return reason

    def _taint_void(self, flight: Flight, result: StepResult) -> None:
        """Rows that ended meanwhile are dropped, but what they wrote may not be finite either."""
        for slot in flight.plan.slots[result.status == _NON_FINITE].tolist():
            if slot in flight.void_slots:
                self.state.pool.taint(self.state.block_row(slot))

    def _fail(self, step: _Step) -> None:
        """Blocks that may hold what is not finite: out of the cache, zeroed before reuse."""
        table, status = self.state.table, step.result.status
        for row in ((status == _NON_FINITE) | (status == _NO_TOKEN)).nonzero()[0].tolist():
            slot, message = int(step.slots[row]), NO_TOKEN_MESSAGE
            table.published[slot] = table.num_tokens[slot]  # nothing of it is opened
            table.draft_lag[slot] = table.kv_len(slot)  # nor does its draft's KV count
            if status[row] == _NON_FINITE:
                message = _ERROR_MESSAGE
                self.state.pool.taint(self.state.block_row(slot))
            self.state.end(step.owners[row], FinishReason.ERROR, message=message)

    def _return_unused(self, reservation: Reservation) -> None:
        """Only rows that got a block for this step can have too many: all run on, and nothing is
        in flight."""
        num_tokens = self.state.table.num_tokens
        rows = zip(reservation.slots, reservation.capacity, strict=True)
        unused = [i for i, (slot, held) in enumerate(rows) if num_tokens.item(slot) - 1 <= held]
        if unused:
            self.state.return_unused(reservation, unused)

    def _return_tails(self, step: _Step) -> None:
        """Give back whole blocks beyond what the known tokens and the plan in flight need."""
        state, table, rows = self.state, self.state.table, step.rows
        size, flights = state.pool.block_size, state.flights
        capacity = table.capacity[rows]
        # A slot that was left in this commit holds no blocks: its spare is negative.
        spare = capacity - np.maximum(table.num_tokens[rows] - 1, table.floor[rows])
        tails = (spare >= size).nonzero()[0]
        if not len(tails):
            return
        slots = step.slots[tails].astype(np.intp)
        needed = table.num_tokens - table.todo
        for flight in flights:
            needed[flight.rows] += flight.plan.query_lens
        used = np.minimum(needed[slots], table.max_total[slots])
        counts = (capacity[tails] - np.maximum(used, table.floor[slots])) // size
        some = (counts > 0).nonzero()[0]
        if len(some):
            state.return_tails(slots[some], counts[some])

    def _report(self, step: _Step, flight: Flight, troubled: bool) -> Commit:
        state, stats, result = self.state, self.state.stats, step.result
        emitted = len(result.tokens)
        stats.steps += step.plan.num_steps
        stats.emitted_tokens += emitted - step.cut_tokens
        stats.draft_s += result.draft_s
        stats.target_s += result.target_s
        if step.drafts.total:
            stats.drafted_tokens += step.drafts.total
            if troubled or flight.has_chunks:
                stats.accepted_tokens += int(np.add.reduce(result.num_accepted))
            else:  # every row emitted one more than it accepted
                stats.accepted_tokens += emitted - len(step.owners)
        finished = tuple(state.finished)
        if finished:
            state.finished = []
        return Commit(
            step_id=result.step_id,
            owners=step.owners,
            tokens=result.tokens,
            row_splits=result.row_splits,
            counts=step.counts,
            num_drafted=result.num_drafted,
            num_accepted=result.num_accepted,
            finished=finished,
            logprobs=self._logprobs(step) if result.logprobs else (),
        )

    @staticmethod
    def _logprobs(step: _Step) -> tuple[tuple[str, TokenLogprobs], ...]:
        """Those of rows that are still wanted, under the names of their requests."""
        names = {
            slot: owner.request.request_id
            for slot, owner in zip(step.slots.tolist(), step.owners, strict=True)
        }
        logprobs = step.result.logprobs
        return tuple((names[entry.slot], entry) for entry in logprobs if entry.slot in names)
