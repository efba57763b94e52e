"""Kernels that few requests need: other processes compile them while the rest are served."""

from __future__ import annotations

import logging
import subprocess
from collections.abc import Hashable, Mapping

from cbatch.core.request.request import SamplingParams
from cbatch.runtime.gpu.logits_processors import shapes_logits
from cbatch.runtime.gpu.target_pass import Deciding
from triton_kernels.build import ahead

Kernels = dict[str, ahead.Specialisation]  # by key, see `ahead.listed`
# Groups of them. Log probabilities need none: torch and the host compute them.
SHAPED = "penalties, logit_bias, min_tokens, and allowed or banned tokens"
BLOCKS = "verification in blocks"
GROUPS = (SHAPED, BLOCKS)
_NICENESS = 10  # steps go first
_logger = logging.getLogger("cbatch")


def groups_of_key(key: Hashable) -> frozenset[str]:
    """Return the groups of the kernels that work of this key launches (see `Device.run`)."""
    match key:
        case ("draft", _, _, bool(shaped)):
            return _named(shaped, False)
        case ("decide", _, Deciding() as how):
            return _named(how.shaped, how.blocks)
    return frozenset()


def groups_of(params: SamplingParams) -> frozenset[str]:
    """Return the groups that a request with these parameters may need."""
    return _named(shapes_logits(params, has_stops=True), params.in_blocks and not params.greedy)


def _named(shaped: bool, blocks: bool) -> frozenset[str]:
    return frozenset(group for group, needs in zip(GROUPS, (shaped, blocks), strict=True) if needs)


class LateKernels:
    """The kernels of the groups that are still `pending`. `by_groups` has the kernels of all steps,
    by the groups that a step needs; those under no group are compiled at once.

    A group that does not compile is not pending any more. Its first launch compiles it again, or
    raises what is wrong."""

    def __init__(self, by_groups: Mapping[frozenset[str], Kernels] = {}) -> None:
        usual = by_groups.get(frozenset(), {})
        ahead.compile_all(usual)
        self._left: dict[str, Kernels] = {}
        self._running: dict[str, subprocess.Popen[bytes]] = {}
        for groups, kernels in by_groups.items():
            rest = {key: each for key, each in kernels.items() if key not in usual}
            if len(groups) == 1 and not ahead.is_compiled(rest):
                self._left[min(groups)] = rest

    def begin(self) -> None:
        """Compile each group in a process of its own."""
        for group in self._left.keys() - self._running.keys():
            _logger.info("compiling while serving: %s", group)
            self._running[group] = ahead.start([*self._left[group].values()], niceness=_NICENESS)

    @property
    def pending(self) -> tuple[str, ...]:
        for group in [group for group, each in self._running.items() if each.poll() is not None]:
            ahead.end([self._running.pop(group)], self._left.pop(group))
        return tuple(self._left)

    def must_wait(self, params: SamplingParams) -> bool:
        """Return whether a request with these parameters has to wait."""
        return not groups_of(params).isdisjoint(self.pending)
