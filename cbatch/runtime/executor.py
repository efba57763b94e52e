"""The torch executor: applies the deltas of a plan, drafts, runs one ragged forward, verifies."""

from __future__ import annotations

import time
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from cbatch.core.plan import Deltas, RowStatus, StepPlan, StepResult
from cbatch.runtime.drafter import Drafter, DraftRows, Proposal
from cbatch.runtime.kv import KVCache
from cbatch.runtime.model import Model
from cbatch.runtime.rows import I64, SlotTable, iota
from cbatch.runtime.sampling import (
    ban_stop_ids,
    filtered_probs,
    filters_of,
    greedy_choice,
    noise_rows,
)
from triton_kernels.verify import rejection_verify


class _Rows(NamedTuple):
    """The rows of a plan that compute something, at their true positions. All int64 [R]."""

    plan_rows: I64 | None  # rows of the plan; None: all of them
    slots: I64
    known: I64  # known tokens of the sequence
    start: I64  # first position computed
    fresh: I64  # known tokens computed: a chunk, or the last one
    num_drafts: I64  # planned, clipped to what max_total_tokens leaves
    wants: NDArray[np.bool_]


class _Verified(NamedTuple):
    """Outcome of the wanted rows: row i emits `tokens[i, :num_accepted[i] + 1]` if it is finite."""

    tokens: I64  # [W, max k + 1]
    num_accepted: I64
    finite: NDArray[np.bool_]


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
    ) -> None:
        self.model = model
        self.device = torch.device(model.device)
        self.table = SlotTable(max_slots, block_size_tokens, model.config.vocab_size)
        self.kv = KVCache(model.config, num_blocks, block_size_tokens, model.dtype, model.device)
        self.drafter = drafter
        if drafter is not None:
            drafter.bind(self.table, num_blocks, self.device)

    def reset(self) -> None:
        """Forget every slot. KV contents stay: nothing reads a position it has not written."""
        self.table.clear()
        if self.drafter is not None:
            self.drafter.reset()

    def run(self, plan: StepPlan) -> StepResult:
        """Run one step. Raises ValueError for a plan that does not fit the slots."""
        with torch.inference_mode():
            self._apply(plan.deltas)
            rows = self._rows(plan)
            started = time.perf_counter()
            proposal = self._propose(plan, rows)
            drafted = time.perf_counter()
            verified = self._forward(rows, proposal)
            finished = time.perf_counter()
            return self._result(
                plan, rows, proposal, verified, drafted - started, finished - drafted
            )

    def _apply(self, deltas: Deltas) -> None:
        table = self.table
        if deltas.reset:
            self.reset()
        if len(deltas.released):
            table.occupied[deltas.released] = False
        if len(deltas.zeroed_blocks):
            self.kv.zero_blocks(deltas.zeroed_blocks)
            if self.drafter is not None:
                self.drafter.zero_blocks(deltas.zeroed_blocks)
        for admission in deltas.admitted:
            table.admit(admission)
            if self.drafter is not None:
                self.drafter.admit(admission.slot, admission.draft_kv_len_tokens)
        table.apply_blocks(deltas)

    def _rows(self, plan: StepPlan) -> _Rows:
        table, slots = self.table, plan.slots.astype(np.int64)
        stale = (table.generation[slots] != plan.generations) | ~table.occupied[slots]
        if stale.any():
            raise ValueError(
                f"step {plan.step_id}: slots {slots[stale].tolist()} do not hold the planned "
                "generation; send a plan with `deltas.reset` and the whole state"
            )
        known, start = table.num_tokens[slots], table.kv_len[slots]
        room = table.max_total[slots] - known
        if self.drafter is None or not plan.num_drafts.any():
            num_drafts = np.zeros(len(slots), dtype=np.int64)
        else:
            num_drafts = np.minimum(plan.num_drafts, room - 1).clip(min=0)
        fresh = plan.query_lens.astype(np.int64) - plan.num_drafts
        idle = table.failed[slots] | ((room <= 0) & plan.wants_logits)
        rows = _Rows(None, slots, known, start, fresh, num_drafts, plan.wants_logits)
        if idle.any():
            index = np.flatnonzero(~idle)
            rows = _Rows(index, *(field[index] for field in rows[1:]))
        reached = rows.start + rows.fresh
        if np.where(rows.wants, reached != rows.known, reached > rows.known).any():
            raise ValueError(
                f"step {plan.step_id}: query_lens {plan.query_lens.tolist()} do not fit sequences "
                f"of {known.tolist()} tokens with {start.tolist()} in KV"
            )
        return rows

    def _propose(self, plan: StepPlan, rows: _Rows) -> Proposal | None:
        """Drafts, written behind the known tokens of each slot; None if nobody drafts."""
        if self.drafter is None or not rows.num_drafts.any():
            return None
        catch_up = plan.catch_up if rows.plan_rows is None else plan.catch_up[rows.plan_rows]
        at = np.flatnonzero(rows.num_drafts)
        asked = DraftRows(rows.slots[at], rows.known[at], rows.num_drafts[at], catch_up[at])
        drafts = self.drafter.propose(asked)
        row, depth = np.nonzero(iota(drafts.tokens.shape[1]) < drafts.num_drafted[:, None])
        self.table.tokens[asked.slots[row], asked.num_tokens[row] + depth] = drafts.tokens[
            row, depth
        ]
        if len(at) == len(rows.slots):
            return drafts
        num_drafted = np.zeros(len(rows.slots), dtype=np.int64)
        non_finite = np.zeros(len(rows.slots), dtype=bool)
        tokens = np.zeros((len(rows.slots), drafts.tokens.shape[1]), dtype=np.int64)
        num_drafted[at], non_finite[at] = drafts.num_drafted, drafts.non_finite
        tokens[at] = drafts.tokens
        return Proposal(tokens, num_drafted, drafts.probs, non_finite)

    def _forward(self, rows: _Rows, proposal: Proposal | None) -> _Verified | None:
        """One pass over all rows, then the verdict on those that want logits."""
        if not len(rows.slots):
            return None
        num_drafted = rows.num_drafts if proposal is None else proposal.num_drafted
        if proposal is None and num_drafted.any():
            num_drafted = np.zeros_like(num_drafted)
        query_lens = rows.fresh + num_drafted
        wanted = (1 + num_drafted) * rows.wants
        batch = self.table.ragged(rows.slots, rows.start, query_lens, wanted, self.device)
        logits = self.model.forward(batch, self.kv)
        if not len(logits):
            return None
        if not rows.wants.all():
            at = np.flatnonzero(rows.wants)
            slots, known, num_drafted = rows.slots[at], rows.known[at], num_drafted[at]
            drafts = None if proposal is None else proposal.tokens[at]
        else:
            slots, known = rows.slots, rows.known
            drafts = None if proposal is None else proposal.tokens
        probs = None if proposal is None else proposal.probs
        return self._verify(logits, slots, known, num_drafted, drafts, probs)

    def _verify(
        self,
        logits: Tensor,
        slots: I64,
        known: I64,
        num_drafted: I64,
        drafts: I64 | None,
        probs: Tensor | None,
    ) -> _Verified:
        """Verdict on W wanted rows whose logits rows (1 + num_drafted each) follow one another."""
        table, lens = self.table, num_drafted + 1
        starts = lens.cumsum() - lens
        ids, finite = greedy_choice(logits)
        if (known < table.first_stop[slots]).any():
            ban_stop_ids(logits, table, slots, known, starts, lens)
            ids, _ = greedy_choice(logits)
        deepest = int(num_drafted.max())
        if deepest == 0 or drafts is None:
            tokens, num_accepted, row_finite = ids[:, None], np.zeros_like(known), finite
        else:
            grid = starts[:, None] + np.minimum(iota(deepest + 1), num_drafted[:, None])
            tokens = ids[grid]
            drafts = drafts[:, :deepest]
            # Greedy: accept while the draft is the target's own choice; the first False ends it.
            agrees = np.zeros(tokens.shape, dtype=bool)
            agrees[:, :-1] = (tokens[:, :-1] == drafts) & (iota(deepest) < num_drafted[:, None])
            num_accepted = agrees.argmin(axis=1)
            row_finite = np.logical_and.reduceat(finite, starts)
        sampled = ~table.greedy[slots]
        if sampled.any():
            at = np.flatnonzero(sampled)
            accepted, last = self._verify_sampled(
                logits, slots[at], known[at], num_drafted[at], starts[at], drafts, at, probs
            )
            if drafts is not None and deepest:
                tokens[at, :-1] = drafts[at]
            tokens[at, accepted] = last
            num_accepted[at] = accepted
        return _Verified(tokens, num_accepted, row_finite)

    def _verify_sampled(
        self,
        logits: Tensor,
        slots: I64,
        known: I64,
        num_drafted: I64,
        starts: I64,
        drafts: I64 | None,
        at: I64,
        probs: Tensor | None,
    ) -> tuple[I64, I64]:
        """Rejection sampling of the sampled rows: accepted drafts, and the token after them."""
        lens = num_drafted + 1
        total = int(lens.sum())
        if total < len(logits):
            flat = iota(total) + (starts - lens.cumsum() + lens).repeat(lens)
            logits = logits[torch.from_numpy(flat).to(self.device)]
        filters = filters_of(self.table, slots.repeat(lens), self.device)
        if drafts is None:
            draft_tokens = np.zeros(0, dtype=np.int64)
        else:
            own = drafts[at]
            draft_tokens = own[iota(own.shape[1]) < num_drafted[:, None]]
        verdict = rejection_verify(
            filtered_probs(logits, filters),
            torch.from_numpy(draft_tokens).to(self.device),
            probs,
            torch.from_numpy(num_drafted).to(self.device),
            noise_rows(self.table, slots, known, self.device),
        )
        host = torch.stack(verdict).cpu().numpy()
        return host[0], host[1]

    def _result(
        self,
        plan: StepPlan,
        rows: _Rows,
        proposal: Proposal | None,
        verified: _Verified | None,
        draft_s: float,
        target_s: float,
    ) -> StepResult:
        """Advance the slots and report."""
        table, num_rows = self.table, plan.num_rows
        emitted = np.zeros(num_rows, dtype=np.int64)
        accepted, drafted = np.zeros((2, num_rows), dtype=np.int32)
        status = np.where(table.failed[plan.slots], RowStatus.NON_FINITE, RowStatus.OK)
        index = iota(num_rows) if rows.plan_rows is None else rows.plan_rows
        flat = np.zeros(0, dtype=np.int64)
        kv_len = rows.start + rows.fresh
        if proposal is not None:
            drafted[index] = proposal.num_drafted
            status[index[proposal.non_finite]] = RowStatus.DRAFT_NON_FINITE
        if verified is not None:
            at = np.flatnonzero(rows.wants)
            slots, count = rows.slots[at], (verified.num_accepted + 1) * verified.finite
            row, depth = np.nonzero(iota(verified.tokens.shape[1]) < count[:, None])
            flat = verified.tokens[row, depth]
            table.tokens[slots[row], rows.known[at][row] + depth] = flat
            table.num_tokens[slots] += count
            kv_len[at] += verified.num_accepted * verified.finite
            emitted[index[at]] = count
            accepted[index[at]] = verified.num_accepted * verified.finite
            if not verified.finite.all():
                bad = ~verified.finite
                status[index[at[bad]]] = RowStatus.NON_FINITE
                table.failed[slots[bad]] = True
        table.kv_len[rows.slots] = kv_len
        if proposal is not None and self.drafter is not None:
            self.drafter.truncate(rows.slots, kv_len)
        row_splits = np.zeros(num_rows + 1, dtype=np.int32)
        emitted.cumsum(out=row_splits[1:])
        return StepResult(
            step_id=plan.step_id,
            generations=plan.generations,
            tokens=flat.astype(np.int32),
            row_splits=row_splits,
            num_drafted=drafted,
            num_accepted=accepted,
            status=status.astype(np.uint8),
            draft_s=draft_s,
            target_s=target_s,
        )
