"""Laws of the acceptance models; only request and position decide a draft's fate.

Statistics are compared at 5 standard errors (one seed in 1.7 million); seeds are fixed.
"""

from __future__ import annotations

import json
import math
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

import sim.executor.acceptance
from cbatch.core.request.errors import FieldError
from sim.executor.acceptance import (
    AcceptanceModel,
    BetaAcceptance,
    DriftingAcceptance,
    PositionAcceptance,
    RecordedAcceptance,
    leading,
    parse_acceptance,
    uniforms,
)

PROMPT_TOKENS = 10
SPECS = ("0.6", "positions:0.8,0.5,0.3", "beta:0.6,3", "drift:0.9,0.2,20", "recorded")
STANDARD_ERRORS = 5


def admission(slot: int, request: int, known_tokens: int = PROMPT_TOKENS) -> Any:
    return SimpleNamespace(
        slot=slot,
        request_id=str(request),
        seed=sim.executor.acceptance.mix(77, request),
        choice=0,
        num_prompt_tokens=PROMPT_TOKENS,
        tokens=np.zeros(known_tokens),
    )


def model_of(spec: str, max_num_seqs: int, folder: Path) -> AcceptanceModel:
    if spec == "recorded":
        path = folder / "fates.json"
        fates = np.random.default_rng(1).integers(0, 2, (7, 90)).tolist()
        path.write_text(json.dumps([row[: 60 + i] for i, row in enumerate(fates)]))
        spec = f"recorded:{path}"
    return parse_acceptance(spec, max_num_seqs=max_num_seqs)


def fates(model: AcceptanceModel, requests: int, tokens: int) -> np.ndarray:
    """Return the fates of a draft of depth 1 at every position of every request, bool [requests,
    tokens]."""
    slots = np.arange(requests)
    for slot in range(requests):
        model.admit(admission(slot, slot))
    one = np.ones(requests, np.int32)
    columns = [
        model.num_accepted(slots, PROMPT_TOKENS + 1 + t * one.astype(np.int64), one)
        for t in range(tokens)
    ]
    return np.stack(columns, axis=1).astype(bool)


def walk(
    model: AcceptanceModel, slot: int, request: int, ks: list[int], stop: int
) -> dict[int, bool]:
    """Return the fates of the positions that a request tries; it drafts `ks` in turn and is
    preempted every few steps."""
    fates: dict[int, bool] = {}
    position = PROMPT_TOKENS + 1
    for step in range(10_000):
        if position >= stop:
            break
        if step % 7 == 0:
            model.admit(admission(slot, request, position))
        k = ks[step % len(ks)]
        drafts = np.array([k], np.int32)
        (accepted,) = model.num_accepted(np.array([slot]), np.array([position]), drafts).tolist()
        fates |= dict.fromkeys(range(position, position + accepted), True)
        if accepted < k:
            fates[position + accepted] = False
        position += accepted + 1
    return fates


@pytest.mark.parametrize("spec", [s for s in SPECS if not s.startswith("positions")])
def test_only_request_and_position_decide(spec: str, tmp_path: Path) -> None:
    """For any k, slot and preemptions, a position's fate is that of a draft of depth 1 there."""
    model = model_of(spec, 20, tmp_path)
    alone = fates(model, 20, 120)
    seen = set()
    for request in (0, 3, 6):
        for slot, ks in ((0, [1]), (5, [4]), (7, [3, 1, 6])):
            fate_by_position = walk(
                model_of(spec, 20, tmp_path), slot, request, ks, PROMPT_TOKENS + 100
            )
            for position, fate in fate_by_position.items():
                assert alone[request, position - PROMPT_TOKENS - 1] == fate
            seen.add(sum(fate_by_position.values()))
    assert len(seen) > 3  # drafting more does accept more
    assert not alone.all() and alone.any()


def test_noise_of_depth_and_of_position_are_the_same(tmp_path: Path) -> None:
    """Chances depend on depth, the coin on the position alone: with the greater chance of a smaller
    depth at least as much is accepted."""
    model = PositionAcceptance([0.8, 0.5, 0.3], max_num_seqs=50)
    constant = PositionAcceptance([0.3], max_num_seqs=50)
    for slot in range(50):
        for one in (model, constant):
            one.admit(admission(slot, slot))
    slots, positions = np.arange(50), np.full(50, 40)
    three = np.full(50, 3, np.int32)
    more, less = (m.num_accepted(slots, positions, three) for m in (model, constant))
    assert (more >= less).all() and (more > less).any()


def within(value: float, expected: float, error: float) -> bool:
    return abs(value - expected) <= STANDARD_ERRORS * error


