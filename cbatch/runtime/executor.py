"""The torch executor: applies the deltas of a plan, drafts, runs one ragged forward, verifies."""

from __future__ import annotations

import time
from typing import NamedTuple

import numpy as np
import torch
from msgspec import structs
from numpy.typing import NDArray
from torch import Tensor

from cbatch.core.plan import (
    Deltas,
    RowStatus,
    ShadowEvidence,
    StepPlan,
    StepResult,
    TokenLogprobs,
)
from cbatch.runtime.drafter import Drafter, DraftRows, Proposal
from cbatch.runtime.index import I64, iota
from cbatch.runtime.kv import KVCache
from cbatch.runtime.logprobs import describe, split_prompt_rows
from cbatch.runtime.model import Model
from cbatch.runtime.rows import SlotTable
from cbatch.runtime.structured import Grammars
from cbatch.runtime.verification import Verified, Wanted, verify

_DRAFT_NON_FINITE = int(RowStatus.DRAFT_NON_FINITE)


class _Rows(NamedTuple):
    """The R rows of a plan that compute something, at their true positions."""

    plan_rows: I64 | None  # which rows of the plan; None: all of them
    slots: NDArray[np.int32]
    known: I64  # known tokens of the sequence
    start: I64  # first position computed
    fresh: I64  # known tokens computed: a chunk, or the last one
    # Planned, clipped to what max_total_tokens leaves, and tokens for the drafter to catch up;
    # None: the drafter has nothing to do.
    num_drafts: I64 | None
    catch_up: NDArray[np.int32]
    wants: NDArray[np.bool_]
    all_want: bool


