"""Choice of each row's drafter in a step: the draft model on the device, or a lookup on the host.

While a step is pending the host lacks the step's tokens, so a lookup guesses these, too. If the
step's tokens match the guess, the device takes the rest of the guess as drafts.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from cbatch.core.request.request import SamplingParams
from cbatch.core.scheduler.executor import errors_of_row
from cbatch.core.scheduler.plan import Deltas, StepPlan
from cbatch.runtime.drafting.chain import ChainDrafter
from cbatch.runtime.drafting.contract import DraftRows, ModelDrafter, Proposal
from cbatch.runtime.drafting.lookup import Lookup, LookupDrafter
from cbatch.runtime.gpu.known_tokens import KnownTokens
from cbatch.runtime.gpu.memory import StepLimits
from cbatch.runtime.input_batch import InputBatch
from cbatch.runtime.model.arrays import I64
from cbatch.runtime.sampling.logits_processors import require_grammars
from cbatch.runtime.sampling.structured import GrammarSource
from triton_kernels.slots import advance as fields

I32 = NDArray[np.int32]


class DraftPlan(NamedTuple):
    """The drafts of a step; arrays have an entry for each row of the plan."""

    model: I32  # drafts by the draft model
    catch_up: I32  # tokens that the draft model ingests before it drafts
    looked_up: I32  # drafts from a lookup
    guesses: Mapping[int, tuple[int, I32]]  # by slot: number of known tokens, tokens after them
    is_empty: bool = False  # no row drafts or catches up

    @classmethod
    def of_model(cls, plan: StepPlan, model: DeviceModel) -> DraftPlan:
        """Let the draft model draft for every row."""
        catch_up = plan.catch_up * (not model.is_head)
        drafts = np.minimum(plan.num_drafts, model.most_drafts)
        return cls(drafts, catch_up, np.zeros_like(plan.num_drafts), {})

    @classmethod
    def empty(cls, plan: StepPlan) -> DraftPlan:
        zeros = np.zeros_like(plan.num_drafts)
        return cls(zeros, zeros, zeros, {}, is_empty=True)


class LookupSettings(NamedTuple):
    """Lookups and default chain of the drafters; arguments of `ChainDrafter`."""

    lookups: Mapping[str, Lookup]
    default: tuple[str, ...]


class DeviceModel(NamedTuple):
    """The host's description of the draft on the device. Its first pass of a step takes up to
    `most_catch_up` tokens, and a row gets up to `most_drafts` drafts. With `is_head` it is a head,
    whose KV cache is always up to date."""

    context_tokens: int
    most_catch_up: int
    most_drafts: int
    is_head: bool = False


class _PlaceholderDrafter(ModelDrafter):
    """Placeholder for the device's draft model in the chain: it records the requested drafts by
    slot. `kv_len`: the draft model's KV lengths in the last result, by slot."""

    def __init__(self, model: DeviceModel) -> None:
        self.on_device, self.context_tokens = model, model.context_tokens

    def bind(self, table: InputBatch, num_blocks: int) -> None:
        super().bind(table, num_blocks)
        self.kv_len = np.zeros(table.max_num_seqs, dtype=np.int64)
        self.drafts, self.catch_up = np.zeros((2, table.max_num_seqs), dtype=np.int32)

    def begin(self) -> None:
        self.drafts[:] = self.catch_up[:] = 0

    def kv_lens(self, slots: NDArray[np.integer]) -> I64 | None:
        return self.kv_len[slots] if self.on_device.is_head else None

    def propose(self, rows: DraftRows) -> Proposal:
        available = np.maximum(self.context_tokens + 1 - rows.num_tokens, 0)
        depths = np.minimum(np.minimum(rows.num_drafts, self.on_device.most_drafts), available)
        works = (depths > 0) | (rows.num_drafts == 0)
        self.drafts[rows.slots] = np.minimum(rows.num_drafts, self.on_device.most_drafts) * works
        self.catch_up[rows.slots] = rows.catch_up * works
        tokens = np.zeros((len(depths), int(depths.max(initial=0))), dtype=np.int64)
        return Proposal(tokens, depths, None, np.zeros(len(depths), dtype=np.bool_))


