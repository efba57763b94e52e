"""The recorder of a model's hidden states at every token that an engine reads or writes."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from cbatch.core.scheduler.plan import NewSequence
from cbatch.runtime.drafting.contract import Drafter, DraftRows, Proposal, StepStates


class Recorder(Drafter):
    """A drafter that drafts nothing. It calls `keep(tokens, num_prompt_tokens, states)` for each
    sequence that ends: int32 [n], and bf16 [n - 1, layers, hidden_size] of all positions but the
    last, which no pass has read. A preempted sequence is kept up to its preemption; a sequence that
    starts with a prefix hit is left out."""

    def __init__(
        self, layers: tuple[int, ...], keep: Callable[[Tensor, int, Tensor], None]
    ) -> None:
        self.hidden_layers = layers
        self._keep = keep
        self._prompts: dict[int, int] = {}
        self._states: dict[int, list[Tensor]] = {}

    def reset(self) -> None:
        self._states.clear()

    def admit(self, admission: NewSequence) -> None:
        is_uncached = admission.kv_len_tokens == 0
        if is_uncached and len(admission.tokens) == admission.num_prompt_tokens:
            self._prompts[admission.slot] = admission.num_prompt_tokens
            self._states[admission.slot] = []

    def release(self, slot: int) -> None:
        parts = self._states.pop(slot, None)
        if not parts:
            return
        states = torch.cat(parts)
        tokens = torch.from_numpy(self.table.tokens[slot, : len(states) + 1].copy()).int()
        self._keep(tokens, self._prompts[slot], states)

    def close(self) -> None:
        """Keep the sequences that have not been released."""
        for slot in list(self._states):
            self.release(slot)

    def read_states(self, states: StepStates) -> None:
        parts = states.hidden.bfloat16().split(states.lens.tolist())
        for slot, part in zip(states.slots.tolist(), parts, strict=True):
            if slot in self._states:
                self._states[slot].append(part)

    def propose(self, rows: DraftRows) -> Proposal:
        raise AssertionError("this drafter only records and never drafts")
