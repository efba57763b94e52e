"""Executors whose target model is a recorded text. They emit its tokens, and accept drafts that are
equal to them. Slots, drafters and results are those of the CPU's executor.

A token depends on its request alone, not on the batch or on k. Greedy and coupled verification
accept a draft if and only if it is the token that the target chooses. A lookup chooses its drafts
with certainty. Rejection sampling then accepts a draft if and only if it is the emitted token,
because the residual excludes a rejected draft. For a model's drafts that are verified by rejection
this is not enough: `RerunExecutor` then verifies them by the target's own logits.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

import numpy as np
from msgspec.structs import replace
from numpy.typing import NDArray

from cbatch.core.scheduler.config import SchedulerConfig
from cbatch.core.scheduler.plan import Deltas, NewSequence, StepPlan, StepResult
from cbatch.engine.prices.meter import StepMeter
from cbatch.runtime.cpu.decoder import Model
from cbatch.runtime.cpu.executor import TorchExecutor
from cbatch.runtime.cpu.verify import Verified
from cbatch.runtime.drafting.contract import Drafter, DraftRows, ModelDrafter, Proposal
from cbatch.runtime.input_batch import InputBatch
from cbatch.runtime.kv_cache import KVCache
from cbatch.runtime.model.arrays import I64, iota
from sim.advise.recording import RecordedText
from sim.advise.speed import RecordedSpeed
from sim.cost.base import CostModel
from sim.executor.acceptance import leading

_SPARE_TOKENS = 64  # columns after the longest text, for drafts past its end
Texts = Mapping[str, RecordedText]


class Fates(NamedTuple):
    """Outcomes of a drafter at the largest k, by position of an output, uint8: its number of
    drafts, and how many of them are accepted. A smaller k cuts both."""

    drafted: np.ndarray
    accepted: np.ndarray


class TextExecutor(TorchExecutor):
    """Executor that knows the text of every request, by its id."""

    def __init__(self, texts: Texts, config: SchedulerConfig, drafter: Drafter | None) -> None:
        # Not the base's: there is no model, and no KV.
        self.table = InputBatch(config.max_num_seqs, config.block_size, config.vocab_size)
        self.drafter, self._hidden = drafter, None
        self._texts, self._names = texts, [""] * config.max_num_seqs
        self._answers = np.zeros((config.max_num_seqs, 0), np.int64)  # texts by slot
        if drafter is not None:
            drafter.bind(self.table, config.num_blocks)

    def _apply(self, deltas: Deltas) -> None:
        super()._apply(deltas)
        for admission in deltas.new_sequences:
            slot, text = admission.slot, self._texts[admission.request_id]
            tokens = (*text.request.prompt, *text.output)
            missing = len(tokens) + _SPARE_TOKENS - self._answers.shape[1]
            if missing > 0:
                self._answers = np.pad(self._answers, ((0, 0), (0, missing)))
            self._names[slot] = admission.request_id
            self._answers[slot, : len(tokens)] = tokens

    def _forward(self, rows: Any, proposal: Proposal | None) -> tuple[Verified | None, list[Any]]:
        at = rows.wants.nonzero()[0]
        if not len(at):
            return None, []
        accepted, depth = np.zeros(len(at), np.int64), 0
        if proposal is not None:
            depth = proposal.tokens.shape[1]
        tokens = self._answers[rows.slots[at][:, None], rows.known[at][:, None] + iota(depth + 1)]
        if proposal is not None:
            equal = proposal.tokens[at] == tokens[:, :-1]
            accepted = leading(equal, proposal.num_drafted[at]).astype(np.int64)
        return Verified(tokens, accepted, np.zeros(len(at), np.uint8), []), []


class RerunExecutor(TextExecutor):
    """Executor that emits one token a step, and notes the fate of the drafts at each position. With
    the target `model` they are verified by its logits, else by the text."""

    def __init__(
        self, texts: Texts, config: SchedulerConfig, drafter: Drafter, model: Model | None
    ) -> None:
        super().__init__(texts, config, drafter)
        self.model = model
        if model is not None:
            sizes = config.num_blocks, config.block_size
            self.kv = KVCache(model.config, *sizes, model.dtype, model.device)
            model.keep_hidden(drafter.hidden_layers)
        self.fates = {
            name: Fates(*np.zeros((2, len(text.output)), np.uint8)) for name, text in texts.items()
        }

    def _forward(self, rows: Any, proposal: Proposal | None) -> tuple[Verified | None, list[Any]]:
        verified, _ = super()._forward(rows, proposal)
        real = verified if self.model is None else TorchExecutor._forward(self, rows, proposal)[0]
        if verified is None or real is None:
            return None, []
        if proposal is not None:
            at = rows.wants.nonzero()[0]
            columns = rows.slots[at], rows.known[at], proposal.num_drafted[at], real.num_accepted
            for slot, known, drafted, accepted in zip(*(c.tolist() for c in columns), strict=True):
                name = self._names[slot]
                position = known - len(self._texts[name].request.prompt)
                fates = self.fates[name]
                fates.drafted[position], fates.accepted[position] = drafted, accepted
        return verified._replace(
            tokens=verified.tokens[:, :1], num_accepted=0 * real.num_accepted
        ), []


class RecordedDrafts(ModelDrafter):
    """A draft model, or a head, whose drafts have the fates of a rerun. Its KV lags and catches up
    as that of `DraftModel`; that of a head never lags."""

    def __init__(
        self, fates: Mapping[str, Fates], texts: Texts, context_tokens: int, is_head: bool
    ) -> None:
        self._fates, self._texts = fates, texts
        self.context_tokens = context_tokens
        self.hidden_layers = (0,) if is_head else ()

    def bind(self, table: InputBatch, num_blocks: int) -> None:
        super().bind(table, num_blocks)
        self.kv_len = np.zeros(table.max_num_seqs, np.int64)
        self._names = [""] * table.max_num_seqs

    def admit(self, admission: NewSequence) -> None:
        super().admit(admission)
        self._names[admission.slot] = admission.request_id

    def kv_lens(self, slots: NDArray[np.integer]) -> I64 | None:
        return self.table.kv_len[slots] if self.hidden_layers else None

    def propose(self, rows: DraftRows) -> Proposal:
        slots, known = rows.slots, rows.num_tokens
        depths = np.maximum(np.minimum(rows.num_drafts, self.context_tokens + 1 - known), 0)
        if not self.hidden_layers:
            missing = known - self.kv_len[slots]
            depths *= missing <= rows.catch_up + 1
            self.kv_len[slots] += np.minimum(rows.catch_up, missing - 1) * (rows.num_drafts == 0)
        tokens = np.zeros((len(slots), int(depths.max(initial=0))), np.int64)
        drafted = np.zeros(len(slots), np.int64)
        for row in depths.nonzero()[0].tolist():
            name = self._names[slots[row]]
            text, fates = self._texts[name], self._fates[name]
            first = int(known[row]) - len(text.request.prompt)
            count = min(int(depths[row]), int(fates.drafted[first]))
            equal, accepted = text.output[first : first + count], int(fates.accepted[first])
            tokens[row, : len(equal)] = equal
            if accepted < count:  # any other token is rejected
                tokens[row, accepted] = (tokens[row, accepted] + 1) % self.table.vocab_size
            drafted[row] = count
            self.kv_len[slots[row]] = known[row] - 1 + count
        return Proposal(tokens, drafted, None, np.zeros(len(slots), np.bool_))


class PricedExecutor:
    """A text executor whose results have the durations of a cost model."""

    def __init__(
        self,
        executor: TextExecutor,
        config: SchedulerConfig,
        cost: CostModel,
        speed: RecordedSpeed | None = None,
    ) -> None:
        """With a `speed`, a step is as slow as the recorded steps of its time were."""
        self._meter, self._cost = StepMeter(executor, config.max_num_seqs), cost
        self._speed, self._now_s = speed, 0.0
        self.host_s = 0.0  # of the last step

    def idle(self, seconds: float) -> None:
        self._meter.idle(seconds)
        self._now_s += seconds

    def run(self, plan: StepPlan) -> StepResult:
        result = self._meter.run(plan)
        parts_s = self._cost.step_s(self._meter.last.work)
        step_s = price_s = sum(parts_s)
        if self._speed is not None:
            step_s = self._speed.end_s(self._now_s, price_s) - self._now_s
        self._now_s += step_s
        draft_s, target_s, self.host_s = (part_s * step_s / price_s for part_s in parts_s)
        return replace(result, draft_s=draft_s, target_s=target_s)
