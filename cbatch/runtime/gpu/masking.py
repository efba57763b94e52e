"""Token masks on the device: the host computes and copies them while the forward pass runs."""

from __future__ import annotations

import numpy as np
import torch

from cbatch.runtime.gpu.device import Device
from cbatch.runtime.gpu.known_tokens import I32, KnownTokens
from cbatch.runtime.gpu.pending import HostBuffers
from cbatch.runtime.gpu.target_pass import TargetPass
from cbatch.runtime.model.arrays import I64, iota
from triton_kernels.sampling.mask import mask_logits, words_of
from triton_kernels.slots.draft_batch import DraftLayout


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