class TorchExecutor:
    """Runs step plans on a model. `reset()` after any exception: the state is then unspecified.

    With a plan committed late the plan's `query_lens`, `num_drafts` and `catch_up` are bounds; true
    positions are kept here. A row that already reached `max_total_tokens` emits nothing.
    """

    def __init__(
        self,
        model: Model,
        *,
        num_blocks: int,
        block_size_tokens: int,
        max_slots: int,
        drafter: Drafter | None = None,
        grammars: Grammars | None = None,
    ) -> None:
        self.model = model
        self.device = torch.device(model.device)
        self.table = SlotTable(max_slots, block_size_tokens, model.config.vocab_size, grammars)
        self.kv = KVCache(model.config, num_blocks, block_size_tokens, model.dtype, model.device)
        self.drafter = drafter
        if drafter is not None:
            drafter.bind(self.table, num_blocks, self.device)

    def reset(self) -> None:
        """Forget every slot. KV contents stay: nothing reads a position it has not written."""
        self.table.clear()
        if self.drafter is not None:
            self.drafter.reset()

    @torch.inference_mode()
    def run(self, plan: StepPlan) -> StepResult:
        """Run one step. Raises ValueError for a plan that does not fit the slots."""
        started = time.perf_counter()
        plan.require_one_step()
        self._apply(plan.deltas)
        rows = self._rows(plan)
        proposal, draft_s = None, 0.0
        if rows.num_drafts is not None:
            drafting = time.perf_counter()
            proposal = self._propose(rows)
            draft_s = time.perf_counter() - drafting
        verified, prompts = self._forward(rows, proposal)
        tokens, counts = self._advance(rows, verified)
        shadow = self._score(rows, proposal)
        # What the step cost besides its drafts, bookkeeping included: somebody has to pay for it.
        durations_s = draft_s, time.perf_counter() - started - draft_s
        logprobs = (*prompts, *verified.logprobs) if verified is not None else tuple(prompts)
        result = self._report(plan, rows, proposal, tokens, counts, durations_s, logprobs)
        if verified is not None and verified.expected_accepted is not None:
            evidence = _by_plan_row(verified.expected_accepted, rows, plan.num_rows)
            result = structs.replace(result, expected_accepted=evidence)
        if self.drafter is not None and rows.num_drafts is not None:
            kv_lens = self.drafter.kv_lens(plan.slots)
            if kv_lens is not None:
                result = structs.replace(result, draft_kv_lens=kv_lens.astype(np.int32))
        return result if shadow is None else structs.replace(result, shadow=shadow)

    def _apply(self, deltas: Deltas) -> None:
        table = self.table
        if deltas.reset:
            self.reset()
        for slot in deltas.released.tolist():
            table.release(slot)
            if self.drafter is not None:
                self.drafter.release(slot)
        if len(deltas.zeroed_blocks):
            self.kv.zero_blocks(deltas.zeroed_blocks)
            if self.drafter is not None:
                self.drafter.zero_blocks(deltas.zeroed_blocks)
        for admission in deltas.admitted:
            table.admit(admission)
            if self.drafter is not None:
                self.drafter.admit(admission)
        table.apply_blocks(deltas)

    def _rows(self, plan: StepPlan) -> _Rows:
        table, slots, wants = self.table, plan.slots, plan.wants_logits
        if np.count_nonzero(table.generation[slots] != plan.generations):
            raise ValueError(
                f"step {plan.step_id}: slots {slots.tolist()} do not hold the planned generations; "
                "send a plan with `deltas.reset` and the whole state"
            )
        known, start = table.num_tokens[slots], table.kv_len[slots]
        room = table.max_total[slots] - known
        all_want = np.count_nonzero(wants) == len(wants)
        fresh, num_drafts = plan.query_lens - plan.num_drafts, None
        catch_up = plan.catch_up
        if self.drafter is not None and np.count_nonzero(plan.num_drafts | catch_up):
            num_drafts = np.minimum(plan.num_drafts, room - 1)
            if np.count_nonzero(num_drafts < plan.num_drafts):
                num_drafts = np.maximum(num_drafts, 0)
                catch_up = catch_up * (num_drafts >= np.minimum(plan.num_drafts, 1))
        rows = _Rows(None, slots, known, start, fresh, num_drafts, catch_up, wants, all_want)
        # A row that already reached its end, or failed, has nothing left to do.
        idle = (room <= 0) & wants
        if table.num_failed:
            idle |= table.failed[slots] > 0
        if np.count_nonzero(idle):
            rows = _select(rows, np.flatnonzero(~idle))
        reached = rows.start + rows.fresh
        if np.count_nonzero(reached != rows.known if all_want else _misfits(rows, reached)):
            raise ValueError(
                f"step {plan.step_id}: query_lens {plan.query_lens.tolist()} do not fit sequences "
                f"of {known.tolist()} tokens with {start.tolist()} in KV"
            )
        return rows

    def _propose(self, rows: _Rows) -> Proposal | None:
        """Drafts for all rows, also written behind the known tokens; None if nobody drafted."""
        assert self.drafter is not None and rows.num_drafts is not None
        asked = DraftRows(rows.slots, rows.known, rows.num_drafts, rows.catch_up)
        works = (rows.num_drafts > 0) | (rows.catch_up > 0)
        if not np.count_nonzero(works):
            return None
        if np.count_nonzero(works) == len(rows.slots):
            drafts = self.drafter.propose(asked)
        else:
            at = np.flatnonzero(works)
            drafts = self.drafter.propose(DraftRows(*(field[at] for field in asked)))
            drafts = _spread(drafts, at, len(rows.slots))
        row, depth = (iota(drafts.tokens.shape[1]) < drafts.num_drafted[:, None]).nonzero()
        where = rows.slots[row], rows.known[row] + depth
        self.table.tokens[where] = drafts.tokens[row, depth]
        return drafts

    def _forward(
        self, rows: _Rows, proposal: Proposal | None
    ) -> tuple[Verified | None, list[TokenLogprobs]]:
        """One pass over all rows, then the verdict on those that want logits; also the log
        probabilities of prompts."""
        prompts: list[TokenLogprobs] = []
        if not len(rows.slots):
            return None, prompts
        query_lens, wanted = rows.fresh, rows.wants
        drafts = probs = None
        num_drafted = np.zeros(len(rows.slots), dtype=np.int64)
        if proposal is not None:
            num_drafted = proposal.num_drafted
            query_lens = query_lens + num_drafted
            wanted = wanted * (1 + num_drafted)
            if np.count_nonzero(num_drafted):
                drafts, probs = proposal.tokens, proposal.probs
        asked = self._prompt_rows(rows) if self.table.asks.prompts else None
        if asked is not None:
            wanted = wanted + asked
        batch = self.table.ragged(rows.slots, rows.start, query_lens, wanted, self.device)
        logits = self.model.forward(batch, self.kv)
        if asked is not None:
            prompts, logits = self._describe_prompts(rows, logits, asked, wanted)
        if not len(logits):
            return None, prompts
        slots, known = rows.slots, rows.known
        if not rows.all_want:
            at = np.flatnonzero(rows.wants)
            slots, known, num_drafted = slots[at], known[at], num_drafted[at]
            drafts = None if drafts is None else drafts[at]
        verified = verify(logits, Wanted(slots, known, num_drafted, drafts, probs), self.table)
        return verified, prompts

    def _prompt_rows(self, rows: _Rows) -> I64:
        """How many computed positions of each row predict a token of a prompt that is asked for."""
        asks = self.table.asks.prompts
        asked = np.array([slot in asks for slot in rows.slots.tolist()], dtype=np.int64)
        return asked * (rows.fresh - rows.wants)

    def _describe_prompts(
        self, rows: _Rows, logits: Tensor, asked: I64, wanted: I64
    ) -> tuple[list[TokenLogprobs], Tensor]:
        """The log probabilities of prompt tokens, and the logits that are left to decide."""
        asks, table, found = self.table.asks.prompts, self.table, []
        counts = [(i, int(asked[i])) for i in asked.nonzero()[0].tolist()]
        parts, rest = split_prompt_rows(logits, wanted.cumsum(), counts, wanted)
        for (i, count), part in zip(counts, parts, strict=True):
            slot, first = int(rows.slots[i]), int(rows.start[i]) + 1
            tokens = table.tokens[slot, first : first + count].copy()
            found.append(describe(slot, first, part, tokens, asks[slot].num_top))
        for slot in rows.slots[rows.wants].tolist():
            asks.pop(slot, None)
        return found, rest

    def _advance(self, rows: _Rows, verified: Verified | None) -> tuple[I64, I64]:
        """Move the slots on; returns the emitted tokens, and how many each row emitted."""
        table = self.table
        kv_len = rows.start + rows.fresh
        counts = np.zeros(len(rows.slots), dtype=np.int64)
        tokens = counts[:0]
        if verified is not None:
            slots, known, emits = rows.slots, rows.known, verified.num_accepted + 1
            troubled = np.count_nonzero(verified.status) > 0
            if troubled:
                emits *= verified.status == 0
            if rows.all_want:
                kv_len = kv_len + verified.num_accepted
                counts = emits
            else:
                at = np.flatnonzero(rows.wants)
                slots, known = slots[at], known[at]
                kv_len[at] += verified.num_accepted
                counts[at] = emits
            if troubled:
                failed = verified.status > 0
                table.fail(slots[failed], verified.status[failed])
            row, depth = (iota(verified.tokens.shape[1]) < emits[:, None]).nonzero()
            tokens = verified.tokens[row, depth]
            table.tokens[slots[row], known[row] + depth] = tokens
            table.num_tokens[slots] = known + emits
            if table.shaping.num_active:
                table.shaping.advance(slots, verified.tokens, emits)
        table.kv_len[rows.slots] = kv_len
        if rows.num_drafts is not None and self.drafter is not None:
            self.drafter.truncate(rows.slots, kv_len)
        return tokens, counts

    def _score(self, rows: _Rows, proposal: Proposal | None) -> ShadowEvidence | None:
        """How drafters would have done in rows that have emitted without drafts."""
        if self.drafter is None or not len(rows.slots):
            return None
        drafted = None if proposal is None else proposal.num_drafted
        shadow = self.drafter.score(rows.slots, drafted)
        if shadow is None or rows.plan_rows is None:
            return shadow
        return structs.replace(shadow, rows=rows.plan_rows[shadow.rows].astype(np.int32))

    def _report(
        self,
        plan: StepPlan,
        rows: _Rows,
        proposal: Proposal | None,
        tokens: I64,
        counts: I64,
        durations_s: tuple[float, float],
        logprobs: tuple[TokenLogprobs, ...],
    ) -> StepResult:
        table, num_rows = self.table, plan.num_rows
        drafted, accepted = np.zeros((2, num_rows), dtype=np.int32)
        status = np.zeros(num_rows, dtype=np.uint8)
        at = slice(None) if rows.plan_rows is None else rows.plan_rows
        if proposal is not None:
            drafted[at] = proposal.num_drafted
            accepted[at] = np.maximum(counts - 1, 0)
            if np.count_nonzero(proposal.non_finite):
                status[at] = proposal.non_finite * np.uint8(_DRAFT_NON_FINITE)
        if table.num_failed:
            failed = table.failed[plan.slots]
            status = np.where(failed, failed, status)
        if rows.plan_rows is not None:
            counts, emitted = np.zeros(num_rows, dtype=np.int64), counts
            counts[rows.plan_rows] = emitted
        row_splits = np.zeros(num_rows + 1, dtype=np.int32)
        counts.cumsum(out=row_splits[1:])
        return StepResult(
            step_id=plan.step_id,
            generations=plan.generations,
            tokens=tokens.astype(np.int32),
            row_splits=row_splits,
            num_drafted=drafted,
            num_accepted=accepted,
            status=status,
            draft_s=durations_s[0],
            target_s=durations_s[1],
            logprobs=logprobs,
        )