def test_constant_and_positions_have_their_chances() -> None:
    count = 40_000
    slots, drafts = np.arange(count), np.full(count, 4, np.int32)
    for chances in ([0.7], [0.8, 0.5, 0.25]):
        model = PositionAcceptance(chances, max_num_seqs=count)
        for slot in range(count):
            model.admit(admission(slot, slot))
        accepted = model.num_accepted(slots, np.full(count, 30), drafts)
        for depth in range(4):
            tried = accepted[accepted >= depth]
            chance = chances[min(depth, len(chances) - 1)]
            error = math.sqrt(chance * (1 - chance) / len(tried))
            assert within(float((tried > depth).mean()), chance, error)


def test_beta_differs_between_requests_by_its_law() -> None:
    mean, concentration, requests, tokens = 0.6, 3.0, 4000, 60
    shares = fates(
        BetaAcceptance(mean, concentration, max_num_seqs=requests), requests, tokens
    ).mean(axis=1)
    of_chance = mean * (1 - mean) / (1 + concentration)
    of_coins = mean * (1 - mean) * concentration / (1 + concentration) / tokens
    variance = of_chance + of_coins
    assert within(float(shares.mean()), mean, math.sqrt(variance / requests))
    # The fourth moment of a law on [0, 1] with this variance: at most 3 times its square here.
    assert within(float(shares.var()), variance, variance * math.sqrt(2 / requests))
    constant = fates(PositionAcceptance([mean], max_num_seqs=requests), requests, tokens).mean(
        axis=1
    )
    assert not within(float(constant.var()), variance, variance * math.sqrt(2 / requests))


@pytest.mark.parametrize("lag", [1, 5, 20])
def test_drift_is_correlated_as_long_as_it_says(lag: int) -> None:
    """For fates x at p and p + lag: mean m = (high + low) / 2, covariance ((high - low) / 2)^2
    times (1 - 1 / tokens)^lag. Standard errors are over requests, which are independent."""
    high, low, dwell, requests, tokens = 0.9, 0.2, 20.0, 3000, 120
    outcomes = fates(DriftingAcceptance(high, low, dwell, max_num_seqs=requests), requests, tokens)
    centred = outcomes - (high + low) / 2
    products = (centred[:, :-lag] * centred[:, lag:]).mean(axis=1)
    error = float(products.std()) / math.sqrt(requests)
    expected = ((high - low) / 2) ** 2 * (1 - 1 / dwell) ** lag
    assert within(float(products.mean()), expected, error)
    level = outcomes.mean(axis=1)
    assert within(float(level.mean()), (high + low) / 2, float(level.std()) / math.sqrt(requests))
    # A chain whose state is never drawn again would be noticed.
    assert not within(float(products.mean()), ((high - low) / 2) ** 2, error)


def test_recorded_sequences_are_replayed_and_begin_again() -> None:
    model = RecordedAcceptance([[1, 0, 1, 1], [0, 1]], max_num_seqs=3)
    for slot, request in enumerate((0, 1, 2)):
        model.admit(admission(slot, request))
    slots, k = np.arange(3), np.array([4, 4, 2], np.int32)
    at = np.full(3, PROMPT_TOKENS + 2)
    assert model.num_accepted(slots, at, k).tolist() == [3, 0, 2]
    assert model.num_accepted(slots, at + 1, k).tolist() == [2, 1, 2]


BAD = (
    "1.5 nan constant: beta:0.5 beta:1,3 beta:0.5,0 drift:0.9,0.1,0.5 positions: positions:0.5,x "
    "gamma:1 recorded:/nowhere/at/all"
)


@pytest.mark.parametrize("text", ["", *BAD.split()])
def test_what_is_no_model_is_refused(text: str) -> None:
    with pytest.raises(FieldError):
        parse_acceptance(text, max_num_seqs=1)


def test_recordings_contain_only_zeros_and_ones(tmp_path: Path) -> None:
    path = tmp_path / "fates.json"
    for bad in ("[]", "[[]]", "[[2]]", "{}", "[[1"):
        path.write_text(bad)
        with pytest.raises(FieldError):
            parse_acceptance(f"recorded:{path}", max_num_seqs=1)
    with pytest.raises(FieldError, match="request_id"):
        RecordedAcceptance([[1]], max_num_seqs=1).admit(
            SimpleNamespace(slot=0, request_id="x", num_prompt_tokens=1)  # type: ignore[arg-type]
        )


def test_leading_and_uniforms() -> None:
    stands = np.array([[1, 1, 0], [1, 1, 1], [0, 1, 1]], bool)
    assert leading(stands, np.array([3, 2, 3])).tolist() == [2, 2, 0]
    noise = uniforms(np.array([5], np.uint64), np.arange(10_000))
    assert within(float(noise.mean()), 0.5, math.sqrt(1 / 12 / 10_000))
