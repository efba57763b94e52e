"""A step's work on the device: memory, passes, and the kernels between them."""

from __future__ import annotations

import numpy as np
import torch

from cbatch.runtime.gpu.attention import Tuning
from cbatch.runtime.gpu.buckets import bucket
from cbatch.runtime.gpu.decoder import Decoder
from cbatch.runtime.gpu.device import Device, device_for
from cbatch.runtime.gpu.head_pass import HeadPasses
from cbatch.runtime.gpu.masking import Masking
from cbatch.runtime.gpu.memory import Draft, StepLimits
from cbatch.runtime.gpu.passes import PassBuilder
from cbatch.runtime.gpu.pending import HostBuffers
from cbatch.runtime.gpu.slot_update import SlotUpdate
from cbatch.runtime.gpu.slots import Bounds
from cbatch.runtime.gpu.target_pass import SamplingFeatures
from triton_kernels.slots.draft_batch import DraftLayout
from triton_kernels.slots.guesses import take_guesses
from triton_kernels.slots.state import Arena, SlotState, apply


class DeviceSteps:
    """Queues the parts of a step, within `limits`. Other arguments are those of `GpuExecutor`."""

    def __init__(
        self,
        target: Decoder,
        draft: Draft | None,
        limits: StepLimits,
        num_blocks: int,
        kv_dtype: torch.dtype | None,
        tuning: Tuning | None,
    ) -> None:
        self.limits, self.queue = limits, device_for(target.device)
        self.sizes = sizes = limits.arena_of(target.config)
        with torch.inference_mode(), self.queue.working():
            self._arena = Arena.allocate(sizes, target.device)
            self.places = self._arena.places
            self.layout: DraftLayout | None = None
            if limits.max_drafts:
                tokens = limits.most_catch_up if draft is not None else 1
                depth, device = limits.max_drafts, target.device
                self.layout = DraftLayout.allocate(sizes.slots, tokens, depth, device)
            passes = PassBuilder(limits, num_blocks, kv_dtype, tuning, self.state, self.layout)
            self.draft_passes, self.draft_kv = (
                (None, None) if draft is None else passes.of_draft(draft, sizes.vocab)
            )
            self.target_pass, self.kv = passes.of_target(target, self.draft_passes)
            self._inbox = torch.zeros(0, dtype=torch.int32, device=target.device)
            self.masking = Masking(
                self.target_pass, self.queue, limits.max_num_seqs, limits.max_drafts
            )

    @property
    def state(self) -> SlotState:
        """The device's state of all slots."""
        return self._arena.state

    def send(self, message: SlotUpdate, buffers: HostBuffers) -> None:
        """Copy a message to the device, and apply it to the slots there."""
        words = message.num_words()
        if words > len(buffers.message):
            buffers.message = self.queue.staging(2 * words)
        if words > len(self._inbox):
            self._inbox = self._inbox.new_zeros(2 * words)
        message.write(buffers.message.numpy())
        self._inbox[:words].copy_(buffers.message[:words], non_blocking=True)
        first, second = message.num_runs()
        apply(self._inbox, self._arena.words, 0, first)
        apply(self._inbox, self._arena.words, first, second)

    def fetch(self, buffers: HostBuffers) -> None:
        """Queue the copy of the step's result to the host."""
        result = self.target_pass.result.view(-1)
        if not len(buffers.result):
            buffers.result = self.queue.staging(len(result))
        self.queue.fetch(result, buffers.result)

    def rows(self, buffers: HostBuffers) -> np.ndarray:
        """Return the result's rows, one per slot; valid until the buffers are reused."""
        return buffers.result.numpy().reshape(self.target_pass.result.shape)

    def zero_blocks(self, block_ids: np.ndarray) -> None:
        """Zero blocks that held non-finite values, in every cache."""
        for kv in (self.kv, self.draft_kv):
            if kv is not None:
                kv.zero_blocks(block_ids)
        if isinstance(self.draft_passes, HeadPasses):
            self.draft_passes.states.zero_blocks(block_ids)

    def draft(self, bounds: Bounds) -> None:
        """Queue the drafts of a step."""
        if bounds.drafting:
            assert self.draft_passes is not None
            rows = bucket(bounds.draft_rows, self.limits.max_num_seqs)
            catch_up = bucket(bounds.catch_up, self.limits.most_catch_up)
            longest = bounds.longest_catch_up
            self.draft_passes.run(self.queue, catch_up, longest, rows, bounds.depth, bounds.shaped)
        if bounds.looked_up:
            self.take_guesses(self.queue, alone=not bounds.drafting)

    def take_guesses(self, device: Device, *, alone: bool) -> None:
        """Queue the drafts of lookups. `alone`: the draft model drafts for no row."""
        layout = self.layout
        assert layout is not None

        def take() -> None:
            take_guesses(self.state, layout, most_drafts=self.limits.max_drafts, alone=alone)

        device.run(("guesses", alone), take)

    def compute(self, bounds: Bounds) -> None:
        """Queue the target's forward pass."""
        tokens = bucket(bounds.tokens, self.limits.max_num_batched_tokens)
        self.target_pass.compute(self.queue, tokens, bounds.longest)

    def find_logits(self, bounds: Bounds) -> int:
        """Queue the logits of a step, and return the number of their rows."""
        rows = bucket(bounds.logits, self.target_pass.most_logits)
        self.target_pass.find_logits(self.queue, rows)
        return rows

    def decide(self, bounds: Bounds, rows: int) -> None:
        """Queue verification and sampling from `rows` rows of logits."""
        sampled = bounds.rejection_sampled and self.draft_passes is not None
        features = SamplingFeatures(bounds.shaped, bounds.filtered, sampled)
        self.target_pass.decide(self.queue, rows, features)
