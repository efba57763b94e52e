"""The GPU executor: step plans by kernels, true positions on the device, no wait for the host."""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from itertools import product
from typing import Any

import numpy as np
import torch

from cbatch.core.request.errors import FieldError
from cbatch.core.scheduler.plan import StepPlan, StepResult
from cbatch.runtime.gpu.attention import PagedAttention, Tuning, heads_of
from cbatch.runtime.gpu.buckets import bucket, ladder
from cbatch.runtime.gpu.decoder import Decoder
from cbatch.runtime.gpu.device import Capturing, Device, Mark, device_for
from cbatch.runtime.gpu.draft_pass import DraftPasses
from cbatch.runtime.gpu.logprobs import LogprobsReader
from cbatch.runtime.gpu.memory import StepLimits
from cbatch.runtime.gpu.slot_update import SlotUpdate
from cbatch.runtime.gpu.slots import Bounds, HostSlots
from cbatch.runtime.gpu.target_pass import PLAIN, WEIGHING, Deciding, TargetPass
from cbatch.runtime.model.kv_cache import KVCache
from triton_kernels.slots import advance as fields
from triton_kernels.slots.state import Arena, SlotState, apply

_logger = logging.getLogger("cbatch")
_MOST_PENDING = 2


class _HostBuffers:
    """Host memory of a step under way; a message is written while the step before still runs."""

    def __init__(self) -> None:
        self.message = torch.zeros(0, dtype=torch.int32)
        self.result = torch.zeros(0, dtype=torch.int32)


@dataclass
class _Pending:
    plan: StepPlan
    buffers: _HostBuffers
    started: Mark
    drafts: tuple[Mark, Mark] | None  # before and behind them, where anybody drafts
    done: Mark
    logprobs: tuple[Any, ...]  # what `LogprobsReader.queue` gave

    @property
    def durations_s(self) -> tuple[float, float]:
        """Of drafting, and of all else: what the host prepares is part of every step, as far as
        the device waited for it."""
        draft_s = 0.0
        if self.drafts is not None:
            begun, drafted = self.drafts
            draft_s = drafted.seconds_since(begun)
        return draft_s, self.done.seconds_since(self.started) - draft_s


