"""Substitutes for a model's acceptance, draft by draft."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Protocol

from sim.workload.tokens import ACCEPT
from tests.checking.language import uniform


class Acceptance(Protocol):
    def num_accepted(
        self, request_id: str, seed: int, choice: int, position: int, num_drafted: int
    ) -> int:
        """Return how many leading drafts are accepted, 0 to `num_drafted`; the first is for
        absolute `position`."""

    def chance(self, request_id: str) -> float | None:
        """Return the chance with which each draft of the request is accepted, or None if it is
        unknown."""


class ModelledAcceptance:
    """Acceptance of every draft of a request with its own probability, position by position.
    `sim.executor.acceptance.PositionAcceptance` does this for all rows at once.

    The noise is a function of (seed, choice, position): k and preemption do not move it. The
    mapping is read at every use, so requests may be added to it later.
    """

    def __init__(self, default: float, by_request: Mapping[str, float] | None = None) -> None:
        self._default = default
        self._by_request = {} if by_request is None else by_request

    def num_accepted(
        self, request_id: str, seed: int, choice: int, position: int, num_drafted: int
    ) -> int:
        probability = self._by_request.get(request_id, self._default)
        for j in range(num_drafted):
            if uniform(seed, choice, position + j, ACCEPT) >= probability:
                return j
        return num_drafted

    def chance(self, request_id: str) -> float | None:
        return self._by_request.get(request_id, self._default)


class ScriptedAcceptance:
    """Acceptance by the request's n-th drafting step; the last entry repeats for ever."""

    def __init__(self, by_request: Mapping[str, Sequence[int]]) -> None:
        self._scripts = {name: list(script) for name, script in by_request.items()}
        self._steps = dict.fromkeys(self._scripts, 0)

    def num_accepted(
        self, request_id: str, seed: int, choice: int, position: int, num_drafted: int
    ) -> int:
        script = self._scripts[request_id]
        step = self._steps[request_id]
        self._steps[request_id] = step + 1
        return min(script[min(step, len(script) - 1)], num_drafted)

    def chance(self, request_id: str) -> float | None:
        return None
