"""Compilation of kernels and capture of graphs, before the first step."""

from __future__ import annotations

import logging
import subprocess
from collections import defaultdict
from collections.abc import Callable, Hashable, Mapping
from functools import partial
from itertools import product

import torch

from cbatch.core.request.request import SamplingParams
from cbatch.runtime.gpu.device import CallbackDevice, Device, bucket, ladder
from cbatch.runtime.gpu.device_steps import DeviceSteps
from cbatch.runtime.gpu.host_drafts import HostSide
from cbatch.runtime.gpu.slots import shapes_logits
from cbatch.runtime.gpu.target_pass import MODEL_FEATURES, PLAIN, SamplingFeatures
from triton_kernels.build import ahead
from triton_kernels.products.dense import MANY_ROWS

Kernels = dict[str, ahead.Specialisation]  # by key, see `ahead.listed`
# Kernel groups. Log probabilities need no group: torch and the host compute them.
SHAPED = "penalties, logit_bias, min_tokens, and allowed or banned tokens"
GROUPS = (SHAPED,)
_NICENESS = 10  # niceness of the compiling processes, so that steps take precedence
_logger = logging.getLogger("cbatch")


def groups_of_key(key: Hashable) -> frozenset[str]:
    """Return the groups of the kernels that the work with this key launches (see `Device.run`)."""
    match key:
        case ("draft", _, _, bool(shaped)):
            return _group_of(shaped)
        case ("decide", _, SamplingFeatures() as features):
            return _group_of(features.shaped)
    return frozenset()


def groups_of(params: SamplingParams) -> frozenset[str]:
    """Return the groups that a request with these parameters may need."""
    return _group_of(shapes_logits(params, has_stops=True))


def _group_of(shaped: bool) -> frozenset[str]:
    return frozenset(GROUPS if shaped else ())


class UncompiledKernels:
    """Kernel groups that are not compiled yet. `by_groups` maps the set of groups that a step needs
    to the step's kernels. Kernels that need no group are compiled in the constructor.

    A group whose compilation fails is no longer pending. Its first launch compiles it again, and
    raises the error."""

    def __init__(self, by_groups: Mapping[frozenset[str], Kernels] = {}) -> None:
        usual = by_groups.get(frozenset(), {})
        ahead.compile_all(usual)
        self._uncompiled: dict[str, Kernels] = {}
        self._running: dict[str, subprocess.Popen[bytes]] = {}
        for groups, kernels in by_groups.items():
            rest = {key: each for key, each in kernels.items() if key not in usual}
            if len(groups) == 1 and not ahead.is_compiled(rest):
                self._uncompiled[min(groups)] = rest

    def start(self) -> None:
        """Start a compiling process for each group."""
        for group in self._uncompiled.keys() - self._running.keys():
            _logger.info("compiling while serving: %s", group)
            kernels = [*self._uncompiled[group].values()]
            self._running[group] = ahead.start(kernels, niceness=_NICENESS)

    @property
    def pending(self) -> tuple[str, ...]:
        """Groups that are not compiled yet."""
        for group in [group for group, each in self._running.items() if each.poll() is not None]:
            ahead.end([self._running.pop(group)], self._uncompiled.pop(group))
        return tuple(self._uncompiled)

    def needs_pending_kernels(self, params: SamplingParams) -> bool:
        """Return whether a request with these parameters needs a pending group."""
        return not groups_of(params).isdisjoint(self.pending)


class StepCapture:
    """Runs every kind of step once, without slots."""

    def __init__(self, steps: DeviceSteps, host_side: HostSide) -> None:
        self._steps, self._host_side = steps, host_side
        self.background_kernels = UncompiledKernels()

    def capture(self, now: frozenset[str] = frozenset(GROUPS)) -> None:
        """Compile kernels and capture the graphs of all bucket sizes.

        Kernels that every request needs, and those of the groups `now`, are compiled here. Other
        groups that Triton's cache lacks are left to `background_kernels`. Their graphs are captured
        after their first use."""
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
            sizes = partial(ladder, max_tokens=self._steps.captured_tokens)
            self.run_all(CallbackDevice(capture), sizes)
            queue.deferred = deferred
            queue.synchronize()

    def run_all(self, device: Device, sizes: Callable[[int], list[int]]) -> None:
        """Run every kind of step, without slots. `sizes` maps a largest count to those to run."""
        steps, limits = self._steps, self._steps.limits
        steps.apply_messages(device)
        lengths = steps.target_pass.attention.lengths
        for count, longest in product(sizes(limits.max_num_batched_tokens), lengths):
            steps.target_pass.compute(device, count, longest)
        variants = MODEL_FEATURES[:1]
        if self._host_side.looks_up:
            for alone in {True, steps.draft_passes is None}:
                steps.take_guesses(device, alone=alone)
        if steps.draft_passes is not None:
            variants = MODEL_FEATURES
            lengths, depths = (
                steps.draft_passes.lengths,
                range(steps.draft_passes.max_drafts, 0, -1),
            )
            for count, longest in product(sizes(limits.max_catch_up), lengths):
                steps.draft_passes.ingest(device, count, longest)
            drafts = product(sizes(limits.max_num_seqs), depths, (False, True))
            for count, depth, shaped in drafts:
                steps.draft_passes.draft(device, count, depth, shaped)
        if self._host_side.known is not None:
            steps.masking.mask_nothing()
        steps.target_pass.decide(device, 0, PLAIN)
        for count in sizes(steps.target_pass.max_logits):
            steps.target_pass.find_logits(device, count)
            for features, shaped, filtered in product(variants, (False, True), (False, True)):
                if count > 1 or not features.rejection_sampled:
                    # A row with a draft has at least two rows of logits.
                    features = features._replace(shaped=shaped, filtered=filtered)
                    steps.target_pass.decide(device, count, features)
                    if steps.joins_parts and not shaped:
                        tokens = bucket(count, limits.max_num_batched_tokens)
                        steps.target_pass.run_whole(device, tokens, count, features)


def _smallest(largest: int) -> list[int]:
    """Return counts that compile all kernels: only products have a variant for many rows."""
    return [min(count, largest) for count in (2, MANY_ROWS)]
