"""The GPU executor: lengths are on the device, so steps are queued before results are known."""

from __future__ import annotations

import logging
from collections import defaultdict, deque
from collections.abc import Callable, Hashable
from functools import partial
from itertools import product

import numpy as np
import torch

from cbatch.core.request.errors import FieldError
from cbatch.core.scheduler.plan import StepPlan, StepResult
from cbatch.runtime.gpu.attention import Tuning
from cbatch.runtime.gpu.buckets import bucket, ladder
from cbatch.runtime.gpu.decoder import Decoder
from cbatch.runtime.gpu.device import Device, Instead, device_for
from cbatch.runtime.gpu.draft_pass import DraftPasses
from cbatch.runtime.gpu.head_pass import HeadPasses
from cbatch.runtime.gpu.heads import GpuHead
from cbatch.runtime.gpu.host_drafts import DeviceModel, HostDrafts, LookupSettings
from cbatch.runtime.gpu.host_side import HostSide
from cbatch.runtime.gpu.known_tokens import KnownTokens
from cbatch.runtime.gpu.late import GROUPS, Kernels, LateKernels, groups_of_key
from cbatch.runtime.gpu.logprobs import LogprobsReader
from cbatch.runtime.gpu.masking import Masking, end_dead_ends
from cbatch.runtime.gpu.memory import Draft, StepLimits
from cbatch.runtime.gpu.passes import PassBuilder
from cbatch.runtime.gpu.pending import HostBuffers, Pending
from cbatch.runtime.gpu.slot_update import SlotUpdate
from cbatch.runtime.gpu.slots import Bounds, HostSlots
from cbatch.runtime.gpu.target_pass import BY_LOOKUPS, PLAIN, WEIGHING, Deciding
from cbatch.runtime.kv_cache import KVCache
from cbatch.runtime.sampling.structured import GrammarSource
from triton_kernels.products.dense import MANY_ROWS
from triton_kernels.slots import advance as fields
from triton_kernels.slots.draft_batch import DraftLayout
from triton_kernels.slots.guesses import take_guesses
from triton_kernels.slots.state import Arena, SlotState, apply

_logger = logging.getLogger("cbatch")
_MOST_PENDING = 2


