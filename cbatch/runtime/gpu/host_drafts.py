"""Who drafts in a step, as the host decides it: the model on the device, or lookups of the host.

With a plan under way the host knows the tokens before that one. What it looks up then goes on from
there, long enough for all that may be emitted in between; the device drafts what is left of it.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

import numpy as np
from msgspec import structs
from numpy.typing import NDArray

from cbatch.core.request.request import MODEL
from cbatch.core.scheduler.plan import Deltas, ShadowEvidence, StepPlan
from cbatch.runtime.cpu.drafter import DraftRows, ModelDrafter, Proposal
from cbatch.runtime.cpu.input_batch import InputBatch
from cbatch.runtime.drafting.chain import ChainDrafter
from cbatch.runtime.drafting.lookup import Lookup, LookupDrafter
from cbatch.runtime.model.arrays import I64

I32 = NDArray[np.int32]


class Asks(NamedTuple):
    """What a step asks of whom, by row of its plan. `guesses` are those of slots, and how many
    tokens were known before each."""

    model: I32
    catch_up: I32
    looked_up: I32
    guesses: Mapping[int, tuple[int, I32]]
    credits: Credits | None = None

    @classmethod
    def of_model(cls, plan: StepPlan, model: DeviceModel) -> Asks:
        """All drafts are the model's."""
        catch_up = plan.catch_up * (not model.reads)
        drafts = np.minimum(plan.num_drafts, model.most_drafts)
        return cls(drafts, catch_up, np.zeros_like(plan.num_drafts), {})

    @classmethod
    def nothing(cls, plan: StepPlan) -> Asks:
        none = np.zeros_like(plan.num_drafts)
        return cls(none, none, none, {})


class Credits(NamedTuple):
    """Rows that were to draft, of a step whose result is not there yet: how many tokens, and for
    each drafter whose drafts they are."""

    slots: I32
    asked: I64
    owners: dict[str, I32]


class LookupSettings(NamedTuple):
    """Of a chain in which the device has the model; see `ChainDrafter`."""

    lookups: Mapping[str, Lookup]
    default: tuple[str, ...]
    model_price: float = 0.0


class DeviceModel(NamedTuple):
    """What the host knows of the draft on the device. It takes in `most_catch_up` tokens a step at
    most, and drafts up to `most_drafts` tokens. With `reads` it is a head, which is never behind.
    """

    context_tokens: int
    most_catch_up: int
    most_drafts: int
    reads: bool = False


class _NotedDrafter(ModelDrafter):
    """Notes what is asked of the draft on the device. `kv_len` is as last reported."""

    def __init__(self, model: DeviceModel) -> None:
        self.on_device, self.context_tokens = model, model.context_tokens

    def bind(self, table: InputBatch, num_blocks: int) -> None:
        super().bind(table, num_blocks)
        self.kv_len = np.zeros(table.max_slots, dtype=np.int64)
        self.drafts, self.catch_up = np.zeros((2, table.max_slots), dtype=np.int32)

    def begin(self) -> None:
        self.drafts[:] = self.catch_up[:] = 0

    def kv_lens(self, slots: NDArray[np.integer]) -> I64 | None:
        return self.kv_len[slots] if self.on_device.reads else None

    def propose(self, rows: DraftRows) -> Proposal:
        room = np.maximum(self.context_tokens + 1 - rows.num_tokens, 0)
        depths = np.minimum(np.minimum(rows.num_drafts, self.on_device.most_drafts), room)
        works = (depths > 0) | (rows.num_drafts == 0)
        self.drafts[rows.slots] = np.minimum(rows.num_drafts, self.on_device.most_drafts) * works
        self.catch_up[rows.slots] = rows.catch_up * works
        tokens = np.zeros((len(depths), int(depths.max(initial=0))), dtype=np.int64)
        return Proposal(tokens, depths, None, np.zeros(len(depths), dtype=np.bool_))


class _AheadLookup(LookupDrafter):
    """Looks up as much more as the step under way may emit, `ahead` by slot."""

    def __init__(self, lookup: Lookup) -> None:
        super().__init__(lookup)
        self.ahead: I64 = np.zeros(0, dtype=np.int64)
        self.found: dict[int, tuple[int, I32]] = {}

    def propose(self, rows: DraftRows) -> Proposal:
        ahead = self.ahead[rows.slots]
        deeper = (rows.num_drafts + ahead) * (rows.num_drafts > 0)
        proposal = super().propose(rows._replace(num_drafts=deeper))
        # A step under way emits a token at least.
        left = np.minimum(proposal.num_drafted - (ahead > 0), rows.num_drafts)
        left = np.maximum(left, 0)
        for i in left.nonzero()[0].tolist():
            guess = proposal.tokens[i, : proposal.num_drafted[i]].astype(np.int32)
            self.found[int(rows.slots[i])] = int(rows.num_tokens[i]), guess
        most = int(rows.num_drafts.max(initial=0))
        return proposal._replace(tokens=proposal.tokens[:, :most], num_drafted=left)