class _AheadLookup(LookupDrafter):
    """A lookup that guesses `ahead` [slots] more tokens, the most that the pending step may emit.
    `guesses` are those of the latest `propose`, see `DraftPlan`."""

    def __init__(self, lookup: Lookup) -> None:
        super().__init__(lookup)
        self.ahead: I64 = np.zeros(0, dtype=np.int64)
        self.guesses: dict[int, tuple[int, I32]] = {}

    def propose(self, rows: DraftRows) -> Proposal:
        ahead = self.ahead[rows.slots]
        deeper = (rows.num_drafts + ahead) * (rows.num_drafts > 0)
        proposal = super().propose(rows._replace(num_drafts=deeper))
        # A pending step emits at least one token.
        usable = np.minimum(proposal.num_drafted - (ahead > 0), rows.num_drafts)
        usable = np.maximum(usable, 0)
        for i in usable.nonzero()[0].tolist():
            guess = proposal.tokens[i, : proposal.num_drafted[i]].astype(np.int32)
            self.guesses[int(rows.slots[i])] = int(rows.num_tokens[i]), guess
        deepest = int(rows.num_drafts.max(initial=0))
        return proposal._replace(tokens=proposal.tokens[:, :deepest], num_drafted=usable)


class HostDrafts:
    """The drafter chains of all slots. `table` has the tokens that the host knows."""

    def __init__(
        self,
        settings: LookupSettings,
        table: InputBatch,
        num_blocks: int,
        model: DeviceModel | None,
    ) -> None:
        self._table = table
        self._model = None if model is None else _PlaceholderDrafter(model)
        self._lookups = {name: _AheadLookup(each) for name, each in settings.lookups.items()}
        self._chain = ChainDrafter(
            model=self._model,
            lookups=self._lookups,
            default=settings.default,
        )
        self._chain.bind(table, num_blocks)
        self.check = self._chain.check

    def reset(self) -> None:
        self._chain.reset()

    def apply_deltas(self, deltas: Deltas) -> None:
        """Apply deltas, after `table` has. Raises RowError for a drafter that is not loaded."""
        for slot in deltas.released.tolist():
            self._chain.release(slot)
        for admission in deltas.new_sequences:
            with errors_of_row(admission.slot, admission.generation):
                self.check(admission.params.drafter or ())
                self._chain.release(admission.slot)
                self._chain.admit(admission)

    def plan(self, plan: StepPlan, ahead: I64) -> DraftPlan:
        """Return the drafts of a step. `ahead` [slots]: tokens that the pending step may emit."""
        slots, known = plan.slots, self._table.num_tokens[plan.slots]
        available = self._table.max_total[slots] - known
        drafts = np.maximum(np.minimum(plan.num_drafts, available - 1), 0)
        catch_up = plan.catch_up * (drafts >= np.minimum(plan.num_drafts, 1))
        at = ((drafts > 0) | (catch_up > 0)).nonzero()[0]
        if not len(at):
            return DraftPlan.empty(plan)
        for lookup in self._lookups.values():
            lookup.ahead, lookup.guesses = ahead, {}
        if self._model is not None:
            self._model.begin()
            if self._model.on_device.is_head:
                self._model.kv_len[slots] = known - 1
        rows = DraftRows(slots[at], known[at], drafts[at], catch_up[at])
        self._chain.propose(rows)
        guesses = {k: v for lookup in self._lookups.values() for k, v in lookup.guesses.items()}
        looked_up = np.array([slot in guesses for slot in slots.tolist()]) * drafts
        zeros = np.zeros_like(plan.num_drafts)
        draft_plan = DraftPlan(zeros, zeros, looked_up.astype(np.int32), guesses)
        return draft_plan if self._model is None else self._of_model(plan, draft_plan, ahead)

    def _of_model(self, plan: StepPlan, draft_plan: DraftPlan, ahead: I64) -> DraftPlan:
        """Add the draft model's part, for as many rows as fit its first pass."""
        assert self._model is not None
        model, catch_up = self._model.drafts[plan.slots], self._model.catch_up[plan.slots]
        model = model * (draft_plan.looked_up == 0)
        if self._model.on_device.is_head:
            return draft_plan._replace(model=model)
        # The chain raised these rows' catch-up by itself, from the tokens before the pending step.
        is_raised = catch_up > plan.catch_up
        added = ahead[plan.slots] * (model > 0) * self._chain.is_mixed(plan.slots)
        catch_up = catch_up + added.astype(np.int32)
        cost = catch_up + (model > 0)
        available = self._model.on_device.most_catch_up - int(cost[~is_raised].sum())
        fits = ~is_raised | ((cost * is_raised).cumsum() <= available)
        return draft_plan._replace(model=model * fits, catch_up=catch_up * fits)

    def learn(self, plan: StepPlan, draft_plan: DraftPlan, draft_kv: I32) -> I32 | None:
        """Take in the valid positions of the draft's KV after a step, one for each row of the plan.
        Return them if they may differ from the plan. Rows whose slot has another sequence by now
        are ignored."""
        slots = plan.slots
        if self._model is not None:
            at = (self._table.generation[slots] == plan.generations).nonzero()[0]
            self._model.kv_len[slots[at]] = draft_kv[at]
        differs = not draft_plan.is_empty and self._chain.kv_lens(slots) is not None
        return draft_kv.copy() if differs else None


