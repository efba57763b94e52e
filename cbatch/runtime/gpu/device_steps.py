"""A step's work on the device: memory, passes, token masks, and the kernels between them."""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import partial
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from cbatch.core.scheduler.plan import StepPlan
from cbatch.runtime.gpu.attention import PagedAttention, Tuning
from cbatch.runtime.gpu.decoder import Decoder
from cbatch.runtime.gpu.device import Device, QueueEvent, bucket, device_for
from cbatch.runtime.gpu.draft_pass import (
    DeviceStates,
    DraftPasses,
    EaglePasses,
    HeadPasses,
    MedusaPasses,
)
from cbatch.runtime.gpu.heads import FIRST_KEY, GpuEagleHead, GpuHead, GpuMedusaHead
from cbatch.runtime.gpu.host_drafts import I32, KnownTokens
from cbatch.runtime.gpu.memory import Draft, StepLimits, host_binds, kv_scales
from cbatch.runtime.gpu.slots import Bounds, SlotUpdate
from cbatch.runtime.gpu.target_pass import SamplingFeatures, TargetPass
from cbatch.runtime.kv_cache import KVCache
from cbatch.runtime.model.arrays import I64, iota
from triton_kernels.sampling.mask import mask_logits, words_of
from triton_kernels.slots.draft_batch import DraftLayout
from triton_kernels.slots.guesses import take_guesses
from triton_kernels.slots.state import Arena, SlotState, apply

# Most runs and words of a message with new sequences that a graph applies: a dozen of them.
_INBOX_RUNS, _INBOX_WORDS = 256, 16384


class Inbox(NamedTuple):
    """Device memory for a message with up to `first` and `second` runs (see `SlotUpdate.write`)."""

    words: Tensor
    first: int
    second: int

    @classmethod
    def allocate(cls, first: int, second: int, more: int, device: torch.device) -> Inbox:
        """Return an inbox with a word for each second run, and `more` words."""
        words = torch.zeros(3 * first + 4 * second + more, dtype=torch.int32, device=device)
        return cls(words, first, second)

    def holds(self, first: int, second: int, words: int) -> bool:
        """Return whether a message with these runs and words fits."""
        fits = first <= self.first and second <= self.second
        return fits and 3 * (self.first + self.second) + words <= self.words.numel()

    def apply(self, arena: Tensor) -> None:
        """Apply the message, with empty runs."""
        apply(self.words, arena, 0, self.first)
        apply(self.words, arena, self.first, self.second)


class HostBuffers:
    """Pinned host memory of one pending step. Each pending step has its own, because the next
    step's message is written while the previous step still runs."""

    def __init__(self) -> None:
        empty = torch.zeros(0, dtype=torch.int32)
        self.work = self.result = self.drafts = self.masks = empty
        self.rows = np.zeros((0, 0), dtype=np.int32)  # of `result`, one per slot
        self.messages = [empty] * 3  # for both inboxes, and for one of any size


