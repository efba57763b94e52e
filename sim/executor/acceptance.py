"""Models of draft acceptance for the fast executor.

The acceptance of a draft is a pure function of its request and its absolute position, and in some
models of its depth. The noise is keyed by seed, choice and position; k, other rows, slots and
preemption do not change it. So two policies that try the same position of a request see the same
result. Their runs differ only by their decisions (paired comparisons, common random numbers).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path

import msgspec
import numpy as np

from cbatch.core.request.errors import FieldError
from cbatch.core.scheduler.plan import NewSequence, StepPlan
from sim.workload.tokens import ACCEPT, mix
from sim.workload.traces.files import read_whole

_REQUEST, _REDRAW = 3, 4  # purposes of the noise, in addition to ACCEPT
_DRIFT_TOKENS = 8192  # after which the changes of an output repeat


class AcceptanceModel:
    """The drafters of an executor, and how many of their drafts are accepted."""

    def admit(self, admission: NewSequence) -> None:
        """Start a request in its slot."""
        raise NotImplementedError

    def num_drafted(self, plan: StepPlan, known: list[int]) -> np.ndarray:
        """Return how many of the planned drafts are made, int32 [rows], given the `known` tokens of
        each row."""
        return plan.num_drafts

    def num_accepted(
        self, slots: np.ndarray, positions: np.ndarray, num_drafted: np.ndarray
    ) -> np.ndarray:
        """Return the number of leading drafts accepted, int32 [rows]. The first draft of row i is
        for the absolute position `positions[i]`, which never decreases while a request holds its
        slot."""
        raise NotImplementedError

    def draft_kv_lens(self, plan: StepPlan, kv_lens: Callable[[], list[int]]) -> np.ndarray | None:
        """Return `StepResult.draft_kv_lens`. `kv_lens()` gives the target's, by row."""
        return None


class _Independent(AcceptanceModel):
    """Base of models that accept each draft independently, given its probability."""

    def __init__(self, max_num_seqs: int) -> None:
        self._states = np.zeros(max_num_seqs, np.uint64)

    def admit(self, admission: NewSequence) -> None:
        self._states[admission.slot] = request_state(ACCEPT, admission)

    def num_accepted(
        self, slots: np.ndarray, positions: np.ndarray, num_drafted: np.ndarray
    ) -> np.ndarray:
        depth = int(np.maximum.reduce(num_drafted, initial=0))
        depths = np.arange(depth)
        noise = uniforms(self._states[slots][:, None], positions[:, None] + depths)
        return leading(noise < self._chances(slots, positions, depth), num_drafted)

    def _chances(self, slots: np.ndarray, positions: np.ndarray, depth: int) -> np.ndarray:
        """Return the probability of each draft given that all drafts before it are accepted;
        broadcasts to [rows, depth]."""
        raise NotImplementedError


class PositionAcceptance(_Independent):
    """An acceptance probability for each depth, given that the drafts before it are accepted. The
    j-th draft of a step has `probabilities[j]`; deeper drafts have the last one."""

    def __init__(self, probabilities: Sequence[float], *, max_num_seqs: int) -> None:
        super().__init__(max_num_seqs)
        if not probabilities:
            raise FieldError("probabilities", "are none", "give one for each depth")
        self._probabilities = np.asarray([_chance("probabilities", p) for p in probabilities])

    def _chances(self, slots: np.ndarray, positions: np.ndarray, depth: int) -> np.ndarray:
        chances: np.ndarray = self._probabilities[
            np.minimum(np.arange(depth), len(self._probabilities) - 1)
        ]
        return chances


class BetaAcceptance(_Independent):
    """Each request has one acceptance probability for all its drafts. It is drawn from the Beta
    distribution with this mean and `concentration` a + b: variance mean (1 - mean) / (1 +
    concentration)."""

    def __init__(self, mean: float, concentration: float, *, max_num_seqs: int) -> None:
        super().__init__(max_num_seqs)
        if not 0 < mean < 1:
            raise FieldError("mean", f"{mean} is not allowed", "use a number in (0, 1)")
        if not 0 < concentration < float("inf"):
            raise FieldError("concentration", f"{concentration} is not allowed", "give a positive")
        self._beta = mean * concentration, (1 - mean) * concentration
        self._chance = np.zeros(max_num_seqs)

    def admit(self, admission: NewSequence) -> None:
        super().admit(admission)
        rng = np.random.default_rng(request_state(_REQUEST, admission))
        self._chance[admission.slot] = rng.beta(*self._beta)

    def _chances(self, slots: np.ndarray, positions: np.ndarray, depth: int) -> np.ndarray:
        chances: np.ndarray = self._chance[slots][:, None]
        return chances


class DriftingAcceptance(_Independent):
    """Acceptance that changes within a request: a Markov chain over positions that is at `high` or
    at `low`, half of the time each. Before every token it is redrawn with probability 1 / `tokens`,
    so its correlation over n tokens is (1 - 1 / tokens)^n."""

    def __init__(self, high: float, low: float, tokens: float, *, max_num_seqs: int) -> None:
        super().__init__(max_num_seqs)
        self._high, self._low = _chance("high", high), _chance("low", low)
        if not 1 <= tokens < float("inf"):
            raise FieldError("tokens", f"{tokens} is not allowed", "give 1 or more")
        self._redraw_chance = 1 / tokens
        self._is_high = np.zeros((max_num_seqs, _DRIFT_TOKENS), np.bool_)
        self._first = np.zeros(max_num_seqs, np.int64)  # by slot: position of the first output

    def admit(self, admission: NewSequence) -> None:
        super().admit(admission)
        rng = np.random.default_rng(request_state(_REDRAW, admission))
        redraws = np.cumsum(rng.random(_DRIFT_TOKENS) < self._redraw_chance)
        self._is_high[admission.slot] = (rng.random(_DRIFT_TOKENS + 1) < 0.5)[redraws]
        self._first[admission.slot] = admission.num_prompt_tokens

    def _chances(self, slots: np.ndarray, positions: np.ndarray, depth: int) -> np.ndarray:
        at = (positions - self._first[slots])[:, None] + np.arange(depth)
        is_high = self._is_high[slots[:, None], at % _DRIFT_TOKENS]
        return np.where(is_high, self._high, self._low)


