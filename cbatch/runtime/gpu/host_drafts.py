"""The host's copy of tokens, with the token masks of grammars, and the choice of each row's drafter
in a step: the draft model on the device, or a lookup on the host. Only slots with a grammar or a
lookup have a copy, so that others cost the host nothing.

While a step is pending the host lacks the step's tokens, so a lookup guesses these, too. If the
step's tokens match the guess, the device takes the rest of the guess as drafts.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import NamedTuple

import numpy as np
from msgspec import structs
from numpy.typing import NDArray

from cbatch.core.request.request import MODEL, SamplingParams
from cbatch.core.scheduler.executor import errors_of_row
from cbatch.core.scheduler.plan import Deltas, NewSequence, RowStatus, StepPlan
from cbatch.runtime.drafting.chain import ChainDrafter
from cbatch.runtime.drafting.contract import DraftRows, ModelDrafter, Proposal
from cbatch.runtime.drafting.lookup import Lookup, LookupDrafter
from cbatch.runtime.gpu.memory import StepLimits
from cbatch.runtime.input_batch import InputBatch
from cbatch.runtime.model.arrays import I64, iota
from cbatch.runtime.sampling.logits_processors import LogitsProcessors, require_grammars
from cbatch.runtime.sampling.structured import GrammarSource
from triton_kernels.slots import advance as fields

I32 = NDArray[np.int32]


class Masks(NamedTuple):
    """Allowed tokens for rows of logits.

    `rows` int32 [N, 2 + ceil(V / 32)]: the slot, the number of drafts before this row of logits,
    then a bit per token: bit j % 32 of word 2 + j // 32 is set if token j is allowed. `dead_ends`
    maps a slot to the number of drafts after which no token is allowed; that row is not masked."""

    rows: I32
    dead_ends: dict[int, int]


class _Grammars(LogitsProcessors):
    """Logits processors of requests with a structured output, reduced to those that forbid tokens.
    The device applies biases and penalties."""

    def admit(self, a: NewSequence) -> None:
        if a.params.structured_outputs is None:
            return
        neutral = {"logit_bias": {}, "repetition_penalty": 1.0}
        neutral |= {"presence_penalty": 0.0, "frequency_penalty": 0.0}
        super().admit(structs.replace(a, params=structs.replace(a.params, **neutral)))


class KnownTokens(InputBatch):
    """Tokens of all slots up to the last result that was read; a pending step may have emitted more
    on the device. `failed` marks sequences whose grammar allows no next token."""

    def __init__(
        self,
        max_num_seqs: int,
        block_size: int,
        vocab_size: int,
        grammars: GrammarSource | None,
    ) -> None:
        self.grammars = grammars
        super().__init__(max_num_seqs, block_size, vocab_size, grammars)

    def clear(self) -> None:
        super().clear()
        self.logits_processors = _Grammars(self.max_num_seqs, self.vocab_size, self.grammars)

    def masked(self, plan: StepPlan) -> I32:
        """Return the slots of the plan whose logits need a mask."""
        slots = plan.slots[plan.wants_logits]
        return slots[self.logits_processors.active[slots] & (self.failed[slots] == 0)]

    def masks(self, slots: I32, num_drafted: I64, drafts: I64) -> Masks:
        """Return the masks: for each slot a row before its first draft, and one after each draft.
        `drafts` [S, longest] has `num_drafted` [S] valid tokens in each row."""
        words = -(-self.vocab_size // 32)
        counts = num_drafted + 1
        rows = np.zeros((int(counts.sum()), 2 + words), dtype=np.int32)
        rows[:, 0] = slots.repeat(counts)
        rows[:, 1] = iota(len(rows)) - (counts.cumsum() - counts).repeat(counts)
        dead_ends, start = {}, 0
        for i, (slot, count) in enumerate(zip(slots.tolist(), counts.tolist(), strict=True)):
            row_drafts = drafts[i, : count - 1].tolist()
            bytes_ = rows[start : start + count, 2:].view(np.uint8)
            with errors_of_row(slot, int(self.generation[slot])):
                dead_end = self.logits_processors.mask_run(slot, row_drafts, bytes_)
            if dead_end is not None:
                dead_ends[slot] = dead_end
            start += count
        return Masks(rows, dead_ends)

    def end_dead_ends(self, plan: StepPlan, dead_ends: dict[int, int], rows: np.ndarray) -> None:
        """Correct the result `rows` (one per slot) of a step: a sequence that reached a dead end
        has emitted nothing, in this step and in later ones."""
        current = plan.slots[self.generation[plan.slots] == plan.generations]
        for slot in dead_ends.keys() & current.tolist():
            if rows[slot, fields.EMITTED] and rows[slot, fields.ACCEPTED] >= dead_ends[slot]:
                self.failed[slot] = RowStatus.NO_TOKEN
        for slot in current[self.failed[current] > 0].tolist():
            rows[slot, fields.STATUS] = RowStatus.NO_TOKEN
            rows[slot, [fields.ACCEPTED, fields.EMITTED]] = 0

    def advance(self, plan: StepPlan, tokens: I64, emitted: I64) -> None:
        """Append the tokens that the plan's rows emitted, `tokens[i, : emitted[i]]`. Rows whose
        slot has another sequence by now are skipped."""
        at = (self.generation[plan.slots] == plan.generations) & (emitted > 0)
        slots, tokens, emitted = plan.slots[at], tokens[at], emitted[at]
        known = self.num_tokens[slots]
        # The device may have emitted tokens past an end that the host has already seen.
        emitted = np.minimum(emitted, np.maximum(self.max_total[slots] - known, 0))
        row, depth = (iota(tokens.shape[1]) < emitted[:, None]).nonzero()
        self.tokens[slots[row], known[row] + depth] = tokens[row, depth]
        self.num_tokens[slots] = known + emitted
        if self.logits_processors.num_active:
            self.logits_processors.advance(slots, tokens, emitted)


class DraftPlan(NamedTuple):
    """The drafts of a step; arrays have an entry for each row of the plan."""

    model: I32  # drafts by the draft model
    catch_up: I32  # tokens that the draft model ingests before it drafts
    looked_up: I32  # drafts from a lookup
    guesses: Mapping[int, tuple[int, I32]]  # by slot: number of known tokens, tokens after them

    @classmethod
    def of_model(cls, plan: StepPlan, model: DeviceModel) -> DraftPlan:
        """Let the draft model draft for every row."""
        zeros = np.zeros(len(plan.slots), dtype=np.int32)
        drafts = plan.num_drafts
        if max(drafts.tolist(), default=0) > model.max_drafts:
            drafts = np.minimum(drafts, model.max_drafts)
        return cls(drafts, zeros if model.is_head else plan.catch_up, zeros, {})

    @classmethod
    def empty(cls, plan: StepPlan) -> DraftPlan:
        zeros = np.zeros(len(plan.slots), dtype=np.int32)
        return cls(zeros, zeros, zeros, {})


class LookupSettings(NamedTuple):
    """Lookups and default chain of the drafters; arguments of `ChainDrafter`."""

    lookups: Mapping[str, Lookup]
    default: tuple[str, ...]


class DeviceModel(NamedTuple):
    """The host's description of the draft on the device. Its first pass of a step takes up to
    `max_catch_up` tokens, and a row gets up to `max_drafts` drafts. With `is_head` it is a head,
    whose KV cache is always up to date."""

    context_tokens: int
    max_catch_up: int
    max_drafts: int
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

    def propose(self, rows: DraftRows) -> Proposal:
        available = np.maximum(self.context_tokens + 1 - rows.num_tokens, 0)
        depths = np.minimum(np.minimum(rows.num_drafts, self.on_device.max_drafts), available)
        works = (depths > 0) | (rows.num_drafts == 0)
        self.drafts[rows.slots] = np.minimum(rows.num_drafts, self.on_device.max_drafts) * works
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


class HostSide:
    """The host's part of a step: lookups and grammars. `known` has the tokens of slots that use
    either; it is None without both. `model` describes the draft on the device, None without one."""

    def __init__(
        self,
        limits: StepLimits,
        num_blocks: int,
        vocab_size: int,
        model: DeviceModel | None,
        lookups: LookupSettings | None,
        grammars: GrammarSource | None,
    ) -> None:
        self.known: KnownTokens | None = None
        self._chain: ChainDrafter | None = None
        self._on_device = model
        self._followed: set[int] = set()  # slots in `known`
        self._in_chain = np.zeros(limits.max_num_seqs, dtype=np.bool_)
        if lookups is not None or grammars is not None:
            slots, page_tokens = limits.max_num_seqs, limits.block_size
            self.known = KnownTokens(slots, page_tokens, vocab_size, grammars)
        if lookups is None or self.known is None:
            return
        self._model = None if model is None else _PlaceholderDrafter(model)
        self._lookups = {name: _AheadLookup(each) for name, each in lookups.lookups.items()}
        self._chain = ChainDrafter(
            model=self._model, lookups=self._lookups, default=lookups.default
        )
        self._chain.bind(self.known, num_blocks)

    @property
    def looks_up(self) -> bool:
        """True if there are lookups."""
        return self._chain is not None

    def check(self, params: SamplingParams) -> None:
        """Raise FieldError for a drafter or a grammar that cannot be used here."""
        if params.structured_outputs is not None:
            require_grammars(None if self.known is None else self.known.grammars)
        if self._chain is not None:
            self._chain.check(params.drafter or ())

    def forget(self) -> None:
        self._followed.clear()
        self._in_chain[:] = False
        if self.known is not None:
            self.known.clear()
        if self._chain is not None:
            self._chain.reset()

    def apply_deltas(self, deltas: Deltas) -> None:
        """Apply a plan's deltas. Raises RowError for a sequence that cannot be run here."""
        if deltas.reset:
            self.forget()
        if self.known is None:
            return
        for slot in deltas.released.tolist():
            self._release(slot)
        for admission in deltas.new_sequences:
            with errors_of_row(admission.slot, admission.generation):
                self._release(admission.slot)
                self._admit(admission)

    def _admit(self, admission: NewSequence) -> None:
        slot, params, chain = admission.slot, admission.params, self._chain
        if chain is not None:
            chain.check(params.drafter or ())
        in_chain = chain is not None and chain.chain_of(params) != (MODEL,)
        if in_chain or params.structured_outputs is not None:
            assert self.known is not None
            self.known.admit(admission)
            self._followed.add(slot)
        if chain is not None and in_chain:
            chain.admit(admission)
            self._in_chain[slot] = True

    def _release(self, slot: int) -> None:
        if slot not in self._followed:
            return
        self._followed.remove(slot)
        assert self.known is not None
        self.known.release(slot)
        if self._chain is not None and self._in_chain[slot]:
            self._chain.release(slot)
            self._in_chain[slot] = False

    def masked(self, plan: StepPlan) -> I32:
        """Return the slots that have a grammar and emit tokens in this step."""
        if self.known is None or not self._followed:
            return plan.slots[:0]
        return self.known.masked(plan)

    def end_dead_ends(self, plan: StepPlan, dead_ends: dict[int, int], rows: np.ndarray) -> None:
        """Correct a step's result as `KnownTokens.end_dead_ends` does."""
        if self.known is not None and self._followed:
            self.known.end_dead_ends(plan, dead_ends, rows)

    def plan_drafts(self, plan: StepPlan, pending_plans: Iterable[StepPlan]) -> DraftPlan:
        """Choose the drafts of a step; steps of `pending_plans` may still emit tokens."""
        model = self._on_device
        drafts = DraftPlan.empty(plan) if model is None else DraftPlan.of_model(plan, model)
        if not self._followed:
            return drafts
        in_chain = self._in_chain[plan.slots]
        if not np.count_nonzero(in_chain):
            return drafts
        assert self.known is not None
        ahead: I64 = np.zeros(self.known.max_num_seqs, dtype=np.int64)
        for pending in pending_plans:
            is_same = self.known.generation[pending.slots] == pending.generations
            ahead[pending.slots] = is_same * pending.wants_logits * (1 + pending.num_drafts)
        drafts = self._look_up(plan, drafts, in_chain, ahead)
        return drafts if self._model is None else self._of_model(plan, drafts, in_chain, ahead)

    def _look_up(
        self, plan: StepPlan, others: DraftPlan, in_chain: NDArray[np.bool_], ahead: I64
    ) -> DraftPlan:
        """Call the chain for its rows, and add the drafts of lookups to the plan of the others."""
        assert self.known is not None and self._chain is not None
        slots, known = plan.slots, self.known.num_tokens[plan.slots]
        rest = np.maximum(self.known.max_total[slots] - known - 1, 0)
        drafts = np.minimum(plan.num_drafts, rest) * in_chain
        catch_up = plan.catch_up * in_chain * (drafts >= np.minimum(plan.num_drafts, 1))
        for lookup in self._lookups.values():
            lookup.ahead, lookup.guesses = ahead, {}
        if self._model is not None:
            self._model.begin()
            if self._model.on_device.is_head:
                self._model.kv_len[slots] = known - 1
        at = ((drafts > 0) | (catch_up > 0)).nonzero()[0]
        if len(at):
            self._chain.propose(DraftRows(slots[at], known[at], drafts[at], catch_up[at]))
        guesses = {k: v for lookup in self._lookups.values() for k, v in lookup.guesses.items()}
        looked_up = np.array([slot in guesses for slot in slots.tolist()]) * drafts
        return others._replace(looked_up=looked_up.astype(np.int32), guesses=guesses)

    def _of_model(
        self, plan: StepPlan, drafts: DraftPlan, in_chain: NDArray[np.bool_], ahead: I64
    ) -> DraftPlan:
        """Set the draft model's part, for as many rows of the chain as fit its first pass."""
        assert self._model is not None
        slots = plan.slots
        by_chain = self._model.drafts[slots] * (drafts.looked_up == 0)
        model = np.where(in_chain, by_chain, drafts.model)
        if self._model.on_device.is_head:
            return drafts._replace(model=model)
        # The chain raises a row's catch-up by itself, from the tokens before the pending step.
        by_chain = self._model.catch_up[slots]
        is_raised = in_chain & (by_chain > plan.catch_up)
        by_chain = by_chain + (ahead[slots] * (model > 0)).astype(np.int32)
        catch_up = np.where(in_chain, by_chain, drafts.catch_up)
        cost = catch_up + (model > 0)
        available = self._model.on_device.max_catch_up - int(cost[~is_raised].sum())
        fits = ~is_raised | ((cost * is_raised).cumsum() <= available)
        return drafts._replace(model=model * fits, catch_up=catch_up * fits)

    def learn(self, plan: StepPlan, rows: np.ndarray) -> I32 | None:
        """Take in a step's result; return `draft_kv_lens` of its `StepResult`. `rows` has a row for
        each row of the plan, packed by `triton_kernels.slots.advance`. Rows whose slot has another
        sequence by now are ignored."""
        slots, draft_kv = plan.slots, rows[:, fields.DRAFT_KV]
        differs = False
        if self.known is not None and self._followed:
            tokens = rows[:, fields.NUM_FIELDS :].astype(np.int64)
            self.known.advance(plan, tokens, rows[:, fields.EMITTED])
            if self._chain is not None and self._model is not None:
                at = (self.known.generation[slots] == plan.generations).nonzero()[0]
                self._model.kv_len[slots[at]] = draft_kv[at]
                may_lag = self._chain.kv_lens(slots) is not None
                differs = may_lag and bool((plan.num_drafts | plan.catch_up).any())
        return draft_kv.copy() if differs else None