@dataclass
class Pending:
    """A pending step. `decided`: verification and sampling are queued too. With a grammar they are
    queued only after the previous step's result, since the token mask depends on its tokens."""

    plan: StepPlan
    bounds: Bounds
    buffers: HostBuffers
    started: QueueEvent
    drafting: tuple[QueueEvent, QueueEvent] | None  # start and end; None if no row drafts
    decided: bool = False
    done: QueueEvent = field(default_factory=QueueEvent)
    logprobs: tuple[Any, ...] = ()  # returned by `LogprobsReader.queue`
    dead_ends: dict[int, int] = field(default_factory=dict)  # see `Masks`

    @property
    def durations_s(self) -> tuple[float, float]:
        """Device time of drafting and of the rest of the step, in seconds, including gaps in which
        the device waited for the host."""
        draft_s = 0.0
        if self.drafting is not None:
            start, end = self.drafting
            draft_s = end.seconds_since(start)
        return draft_s, self.done.seconds_since(self.started) - draft_s


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
        self._num_blocks, self._kv_dtype, self._tuning = num_blocks, kv_dtype, tuning
        self.sizes = sizes = limits.arena_of(target.config)
        self.joins_parts = host_binds(target.config)
        self.captured_tokens = limits.captured_tokens(target.config)
        with torch.inference_mode(), self.queue.working():
            self._arena = Arena.allocate(sizes, target.device)
            self.places = self._arena.places
            self.layout: DraftLayout | None = None
            if limits.max_drafts:
                tokens = limits.max_catch_up if draft is not None else 1
                depth, device = limits.max_drafts, target.device
                self.layout = DraftLayout.allocate(sizes.slots, tokens, depth, device)
            self.draft_passes, self.draft_kv = (
                (None, None) if draft is None else self._passes_of_draft(draft, sizes.vocab)
            )
            self.target_pass, self.kv = self._pass_of_target(target, self.draft_passes)
            self._inboxes = [  # for appended blocks, and with new sequences
                Inbox.allocate(first, sizes.slots, words, target.device)
                for first, words in ((0, 0), (_INBOX_RUNS, _INBOX_WORDS))
            ]
            self.masking = Masking(
                self.target_pass, self.queue, limits.max_num_seqs, limits.max_drafts
            )

    @property
    def state(self) -> SlotState:
        """The device's state of all slots."""
        return self._arena.state

    def send(self, message: SlotUpdate, buffers: HostBuffers) -> None:
        """Copy a message to the device, and apply it to the slots there."""
        if not buffers.work.numel():
            buffers.work = self.queue.staging(message.work.size).view(message.work.shape)
        buffers.work.numpy()[:] = message.work
        self.state.work.copy_(buffers.work, non_blocking=True)
        first, second = message.num_runs()
        if not (first or second):
            return
        sizes = first, second, message.num_words()
        number = next((i for i, inbox in enumerate(self._inboxes) if inbox.holds(*sizes)), None)
        if number is None:  # many new sequences, or long ones
            inbox = Inbox.allocate(*sizes, self._arena.words.device)
            staged = buffers.messages[-1] = self.queue.staging(len(inbox.words))
        else:
            inbox = self._inboxes[number]
            if not buffers.messages[number].numel():
                buffers.messages[number] = self.queue.staging(len(inbox.words))
            staged = buffers.messages[number]
        message.write(staged.numpy(), inbox.first, inbox.second)
        inbox.words.copy_(staged, non_blocking=True)
        if number is None:
            inbox.apply(self._arena.words)
        else:
            self._apply(number, self.queue)

    def apply_messages(self, device: Device) -> None:
        """Apply a message of each captured size."""
        for number in range(len(self._inboxes)):
            self._apply(number, device)

    def _apply(self, number: int, device: Device) -> None:
        # A graph, because the host needs longer to launch two kernels.
        apply = partial(self._inboxes[number].apply, self._arena.words)
        device.run(("message", number), apply)

    def fetch(self, buffers: HostBuffers) -> None:
        """Queue the copy of the step's result to the host."""
        result = self.target_pass.flat_result
        if not buffers.result.numel():
            buffers.result = self.queue.staging(len(result))
            buffers.rows = buffers.result.numpy().reshape(self.state.work.shape[1], -1)
        self.queue.fetch(result, buffers.result)

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
            catch_up = bucket(bounds.catch_up, self.limits.max_catch_up)
            longest = bounds.longest_catch_up
            self.draft_passes.run(self.queue, catch_up, longest, rows, bounds.depth, bounds.shaped)
        if bounds.looked_up:
            self.take_guesses(self.queue, alone=not bounds.drafting)

    def take_guesses(self, device: Device, *, alone: bool) -> None:
        """Queue the drafts of lookups. `alone`: the draft model drafts for no row."""
        layout = self.layout
        assert layout is not None

        def take() -> None:
            take_guesses(self.state, layout, max_drafts=self.limits.max_drafts, alone=alone)

        device.run(("guesses", alone), take)

    def compute(self, bounds: Bounds) -> None:
        """Queue the target's forward pass."""
        tokens = bucket(bounds.tokens, self.limits.max_num_batched_tokens)
        self.target_pass.compute(self.queue, tokens, bounds.longest)

    def run_whole(self, bounds: Bounds) -> bool:
        """Queue the target's part of a step without masks as one graph; return False if there is
        no such graph."""
        target = self.target_pass
        short = bounds.longest <= target.attention.short_tokens
        if not self.joins_parts or bounds.shaped or bounds.tokens > bounds.logits or not short:
            return False
        rows = bucket(bounds.logits, target.max_logits)
        tokens = bucket(rows, self.limits.max_num_batched_tokens)
        target.run_whole(self.queue, tokens, rows, self._features(bounds))
        return True

    def _features(self, bounds: Bounds) -> SamplingFeatures:
        sampled = bounds.rejection_sampled and self.draft_passes is not None
        return SamplingFeatures(bounds.shaped, bounds.filtered, sampled)

    def find_logits(self, bounds: Bounds) -> int:
        """Queue the logits of a step, and return the number of their rows."""
        rows = bucket(bounds.logits, self.target_pass.max_logits)
        self.target_pass.find_logits(self.queue, rows)
        return rows

    def decide(self, bounds: Bounds, rows: int) -> None:
        """Queue verification and sampling from `rows` rows of logits."""
        self.target_pass.decide(self.queue, rows, self._features(bounds))

    def _passes_of_draft(self, draft: Draft, vocab: int) -> tuple[DraftPasses, KVCache | None]:
        """Return the draft's passes and its KV cache, None for Medusa heads, which need none.
        `vocab` is the size of the target's vocabulary."""
        assert self.layout is not None
        limits, max_tokens = self.limits, self.limits.max_catch_up
        kv, attention, kind, more = None, None, DraftPasses, {}
        if isinstance(draft, GpuHead):
            kind = EaglePasses if isinstance(draft, GpuEagleHead) else MedusaPasses
            more["states"] = DeviceStates(
                draft,
                self.state,
                num_blocks=self._num_blocks,
                block_size=limits.block_size,
                max_tokens=limits.max_num_batched_tokens,
            )
        if not isinstance(draft, GpuMedusaHead):
            first_key = FIRST_KEY if isinstance(draft, GpuEagleHead) else 0
            kv, attention = self._memory(draft, max_tokens, first_key)
        passes = kind(
            draft,
            attention,
            self.state,
            self.layout,
            block_size=limits.block_size,
            max_tokens=max_tokens,
            max_positions=limits.max_sequence_tokens,
            max_drafts=limits.max_drafts,
            vocab=vocab,
            **more,
        )
        return passes, kv

    def _pass_of_target(
        self, decoder: Decoder, drafting: DraftPasses | None
    ) -> tuple[TargetPass, KVCache]:
        max_tokens = self.limits.max_num_batched_tokens
        kv, attention = self._memory(decoder, max_tokens)
        target = TargetPass(
            decoder,
            kv,
            attention,
            self.state,
            self.layout,
            drafting,
            max_tokens=max_tokens,
            max_positions=self.limits.max_sequence_tokens,
            max_drafts=self.limits.max_drafts,
        )
        return target, kv

    def _memory(
        self, decoder: Decoder | GpuEagleHead, max_tokens: int, first_key: int = 0
    ) -> tuple[KVCache, PagedAttention]:
        config, page_tokens = decoder.config, self.limits.block_size
        kv_dtype, tuning = self._kv_dtype or decoder.dtype, self._tuning
        kv = KVCache(
            config,
            self._num_blocks,
            page_tokens,
            kv_dtype,
            decoder.device,
            self.limits.num_state_pages,
            self.limits.max_num_seqs,
            self.limits.max_drafts,
        )
        if tuning is None:
            tuning = self.limits.tuning_of(decoder, kv_dtype)
        scales = kv_scales(decoder, kv_dtype)
        tables, pages = self.state.blocks, self.state.pages
        return kv, PagedAttention(config, kv, tables, max_tokens, tuning, scales, first_key, pages)


