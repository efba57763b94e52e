"""The fake executor of tests: it keeps the contract of the real one, without a model.

It keeps per-slot state from the deltas exactly as a real executor must, and checks it: stale
generations, gaps in a block table, and query lengths that do not fit the sequence. Through a shadow
of the KV it checks every position that a row reads. Any error raises `ContractBreachError`. Tokens
are a function of the request alone (`tests.checking.language`). Acceptance
(`tests.checking.models`) and durations (`sim.cost.base`) are modelled, and time is virtual.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Self

import numpy as np

from cbatch.core.prices.step_work import StepWork
from cbatch.core.request.request import MODEL, Request
from cbatch.core.scheduler.config import SchedulerConfig
from cbatch.core.scheduler.plan import Deltas, NewSequence, RowStatus, StepPlan, StepResult
from sim.cost.base import CostModel
from tests.checking.clock import VirtualClock
from tests.checking.cost import LinearCost
from tests.checking.drafting import DraftingModel, expected_accepted, forget
from tests.checking.kv import POISON, ContractBreachError, ShadowKV
from tests.checking.language import next_token
from tests.checking.models import Acceptance, ModelledAcceptance
from tests.checking.slots import CheckedSlot, RowState, require
from tests.checking.states import WRONG, ShadowStates


class ScriptedFault(RuntimeError):  # noqa: N818 - a fault, as the engine calls it
    """An executor failure that a test requested."""


@dataclass(frozen=True)
class Faults:
    """Faults to inject. Runs are counted from 0 over the executor's life."""

    raise_at_runs: frozenset[int] = frozenset()
    raise_with_requests: frozenset[str] = frozenset()  # every run with such a row raises
    # The row that would emit output token number n (from 0) of the request is not finite.
    non_finite_at: Mapping[str, int] = field(default_factory=dict)
    draft_non_finite_at: Mapping[str, frozenset[int]] = field(default_factory=dict)


@dataclass
class ExecutorStats:
    """Counts of events, so that a test of invariance can assert that they occurred."""

    num_runs: int = 0
    prefill_tokens: int = 0
    catch_up_tokens: int = 0
    drafted_tokens: int = 0
    accepted_tokens: int = 0
    num_rejections: int = 0
    num_full_acceptances: int = 0
    num_mixed_steps: int = 0  # a prefill chunk and a decode in one step
    num_resets: int = 0
    rows_by_drafter: Counter[str] = field(default_factory=Counter)
    rows_by_k: Counter[int] = field(default_factory=Counter)  # decoding rows, by drafts


