"""Log probabilities: what few requests ask for, computed eagerly behind the step.

These wait for the device, and read from it what they need.
"""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from cbatch.core.request.logprobs import TokenLogprobs
from cbatch.core.request.request import SamplingParams
from cbatch.core.scheduler.plan import Deltas, NewSequence, StepPlan
from cbatch.runtime.cpu.filters import Filters, filtered_logits
from cbatch.runtime.gpu.decoder import Decoder
from cbatch.runtime.gpu.target_pass import TargetPass
from cbatch.runtime.model.arrays import I64
from cbatch.runtime.sampling.logits_processors import ProcessorChain, processors_of
from cbatch.runtime.sampling.logprobs import LogprobRequest, LogprobRequests, describe
from triton_kernels.slots import advance as fields
from triton_kernels.slots.state import SlotState

_PROMPT_ROWS = 128  # logits of so many prompt tokens at a time


class LogprobsReader:
    def __init__(self, decoder: Decoder, target: TargetPass, state: SlotState) -> None:
        self._decoder, self._target, self._state = decoder, target, state
        self.clear()

    def clear(self) -> None:
        self._asks = LogprobRequests()
        self._params: dict[int, SamplingParams] = {}  # of the slots that ask for processed ones
        self._chains: dict[int, ProcessorChain] = {}
        self._prompts: dict[int, I64] = {}

    def take_in(self, deltas: Deltas) -> None:
        if deltas.reset:
            self.clear()
        for slot in deltas.released.tolist():
            self._release(slot)
        for admission in deltas.new_sequences:
            self._release(admission.slot)
            self._admit(admission)

    def asked(self, plan: StepPlan) -> bool:
        asks = self._asks
        if not (asks.outputs or asks.prompts):
            return False
        return any(slot in asks.outputs or slot in asks.prompts for slot in plan.slots.tolist())

    def describe(self, plan: StepPlan, result: np.ndarray) -> tuple[TokenLogprobs, ...]:
        """Of the step that has just run; `result` by slot, as `advance` packs it."""
        found = []
        num_new_tokens = plan.query_lens - plan.num_drafts
        for slot, count, wants in zip(
            plan.slots.tolist(), num_new_tokens.tolist(), plan.wants_logits.tolist(), strict=True
        ):
            ask = self._asks.prompts.get(slot)
            if ask is not None and count > wants:
                found.append(self._describe_prompt(slot, count - wants, ask))
            if wants:
                self._asks.prompts.pop(slot, None)
        num_tokens = self._state.num_tokens.cpu()
        starts = self._target.layout.logit_starts.cpu()
        for slot in plan.slots.tolist():
            ask = self._asks.outputs.get(slot)
            emitted = int(result[slot, fields.EMITTED])
            if ask is None or not emitted:
                continue
            tokens = result[slot, fields.NUM_FIELDS :][:emitted].astype(np.int64)
            start = int(starts[slot])
            x = self._target.logits[start : start + emitted].float()
            if ask.processed:
                x = self._processed(slot, x, tokens)
            known = int(num_tokens[slot]) - emitted
            found.append(describe(slot, known, x, tokens, ask.num_top))
        return tuple(found)

    def _admit(self, a: NewSequence) -> None:
        self._asks.admit(a)
        if a.slot in self._asks.prompts:
            self._prompts[a.slot] = a.tokens.astype(np.int64)
        ask = self._asks.outputs.get(a.slot)
        if ask is not None and ask.processed:
            prompt = a.tokens[: a.num_prompt_tokens].tolist()
            vocab = self._decoder.config.vocab_size
            chain = processors_of(a.params, a.stop_ids, prompt, vocab)
            for token in a.tokens[a.num_prompt_tokens :].tolist():
                chain.advance(token)
            self._params[a.slot], self._chains[a.slot] = a.params, chain

    def _release(self, slot: int) -> None:
        self._asks.release(slot)
        for held in (self._params, self._chains, self._prompts):
            held.pop(slot, None)

    def _describe_prompt(self, slot: int, count: int, ask: LogprobRequest) -> TokenLogprobs:
        """Of the prompt tokens that the first `count` rows of a chunk predict."""
        layout = self._target.layout
        begin, end = layout.query_starts[slot : slot + 2].tolist()
        start = int(layout.contexts[slot]) - (end - begin)
        tokens = self._prompts[slot][start + 1 : start + 1 + count]
        parts = []
        for at in range(0, count, _PROMPT_ROWS):
            stop = min(at + _PROMPT_ROWS, count)
            rows = torch.arange(
                begin + at, begin + stop, dtype=torch.int32, device=self._decoder.device
            )
            logits = self._target.logits.new_empty(len(rows), self._decoder.config.vocab_size)
            self._decoder.logits(self._target.hidden, rows, logits)
            first = start + 1 + at
            parts.append(describe(slot, first, logits.float(), tokens[at:stop], ask.num_top))
        return TokenLogprobs(
            slot=slot,
            first_position=start + 1,
            chosen=np.concatenate([part.chosen for part in parts]),
            top_ids=np.concatenate([part.top_ids for part in parts]),
            top=np.concatenate([part.top for part in parts]),
        )

    def _processed(self, slot: int, x: Tensor, tokens: I64) -> Tensor:
        """What the distribution that is sampled from has instead of logits [T, V]; each follows the
        tokens before it."""
        chain, params = self._chains[slot], self._params[slot]
        for row, token in zip(x, tokens.tolist(), strict=True):
            chain.shape(row)
            chain.advance(token)

        def each(value: float, dtype: torch.dtype) -> Tensor:
            return torch.full((len(x),), value, dtype=dtype, device=x.device)

        return filtered_logits(
            x,
            Filters(
                each(params.logits_divisor, torch.float32),
                None if params.top_k is None else each(params.top_k, torch.int64),
                each(params.top_p, torch.float32) if params.top_p < 1 else None,
                each(params.min_p, torch.float32) if params.min_p else None,
            ),
        )