class HostSide:
    """The host's part of a step. `known`: tokens, for lookups and grammars. `chains`: drafters, for
    lookups. `model` describes the draft on the device. Each may be None."""

    def __init__(
        self, known: KnownTokens | None, chains: HostDrafts | None, model: DeviceModel | None
    ) -> None:
        self.known, self.chains, self._model = known, chains, model

    @classmethod
    def of(
        cls,
        limits: StepLimits,
        num_blocks: int,
        vocab_size: int,
        model: DeviceModel | None,
        lookups: LookupSettings | None,
        grammars: GrammarSource | None,
    ) -> HostSide:
        """Create what an executor with these lookups and grammars needs."""
        if lookups is None and grammars is None:
            return cls(None, None, model)
        known = KnownTokens(limits.max_num_seqs, limits.block_size, vocab_size, grammars)
        chains = None if lookups is None else HostDrafts(lookups, known, num_blocks, model)
        return cls(known, chains, model)

    def check(self, params: SamplingParams) -> None:
        """Raise FieldError for a drafter or a grammar that cannot be used here."""
        if params.structured_outputs is not None:
            require_grammars(None if self.known is None else self.known.grammars)
        if self.chains is not None:
            self.chains.check(params.drafter or ())

    def forget(self) -> None:
        if self.known is not None:
            self.known.clear()
        if self.chains is not None:
            self.chains.reset()

    def apply_deltas(self, deltas: Deltas) -> None:
        """Apply a plan's deltas. Raises RowError for a sequence that cannot be run here."""
        if deltas.reset:
            self.forget()
        if self.known is not None:
            for slot in deltas.released.tolist():
                self.known.release(slot)
            for admission in deltas.new_sequences:
                with errors_of_row(admission.slot, admission.generation):
                    self.known.admit(admission)
        if self.chains is not None:
            self.chains.apply_deltas(deltas)

    def plan_drafts(self, plan: StepPlan, pending_plans: Iterable[StepPlan]) -> DraftPlan:
        """Choose the drafts of a step; steps of `pending_plans` may still emit tokens."""
        if self.chains is None:
            return (
                DraftPlan.empty(plan)
                if self._model is None
                else DraftPlan.of_model(plan, self._model)
            )
        assert self.known is not None
        ahead: I64 = np.zeros(self.known.max_num_seqs, dtype=np.int64)
        for pending in pending_plans:
            is_same = self.known.generation[pending.slots] == pending.generations
            ahead[pending.slots] = is_same * pending.wants_logits * (1 + pending.num_drafts)
        return self.chains.plan(plan, ahead)

    def masked(self, plan: StepPlan) -> I32:
        """Return the slots that have a grammar and emit tokens in this step."""
        return plan.slots[:0] if self.known is None else self.known.masked(plan)

    def learn(self, plan: StepPlan, draft_plan: DraftPlan, rows: np.ndarray) -> I32 | None:
        """Take in a step's result; return `draft_kv_lens` of its `StepResult`. `rows` has a row for
        each row of the plan, packed by `triton_kernels.slots.advance`."""
        draft_kv, kv_lens = rows[:, fields.DRAFT_KV], None
        if self.known is not None:
            tokens = rows[:, fields.NUM_FIELDS :].astype(np.int64)
            self.known.advance(plan, tokens, rows[:, fields.EMITTED])
        if self.chains is not None:
            kv_lens = self.chains.learn(plan, draft_plan, draft_kv)
        # A head's KV length is known after every step, whichever drafter was used.
        is_head = self._model is not None and self._model.is_head
        return draft_kv.copy() if is_head else kv_lens
