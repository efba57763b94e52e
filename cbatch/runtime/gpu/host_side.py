"""The host's part of a step, where it follows the tokens: lookups and grammars. Without either it
keeps nothing."""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np

from cbatch.core.scheduler.plan import Deltas, ShadowEvidence, StepPlan
from cbatch.runtime.gpu.host_drafts import I32, Asks, DeviceModel, HostDrafts
from cbatch.runtime.gpu.known_tokens import KnownTokens
from cbatch.runtime.model.arrays import I64
from triton_kernels.slots import advance as fields


class HostSide:
    """`known` where lookups or grammars are, `chains` where lookups are, `model` where the device
    has one."""

    def __init__(
        self, known: KnownTokens | None, chains: HostDrafts | None, model: DeviceModel | None
    ) -> None:
        self.known, self.chains, self._model = known, chains, model

    def forget(self) -> None:
        if self.known is not None:
            self.known.clear()
        if self.chains is not None:
            self.chains.reset()

    def take_in(self, deltas: Deltas) -> None:
        """Raises FieldError for a request that cannot be served here."""
        if deltas.reset:
            self.forget()
        if self.known is not None:
            for slot in deltas.released.tolist():
                self.known.release(slot)
            for admission in deltas.new_sequences:
                self.known.admit(admission)
        if self.chains is not None:
            self.chains.take_in(deltas)

    def asks(self, plan: StepPlan, under_way: Iterable[StepPlan]) -> Asks:
        if self.chains is None:
            return Asks.nothing(plan) if self._model is None else Asks.of_model(plan, self._model)
        assert self.known is not None
        ahead: I64 = np.zeros(self.known.max_slots, dtype=np.int64)
        for before in under_way:
            stays = self.known.generation[before.slots] == before.generations
            ahead[before.slots] = stays * before.wants_logits * (1 + before.num_drafts)
        return self.chains.plan(plan, ahead)

    def masked(self, plan: StepPlan) -> I32:
        """Slots whose tokens follow a grammar, of those that decide some."""
        return plan.slots[:0] if self.known is None else self.known.masked(plan)

    def learn(
        self, plan: StepPlan, asks: Asks, rows: np.ndarray
    ) -> tuple[I32 | None, ShadowEvidence | None]:
        """From the result of a step, a row for each of the plan, as `advance` packs it. Returns
        `draft_kv_lens` and `shadow` of a `StepResult`."""
        drafted, draft_kv = rows[:, fields.DRAFTED], rows[:, fields.DRAFT_KV]
        # Of a head it is known after every step, whoever drafted.
        kv_lens = draft_kv.copy() if self._model is not None and self._model.reads else None
        if self.known is None:
            return kv_lens, None
        before = self.known.num_tokens[plan.slots]
        tokens = rows[:, fields.NUM_FIELDS :].astype(np.int64)
        self.known.advance(plan, tokens, rows[:, fields.EMITTED])
        if self.chains is None:
            return kv_lens, None
        found, shadow = self.chains.learn(plan, asks, before, drafted, draft_kv)
        return found if kv_lens is None else kv_lens, shadow