class HostDrafts:
    """The chains of all slots, over `table`: what the host knows of their tokens."""

    def __init__(
        self,
        settings: LookupSettings,
        table: InputBatch,
        num_blocks: int,
        model: DeviceModel | None,
    ) -> None:
        self._table = table
        self._model = None if model is None else _NotedDrafter(model)
        self._lookups = {name: _AheadLookup(each) for name, each in settings.lookups.items()}
        self._chain = ChainDrafter(
            model=self._model,
            lookups=self._lookups,
            default=settings.default,
            model_price=settings.model_price,
        )
        self._chain.bind(table, num_blocks)

    def reset(self) -> None:
        self._chain.reset()

    def take_in(self, deltas: Deltas) -> None:
        """Behind the table. Raises FieldError for a drafter that is not held."""
        for slot in deltas.released.tolist():
            self._chain.release(slot)
        for admission in deltas.new_sequences:
            self._chain.check(admission.params.drafter or ())
            self._chain.release(admission.slot)
            self._chain.admit(admission)

    def plan(self, plan: StepPlan, ahead: I64) -> Asks:
        """`ahead` by slot: tokens that the step under way may emit."""
        slots, known = plan.slots, self._table.num_tokens[plan.slots]
        room = self._table.max_total[slots] - known
        drafts = np.maximum(np.minimum(plan.num_drafts, room - 1), 0)
        catch_up = plan.catch_up * (drafts >= np.minimum(plan.num_drafts, 1))
        at = ((drafts > 0) | (catch_up > 0)).nonzero()[0]
        if not len(at):
            return Asks.nothing(plan)
        for lookup in self._lookups.values():
            lookup.ahead, lookup.found = ahead, {}
        if self._model is not None:
            self._model.begin()
            if self._model.on_device.reads:
                self._model.kv_len[slots] = known - 1
        rows = DraftRows(slots[at], known[at], drafts[at], catch_up[at])
        proposal = self._chain.propose(rows)
        guesses = {k: v for lookup in self._lookups.values() for k, v in lookup.found.items()}
        looked_up = np.array([slot in guesses for slot in slots.tolist()]) * drafts
        asks = Asks.nothing(plan)._replace(looked_up=looked_up.astype(np.int32), guesses=guesses)
        if self._model is not None:
            asks = self._of_model(plan, asks, ahead)
        drafted = rows.slots[proposal.num_drafted > 0]
        return asks._replace(credits=self._credits(drafted, drafts, slots))

    def _of_model(self, plan: StepPlan, asks: Asks, ahead: I64) -> Asks:
        """With what is asked of the model, as far as a step takes it in."""
        assert self._model is not None
        model, catch_up = self._model.drafts[plan.slots], self._model.catch_up[plan.slots]
        model = model * (asks.looked_up == 0)
        if self._model.on_device.reads:
            return asks._replace(model=model)
        made_up = catch_up > plan.catch_up  # by the chain, from what was known before
        more = ahead[plan.slots] * (model > 0) * self._chain.is_mixed(plan.slots)
        catch_up = catch_up + more.astype(np.int32)
        cost = catch_up + (model > 0)
        left = self._model.on_device.most_catch_up - int(cost[~made_up].sum())
        fits = ~made_up | ((cost * made_up).cumsum() <= left)
        return asks._replace(model=model * fits, catch_up=catch_up * fits)

    def _credits(self, drafted: I32, drafts: I64, slots: I32) -> Credits:
        by_slot = dict(zip(slots.tolist(), drafts.tolist(), strict=True))
        asked = np.array([by_slot[slot] for slot in drafted.tolist()], dtype=np.int64)
        owners = {
            name: np.array([s for s in drafted.tolist() if s in lookup.found], dtype=np.int32)
            for name, lookup in self._lookups.items()
        }
        if self._model is not None:
            looked_up = [slot for lookup in self._lookups.values() for slot in lookup.found]
            owners[MODEL] = drafted[~np.isin(drafted, looked_up)]
        return Credits(drafted, asked, owners)

    def learn(
        self, plan: StepPlan, asks: Asks, known: I64, num_drafted: I32, draft_kv: I32
    ) -> tuple[I32 | None, ShadowEvidence | None]:
        """After the result of a step, which the table has taken in: how far the draft's KV is
        valid, if that is not as planned, and how lookups would have done. `known` by row: tokens
        before it. Rows of the plan whose slot has another sequence by now do not count."""
        slots = plan.slots
        at = (self._table.generation[slots] == plan.generations).nonzero()[0]
        kv_lens = None
        if self._model is not None:
            self._model.kv_len[slots[at]] = draft_kv[at]
        if asks.credits is not None:
            if self._chain.kv_lens(slots) is not None:
                kv_lens = draft_kv.copy()
            self._chain.recall(slots[at], known[at], *asks.credits)
        drafts = None if asks.credits is None else num_drafted[at].astype(np.int64)
        shadow = self._chain.score(slots[at], drafts) if len(at) else None
        if shadow is not None:
            shadow = structs.replace(shadow, rows=at[shadow.rows].astype(np.int32))
        return kv_lens, shadow
