"""Which drafts are accepted: models of acceptance for the fast executor.

In every model a draft's fate is a pure function of its request and its absolute position (where
acceptance depends on depth, also of how deep in its draft it stands): noise is keyed by seed,
choice and position. So two policies that try the same position of the same request see the same
thing, and what differs between their runs is what they decided: comparisons are paired (common
random numbers). k, neighbours, slots and preemption do not move it.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Protocol

import msgspec
import numpy as np

from cbatch.core.request.errors import FieldError
from cbatch.core.scheduler.plan import NewSequence
from sim.traces.files import read_whole
from sim.workload.tokens import ACCEPT, mix

_REQUEST, _REDRAW, _LEVEL = 3, 4, 5  # purposes of the noise, beside ACCEPT


class AcceptanceModel(Protocol):
    def admit(self, admission: NewSequence) -> None:
        """The request is in its slot from now on."""

    def num_accepted(
        self, slots: np.ndarray, positions: np.ndarray, num_drafted: np.ndarray
    ) -> np.ndarray:
        """Leading drafts accepted, int32 [rows]; row i's first draft is for the absolute position
        `positions[i]`, which never goes back while a request holds its slot."""


class _Independent:
    """Base of models in which, given its chance, each draft's fate is a coin of its own."""

    def __init__(self, max_slots: int) -> None:
        self._states = np.zeros(max_slots, np.uint64)

    def admit(self, admission: NewSequence) -> None:
        self._states[admission.slot] = request_state(ACCEPT, admission)

    def num_accepted(
        self, slots: np.ndarray, positions: np.ndarray, num_drafted: np.ndarray
    ) -> np.ndarray:
        depth = int(np.maximum.reduce(num_drafted, initial=0))
        ahead = np.arange(depth)
        noise = uniforms(self._states[slots][:, None], positions[:, None] + ahead)
        return leading(noise < self._chances(slots, positions, depth), num_drafted)

    def _chances(self, slots: np.ndarray, positions: np.ndarray, depth: int) -> np.ndarray:
        """Of each draft given that those before it stand; broadcasts to [rows, depth]."""
        raise NotImplementedError


class PositionAcceptance(_Independent):
    """A chance for each depth of a draft, given that the drafts before it stand: the j-th draft of
    a step has `probabilities[j]`, and those beyond the last one its chance."""

    def __init__(self, probabilities: Sequence[float], *, max_slots: int) -> None:
        super().__init__(max_slots)
        if not probabilities:
            raise FieldError("probabilities", "are none", "give one for each depth")
        self._probabilities = np.asarray([_chance("probabilities", p) for p in probabilities])

    def _chances(self, slots: np.ndarray, positions: np.ndarray, depth: int) -> np.ndarray:
        chances: np.ndarray = self._probabilities[
            np.minimum(np.arange(depth), len(self._probabilities) - 1)
        ]
        return chances


class BetaAcceptance(_Independent):
    """Requests differ: each has one chance for all its drafts, drawn from the Beta law of this mean
    and `concentration` a + b (its variance is mean (1 - mean) / (1 + concentration))."""

    def __init__(self, mean: float, concentration: float, *, max_slots: int) -> None:
        super().__init__(max_slots)
        if not 0 < mean < 1:
            raise FieldError("mean", f"{mean} is not allowed", "use a number in (0, 1)")
        if not 0 < concentration < float("inf"):
            raise FieldError("concentration", f"{concentration} is not allowed", "give a positive")
        self._law = mean * concentration, (1 - mean) * concentration
        self._chance = np.zeros(max_slots)

    def admit(self, admission: NewSequence) -> None:
        super().admit(admission)
        rng = np.random.default_rng(request_state(_REQUEST, admission))
        self._chance[admission.slot] = rng.beta(*self._law)

    def _chances(self, slots: np.ndarray, positions: np.ndarray, depth: int) -> np.ndarray:
        chances: np.ndarray = self._chance[slots][:, None]
        return chances


class DriftingAcceptance(_Independent):
    """Acceptance comes and goes within a request: a Markov chain over positions that is at `high`
    or at `low`, half of the time each. Before every token it is drawn anew with the chance
    1 / `tokens`, so its correlation over n tokens is (1 - 1 / tokens)^n."""

    def __init__(self, high: float, low: float, tokens: float, *, max_slots: int) -> None:
        super().__init__(max_slots)
        self._high, self._low = _chance("high", high), _chance("low", low)
        if not 1 <= tokens < float("inf"):
            raise FieldError("tokens", f"{tokens} is not allowed", "give 1 or more")
        self._renewal = 1 / tokens
        self._redraws, self._levels = (np.zeros(max_slots, np.uint64) for _ in range(2))
        # By slot: a position, and the last one up to it at which the chain was drawn.
        self._reached, self._drawn = (np.zeros(max_slots, np.int64) for _ in range(2))

    def admit(self, admission: NewSequence) -> None:
        """The chain begins with the output; of one that was preempted it is followed again."""
        super().admit(admission)
        slot = admission.slot
        self._redraws[slot] = request_state(_REDRAW, admission)
        self._levels[slot] = request_state(_LEVEL, admission)
        self._reached[slot] = self._drawn[slot] = admission.num_prompt_tokens
        known_tokens = len(admission.tokens)
        if known_tokens > admission.num_prompt_tokens:
            self._follow(np.array([slot]), np.array([known_tokens]), 1)

    def _chances(self, slots: np.ndarray, positions: np.ndarray, depth: int) -> np.ndarray:
        drawn = self._follow(slots, positions, depth)
        is_high = uniforms(self._levels[slots][:, None], drawn) < 0.5
        return np.where(is_high, self._high, self._low)

    def _follow(self, slots: np.ndarray, positions: np.ndarray, depth: int) -> np.ndarray:
        """For each of `depth` positions the last draw up to it, int64 [rows, depth]."""
        reached = self._reached[slots]
        window = int(np.max(positions - reached)) + depth
        steps = reached[:, None] + np.arange(1, window + 1)
        anew = uniforms(self._redraws[slots][:, None], steps) < self._renewal
        drawn = np.concatenate([self._drawn[slots][:, None], np.where(anew, steps, 0)], axis=1)
        np.maximum.accumulate(drawn, axis=1, out=drawn)
        first = positions - reached
        found: np.ndarray = np.take_along_axis(drawn, first[:, None] + np.arange(depth), axis=1)
        self._reached[slots], self._drawn[slots] = positions, found[:, 0]
        return found


