"""GPU executor: with sequence lengths on the device, steps are queued before results are known."""

from __future__ import annotations

from collections import deque

import numpy as np
import torch

from cbatch.core.request.request import Request
from cbatch.core.scheduler.plan import StepPlan, StepResult
from cbatch.runtime.gpu.attention import Tuning
from cbatch.runtime.gpu.capture import GROUPS, StepCapture, UncompiledKernels
from cbatch.runtime.gpu.decoder import Decoder
from cbatch.runtime.gpu.device_steps import DeviceSteps, HostBuffers, Pending
from cbatch.runtime.gpu.host_drafts import DeviceModel, HostSide, LookupSettings
from cbatch.runtime.gpu.logprobs import LogprobsReader
from cbatch.runtime.gpu.memory import Draft, StepLimits
from cbatch.runtime.gpu.slots import Bounds, HostSlots
from cbatch.runtime.model.arrays import iota
from cbatch.runtime.sampling.structured import GrammarSource
from triton_kernels.slots import advance as fields

_MAX_PENDING = 2


class GpuExecutor:
    """Runs step plans on a model with Triton kernels. Both an `Executor` (`run`) and an
    `OverlappedExecutor` (`submit` and `wait`: one plan is queued while another runs).

    - `max_sequence_tokens`, `max_num_batched_tokens`: most tokens of a sequence, and of a step.
    - `max_drafts`: most drafts of a row; 0 turns speculation off. Drafts come from `draft`, and
      from `lookups`, which run on the host over the tokens before the pending step.
    - `block_size`: page size of the KV cache; the attention kernel checks it.
    - `grammars`: the host computes their token masks. Sampling of a step then waits for the
      previous step's result; its forward pass does not.
    - `kv_dtype`: type of the KV cache, the model's by default, or an fp8 type.
    - `eos_ids`: the ids of end tokens, for `check`.
    - `num_state_pages`: pages for the states of recurrent layers.
    - `tuning`: tile and launch sizes of attention, by default from the table for this device.

    `submit` queues the work of a step and never waits for the device. The result is one copy to the
    host; log probabilities are copied separately. After any exception the state is unspecified:
    call `reset()`.
    """

    def __init__(
        self,
        target: Decoder,
        *,
        num_blocks: int,
        block_size: int,
        max_num_seqs: int,
        max_sequence_tokens: int,
        max_num_batched_tokens: int,
        draft: Draft | None = None,
        max_drafts: int = 0,
        lookups: LookupSettings | None = None,
        grammars: GrammarSource | None = None,
        kv_dtype: torch.dtype | None = None,
        tuning: Tuning | None = None,
        eos_ids: tuple[int, ...] = (),
        num_state_pages: int = 0,
    ) -> None:
        draft, lookups = (draft, lookups) if max_drafts else (None, None)
        if draft is None and lookups is None:
            max_drafts = 0
        step = max_num_seqs, max_sequence_tokens, max_num_batched_tokens, block_size, max_drafts
        limits = StepLimits.of(draft, *step)._replace(num_state_pages=num_state_pages)
        self.target, self.draft, self.limits = target, draft, limits
        self.steps = steps = DeviceSteps(target, draft, limits, num_blocks, kv_dtype, tuning)
        self.queue, self.kv, self.draft_kv = steps.queue, steps.kv, steps.draft_kv
        self.target_pass, self.draft_passes = steps.target_pass, steps.draft_passes
        self.state = steps.state
        self._slots = HostSlots(steps.sizes, steps.places, block_size)
        self._eos_ids = eos_ids
        model = None
        if self.draft_passes is not None:
            model = DeviceModel(
                self.draft_passes.context_tokens,
                limits.max_catch_up,
                self.draft_passes.max_drafts,
                is_head=limits.is_head,
            )
        vocab = target.config.vocab_size
        self.host_side = HostSide(limits, num_blocks, vocab, model, lookups, grammars)
        self.step_capture = StepCapture(steps, self.host_side)
        self._logprobs = LogprobsReader(target, self.target_pass, self.state, grammars)
        self._buffers = deque(HostBuffers() for _ in range(_MAX_PENDING))
        self.pending: deque[Pending] = deque()

    @property
    def background_kernels(self) -> UncompiledKernels:
        return self.step_capture.background_kernels

    def capture(self, now: frozenset[str] = frozenset(GROUPS)) -> None:
        """Compile kernels and capture graphs; see `StepCapture.capture`."""
        self.step_capture.capture(now)

    @property
    def num_pending(self) -> int:
        return len(self.pending)

    def check(self, request: Request) -> None:
        self.host_side.check(request.params)
        self._slots.check(request, self._eos_ids)

    @torch.inference_mode()
    def submit(self, plan: StepPlan) -> None:
        """Queue a step. Raises ValueError for a plan that does not fit the slots, RowError for a
        sequence that cannot be run here, RuntimeError if two steps are pending already."""
        if len(self.pending) >= _MAX_PENDING:
            raise RuntimeError(f"submit: {_MAX_PENDING} steps are under way; call wait() first")
        with self.queue.working():
            step = self._begin(plan)
            masks = len(self.host_side.masked(plan)) > 0
            if not masks and self.steps.run_whole(step.bounds):
                self.finish(step)
            else:
                self.steps.compute(step.bounds)
                if not (masks and self.pending):
                    self.decide(step)
            self.pending.append(step)

    def wait(self) -> StepResult:
        """Wait for the oldest pending step and return its result. Raises ValueError if its plan did
        not fit the sequences on the device, RuntimeError if no step is pending."""
        if not self.pending:
            raise RuntimeError("wait: no step was submitted; call submit(plan) first")
        step = self.pending.popleft()
        self.queue.capture_late()
        step.done.wait()
        result = self.report(step)
        self._buffers.append(step.buffers)
        for later in self.pending:
            if not later.decided:
                with torch.inference_mode(), self.queue.working():
                    self.decide(later)
        return result

    def run(self, plan: StepPlan) -> StepResult:
        """Run one step; raises what `submit` and `wait` do."""
        self.submit(plan)
        return self.wait()

    def reset(self) -> None:
        """Forget every slot and pending step. KV stays: no sequence reads what it did not write."""
        self.queue.synchronize()
        self._buffers = deque(HostBuffers() for _ in range(_MAX_PENDING))
        self.pending.clear()
        self._slots.clear()
        self._logprobs.clear()
        self.host_side.forget()

    def _begin(self, plan: StepPlan) -> Pending:
        started = self.queue.record_event()
        self.host_side.apply_deltas(plan.deltas)
        draft_plan = self.host_side.plan_drafts(plan, (step.plan for step in self.pending))
        message, bounds = self._slots.update(plan, draft_plan)
        self._check_bounds(plan, bounds)
        self._logprobs.apply_deltas(plan.deltas)
        buffers = self._buffers.popleft()
        self.steps.send(message, buffers)
        if len(plan.deltas.zeroed_blocks):
            self.steps.zero_blocks(plan.deltas.zeroed_blocks)
        step = Pending(plan, bounds, buffers, started, None)
        if bounds.drafting or bounds.looked_up:
            drafting_started = self.queue.record_event()
            self.steps.draft(bounds)
            if len(self.host_side.masked(plan)):
                assert self.steps.layout is not None
                self.steps.masking.fetch_drafts(self.steps.layout, buffers)
            step.drafting = drafting_started, self.queue.record_event()
        return step

    def decide(self, step: Pending) -> None:
        """Queue the rest of a step: logits, masks, verification and sampling."""
        plan, bounds = step.plan, step.bounds
        rows = self.steps.find_logits(bounds)
        masked = self.host_side.masked(plan)
        if self._logprobs.reads_outputs:
            shaped = plan.slots[plan.wants_logits & self._slots.shaped[plan.slots]]
            self._logprobs.keep(plan, np.union1d(masked, shaped))
        if len(masked):
            assert self.host_side.known is not None
            drafts = step.drafting is not None
            if step.drafting is not None:
                step.drafting[1].wait()
            known = self.host_side.known
            step.dead_ends = self.steps.masking.mask(known, masked, step.buffers, drafts=drafts)
        self.steps.decide(bounds, rows)
        self.finish(step)

    def finish(self, step: Pending) -> None:
        self.steps.fetch(step.buffers)
        step.logprobs = self._logprobs.queue(step.plan, self.queue)
        step.done, step.decided = self.queue.record_event(), True

    def _check_bounds(self, plan: StepPlan, bounds: Bounds) -> None:
        for name, count, limit in (
            ("query_lens", bounds.tokens, self.limits.max_num_batched_tokens),
            ("catch_up", bounds.catch_up, self.limits.max_catch_up),
            ("num_drafts", max(bounds.depth, bounds.looked_up), self.limits.max_drafts),
        ):
            if count > limit:
                raise ValueError(
                    f"step {plan.step_id}: {name}: {count} is more than the {limit} that the "
                    "executor supports"
                )

    def report(self, step: Pending) -> StepResult:
        plan, all_rows = step.plan, step.buffers.rows
        self.host_side.end_dead_ends(plan, step.dead_ends, all_rows)
        rows = all_rows[plan.slots.astype(np.intp)]
        status, drafted, accepted, emitted = rows[:, : fields.DRAFT_KV].T.copy()
        if np.count_nonzero(status == fields.DOES_NOT_FIT):
            raise ValueError(
                f"step {plan.step_id}: query_lens {plan.query_lens.tolist()} do not fit the "
                f"sequences in slots {plan.slots[status == fields.DOES_NOT_FIT].tolist()}"
            )
        tokens = rows[:, fields.NUM_FIELDS :]
        kv_lens = self.host_side.learn(plan, rows)
        row_splits = np.zeros(len(rows) + 1, dtype=np.int32)
        np.add.accumulate(emitted, out=row_splits[1:])
        draft_s, target_s = step.durations_s
        return StepResult(
            step_id=plan.step_id,
            generations=plan.generations,
            tokens=tokens[iota(tokens.shape[1]) < emitted[:, None]],
            row_splits=row_splits,
            num_drafted=drafted,
            num_accepted=accepted,
            status=status.astype(np.uint8),
            draft_s=draft_s,
            target_s=target_s,
            draft_kv_lens=kv_lens,
            logprobs=self._logprobs.describe(step.logprobs, all_rows),
        )