class GpuExecutor:
    """Runs step plans on a model with Triton kernels. Both an `Executor` (`run`) and an
    `OverlappedExecutor` (`submit` and `wait`: one plan is queued while another runs).

    - `max_sequence_tokens`, `max_num_batched_tokens`: most tokens of a sequence, and of a step.
    - `max_drafts`: most drafts of a row; 0 turns speculation off. Drafts come from `draft`, and
    from
      `lookups`, which run on the host over the tokens before the pending step.
    - `block_size`: page size of the KV cache; the attention kernel checks it.
    - `grammars`: the host computes their token masks. Sampling of a step then waits for the
    previous
      step's result; its forward pass does not.
    - `kv_dtype`: type of the KV cache, the model's by default, or an fp8 type.
    - `tuning`: of attention, by default the table's for this device.

    `submit` queues the work of a step and never waits for the device. The result is one copy to the
    host, log probabilities are others. After any exception the state is unspecified: call
    `reset()`.
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
    ) -> None:
        if draft is not None and draft.device != target.device:
            raise FieldError("draft", f"it is on {draft.device}", f"load it on {target.device}")
        draft, lookups = (draft, lookups) if max_drafts else (None, None)
        if draft is None and lookups is None:
            max_drafts = 0
        self.target, self.draft, self.device = target, draft, target.device
        self._max_num_seqs, self._max_drafts = max_num_seqs, max_drafts
        self._budget_tokens = max_num_batched_tokens
        self.queue = device_for(target.device)
        limits = StepLimits(
            max_num_seqs,
            max_sequence_tokens,
            max_num_batched_tokens,
            block_size,
            max_drafts,
            reads=isinstance(draft, GpuHead),
        )
        self._most_catch_up = limits.most_catch_up
        sizes = limits.arena_of(target.config)
        with torch.inference_mode(), self.queue.working():
            self._arena = Arena.allocate(sizes, self.device)
            self._layout: DraftLayout | None = None
            if max_drafts:
                tokens = self._most_catch_up if draft is not None else 1
                self._layout = DraftLayout.allocate(sizes.slots, tokens, max_drafts, self.device)
            passes = PassBuilder(limits, num_blocks, kv_dtype, tuning, self.state, self._layout)
            self.draft_passes: DraftPasses | None = None
            self.draft_kv: KVCache | None = None
            if draft is not None:
                self.draft_passes, self.draft_kv = passes.of_draft(draft, sizes.vocab)
            self.target_pass, self.kv = passes.of_target(target, self.draft_passes)
            self._inbox = torch.zeros(0, dtype=torch.int32, device=self.device)
            self._masking = Masking(self.target_pass, self.queue, max_num_seqs, max_drafts)
        self._slots = HostSlots(sizes, self._arena.places)
        self.host_side = self._host_side(lookups, grammars, block_size, num_blocks)
        self._logprobs = LogprobsReader(target, self.target_pass, self.state, grammars)
        self._buffers = deque(HostBuffers() for _ in range(_MOST_PENDING))
        self._pending: deque[Pending] = deque()
        self.late = LateKernels()

    def _host_side(
        self,
        lookups: LookupSettings | None,
        grammars: GrammarSource | None,
        block_size: int,
        num_blocks: int,
    ) -> HostSide:
        known, chains, model = None, None, None
        if self.draft_passes is not None:
            model = DeviceModel(
                self.draft_passes.context_tokens,
                self._most_catch_up,
                self.draft_passes.most_drafts,
                reads=isinstance(self.draft_passes, HeadPasses),
            )
        if lookups is not None or grammars is not None:
            vocab = self.target.config.vocab_size
            known = KnownTokens(self._max_num_seqs, block_size, vocab, grammars)
        if lookups is not None:
            assert known is not None
            chains = HostDrafts(lookups, known, num_blocks, model)
        return HostSide(known, chains, model)

    @property
    def state(self) -> SlotState:
        """The device's state of all slots."""
        return self._arena.state

    @property
    def num_pending(self) -> int:
        return len(self._pending)

    def capture(self, now: frozenset[str] = frozenset(GROUPS)) -> None:
        """Compile kernels and capture the graphs of all bucket sizes; call it before the first
        step.

        Kernels that every request needs, and those of the groups `now`, are compiled here. Other
        groups that Triton's cache lacks are left to `late`, and captured at their first use."""
        if not self.queue.captures:
            return
        by_groups: defaultdict[frozenset[str], Kernels] = defaultdict(dict)
        deferred: set[Hashable] = set()

        def note(key: Hashable, work: Callable[[], None]) -> None:
            by_groups[groups_of_key(key) - now] |= self.queue.kernels_of(work)

        def capture(key: Hashable, work: Callable[[], None]) -> None:
            if groups_of_key(key).isdisjoint(self.late.pending):
                self.queue.capture(key, work)
            else:
                deferred.add(key)

        with torch.inference_mode(), self.queue.working():
            run_all = partial(self.run_all, Instead(note), _smallest)
            by_groups[frozenset()] |= self.queue.kernels_of(run_all)
            self.late = LateKernels(by_groups)
            _logger.info("capturing steps")
            self.run_all(Instead(capture), ladder)
            self.queue.deferred = deferred
            self.queue.synchronize()

    def run_all(self, device: Device, sizes: Callable[[int], list[int]]) -> None:
        """Run every kind of step, without slots. `sizes` maps the largest count to all to run."""
        message = SlotUpdate(self._arena.places)
        message.put_all("asked", np.zeros(self.state.asked.shape, dtype=np.int32))
        self.send(message, self._buffers[0])
        lengths = self.target_pass.attention.lengths
        for count, longest in product(sizes(self._budget_tokens), lengths):
            self.target_pass.compute(device, count, longest)
        ways = WEIGHING[:1]
        if self.host_side.chains is not None:
            ways = BY_LOOKUPS
            for alone in {True, self.draft_passes is None}:
                self._take_guesses(device, alone=alone)
        if self.draft_passes is not None:
            ways = WEIGHING
            lengths, depths = self.draft_passes.lengths, range(self.draft_passes.most_drafts)
            for count, longest in product(sizes(self._most_catch_up), lengths):
                self.draft_passes.ingest(device, count, longest)
            drafts = product(sizes(self._max_num_seqs), depths, (False, True))
            for count, depth, shaped in drafts:
                self.draft_passes.draft(device, count, depth, shaped)
        if self.host_side.known is not None:
            self._masking.mask_nothing()
        self.target_pass.decide(device, 0, PLAIN)
        for count in sizes(self.target_pass.most_logits):
            self.target_pass.find_logits(device, count)
            for how, shaped, filtered in product(ways, (False, True), (False, True)):
                if count > 1 or not how.blocks and not how.weighs:
                    # A row with a draft has at least two rows of logits.
                    how = how._replace(shaped=shaped, filtered=filtered)
                    self.target_pass.decide(device, count, how)

    @torch.inference_mode()
    def submit(self, plan: StepPlan) -> None:
        """Queue a step. Raises ValueError for a plan that does not fit the slots, FieldError for a
        request that cannot be served here, RuntimeError if two steps are pending already."""
        if len(self._pending) >= _MOST_PENDING:
            raise RuntimeError(f"submit: {_MOST_PENDING} steps are under way; call wait() first")
        with self.queue.working():
            step = self._begin(plan)
            waits = bool(self._pending) and len(self.host_side.masked(plan)) > 0
            self._pending.append(step)
            if not waits:
                self.decide(step)

    def wait(self) -> StepResult:
        """Wait for the oldest pending step and return its result. Raises ValueError if its plan did
        not fit the sequences on the device, RuntimeError if no step is pending."""
        if not self._pending:
            raise RuntimeError("wait: no step was submitted; call submit(plan) first")
        step = self._pending.popleft()
        step.done.wait()
        self._buffers.append(step.buffers)
        result = self.report(step)
        for later in self._pending:
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
        self._buffers = deque(HostBuffers() for _ in range(_MOST_PENDING))
        self._pending.clear()
        self._slots.clear()
        self._logprobs.clear()
        self.host_side.forget()

    def _begin(self, plan: StepPlan) -> Pending:
        """Queue a step up to the target's forward pass."""
        started = self.queue.mark()
        self.host_side.take_in(plan.deltas)
        draft_plan = self.host_side.plan_drafts(plan, (step.plan for step in self._pending))
        message = self._slots.take_in(plan, draft_plan)
        bounds = self._checked(plan, self._slots.bounds(plan, draft_plan))
        self._logprobs.take_in(plan.deltas)
        buffers = self._buffers.popleft()
        self.send(message, buffers)
        if len(plan.deltas.zeroed_blocks):
            for kv in (self.kv, self.draft_kv):
                if kv is not None:
                    kv.zero_blocks(plan.deltas.zeroed_blocks)
            if isinstance(self.draft_passes, HeadPasses):
                self.draft_passes.states.zero_blocks(plan.deltas.zeroed_blocks)
        step = Pending(plan, draft_plan, bounds, buffers, started, None)
        if bounds.drafting or bounds.looked_up:
            begun = self.queue.mark()
            self._draft(bounds)
            if len(self.host_side.masked(plan)):
                assert self._layout is not None
                self._masking.fetch_drafts(self._layout, buffers)
            step.drafts = begun, self.queue.mark()
        tokens = bucket(bounds.tokens, self._budget_tokens)
        self.target_pass.compute(self.queue, tokens, bounds.longest)
        return step

    def _draft(self, bounds: Bounds) -> None:
        if bounds.drafting:
            assert self.draft_passes is not None
            rows = bucket(bounds.draft_rows, self._max_num_seqs)
            catch_up = bucket(bounds.catch_up, self._most_catch_up)
            longest = bounds.longest_catch_up
            self.draft_passes.run(self.queue, catch_up, longest, rows, bounds.depth, bounds.shaped)
        if bounds.looked_up:
            self._take_guesses(self.queue, alone=not bounds.drafting)

    def _take_guesses(self, device: Device, *, alone: bool) -> None:
        layout = self._layout
        assert layout is not None

        def take() -> None:
            take_guesses(self.state, layout, most_drafts=self._max_drafts, alone=alone)

        device.run(("guesses", alone), take)

    def decide(self, step: Pending) -> None:
        """Queue the rest of a step: logits, masks, verification and sampling."""
        plan, bounds = step.plan, step.bounds
        rows = bucket(bounds.logits, self.target_pass.most_logits)
        self.target_pass.find_logits(self.queue, rows)
        masked = self.host_side.masked(plan)
        shaped = plan.slots[plan.wants_logits & self._slots.shaped[plan.slots]]
        self._logprobs.keep(plan, np.union1d(masked, shaped))
        if len(masked):
            assert self.host_side.known is not None
            drafts = step.drafts is not None
            if step.drafts is not None:
                step.drafts[1].wait()
            known = self.host_side.known
            step.dead_ends = self._masking.mask(known, masked, step.buffers, drafts=drafts)
        weighs = bounds.weighs and self.draft_passes is not None
        how = Deciding(bounds.shaped, bounds.filtered, weighs, bounds.blocks)
        self.target_pass.decide(self.queue, rows, how)
        self._fetch(step.buffers)
        step.logprobs = self._logprobs.queue(plan, self.queue)
        step.done, step.decided = self.queue.mark(), True

    def _checked(self, plan: StepPlan, bounds: Bounds) -> Bounds:
        for name, count, limit in (
            ("query_lens", bounds.tokens, self._budget_tokens),
            ("catch_up", bounds.catch_up, self._most_catch_up),
            ("num_drafts", max(bounds.depth, bounds.looked_up), self._max_drafts),
        ):
            if count > limit:
                raise ValueError(
                    f"step {plan.step_id}: {name}: {count} is more than the {limit} that the "
                    "executor supports"
                )
        return bounds

    def send(self, message: SlotUpdate, buffers: HostBuffers) -> None:
        """Copy a message to the device, and apply it to the slots there."""
        words = message.num_words()
        if words > len(buffers.message):
            buffers.message = self.queue.staging(2 * words)
        if words > len(self._inbox):
            self._inbox = torch.zeros(2 * words, dtype=torch.int32, device=self.device)
        message.write(buffers.message.numpy())
        self._inbox[:words].copy_(buffers.message[:words], non_blocking=True)
        first, second = message.num_runs()
        apply(self._inbox, self._arena.words, 0, first)
        apply(self._inbox, self._arena.words, first, second)

    def _fetch(self, buffers: HostBuffers) -> None:
        """Queue the copy of the step's result to the host."""
        result = self.target_pass.result.view(-1)
        if not len(buffers.result):
            buffers.result = self.queue.staging(len(result))
        self.queue.fetch(result, buffers.result)

    def _rows(self, buffers: HostBuffers) -> np.ndarray:
        """Return the result's rows, one per slot; valid until the buffers are reused."""
        return buffers.result.numpy().reshape(self.target_pass.result.shape)

    def report(self, step: Pending) -> StepResult:
        plan, all_rows = step.plan, self._rows(step.buffers)
        if self.host_side.known is not None:
            end_dead_ends(plan, step.dead_ends, self.host_side.known, all_rows)
        rows = all_rows[plan.slots]
        status = rows[:, fields.STATUS]
        if (status == fields.DOES_NOT_FIT).any():
            raise ValueError(
                f"step {plan.step_id}: query_lens {plan.query_lens.tolist()} do not fit the "
                f"sequences in slots {plan.slots[status == fields.DOES_NOT_FIT].tolist()}"
            )
        emitted, tokens = rows[:, fields.EMITTED], rows[:, fields.NUM_FIELDS :]
        kv_lens, shadow = self.host_side.learn(plan, step.draft_plan, rows)
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
            draft_kv_lens=kv_lens,
            shadow=shadow,
            logprobs=self._logprobs.describe(step.logprobs, all_rows),
        )


def _smallest(largest: int) -> list[int]:
    """Return counts that compile all kernels: only products have a variant for many rows."""
    return [min(count, largest) for count in (2, MANY_ROWS)]
