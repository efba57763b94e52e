"""Compilation of kernels and capture of graphs, before the first step."""

from __future__ import annotations

import logging
from collections import defaultdict
from collections.abc import Callable, Hashable
from functools import partial
from itertools import product

import numpy as np
import torch

from cbatch.runtime.gpu.background_kernels import GROUPS, Kernels, UncompiledKernels, groups_of_key
from cbatch.runtime.gpu.buckets import ladder
from cbatch.runtime.gpu.device import CallbackDevice, Device
from cbatch.runtime.gpu.device_steps import DeviceSteps
from cbatch.runtime.gpu.host_side import HostSide
from cbatch.runtime.gpu.pending import HostBuffers
from cbatch.runtime.gpu.slot_update import SlotUpdate
from cbatch.runtime.gpu.target_pass import MODEL_FEATURES, PLAIN
from triton_kernels.products.dense import MANY_ROWS

_logger = logging.getLogger("cbatch")


class StepCapture:
    """Runs every kind of step once, without slots."""

    def __init__(self, steps: DeviceSteps, host_side: HostSide) -> None:
        self._steps, self._host_side = steps, host_side
        self._buffers = HostBuffers()
        self.background_kernels = UncompiledKernels()

    def capture(self, now: frozenset[str] = frozenset(GROUPS)) -> None:
        """Compile kernels and capture the graphs of all bucket sizes.

        Kernels that every request needs, and those of the groups `now`, are compiled here. Other
        groups that Triton's cache lacks are left to `background_kernels`. Their graphs are captured
        at first use."""
        queue = self._steps.queue
        if not queue.captures:
            return
        by_groups: defaultdict[frozenset[str], Kernels] = defaultdict(dict)
        deferred: set[Hashable] = set()

        def note(key: Hashable, work: Callable[[], None]) -> None:
            by_groups[groups_of_key(key) - now] |= queue.kernels_of(work)

        def capture(key: Hashable, work: Callable[[], None]) -> None:
            if groups_of_key(key).isdisjoint(self.background_kernels.pending):
                queue.capture(key, work)
            else:
                deferred.add(key)

        with torch.inference_mode(), queue.working():
            run_all = partial(self.run_all, CallbackDevice(note), _smallest)
            by_groups[frozenset()] |= queue.kernels_of(run_all)
            self.background_kernels = UncompiledKernels(by_groups)
            _logger.info("capturing steps")
            self.run_all(CallbackDevice(capture), ladder)
            queue.deferred = deferred
            queue.synchronize()

    def run_all(self, device: Device, sizes: Callable[[int], list[int]]) -> None:
        """Run every kind of step, without slots. `sizes` maps a largest count to those to run."""
        steps, limits = self._steps, self._steps.limits
        message = SlotUpdate(steps.places)
        message.put_all("work", np.zeros(steps.state.work.shape, dtype=np.int32))
        steps.send(message, self._buffers)
        lengths = steps.target_pass.attention.lengths
        for count, longest in product(sizes(limits.max_num_batched_tokens), lengths):
            steps.target_pass.compute(device, count, longest)
        variants = MODEL_FEATURES[:1]
        if self._host_side.chains is not None:
            for alone in {True, steps.draft_passes is None}:
                steps.take_guesses(device, alone=alone)
        if steps.draft_passes is not None:
            variants = MODEL_FEATURES
            lengths, depths = steps.draft_passes.lengths, range(steps.draft_passes.most_drafts)
            for count, longest in product(sizes(limits.most_catch_up), lengths):
                steps.draft_passes.ingest(device, count, longest)
            drafts = product(sizes(limits.max_num_seqs), depths, (False, True))
            for count, depth, shaped in drafts:
                steps.draft_passes.draft(device, count, depth, shaped)
        if self._host_side.known is not None:
            steps.masking.mask_nothing()
        steps.target_pass.decide(device, 0, PLAIN)
        for count in sizes(steps.target_pass.most_logits):
            steps.target_pass.find_logits(device, count)
            for features, shaped, filtered in product(variants, (False, True), (False, True)):
                if count > 1 or not features.rejection_sampled:
                    # A row with a draft has at least two rows of logits.
                    features = features._replace(shaped=shaped, filtered=filtered)
                    steps.target_pass.decide(device, count, features)


def _smallest(largest: int) -> list[int]:
    """Return counts that compile all kernels: only products have a variant for many rows."""
    return [min(count, largest) for count in (2, MANY_ROWS)]
