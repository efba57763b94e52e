"""A step that is being committed: its rows and results, without those of cancelled slots."""

from __future__ import annotations

import numpy as np
from msgspec import structs

from cbatch.core.prices.step_work import StepSample, StepWork
from cbatch.core.scheduler.decode_batch import InFlightStep
from cbatch.core.scheduler.plan import RowStatus, ShadowEvidence, StepResult
from cbatch.core.scheduler.slot_table import SlotTable
from cbatch.core.speculation.policy import Shadow


class CommittedStep:
    """The rows of a plan that are still running, and their results. A lookahead policy sees it as
    `policy.DraftedStep`."""

    def __init__(
        self, table: SlotTable, planned: InFlightStep, result: StepResult, elapsed_s: float | None
    ) -> None:
        """`elapsed_s`: seconds since the previous commit, or None if the engine was idle since."""
        self._table, self._planned, self._elapsed_s = table, planned, elapsed_s
        self.plan, self.result = planned.plan, result
        self.owners, self.rows = planned.owners, planned.rows
        if planned.cancelled_slots:
            self._keep_rows(~np.isin(planned.plan.slots, planned.cancelled_slots))
        self.slots, self.tokens = self.plan.slots, self.result.tokens
        self.num_drafted, self.num_accepted = self.result.num_drafted, self.result.num_accepted
        self.evidence = self.result.expected_accepted
        self.shadow = None if result.shadow is None else self._live_shadow(result.shadow)
        self.has_chunks = planned.tokens.num_chunks > 0
        # Counted in bytes, because numpy takes ten times as long for an array that short.
        self.has_errors = result.status.tobytes().count(RowStatus.OK) < len(result.status)
        tokens = planned.tokens
        self.total_caught_up = tokens.total_catch_up
        self.drafter_idle = not (tokens.total_drafts or tokens.total_catch_up)
        self.total_planned = tokens.total_drafts
        self.total_drafted, self.all_drafted = self.total_planned, tokens.all_draft
        # Nearly always the executor drafts what was planned, whose sums are known already.
        planned_drafts = tokens.num_drafts
        if self.total_drafted and self.num_drafted.tobytes() != planned_drafts.tobytes():
            self.total_drafted = int(np.add.reduce(self.num_drafted))
            self.all_drafted = bool(np.count_nonzero(self.num_drafted) == len(self.num_drafted))
        self.cut_tokens = 0
        # Without drafts a row emits at most one token, so that the total is enough to decide.
        self.one_token_per_row = not self.total_drafted and len(self.tokens) == len(self.slots)
        if self.one_token_per_row:
            self.counts = table.ones[: len(self.slots)]
        else:
            splits = self.result.row_splits
            self.counts = splits[1:] - splits[:-1]

    def _keep_rows(self, live: np.ndarray) -> None:
        """Remove all rows from plan and result for which `live`, bool [rows], is false."""
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

    def _live_shadow(self, evidence: ShadowEvidence) -> Shadow:
        """Return the evidence by slot, without cancelled slots."""
        slots = self._planned.plan.slots[evidence.rows]
        live = ~np.isin(slots, self._planned.cancelled_slots)
        return Shadow(slots[live], evidence.trials[live], evidence.hits[live])

    def num_pairs(self) -> int:
        """Return the (query, key) pairs of the step's attention: each token that a row computed
        attends to all its KV. Call it once the step's tokens are in the table."""
        table, rows = self._table, self.rows
        kv_len = table.num_tokens[rows] - table.num_uncomputed_tokens[rows]
        return int(kv_len.astype(np.int64) @ self.plan.query_lens)

    def sample(self) -> StepSample:
        """Return the composition of the step and its duration, which is the wall time since the
        previous commit: planning, launches and detokenization take part of a small model's step.
        If there was no previous commit, or the executor measured more, it is that measurement."""
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
        if self.has_chunks or not (self.drafter_idle and self.one_token_per_row):
            unused = int(np.add.reduce(plan.num_drafts)) - self.total_drafted
            work.target_tokens = int(np.add.reduce(plan.query_lens)) - unused
            work.logit_tokens = int(np.count_nonzero(plan.wants_logits)) + self.total_drafted
            work.draft_depth = int(np.maximum.reduce(self.num_drafted, initial=0))
            work.draft_tokens = self.total_drafted
            work.ingested_tokens = int(np.add.reduce(plan.catch_up))
        return StepSample(work, result.draft_s, target_s)


def _rows(column: np.ndarray | None, live: np.ndarray) -> np.ndarray | None:
    return None if column is None else column[live]