class Masking:
    """Applies the host's token masks to the logits of `target`."""

    def __init__(
        self, target: TargetPass, device: Device, max_num_seqs: int, max_drafts: int
    ) -> None:
        self._target, self._device = target, device
        self._max_num_seqs, self._max_drafts = max_num_seqs, max_drafts
        self._bits = torch.zeros(0, dtype=torch.int32, device=target.logits.device)

    def mask_nothing(self) -> None:
        """Launch the kernel of `mask` without effect, so that it is compiled."""
        no_rows = self._bits.new_zeros(1, words_of(self._target.logits.shape[1]))
        mask_logits(self._target.logits, no_rows, self._target.layout.logit_starts, no_rows[0])

    def fetch_drafts(self, layout: DraftLayout, buffers: HostBuffers) -> None:
        """Queue a copy to the host: each slot's draft count and first draft index, all drafts."""
        drafts = torch.cat([layout.depths, layout.starts, layout.drafts])
        if not len(buffers.drafts):
            buffers.drafts = self._device.staging(len(drafts))
        self._device.fetch(drafts, buffers.drafts)

    def mask(
        self, known: KnownTokens, slots: I32, buffers: HostBuffers, *, drafts: bool
    ) -> dict[int, int]:
        """Mask the tokens that these slots' grammars forbid, and return the dead ends (see
        `Masks`). `drafts`: the step has drafts, and `fetch_drafts` has copied them."""
        counts: I64 = np.zeros(len(slots), dtype=np.int64)
        tokens: I64 = np.zeros((len(slots), self._max_drafts), dtype=np.int64)
        if drafts:
            num_slots, words = self._max_num_seqs + 1, buffers.drafts.numpy()
            counts = words[slots].astype(np.int64)
            places = words[num_slots + slots][:, None] + iota(self._max_drafts)
            tokens = words[2 * num_slots + places].astype(np.int64)
        rows, dead_ends = known.masks(slots, counts, tokens)
        if rows.size > len(buffers.masks):
            buffers.masks = self._device.staging(2 * rows.size)
        if rows.size > len(self._bits):
            self._bits = self._bits.new_zeros(2 * rows.size)
        buffers.masks.numpy()[: rows.size] = rows.reshape(-1)
        bits = self._bits[: rows.size]
        bits.copy_(buffers.masks[: rows.size], non_blocking=True)
        target = self._target
        starts, lens = target.layout.logit_starts, target.num_rows()
        mask_logits(target.logits, bits.view(rows.shape), starts, lens)
        return dead_ends
