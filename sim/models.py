"""What stands in for a model: how often drafts are accepted, and what a step costs."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Protocol

import msgspec

from sim.tokens import uniform

ACCEPT = 1  # purpose of the noise


class Acceptance(Protocol):
    def num_accepted(
        self, request_id: str, seed: int, choice: int, position: int, num_drafted: int
    ) -> int:
        """Leading drafts accepted, 0 to `num_drafted`; the first is for absolute `position`."""

    def chance(self, request_id: str) -> float | None:
        """With which each draft of the request is accepted; None: that is not known."""


class ModelledAcceptance:
    """Every draft of a request is accepted with its own probability, position by position.

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
    """Accepted drafts by the request's n-th drafting step; the last entry repeats for ever."""

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


class StepCost(msgspec.Struct, frozen=True, kw_only=True):
    """Seconds of a step, linear in what it does. The defaults resemble a small model on a CPU."""

    target_base_s: float = 2e-3
    target_token_s: float = 1e-4
    target_context_token_s: float = 1e-7
    row_s: float = 1e-5
    draft_pass_s: float = 2e-4  # one sequential pass of the drafter, whatever its rows
    draft_token_s: float = 1e-5

    def target_s(self, num_tokens: int, context_tokens: int, num_rows: int) -> float:
        return (
            self.target_base_s
            + self.target_token_s * num_tokens
            + self.target_context_token_s * context_tokens
            + self.row_s * num_rows
        )

    def draft_s(self, num_passes: int, num_tokens: int) -> float:
        return self.draft_pass_s * num_passes + self.draft_token_s * num_tokens