class RecordedAcceptance:
    """What an engine saw: for each request in order of arrival, whether a draft for each position
    of its output would be accepted. Shorter recordings begin again, for requests as for tokens."""

    def __init__(self, sequences: Sequence[Sequence[int]], *, max_slots: int) -> None:
        if not sequences or not all(len(sequence) for sequence in sequences):
            raise FieldError("sequences", "are none, or one is empty", "record the run anew")
        self._fates = [np.asarray(sequence, np.bool_) for sequence in sequences]
        self._of_slot = [self._fates[0]] * max_slots
        self._first = [0] * max_slots

    def admit(self, admission: NewSequence) -> None:
        """Raises `FieldError` unless the request's id is its number, as in a replay."""
        name = admission.request_id
        if not name.isdecimal():
            raise FieldError("request_id", f"{name!r} is no number", "number requests by arrival")
        self._of_slot[admission.slot] = self._fates[int(name) % len(self._fates)]
        self._first[admission.slot] = admission.num_prompt_tokens

    def num_accepted(
        self, slots: np.ndarray, positions: np.ndarray, num_drafted: np.ndarray
    ) -> np.ndarray:
        depth = int(np.maximum.reduce(num_drafted, initial=0))
        stands = np.zeros((len(slots), depth), np.bool_)
        ahead = np.arange(depth)
        for row, slot in enumerate(slots.tolist()):
            fates, first = self._of_slot[slot], int(positions[row]) - self._first[slot]
            stands[row] = fates[(first + ahead) % len(fates)]
        return leading(stands, num_drafted)


def parse_acceptance(text: str, *, max_slots: int) -> AcceptanceModel:
    """From "0.7", "positions:0.8,0.6", "beta:0.7,8" (mean, concentration), "drift:0.9,0.4,64"
    (high, low, tokens), "recorded:FILE" (JSON, a list of 0 and 1 for each request)."""
    kind, colon, rest = text.partition(":")
    if not colon:
        kind, rest = "constant", text
    if kind == "recorded":
        return RecordedAcceptance(_read_sequences(Path(rest)), max_slots=max_slots)
    try:
        return _parse_numbers(kind, [float(part) for part in rest.split(",")], max_slots)
    except ValueError as error:  # a FieldError is one: it says which of the numbers is wrong
        reason = f" ({error})" if isinstance(error, FieldError) else ""
        remedy = "write 0.7, positions:0.8,0.6, beta:0.7,8, drift:0.9,0.4,64 or recorded:FILE"
        raise FieldError("--acceptance", f"{text!r} is no model{reason}", remedy) from error


def _parse_numbers(kind: str, numbers: list[float], max_slots: int) -> AcceptanceModel:
    match kind, numbers:
        case ("positions", _) | ("constant", [_]):
            return PositionAcceptance(numbers, max_slots=max_slots)
        case "beta", [mean, concentration]:
            return BetaAcceptance(mean, concentration, max_slots=max_slots)
        case "drift", [high, low, tokens]:
            return DriftingAcceptance(high, low, tokens, max_slots=max_slots)
    raise ValueError(kind)


def _read_sequences(path: Path) -> list[list[bool]]:
    try:
        found = msgspec.json.decode(read_whole(path), type=list[list[int]])
    except (OSError, msgspec.MsgspecError, RecursionError) as error:
        raise FieldError(
            "--acceptance", f"{path} has no sequences ({error})", "give a list of 0 and 1 a request"
        ) from error
    if any(value not in (0, 1) for sequence in found for value in sequence):
        raise FieldError("--acceptance", f"{path} holds other numbers", "use 0 and 1")
    return [[value == 1 for value in sequence] for sequence in found]


def leading(stands: np.ndarray, num_drafted: np.ndarray) -> np.ndarray:
    """How many drafts stand before the first that falls, int32 [rows], of bool [rows, depth]."""
    within = stands & (np.arange(stands.shape[1]) < num_drafted[:, None])
    accepted: np.ndarray = np.logical_and.accumulate(within, axis=1).sum(axis=1, dtype=np.int32)
    return accepted


def request_state(purpose: int, admission: NewSequence) -> int:
    """Noise of a request, to be joined with a position."""
    state: int = mix(mix(purpose, admission.seed), admission.choice)
    return state


def uniforms(states: np.ndarray, positions: np.ndarray) -> np.ndarray:
    """Noise in [0, 1) at absolute positions."""
    noise: np.ndarray = mix(mix(states, positions.astype(np.uint64)), 0) / 2.0**64
    return noise


def _chance(field: str, value: float) -> float:
    if not 0 <= value <= 1:
        raise FieldError(field, f"{value} is not allowed", "use a number in [0, 1]")
    return value