def _misfits(rows: _Rows, reached: I64) -> NDArray[np.bool_]:
    """Rows that do not end at the last known token where they want logits, or pass it."""
    return np.where(rows.wants, reached != rows.known, reached > rows.known)


def _by_plan_row(evidence: NDArray[np.float32], rows: _Rows, num_rows: int) -> NDArray[np.float32]:
    """What rows that want logits have, for all rows of the plan; nothing for the others."""
    at = np.flatnonzero(rows.wants)
    if rows.plan_rows is not None:
        at = rows.plan_rows[at]
    spread = np.zeros(num_rows, dtype=np.float32)
    spread[at] = evidence
    return spread


def _select(rows: _Rows, at: I64) -> _Rows:
    return _Rows(
        plan_rows=at,
        slots=rows.slots[at],
        known=rows.known[at],
        start=rows.start[at],
        fresh=rows.fresh[at],
        num_drafts=None if rows.num_drafts is None else rows.num_drafts[at],
        catch_up=rows.catch_up[at],
        wants=rows.wants[at],
        all_want=rows.all_want,
    )


def _spread(drafts: Proposal, at: I64, num_rows: int) -> Proposal:
    """A proposal for the rows `at`, as one for all rows; the others drafted nothing."""
    tokens = np.zeros((num_rows, drafts.tokens.shape[1]), dtype=np.int64)
    num_drafted = np.zeros(num_rows, dtype=np.int64)
    non_finite = np.zeros(num_rows, dtype=np.bool_)
    tokens[at], num_drafted[at], non_finite[at] = (
        drafts.tokens,
        drafts.num_drafted,
        drafts.non_finite,
    )
    return Proposal(tokens, num_drafted, drafts.probs, non_finite)
