"""Log probabilities, which few requests need: they are computed after the step, without a graph.

Nothing here waits for the device. The values are copied to the host, which reads them together with
the step's result. Log probabilities after penalties and filters are computed on the host, from the
step's logits, because penalties depend on the tokens that the step emitted.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from cbatch.core.request.logprobs import TokenLogprobs
from cbatch.core.request.request import SamplingParams
from cbatch.core.scheduler.executor import errors_of_row
from cbatch.core.scheduler.plan import Deltas, NewSequence, StepPlan
from cbatch.runtime.gpu.decoder import Decoder
from cbatch.runtime.gpu.device import Device
from cbatch.runtime.gpu.target_pass import TargetPass
from cbatch.runtime.model.arrays import I64, iota
from cbatch.runtime.sampling.filters import Filters, filtered_logits
from cbatch.runtime.sampling.logits_processors import ProcessorChain, processors_of
from cbatch.runtime.sampling.logprobs import LogprobRequest, LogprobRequests, describe, pack, unpack
from cbatch.runtime.sampling.structured import GrammarSource
from triton_kernels.slots import advance as fields
from triton_kernels.slots.state import SlotState

PROMPT_ROWS = 128  # prompt tokens whose logits are in memory at a time


class _Processed(NamedTuple):
    """Parameters of a sequence whose log probabilities are taken after penalties and filters."""

    params: SamplingParams
    chain: ProcessorChain


class _Copy(NamedTuple):
    """Rows of one sequence that are being copied to the host.

    Prompt rows begin at `position`. For output rows it is None: the result has the number of
    emitted tokens, and `known` the sequence's length after the step, from which the position
    follows."""

    slot: int
    num_top: int
    host: Tensor  # packed int32 [T, 1 + 2 n], or the logits fp32 [T, V]
    known: Tensor  # int32 [1]
    position: int | None
    processed: _Processed | None


class LogprobsReader:
    """Queues the log probabilities that a step's sequences request, and reads them afterwards."""

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
        self._computed: dict[int, int] = {}  # by slot: prompt tokens computed so far
        self._kept: dict[int, Tensor] = {}  # by slot: logits before penalties and masks

    def apply_deltas(self, deltas: Deltas) -> None:
        if deltas.reset:
            self.clear()
        for slot in deltas.released.tolist():
            self._release(slot)
        for admission in deltas.new_sequences:
            with errors_of_row(admission.slot, admission.generation):
                self._release(admission.slot)
                self._admit(admission)

    @property
    def reads_outputs(self) -> bool:
        """True if a sequence requests log probabilities of its output."""
        return bool(self._asks.outputs)

    def keep(self, plan: StepPlan, slots: NDArray[np.int32]) -> None:
        """Copy the logits of these slots, before masks or penalties change them."""
        counts = dict(zip(plan.slots.tolist(), plan.num_drafts.tolist(), strict=True))
        for slot in slots.tolist():
            if slot in self._asks.outputs:
                self._kept[slot] = self._logits(slot, 1 + counts[slot])

    def queue(self, plan: StepPlan, device: Device) -> tuple[_Copy, ...]:
        """Queue the log probabilities of the step that was queued last; pass the copies to
        `describe` once that step has been waited for."""
        asks = self._asks
        if not (asks.outputs or asks.prompts):
            return ()
        prompts, outputs = [], []
        together: dict[int, dict[int, int]] = {}  # by `num_top`: rows by slot
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
                if slot in self._kept or slot in self._processed:
                    outputs.append(self._queue_output(slot, 1 + drafts, device))
                elif slot in asks.outputs:
                    together.setdefault(asks.outputs[slot].num_top, {})[slot] = 1 + drafts
        for num_top, counts in together.items():
            outputs += self._queue_together(counts, num_top, device)
        places = {slot: place for place, slot in enumerate(plan.slots.tolist())}
        outputs.sort(key=lambda copy: places[copy.slot])
        return *prompts, *outputs

    def describe(self, copies: tuple[_Copy, ...], result: np.ndarray) -> tuple[TokenLogprobs, ...]:
        """Return the log probabilities of a step that has been waited for. `result` has a row for
        each slot, packed by `triton_kernels.slots.advance`."""
        logprobs = []
        for copy in copies:
            if copy.position is not None:
                logprobs.append(unpack(copy.slot, copy.position, copy.host.numpy()))
                continue
            emitted = int(result[copy.slot, fields.EMITTED])
            if not emitted:
                continue
            rows, first = copy.host[:emitted], int(copy.known) - emitted
            if copy.processed is None:
                logprobs.append(unpack(copy.slot, first, rows.numpy()))
                continue
            tokens = result[copy.slot, fields.NUM_FIELDS :][:emitted].astype(np.int64)
            logits = _shaped(rows.clone(), tokens, copy.processed)
            logprobs.append(describe(copy.slot, first, logits, tokens, copy.num_top))
        return tuple(logprobs)

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

    def _queue_prompt(self, slot: int, count: int, ask: LogprobRequest, device: Device) -> _Copy:
        """Queue log probabilities of prompt tokens that a chunk's first `count` rows predict."""
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

    def _queue_output(self, slot: int, count: int, device: Device) -> _Copy:
        target, ask = self._target, self._asks.outputs[slot]
        logits = self._kept.pop(slot, None)
        if logits is None:
            logits = self._logits(slot, count)
        if slot not in self._processed:
            tokens = target.result[slot, fields.NUM_FIELDS :][:count].long()
            tokens.clamp_(0, logits.shape[1] - 1)  # entries past the emitted tokens are undefined
            logits = pack(logits, tokens, ask.num_top)
        return self._fetched(slot, ask, logits, device)

    def _queue_together(self, counts: dict[int, int], num_top: int, device: Device) -> list[_Copy]:
        """Queue log probabilities of output rows, whose number by slot is `counts`."""
        target, state, ends = self._target, self._state, np.cumsum([*counts.values()])
        host = device.staging(2 * int(ends[-1])).view(2, -1)
        host.numpy()[0] = np.repeat([*counts], [*counts.values()])
        host.numpy()[1] = np.concatenate([*map(iota, counts.values())])
        index = torch.empty_like(host, device=target.logits.device)
        slots, depths = index.copy_(host, non_blocking=True).long()
        rows = (target.layout.logit_starts[slots] + depths).clamp_(max=target.max_logits - 1)
        tokens = target.result[slots, fields.NUM_FIELDS + depths].long()
        tokens.clamp_(0, target.logits.shape[1] - 1)  # entries past the emitted are undefined
        parts = zip(rows.split(PROMPT_ROWS), tokens.split(PROMPT_ROWS), strict=True)
        values = [pack(target.logits.index_select(0, r).float(), t, num_top) for r, t in parts]
        copies = []
        for source in (torch.cat([*map(torch.flatten, values)]), state.num_tokens[slots]):
            copies.append(device.staging(source.numel()))
            device.fetch(source, copies[-1])
        packed, known = copies
        rows_of = packed.view(len(slots), -1).split([*counts.values()])
        return [
            _Copy(slot, num_top, rows, known[end - 1 : end], None, None)
            for slot, rows, end in zip(counts, rows_of, ends.tolist(), strict=True)
        ]

    def _logits(self, slot: int, count: int) -> Tensor:
        target = self._target
        index = torch.arange(count, dtype=torch.int32, device=target.logits.device)
        rows = (target.layout.logit_starts[slot] + index).clamp_(max=target.max_logits - 1)
        return target.logits.index_select(0, rows).float()

    def _fetched(self, slot: int, ask: LogprobRequest, values: Tensor, device: Device) -> _Copy:
        host = device.staging(values.numel()).view(values.dtype).view(values.shape)
        known = device.staging(1)
        device.fetch(values, host)
        device.fetch(self._state.num_tokens[slot : slot + 1], known)
        return _Copy(slot, ask.num_top, host, known, None, self._processed.get(slot))


def _shaped(x: Tensor, tokens: I64, processed: _Processed) -> Tensor:
    """Apply penalties and filters to logits [T, V]; row t comes after the first t tokens."""
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