class SimExecutor:
    """An executor with `run(plan)`, or `submit(plan)` and later `wait()` with at most two plans in
    flight."""

    host_s = 0.0  # its loop takes no time

    def __init__(
        self,
        *,
        num_blocks: int,
        block_size: int,
        max_num_seqs: int,
        vocab_size: int,
        clock: VirtualClock | None = None,
        acceptance: Acceptance | None = None,
        cost: CostModel | None = None,
        faults: Faults | None = None,
        num_state_pages: int = 0,
        draft_context_tokens: int | None = None,
        drafter: tuple[str, ...] = (MODEL,),
        coverage: float = 0.6,
    ) -> None:
        """`drafter` is the chain of a request that names none; its lookups have drafts at a share
        `coverage` of the positions."""
        self.stats = ExecutorStats()
        self._clock = clock or VirtualClock()
        self.acceptance = acceptance or ModelledAcceptance(0.7)
        self._cost = cost or LinearCost()
        self._faults = faults or Faults()
        self._vocab_size = vocab_size
        self._block_size_tokens = block_size
        self._num_blocks = num_blocks
        self._slots: list[CheckedSlot | None] = [None] * max_num_seqs
        self._generations: list[int | None] = [None] * max_num_seqs
        self._target_kv = ShadowKV("target", num_blocks, block_size)
        self._draft_kv = ShadowKV("draft", num_blocks, block_size)
        self._states = ShadowStates(num_state_pages, block_size)
        self._drafting = DraftingModel(self._draft_kv, drafter, draft_context_tokens, coverage)
        self._in_flight: deque[tuple[StepResult | Exception, float]] = deque()
        self._busy_until_s = self._clock()
        self._needs_reset = False
        self._expects_snapshot = True

    @classmethod
    def of(cls, config: SchedulerConfig, **more: Any) -> Self:
        """Return an executor with the sizes of a scheduler's configuration."""
        return cls(
            num_blocks=config.num_blocks,
            block_size=config.block_size,
            max_num_seqs=config.max_num_seqs,
            vocab_size=config.vocab_size,
            num_state_pages=config.num_state_pages,
            draft_context_tokens=config.draft_context_tokens,
            drafter=config.default_chain,
            **more,
        )

    def check(self, request: Request) -> None:
        """Refuse nothing."""

    def run(self, plan: StepPlan) -> StepResult:
        self.submit(plan)
        return self.wait()

    def submit(self, plan: StepPlan) -> None:
        """Start a step. Its failure, if any, is raised by the `wait` that would return it."""
        require(len(self._in_flight) < 2, "a third plan was submitted")
        start_s = max(self._clock(), self._busy_until_s)
        outcome: StepResult | Exception
        try:
            outcome = self.execute(plan, overlapped=bool(self._in_flight))
            self._busy_until_s = start_s + outcome.draft_s + outcome.target_s
        except ScriptedFault as fault:
            self._needs_reset = True
            outcome = fault
            self._busy_until_s = start_s + self._cost.step_s(StepWork())[1]
        self._in_flight.append((outcome, self._busy_until_s))

    def wait(self) -> StepResult:
        require(bool(self._in_flight), "wait without a plan in flight")
        outcome, ready_s = self._in_flight.popleft()
        self._clock.advance_to(ready_s)
        if isinstance(outcome, Exception):
            raise outcome
        return outcome

    def reset(self) -> None:
        """Forget everything, in flight or not. The next plan must be a full snapshot."""
        self._in_flight.clear()
        self._slots = [None] * len(self._slots)
        self._generations = [None] * len(self._slots)
        self._target_kv.clear()
        self._draft_kv.clear()
        self._states.clear()
        self._needs_reset = False
        self._expects_snapshot = True
        self.stats.num_resets += 1

    # -- deltas

    def _apply(self, deltas: Deltas) -> None:
        if deltas.reset:
            self._slots = [None] * len(self._slots)
        elif self._expects_snapshot and self.stats.num_resets:
            raise ContractBreachError("a plan without deltas.reset followed a reset")
        self._expects_snapshot = False
        for slot in deltas.released.tolist():
            require(self._slots[slot] is not None, f"slot {slot} was released twice")
            self._slots[slot] = None
        self._target_kv.zero(deltas.zeroed_blocks)
        self._draft_kv.zero(deltas.zeroed_blocks)
        for admission in deltas.new_sequences:
            self._admit(admission)
        for slot, index, block in zip(
            deltas.append_slots.tolist(),
            deltas.append_indices.tolist(),
            deltas.append_blocks.tolist(),
            strict=True,
        ):
            require(0 <= block < self._num_blocks, f"block {block} does not exist")
            self._occupied(slot).set_block(index, block)
        for slot, boundary, page in deltas.state_pages.T.tolist():
            self._states.give(self._occupied(slot), boundary, page)

    def _admit(self, admission: NewSequence) -> None:
        a = admission
        require(self._slots[a.slot] is None, f"slot {a.slot} was admitted into while occupied")
        previous = self._generations[a.slot]
        require(
            previous is None or a.generation > previous,
            f"slot {a.slot}: generation {a.generation} after {previous}",
        )
        require(
            0 < len(a.tokens) <= a.max_total_tokens,
            f"request {a.request_id}: {len(a.tokens)} tokens of at most {a.max_total_tokens}",
        )
        require(
            0 <= a.draft_kv_len_tokens <= a.kv_len_tokens < len(a.tokens),
            f"request {a.request_id}: kv_len {a.kv_len_tokens} and draft's {a.draft_kv_len_tokens}"
            f" do not fit {len(a.tokens)} tokens",
        )
        slot = CheckedSlot(a)
        self._drafting.admit(slot)
        self._states.admit(slot)
        self._target_kv.check_read(slot.label, slot.blocks, slot.hashes[: a.kv_len_tokens])
        self._draft_kv.check_read(slot.label, slot.blocks, slot.hashes[: a.draft_kv_len_tokens])
        self._slots[a.slot] = slot
        self._generations[a.slot] = a.generation

    def _occupied(self, index: int) -> CheckedSlot:
        slot = self._slots[index]
        if slot is None:
            raise ContractBreachError(f"slot {index} is empty but the plan uses it")
        return slot

    # -- one step

    def execute(self, plan: StepPlan, *, overlapped: bool) -> StepResult:
        if self._needs_reset:  # as in a real one, everything after a fault fails until reset
            raise ScriptedFault("the executor failed before and was not reset")
        run = self.stats.num_runs
        self.stats.num_runs += 1
        self._apply(plan.deltas)
        require(len(set(plan.slots.tolist())) == plan.num_rows, "a slot has two rows in one step")
        rows = [self._row(plan, i, overlapped=overlapped) for i in range(plan.num_rows)]
        self._raise_faults(run, rows)
        for row in rows:
            self._check_reads(row)
        for row in rows:
            self._draft(row)
        for row in rows:
            self._compute(row)
        for row in rows:  # again: did two rows of this step write the same position?
            slot = row.slot
            if not slot.failed:
                known = slot.hashes[: slot.kv_len_tokens]
                self._target_kv.check_read(slot.label, slot.blocks, known)
                self._states.check_read(slot)
        kinds = {row.wants_logits and row.query_len == 1 + row.num_drafts for row in rows}
        self.stats.num_mixed_steps += len(kinds) == 2
        return self._result(plan, rows)

    def _row(self, plan: StepPlan, i: int, *, overlapped: bool) -> RowState:
        slot = self._occupied(int(plan.slots[i]))
        k = int(plan.num_drafts[i])
        catch_up = int(plan.catch_up[i])
        query_len = int(plan.query_lens[i])
        wants_logits = bool(plan.wants_logits[i])
        require(
            int(plan.generations[i]) == slot.admission.generation, f"{slot.label}: stale generation"
        )
        unread = slot.num_tokens - slot.kv_len_tokens
        if wants_logits:
            fits = query_len - k == unread and (k == 0 or unread == 1)
        else:
            fits = k == 0 and 0 < query_len < unread
        require(
            fits or slot.failed,
            f"{slot.label}: query of {query_len} with {k} drafts, {unread} tokens not in KV",
        )
        self._drafting.check_catch_up(slot, k, catch_up, overlapped=overlapped)
        return RowState(slot, query_len - k, k, 0, catch_up, wants_logits)

    def _raise_faults(self, run: int, rows: list[RowState]) -> None:
        if run in self._faults.raise_at_runs:
            raise ScriptedFault(f"scripted for run {run}")
        for row in rows:
            name = row.slot.admission.request_id
            if name in self._faults.raise_with_requests:
                raise ScriptedFault(f"scripted for every run with request {name}")

    def _check_reads(self, row: RowState) -> None:
        slot = row.slot
        if slot.failed:
            return
        stop = slot.kv_len_tokens + row.query_len
        num_blocks = -(-stop // self._block_size_tokens)
        require(
            num_blocks <= len(slot.blocks),
            f"{slot.label}: positions to {stop}, {len(slot.blocks)} blocks",
        )
        self._target_kv.check_finite(slot.label, slot.blocks[:num_blocks])
        self._target_kv.check_read(slot.label, slot.blocks, slot.hashes[: slot.kv_len_tokens])
        self._states.check_read(slot)
        if row.num_drafts or row.catch_up:
            known = slot.hashes[: slot.draft_kv_len_tokens]
            self._draft_kv.check_read(slot.label, slot.blocks, known)

    def _draft(self, row: RowState) -> None:
        if row.planned_drafts:
            drafter, count = self._drafting.choose(row.slot, row.planned_drafts, row.catch_up)
            row.drafter, row.num_drafts = drafter, count
            if drafter == MODEL:
                self._break_draft(row)
            row.query_len += row.num_drafts

    def _break_draft(self, row: RowState) -> None:
        """Stop drafting where the numbers are not finite: drafts before that remain."""
        at = self._faults.draft_non_finite_at.get(row.slot.admission.request_id, frozenset())
        first = row.slot.num_output_tokens
        drawn = [n - first for n in at if 0 <= n - first <= row.num_drafts]
        if drawn:
            row.num_drafts, row.status = min(drawn), RowStatus.DRAFT_NON_FINITE

    def _compute(self, row: RowState) -> None:
        slot = row.slot
        if slot.failed or slot.num_tokens >= slot.admission.max_total_tokens:
            self._compute_ended(row)
        elif not row.wants_logits:
            self._write_known(slot, row.query_len)
            self.stats.catch_up_tokens += self._drafting.catch_up(row)
            self.stats.prefill_tokens += row.query_len
        elif self._emits(row, self._faults.non_finite_at.get(slot.admission.request_id)):
            stop = slot.kv_len_tokens + row.query_len
            self._target_kv.poison(slot.blocks, slot.kv_len_tokens, stop)
            poison = np.full(row.query_len, POISON, np.uint64)
            self._states.write(slot, slot.kv_len_tokens, poison)
            row.status = RowStatus.NON_FINITE
            row.num_drafts = 0
            slot.failed = True
        else:
            self._decode(row)
        row.context_tokens = slot.kv_len_tokens

    def _compute_ended(self, row: RowState) -> None:
        """Compute a row whose sequence has ended, which the scheduler did not know yet: it has no
        result."""
        row.num_drafts = 0
        row.query_len = 1
        row.status = RowStatus.NON_FINITE if row.slot.failed else RowStatus.OK

    def _emits(self, row: RowState, at: int | None) -> bool:
        return at is not None and row.slot.num_output_tokens + row.num_drafts >= at

    def _write_known(self, slot: CheckedSlot, query_len: int) -> None:
        stop = slot.kv_len_tokens + query_len
        self._target_kv.write(
            slot.blocks, slot.kv_len_tokens, slot.hashes[slot.kv_len_tokens : stop]
        )
        self._states.write(slot, slot.kv_len_tokens, slot.hashes[slot.kv_len_tokens : stop])
        slot.kv_len_tokens = stop

    def _decode(self, row: RowState) -> None:
        slot = row.slot
        a = slot.admission
        known_tokens = slot.num_tokens
        self.stats.prefill_tokens += row.query_len - 1 - row.num_drafts
        if row.num_drafts == row.query_len - 1:
            self.stats.rows_by_k[row.num_drafts] += 1
        self._write_known(slot, row.query_len - row.num_drafts)
        self.stats.catch_up_tokens += self._drafting.catch_up(row)
        if row.num_drafts:
            if row.drafter == MODEL:
                slot.draft_was_reset = False
            row.num_accepted = self.acceptance.num_accepted(
                a.request_id, a.seed, a.choice, known_tokens, row.num_drafts
            )
        emitted = [self._append_next(slot) for _ in range(row.num_accepted + 1)]
        row.emitted = tuple(emitted)
        if row.num_drafts:
            self._write_drafted(row, known_tokens)
        if row.status is RowStatus.DRAFT_NON_FINITE:
            forget(row)
        slot.kv_len_tokens = slot.num_tokens - 1

    def _append_next(self, slot: CheckedSlot) -> int:
        a = slot.admission
        banned = a.stop_ids if slot.num_output_tokens < a.params.min_tokens else ()
        token = next_token(
            int(slot.hashes[slot.num_tokens - 1]),
            seed=a.seed,
            choice=a.choice,
            position=slot.num_tokens,
            vocab_size=self._vocab_size,
            banned=banned,
        )
        slot.append(token)
        return token

    def _write_drafted(self, row: RowState, known_tokens: int) -> None:
        """Write KV of the drafts in the models that computed them: valid up to the last accepted
        one, dead data after it."""
        slot = row.slot
        k, accepted = row.num_drafts, row.num_accepted
        hashes = np.full(k, WRONG, np.uint64)
        hashes[:accepted] = slot.hashes[known_tokens : known_tokens + accepted]
        self._target_kv.write(slot.blocks, known_tokens, hashes)
        self._states.write(slot, known_tokens, hashes)
        self.stats.catch_up_tokens += self._drafting.write(row, known_tokens, hashes)
        assert row.drafter is not None
        self.stats.rows_by_drafter[row.drafter] += 1
        self.stats.drafted_tokens += k
        self.stats.accepted_tokens += accepted
        self.stats.num_rejections += accepted < k
        self.stats.num_full_acceptances += accepted == k

    def _result(self, plan: StepPlan, rows: list[RowState]) -> StepResult:
        emitted = [token for row in rows for token in row.emitted]
        splits = np.cumsum([0, *(len(row.emitted) for row in rows)])
        work = StepWork(
            rows=len(rows),
            target_tokens=sum(row.query_len for row in rows),
            context_tokens=sum(row.context_tokens for row in rows),
            decode_pairs=sum(row.query_len * row.context_tokens for row in rows),
            draft_depth=max((row.num_drafts for row in rows), default=0),
            draft_tokens=sum(row.num_drafts + row.catch_up for row in rows),
        )
        draft_s, target_s, _ = self._cost.step_s(work)
        return StepResult(
            step_id=plan.step_id,
            generations=plan.generations,
            tokens=np.asarray(emitted, np.int32),
            row_splits=splits.astype(np.int32),
            num_drafted=np.asarray([row.num_drafts for row in rows], np.int32),
            num_accepted=np.asarray([row.num_accepted for row in rows], np.int32),
            status=np.asarray([row.status for row in rows], np.uint8),
            draft_s=draft_s,
            target_s=target_s,
            draft_kv_lens=self._drafting.kv_lens(rows),
            expected_accepted=expected_accepted(rows, self.acceptance),
        )
