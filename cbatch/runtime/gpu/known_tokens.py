"""The host's copy of every slot's tokens, and the token masks of slots with a grammar."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import torch
from msgspec import structs
from numpy.typing import NDArray

from cbatch.core.scheduler.executor import errors_of_row
from cbatch.core.scheduler.plan import NewSequence, RowStatus, StepPlan
from cbatch.runtime.input_batch import InputBatch
from cbatch.runtime.model.arrays import I64, iota
from cbatch.runtime.sampling.logits_processors import LogitsProcessors
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
            logits = torch.zeros(count, self.vocab_size)
            with errors_of_row(slot, int(self.generation[slot])):
                dead_ends_of_row = self.logits_processors.shape_runs(
                    logits, slots[i : i + 1], iota(1), num_drafted[i : i + 1], drafts[i : i + 1]
                )
            if dead_ends_of_row:
                dead_ends[slot] = dead_ends_of_row[0]
            bits = np.packbits(logits.numpy() == 0, axis=1, bitorder="little")
            bytes_ = rows[start : start + count, 2:].view(np.uint8)
            bytes_[:, : bits.shape[1]] = bits
            start += count
        return Masks(rows, dead_ends)

    def end_dead_ends(self, plan: StepPlan, dead_ends: dict[int, int], rows: np.ndarray) -> None:
        """Correct the result `rows` (one per slot) of a step: a sequence that reached a dead end
        has emitted nothing, in this step and in later ones."""
        for slot, depth in dead_ends.items():
            if rows[slot, fields.EMITTED] and rows[slot, fields.ACCEPTED] >= depth:
                self.failed[slot] = RowStatus.NO_TOKEN
        at = (self.generation[plan.slots] == plan.generations) & (self.failed[plan.slots] > 0)
        for slot in plan.slots[at].tolist():
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
