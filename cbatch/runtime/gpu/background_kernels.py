"""Kernels that few requests need: other processes compile them while the engine already serves."""

from __future__ import annotations

import logging
import subprocess
from collections.abc import Hashable, Mapping

from cbatch.core.request.request import SamplingParams
from cbatch.runtime.gpu.logits_processors import shapes_logits
from cbatch.runtime.gpu.target_pass import SamplingFeatures
from triton_kernels.build import ahead

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
