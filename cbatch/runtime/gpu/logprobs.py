"""Log probabilities: what few requests ask for, computed eagerly behind the step.

Nothing here waits for the device: what it computes comes in a copy of its own, and is looked at
when the step is waited for. Those of what filters and penalties leave the host computes then, from
the step's logits: penalties follow tokens that are known by then.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from cbatch.core.request.logprobs import TokenLogprobs
from cbatch.core.request.request import SamplingParams
from cbatch.core.scheduler.plan import Deltas, NewSequence, StepPlan
from cbatch.runtime.cpu.filters import Filters, filtered_logits
from cbatch.runtime.gpu.decoder import Decoder
from cbatch.runtime.gpu.device import Device
from cbatch.runtime.gpu.target_pass import TargetPass
from cbatch.runtime.model.arrays import I64
from cbatch.runtime.sampling.logits_processors import ProcessorChain, processors_of
from cbatch.runtime.sampling.logprobs import LogprobRequest, LogprobRequests, describe, pack, unpack
from cbatch.runtime.sampling.structured import GrammarSource
from triton_kernels.slots import advance as fields
from triton_kernels.slots.state import SlotState

PROMPT_ROWS = 128  # logits of so many prompt tokens at a time


class _Processed(NamedTuple):
    """Whose log probabilities follow penalties and filters."""

    params: SamplingParams
    chain: ProcessorChain


class _Asked(NamedTuple):
    """Rows of one sequence, on their way to the host. Of a prompt `position` is known; else it is
    that of the first token emitted, whose number the device tells: `known` tokens after the step,
    and how many of the rows count, it emitted."""

    slot: int
    num_top: int
    host: Tensor  # packed int32 [T, 1 + 2 n], or the logits fp32 [T, V]
    known: Tensor  # int32 [1]
    position: int | None
    processed: _Processed | None


class LogprobsReader:
    def __init__(
        self,
        decoder: Decoder,
        target: TargetPass,
        state: SlotState,
        grammars: GrammarSource | None = None,
    ) -> None:
        self._decoder, self._target, self._state = decoder, target, state
        self._grammars = grammars
        self.clear()

    def clear(self) -> None:
        self._asks = LogprobRequests()
        self._processed: dict[int, _Processed] = {}
        self._computed: dict[int, int] = {}  # tokens of prompts that are asked for
        self._kept: dict[int, Tensor] = {}  # logits of a slot as they were before masks

    def take_in(self, deltas: Deltas) -> None:
        if deltas.reset:
            self.clear()
        for slot in deltas.released.tolist():
            self._release(slot)
        for admission in deltas.new_sequences:
            self._release(admission.slot)
            self._admit(admission)

    def keep(self, plan: StepPlan, slots: NDArray[np.int32]) -> None:
        """Tokens are about to be forbidden in the logits of these slots."""
        counts = dict(zip(plan.slots.tolist(), plan.num_drafts.tolist(), strict=True))
        for slot in slots.tolist():
            if slot in self._asks.outputs:
                self._kept[slot] = self._logits(slot, 1 + counts[slot])

    def queue(self, plan: StepPlan, device: Device) -> tuple[_Asked, ...]:
        """Behind the step that was queued last: what its sequences ask for."""
        asks = self._asks
        if not (asks.outputs or asks.prompts):
            return ()
        prompts, outputs = [], []
        num_new_tokens = plan.query_lens - plan.num_drafts
        for slot, count, drafts, wants in zip(
            plan.slots.tolist(),
            num_new_tokens.tolist(),
            plan.num_drafts.tolist(),
            plan.wants_logits.tolist(),
            strict=True,
        ):
            ask = asks.prompts.get(slot)
            if ask is not None and count > wants:
                prompts.append(self._queue_prompt(slot, count - wants, ask, device))
            if wants:
                asks.prompts.pop(slot, None)
                if slot in asks.outputs:
                    outputs.append(self._queue_output(slot, 1 + drafts, device))
        return *prompts, *outputs

    def describe(self, asked: tuple[_Asked, ...], result: np.ndarray) -> tuple[TokenLogprobs, ...]:
        """Of a step that has been waited for; `result` by slot, as `advance` packs it."""
        found = []
        for each in asked:
            if each.position is not None:
                found.append(unpack(each.slot, each.position, each.host.numpy()))
                continue
            emitted = int(result[each.slot, fields.EMITTED])
            if not emitted:
                continue
            rows, first = each.host[:emitted], int(each.known) - emitted
            if each.processed is None:
                found.append(unpack(each.slot, first, rows.numpy()))
                continue
            tokens = result[each.slot, fields.NUM_FIELDS :][:emitted].astype(np.int64)
            logits = _shaped(rows.clone(), tokens, each.processed)
            found.append(describe(each.slot, first, logits, tokens, each.num_top))
        return tuple(found)

    def _admit(self, a: NewSequence) -> None:
        self._asks.admit(a)
        if a.slot in self._asks.prompts:
            self._computed[a.slot] = 0
        ask = self._asks.outputs.get(a.slot)
        if ask is not None and ask.processed:
            prompt = a.tokens[: a.num_prompt_tokens].tolist()
            vocab = self._decoder.config.vocab_size
            chain = processors_of(a.params, a.stop_ids, prompt, vocab, self._grammars)
            for token in a.tokens[a.num_prompt_tokens :].tolist():
                chain.advance(token)
            self._processed[a.slot] = _Processed(a.params, chain)

    def _release(self, slot: int) -> None:
        self._asks.release(slot)
        self._processed.pop(slot, None)
        self._computed.pop(slot, None)

    def _queue_prompt(self, slot: int, count: int, ask: LogprobRequest, device: Device) -> _Asked:
        """Of the prompt tokens that the first `count` rows of a chunk predict."""
        start = self._computed[slot]
        self._computed[slot] = start + count
        begin = self._target.layout.query_starts[slot]
        tokens = self._state.tokens[slot, start + 1 : start + 1 + count].long()
        parts = []
        for at in range(0, count, PROMPT_ROWS):
            stop = min(at + PROMPT_ROWS, count)
            rows = begin + torch.arange(at, stop, dtype=torch.int32, device=begin.device)
            logits = self._target.logits.new_empty(len(rows), self._decoder.config.vocab_size)
            self._decoder.logits(self._target.hidden, rows, logits)
            parts.append(pack(logits.float(), tokens[at:stop], ask.num_top))
        return self._fetched(slot, ask, torch.cat(parts), device)._replace(position=start + 1)

    def _queue_output(self, slot: int, count: int, device: Device) -> _Asked:
        """Of as many tokens as the step may emit."""
        target, ask = self._target, self._asks.outputs[slot]
        logits = self._kept.pop(slot, None)
        if logits is None:
            logits = self._logits(slot, count)
        if slot not in self._processed:
            tokens = target.result[slot, fields.NUM_FIELDS :][:count].long()
            tokens.clamp_(0, logits.shape[1] - 1)  # what was not emitted is any number
            logits = pack(logits, tokens, ask.num_top)
        return self._fetched(slot, ask, logits, device)

    def _logits(self, slot: int, count: int) -> Tensor:
        """Of the first `count` rows of a slot: fp32 [count, V], a copy."""
        target = self._target
        each = torch.arange(count, dtype=torch.int32, device=target.logits.device)
        rows = (target.layout.logit_starts[slot] + each).clamp_(max=target.most_logits - 1)
        return target.logits.index_select(0, rows).float()

    def _fetched(self, slot: int, ask: LogprobRequest, found: Tensor, device: Device) -> _Asked:
        host = device.staging(found.numel()).view(found.dtype).view(found.shape)
        known = device.staging(1)
        device.fetch(found, host)
        device.fetch(self._state.num_tokens[slot : slot + 1], known)
        return _Asked(slot, ask.num_top, host, known, None, self._processed.get(slot))


def _shaped(x: Tensor, tokens: I64, processed: _Processed) -> Tensor:
    """What the distribution that is sampled from has instead of logits [T, V]; each follows the
    tokens before it."""
    params, chain = processed
    for row, token in zip(x, tokens.tolist(), strict=True):
        chain.shape(row)
        chain.advance(token)

    def each(value: float, dtype: torch.dtype) -> Tensor:
        return torch.full((len(x),), value, dtype=dtype)

    return filtered_logits(
        x,
        Filters(
            each(params.logits_divisor, torch.float32),
            None if params.top_k is None else each(params.top_k, torch.int64),
            each(params.top_p, torch.float32) if params.top_p < 1 else None,
            each(params.min_p, torch.float32) if params.min_p else None,
        ),
    )
