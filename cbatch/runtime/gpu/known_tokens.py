"""What the host knows of every slot: its tokens, and which may follow where there is a grammar."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import torch
from msgspec import structs
from numpy.typing import NDArray

from cbatch.core.scheduler.plan import NewSequence, RowStatus, StepPlan
from cbatch.runtime.cpu.input_batch import InputBatch
from cbatch.runtime.model.arrays import I64, iota
from cbatch.runtime.sampling.logits_processors import LogitsProcessors
from cbatch.runtime.sampling.structured import GrammarSource

I32 = NDArray[np.int32]


class Masks(NamedTuple):
    """Of rows of logits: row i is that of slot `rows[i, 0]` behind `rows[i, 1]` drafts, and bit
    j % 32 of word 2 + j // 32 says whether token j may follow. `dead_ends`: slots with a row that
    no token may follow, and behind how many drafts; nothing is masked there."""

    rows: I32
    dead_ends: dict[int, int]


class _Grammars(LogitsProcessors):
    """Of requests with a structured output what forbids tokens; the rest is the device's."""

    def admit(self, a: NewSequence) -> None:
        if a.params.structured_outputs is None:
            return
        neutral = {"logit_bias": {}, "repetition_penalty": 1.0}
        neutral |= {"presence_penalty": 0.0, "frequency_penalty": 0.0}
        super().admit(structs.replace(a, params=structs.replace(a.params, **neutral)))


class KnownTokens(InputBatch):
    """As of the last result; a step under way may know more. A sequence that came to where no token
    may follow has `failed`."""

    def __init__(
        self,
        max_slots: int,
        block_size_tokens: int,
        vocab_size: int,
        grammars: GrammarSource | None,
    ) -> None:
        self._source = grammars
        super().__init__(max_slots, block_size_tokens, vocab_size, grammars)

    def clear(self) -> None:
        super().clear()
        self.logits_processors = _Grammars(self.max_slots, self.vocab_size, self._source)

    def masked(self, plan: StepPlan) -> I32:
        """Slots of the plan whose logits are masked."""
        slots = plan.slots[plan.wants_logits]
        return slots[self.logits_processors.active[slots] & (self.failed[slots] == 0)]

    def masks(self, slots: I32, num_drafted: I64, drafts: I64) -> Masks:
        """For the rows of these slots, behind each of their `drafts` [S, most]."""
        words = -(-self.vocab_size // 32)
        counts = num_drafted + 1
        rows = np.zeros((int(counts.sum()), 2 + words), dtype=np.int32)
        rows[:, 0] = slots.repeat(counts)
        rows[:, 1] = iota(len(rows)) - (counts.cumsum() - counts).repeat(counts)
        dead_ends, start = {}, 0
        for i, (slot, count) in enumerate(zip(slots.tolist(), counts.tolist(), strict=True)):
            logits = torch.zeros(count, self.vocab_size)
            found = self.logits_processors.shape_runs(
                logits, slots[i : i + 1], iota(1), num_drafted[i : i + 1], drafts[i : i + 1]
            )
            if found:
                dead_ends[slot] = found[0]
            bits = np.packbits(logits.numpy() == 0, axis=1, bitorder="little")
            bytes_ = rows[start : start + count, 2:].view(np.uint8)
            bytes_[:, : bits.shape[1]] = bits
            start += count
        return Masks(rows, dead_ends)

    def fail(self, slots: I32) -> None:
        """No token may follow there."""
        self.failed[slots] = RowStatus.NO_TOKEN

    def advance(self, plan: StepPlan, tokens: I64, emitted: I64) -> None:
        """The rows of a plan emitted `tokens[i, : emitted[i]]`; whoever left its slot is passed
        over."""
        at = (self.generation[plan.slots] == plan.generations) & (emitted > 0)
        slots, tokens, emitted = plan.slots[at], tokens[at], emitted[at]
        known = self.num_tokens[slots]
        # One that reached its end on the host may have gone on, on the device.
        emitted = np.minimum(emitted, np.maximum(self.max_total[slots] - known, 0))
        row, depth = (iota(tokens.shape[1]) < emitted[:, None]).nonzero()
        self.tokens[slots[row], known[row] + depth] = tokens[row, depth]
        self.num_tokens[slots] = known + emitted
        if self.logits_processors.num_active:
            self.logits_processors.advance(slots, tokens, emitted)
