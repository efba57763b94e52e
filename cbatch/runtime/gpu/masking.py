"""Masks of logits: they go to the device beside the plan, while its forward pass runs."""

from __future__ import annotations

import numpy as np
import torch

from cbatch.core.scheduler.plan import RowStatus, StepPlan
from cbatch.runtime.gpu.device import Device
from cbatch.runtime.gpu.known_tokens import I32, KnownTokens
from cbatch.runtime.gpu.pending import HostBuffers
from cbatch.runtime.gpu.target_pass import TargetPass
from cbatch.runtime.model.arrays import I64, iota
from triton_kernels.sampling.mask import mask_logits, words_of
from triton_kernels.slots import advance as fields
from triton_kernels.slots.draft_batch import DraftLayout


class Masking:
    """Of the logits of `target`; `max_slots` have up to `max_drafts` drafts each."""

    def __init__(self, target: TargetPass, device: Device, max_slots: int, max_drafts: int) -> None:
        self._target, self._device = target, device
        self._max_slots, self._max_drafts = max_slots, max_drafts
        self._bits = torch.zeros(0, dtype=torch.int32, device=target.logits.device)

    def mask_nothing(self) -> None:
        """Launches what `mask` does."""
        nobody = self._bits.new_zeros(1, words_of(self._target.logits.shape[1]))
        mask_logits(self._target.logits, nobody, self._target.layout.logit_starts, nobody[0])

    def fetch_drafts(self, layout: DraftLayout, buffers: HostBuffers) -> None:
        """How many each slot has, where they begin, and they."""
        found = torch.cat([layout.depths, layout.starts, layout.drafts])
        if not len(buffers.drafts):
            buffers.drafts = self._device.staging(len(found))
        self._device.fetch(found, buffers.drafts)

    def mask(
        self, known: KnownTokens, slots: I32, buffers: HostBuffers, *, drafts: bool
    ) -> dict[int, int]:
        """Forbid what no grammar of these slots lets follow, behind each of their `drafts`, which
        have been fetched. Returns the dead ends, see `Masks`."""
        counts: I64 = np.zeros(len(slots), dtype=np.int64)
        tokens: I64 = np.zeros((len(slots), self._max_drafts), dtype=np.int64)
        if drafts:
            held, words = self._max_slots + 1, buffers.drafts.numpy()
            counts = words[slots].astype(np.int64)
            places = words[held + slots][:, None] + iota(self._max_drafts)
            tokens = words[2 * held + places].astype(np.int64)
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


def end_dead_ends(
    plan: StepPlan, dead_ends: dict[int, int], known: KnownTokens, rows: np.ndarray
) -> None:
    """In what a step reports, by slot: sequences that came to where no token may follow have
    emitted nothing, now and later."""
    for slot, depth in dead_ends.items():
        if rows[slot, fields.EMITTED] and rows[slot, fields.ACCEPTED] >= depth:
            known.fail(np.array([slot]))
    at = (known.generation[plan.slots] == plan.generations) & (known.failed[plan.slots] > 0)
    for slot in plan.slots[at].tolist():
        rows[slot, fields.STATUS] = RowStatus.NO_TOKEN
        rows[slot, [fields.ACCEPTED, fields.EMITTED]] = 0