class GpuExecutor:
    """Runs step plans on a model, by kernels. Both an `Executor` (`run`) and an
    `OverlappedExecutor` (`submit` and `wait`, one plan while one runs).

    `max_sequence_tokens` is the longest sequence, `step_budget_tokens` the most tokens of a step,
    `max_drafts` the most drafts of a row (0: nobody drafts). `block_size_tokens` is a page of the
    attention kernel, which refuses others. Drafts come from the draft model alone: lookups live on
    the host, which does not know the latest tokens, and are refused. `reset()` after any exception:
    the state is then unspecified. `tuning` is found for the device unless it is given.

    A step queues its work and returns; what it emitted comes in one copy, log probabilities in
    others. `submit` never waits for the device, nor reads from it.
    """

    def __init__(
        self,
        target: Decoder,
        *,
        num_blocks: int,
        block_size_tokens: int,
        max_slots: int,
        max_sequence_tokens: int,
        step_budget_tokens: int,
        draft: Decoder | None = None,
        max_drafts: int = 0,
        tuning: Tuning | None = None,
    ) -> None:
        if draft is not None and draft.device != target.device:
            raise FieldError("draft", f"it is on {draft.device}", f"load it on {target.device}")
        draft = draft if max_drafts else None
        max_drafts = max_drafts if draft is not None else 0
        self.target, self.draft, self.device = target, draft, target.device
        self._max_slots, self._max_drafts = max_slots, max_drafts
        self._budget_tokens = step_budget_tokens
        self._queue = device_for(target.device)
        made_for = StepLimits(
            max_slots, max_sequence_tokens, step_budget_tokens, block_size_tokens, max_drafts
        )
        self._most_catch_up = made_for.most_catch_up
        sizes = made_for.arena_of(target.config)
        limits = {"most_positions": max_sequence_tokens, "most_drafts": max_drafts}
        memory = partial(self._memory, num_blocks, block_size_tokens, tuning)
        with torch.inference_mode(), self._queue.working():
            self._arena = Arena.allocate(sizes, self.device)
            self._drafting: DraftPasses | None = None
            self.draft_kv: KVCache | None = None
            if draft is not None:
                most = self._most_catch_up
                self.draft_kv, attention = memory(draft, most)
                self._drafting = DraftPasses(
                    draft,
                    self.draft_kv,
                    attention,
                    self.state,
                    most_tokens=most,
                    vocab=sizes.vocab,
                    **limits,
                )
            self.kv, attention = memory(target, step_budget_tokens)
            self._target = TargetPass(
                target,
                self.kv,
                attention,
                self.state,
                self._drafting,
                most_tokens=step_budget_tokens,
                **limits,
            )
            self._inbox = torch.zeros(0, dtype=torch.int32, device=self.device)
        self._slots = HostSlots(sizes, self._arena.places, drafts=draft is not None)
        self._logprobs = LogprobsReader(target, self._target, self.state)
        self._buffers = deque(_HostBuffers() for _ in range(_MOST_PENDING))
        self._pending: deque[_Pending] = deque()

    def _memory(
        self,
        num_blocks: int,
        block_size_tokens: int,
        tuning: Tuning | None,
        decoder: Decoder,
        most_tokens: int,
    ) -> tuple[KVCache, PagedAttention]:
        """A model's pool, and its attention over it."""
        config = decoder.config
        kv = KVCache(config, num_blocks, block_size_tokens, decoder.dtype, self.device)
        if tuning is None:
            heads = heads_of(config)
            tuning = Tuning.of(heads, decoder.dtype, self.device, block_size_tokens)
        return kv, PagedAttention(config, kv, self.state.blocks, most_tokens, tuning)

    @property
    def state(self) -> SlotState:
        """What the device knows of the slots."""
        return self._arena.state

    @property
    def num_pending(self) -> int:
        return len(self._pending)

    def capture(self) -> None:
        """Before it serves: compile the kernels of whatever a request may ask for, and capture
        every step of no more tokens and rows than are captured at all. No slot takes part."""
        if not self._queue.captures:
            return
        with torch.inference_mode(), self._queue.working():
            self._queue.compile_ahead(partial(self._run_all, self._queue, _smallest))
            _logger.info("capturing steps")
            self._run_all(Capturing(self._queue), ladder)
            self._queue.synchronize()

    def _run_all(self, device: Device, sizes: Callable[[int], list[int]]) -> None:
        """Steps of every kind, of these sizes up to the most that there may be; nothing is asked of
        any slot."""
        message = SlotUpdate(self._arena.places)
        message.put_all("asked", np.zeros(self.state.asked.shape, dtype=np.int32))
        self._send(message, self._buffers[0])
        for count in sizes(self._budget_tokens):
            self._target.compute(device, count)
        ways = WEIGHING[:1]
        if self._drafting is not None:
            ways = WEIGHING
            for count in sizes(self._most_catch_up):
                self._drafting.ingest(device, count)
            drafts = product(sizes(self._max_slots), range(self._max_drafts), (False, True))
            for count, depth, shaped in drafts:
                self._drafting.draft(device, count, depth, shaped)
        self._target.decide(device, 0, PLAIN)
        for count, how, shaped in product(sizes(self._target.most_logits), ways, (False, True)):
            if count > 1 or not how.weighs:  # a draft has a row of logits, and one behind it
                self._target.decide(device, count, how._replace(shaped=shaped))

    @torch.inference_mode()
    def submit(self, plan: StepPlan) -> None:
        """Queue a step on the device, at most one behind one that was not waited for. Raises
        ValueError for a plan that does not fit the slots, FieldError for a request that cannot be
        served here."""
        if len(self._pending) >= _MOST_PENDING:
            raise RuntimeError(f"submit: {_MOST_PENDING} steps are under way; call wait() first")
        with self._queue.working():
            self._pending.append(self._run(plan))

    def wait(self) -> StepResult:
        """Result of the oldest step not waited for. Raises ValueError if its plan did not fit what
        the sequences had become."""
        if not self._pending:
            raise RuntimeError("wait: no step was submitted; call submit(plan) first")
        step = self._pending.popleft()
        step.done.wait()
        self._buffers.append(step.buffers)
        return self._report(step)

    def run(self, plan: StepPlan) -> StepResult:
        """Run one step; raises what `submit` and `wait` do."""
        self.submit(plan)
        return self.wait()

    def reset(self) -> None:
        """Forget every slot, and drop the results of steps under way. KV contents stay: nothing
        reads a position it has not written."""
        self._queue.synchronize()
        self._buffers = deque(_HostBuffers() for _ in range(_MOST_PENDING))
        self._pending.clear()
        self._slots.clear()
        self._logprobs.clear()

    def _run(self, plan: StepPlan) -> _Pending:
        started = self._queue.mark()
        message = self._slots.take_in(plan)
        bounds = self._checked(plan, self._slots.bounds(plan))
        self._logprobs.take_in(plan.deltas)
        buffers = self._buffers.popleft()
        self._send(message, buffers)
        for kv in (self.kv, self.draft_kv):
            if kv is not None and len(plan.deltas.zeroed_blocks):
                kv.zero_blocks(plan.deltas.zeroed_blocks)
        drafts = None
        if bounds.drafting:
            assert self._drafting is not None
            begun = self._queue.mark()
            rows = bucket(bounds.draft_rows, self._max_slots)
            catch_up = bucket(bounds.catch_up, self._most_catch_up)
            self._drafting.run(self._queue, catch_up, rows, bounds.depth, bounds.shaped)
            drafts = begun, self._queue.mark()
        self._target.run(
            self._queue,
            bucket(bounds.tokens, self._budget_tokens),
            bucket(bounds.logits, self._target.most_logits),
            Deciding(bounds.shaped, bounds.weighs, bounds.blocks),
        )
        self._fetch(buffers)
        logprobs = self._logprobs.queue(plan, self._queue)
        return _Pending(plan, buffers, started, drafts, self._queue.mark(), logprobs)

    def _checked(self, plan: StepPlan, bounds: Bounds) -> Bounds:
        for name, found, most in (
            ("query_lens", bounds.tokens, self._budget_tokens),
            ("catch_up", bounds.catch_up, self._most_catch_up),
            ("num_drafts", bounds.depth, self._max_drafts),
        ):
            if found > most:
                raise ValueError(
                    f"step {plan.step_id}: {name}: {found} is more than the {most} that the "
                    "executor was made for"
                )
        return bounds

    def _send(self, message: SlotUpdate, buffers: _HostBuffers) -> None:
        """One copy to the device, and the words go to their places."""
        words = message.num_words()
        if words > len(buffers.message):
            buffers.message = self._queue.staging(2 * words)
        if words > len(self._inbox):
            self._inbox = torch.zeros(2 * words, dtype=torch.int32, device=self.device)
        message.write(buffers.message.numpy())
        self._inbox[:words].copy_(buffers.message[:words], non_blocking=True)
        first, second = message.num_runs()
        apply(self._inbox, self._arena.words, 0, first)
        apply(self._inbox, self._arena.words, first, second)

    def _fetch(self, buffers: _HostBuffers) -> None:
        """The one copy back."""
        result = self._target.result.view(-1)
        if not len(buffers.result):
            buffers.result = self._queue.staging(len(result))
        self._queue.fetch(result, buffers.result)

    def _rows(self, buffers: _HostBuffers) -> np.ndarray:
        """By slot; valid until the buffers are used again."""
        return buffers.result.numpy().reshape(self._target.result.shape)

    def _report(self, step: _Pending) -> StepResult:
        plan, rows = step.plan, self._rows(step.buffers)[step.plan.slots]
        status = rows[:, fields.STATUS]
        if (status == fields.DOES_NOT_FIT).any():
            raise ValueError(
                f"step {plan.step_id}: query_lens {plan.query_lens.tolist()} do not fit the "
                f"sequences in slots {plan.slots[status == fields.DOES_NOT_FIT].tolist()}"
            )
        emitted, tokens = rows[:, fields.EMITTED], rows[:, fields.NUM_FIELDS :]
        row_splits = np.zeros(len(rows) + 1, dtype=np.int32)
        emitted.cumsum(out=row_splits[1:])
        draft_s, target_s = step.durations_s
        return StepResult(
            step_id=plan.step_id,
            generations=plan.generations,
            tokens=tokens[np.arange(tokens.shape[1]) < emitted[:, None]],
            row_splits=row_splits,
            num_drafted=rows[:, fields.DRAFTED].copy(),
            num_accepted=rows[:, fields.ACCEPTED].copy(),
            status=status.astype(np.uint8),
            draft_s=draft_s,
            target_s=target_s,
            logprobs=self._logprobs.describe(step.logprobs, self._rows(step.buffers)),
        )


def _smallest(most: int) -> list[int]:
    """One of a kind: kernels are the same for any number of rows."""
    return [min(2, most)]
