"""A step that commits: the rows of its plan that are still wanted, and what they returned."""

from __future__ import annotations

import numpy as np
from msgspec import structs

from cbatch.core.prices.step_work import StepSample, StepWork
from cbatch.core.scheduler.decode_batch import Flight
from cbatch.core.scheduler.plan import RowStatus, ShadowEvidence, StepResult
from cbatch.core.scheduler.slot_table import SlotTable
from cbatch.core.speculation.policy import Shadow


class CommittedStep:
    """What a lookahead policy sees of it is `policy.DraftedStep`."""

    def __init__(
        self, table: SlotTable, flight: Flight, result: StepResult, elapsed_s: float | None
    ) -> None:
        """`elapsed_s`: since the previous commit, if there was work ever since."""
        self._table, self._flight, self._elapsed_s = table, flight, elapsed_s
        self.plan, self.result = flight.plan, result
        self.owners, self.rows = flight.owners, flight.rows
        if flight.void_slots:
            self._drop(~np.isin(flight.plan.slots, flight.void_slots))
        self.slots, self.tokens = self.plan.slots, self.result.tokens
        self.num_drafted, self.num_accepted = self.result.num_drafted, self.result.num_accepted
        self.evidence = self.result.expected_accepted
        self.shadow = None if result.shadow is None else self._live_shadow(result.shadow)
        self.has_chunks = flight.tokens.num_chunks > 0
        # As bytes: for an array that short, numpy takes ten times as long.
        self.has_errors = result.status.tobytes().count(RowStatus.OK) < len(result.status)
        tokens = flight.tokens
        self.total_caught_up = tokens.total_catch_up
        self.undrafted = not (tokens.total_drafts or tokens.total_catch_up)
        self.total_planned = tokens.total_drafts
        self.total_drafted, self.all_drafted = self.total_planned, tokens.all_draft
        # What was drafted is nearly always what was planned, which has been summed up already.
        planned = tokens.num_drafts
        if self.total_drafted and self.num_drafted.tobytes() != planned.tobytes():
            self.total_drafted = int(np.add.reduce(self.num_drafted))
            self.all_drafted = bool(np.count_nonzero(self.num_drafted) == len(self.num_drafted))
        self.cut_tokens = 0
        # Without drafts no row emits more than that, so their sum tells.
        self.one_each = not self.total_drafted and len(self.tokens) == len(self.slots)
        if self.one_each:
            self.counts = table.ones[: len(self.slots)]
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

    def _live_shadow(self, found: ShadowEvidence) -> Shadow:
        slots = self._flight.plan.slots[found.rows]
        live = ~np.isin(slots, self._flight.void_slots)
        return Shadow(slots[live], found.trials[live], found.hits[live])

    def num_pairs(self) -> int:
        """Return the (query, key) pairs of its attention, once its tokens are in the table: each
        row's new tokens attend to all that it then has in KV."""
        table, rows = self._table, self.rows
        kv_len = table.num_tokens[rows] - table.num_uncomputed_tokens[rows]
        return int(kv_len.astype(np.int64) @ self.plan.query_lens)

    def sample(self) -> StepSample:
        """Return what the step computed, and its wall time: all of it since the previous commit,
        for a small model on a fast device waits for planning, launches and text. Without a previous
        commit, what the executor measured."""
        plan, result = self.plan, self.result
        target_s = result.target_s
        if self._elapsed_s is not None:
            target_s = max(self._elapsed_s - result.draft_s, target_s)
        rows = len(self.slots)
        work = StepWork(
            rows=rows,
            target_tokens=rows,
            logit_tokens=rows,
            context_tokens=int(np.add.reduce(self._table.num_tokens[self.rows])),
        )
        if self.has_chunks or not (self.undrafted and self.one_each):
            unused = int(np.add.reduce(plan.num_drafts)) - self.total_drafted
            work.target_tokens = int(np.add.reduce(plan.query_lens)) - unused
            work.logit_tokens = int(np.count_nonzero(plan.wants_logits)) + self.total_drafted
            work.draft_depth = int(np.maximum.reduce(self.num_drafted, initial=0))
            work.draft_tokens = self.total_drafted
            work.ingested_tokens = int(np.add.reduce(plan.catch_up))
        return StepSample(work, result.draft_s, target_s)


def _rows(column: np.ndarray | None, live: np.ndarray) -> np.ndarray | None:
    return None if column is None else column[live]