class RecordedAcceptance(AcceptanceModel):
    """Acceptance as an engine recorded it: for each request in order of arrival, and each position
    of its output, whether a draft would be accepted. A recording with too few requests, or a
    request with too few positions, repeats from its start."""

    def __init__(self, sequences: Sequence[Sequence[int]], *, max_num_seqs: int) -> None:
        if not sequences or not all(len(sequence) for sequence in sequences):
            raise FieldError("sequences", "are empty, or one of them is", "record the run again")
        self._sequences = [np.asarray(sequence, np.bool_) for sequence in sequences]
        self._of_slot = [self._sequences[0]] * max_num_seqs
        self._first = [0] * max_num_seqs

    def admit(self, admission: NewSequence) -> None:
        """Assign the slot a recorded sequence. Raises `FieldError` unless the request's id is its
        number in the trace, as in a replay."""
        name = admission.request_id
        if not name.isdecimal():
            raise FieldError(
                "request_id", f"{name!r} is not a number", "number requests by arrival"
            )
        self._of_slot[admission.slot] = self._sequences[int(name) % len(self._sequences)]
        self._first[admission.slot] = admission.num_prompt_tokens

    def num_accepted(
        self, slots: np.ndarray, positions: np.ndarray, num_drafted: np.ndarray
    ) -> np.ndarray:
        depth = int(np.maximum.reduce(num_drafted, initial=0))
        accepted = np.zeros((len(slots), depth), np.bool_)
        depths = np.arange(depth)
        for row, slot in enumerate(slots.tolist()):
            sequence, first = self._of_slot[slot], int(positions[row]) - self._first[slot]
            accepted[row] = sequence[(first + depths) % len(sequence)]
        return leading(accepted, num_drafted)


def parse_acceptance(text: str, *, max_num_seqs: int) -> AcceptanceModel:
    """Return the model that `text` describes: "0.7", "positions:0.8,0.6", "beta:0.7,8" (mean,
    concentration), "drift:0.9,0.4,64" (high, low, tokens) or "recorded:FILE" (JSON, a list of 0 and
    1 for each request). Raises `FieldError`."""
    kind, colon, rest = text.partition(":")
    if not colon:
        kind, rest = "constant", text
    if kind == "recorded":
        return RecordedAcceptance(_read_sequences(Path(rest)), max_num_seqs=max_num_seqs)
    try:
        return _parse_numbers(kind, [float(part) for part in rest.split(",")], max_num_seqs)
    except ValueError as error:  # a FieldError is a ValueError that says which number is wrong
        reason = f" ({error})" if isinstance(error, FieldError) else ""
        remedy = "write 0.7, positions:0.8,0.6, beta:0.7,8, drift:0.9,0.4,64 or recorded:FILE"
        raise FieldError(
            "--acceptance", f"{text!r} is not an acceptance model{reason}", remedy
        ) from error


def _parse_numbers(kind: str, numbers: list[float], max_num_seqs: int) -> AcceptanceModel:
    match kind, numbers:
        case ("positions", _) | ("constant", [_]):
            return PositionAcceptance(numbers, max_num_seqs=max_num_seqs)
        case "beta", [mean, concentration]:
            return BetaAcceptance(mean, concentration, max_num_seqs=max_num_seqs)
        case "drift", [high, low, tokens]:
            return DriftingAcceptance(high, low, tokens, max_num_seqs=max_num_seqs)
    raise ValueError(kind)


def _read_sequences(path: Path) -> list[list[bool]]:
    try:
        sequences = msgspec.json.decode(read_whole(path), type=list[list[int]])
    except (OSError, msgspec.MsgspecError, RecursionError) as error:
        raise FieldError(
            "--acceptance", f"{path} has no sequences ({error})", "give a list of 0 and 1 a request"
        ) from error
    if any(value not in (0, 1) for sequence in sequences for value in sequence):
        raise FieldError("--acceptance", f"{path} contains other numbers", "use 0 and 1")
    return [[value == 1 for value in sequence] for sequence in sequences]


def leading(accepted: np.ndarray, num_drafted: np.ndarray) -> np.ndarray:
    """Return how many drafts of bool [rows, depth] precede the first rejected one, int32 [rows]."""
    within = accepted & (np.arange(accepted.shape[1]) < num_drafted[:, None])
    lengths: np.ndarray = np.logical_and.accumulate(within, axis=1).sum(axis=1, dtype=np.int32)
    return lengths


def request_state(purpose: int, admission: NewSequence) -> int:
    """Return the noise state of a request, to be mixed with a position."""
    state: int = mix(mix(purpose, admission.seed), admission.choice)
    return state


def uniforms(states: np.ndarray, positions: np.ndarray) -> np.ndarray:
    """Return noise in [0, 1) at absolute positions, float64."""
    noise: np.ndarray = mix(mix(states, positions.astype(np.uint64)), 0) / 2.0**64
    return noise


def _chance(field: str, value: float) -> float:
    if not 0 <= value <= 1:
        raise FieldError(field, f"{value} is not allowed", "use a number in [0, 1]")
    return value
