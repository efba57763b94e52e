"""The host's part of a step: lookups and grammars. Without them it keeps no tokens."""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np

from cbatch.core.request.request import SamplingParams
from cbatch.core.scheduler.executor import errors_of_row
from cbatch.core.scheduler.plan import Deltas, StepPlan
from cbatch.runtime.gpu.host_drafts import (
    I32,
    DeviceModel,
    DraftPlan,
    HostDrafts,
    LookupSettings,
)
from cbatch.runtime.gpu.known_tokens import KnownTokens
from cbatch.runtime.gpu.memory import StepLimits
from cbatch.runtime.model.arrays import I64
from cbatch.runtime.sampling.logits_processors import require_grammars
from cbatch.runtime.sampling.structured import GrammarSource
from triton_kernels.slots import advance as fields


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
