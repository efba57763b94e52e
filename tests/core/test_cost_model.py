"""Prices of steps: a profile gives the first ones, the durations of real steps correct them."""

from __future__ import annotations

import msgspec
import numpy as np
import pytest

from cbatch.core.prices.cost_profile import CostProfile
from cbatch.core.prices.step_costs import StepCosts
from cbatch.core.prices.step_work import StepSample, StepWork
from cbatch.core.request.errors import FieldError
from cbatch.core.speculation.adaptive_policy import AdaptivePolicy
from cbatch.core.speculation.config import LookaheadConfig
from cbatch.core.speculation.policy import PolicyLimits
from tests.helpers import DraftedRows, RowsToPlan, decoding, prefilling

PROFILE = CostProfile(
    5e-3, 2e-5, 3.0, 1e-5, context_s=1e-7, draft_pass_s=4e-4, draft_token_s=5e-6, verify_s=2e-4
)


def truth(work: StepWork, scale: float = 1.0) -> tuple[float, float]:
    """Duration in seconds on a machine that the profile does not describe: a straight line."""
    draft_s = 8e-4 * work.draft_depth + 1e-5 * work.draft_tokens
    target_s = 4e-3 + 5e-5 * work.target_tokens + 2e-7 * work.context_tokens
    return scale * draft_s, scale * target_s


def sample(rng: np.random.Generator, *, noise: float = 0.0, scale: float = 1.0) -> StepSample:
    context, depth = int(rng.integers(2000, 9000)), int(rng.integers(0, 5))
    work = decoding(16, context, depth=depth, decode_pairs=context * (1 + depth))
    return StepSample(work, *(np.exp(noise * rng.standard_normal(2)) * truth(work, scale)).tolist())


def errors(model: StepCosts, scale: float = 1.0) -> np.ndarray:
    """Return relative errors of the prices of whole steps of 16 rows and 0 to 4 drafts a row."""
    prices = model.prices(16, 5000, np.arange(65))
    estimates = [prices.step_s[16 * d] + prices.pass_s * d for d in range(5)]
    works = [decoding(16, 5000, depth=d) for d in range(5)]
    return np.abs(np.array(estimates) / [sum(truth(work, scale)) for work in works] - 1)


@pytest.mark.parametrize("tokens", [4, 100, 250, 400])
def test_a_profile_is_priced_as_it_says(tokens: int) -> None:
    prices = StepCosts(PROFILE).prices(4, 10_000, np.arange(509))
    work = decoding(4, 10_000, drafts=tokens - 4, depth=1)
    draft_s, target_s, _ = PROFILE.step_s(work)
    assert prices.step_s[tokens - 4] == pytest.approx(target_s, rel=1e-9)
    assert prices.pass_s + (tokens - 4) * prices.ingest_s == pytest.approx(
        PROFILE.draft_pass_s + (tokens - 4) * PROFILE.draft_token_s
    )
    assert draft_s == pytest.approx(4e-4 + (tokens - 4) * 5e-6) or tokens == 4


@pytest.mark.parametrize("depth", [0, 2])
def test_a_step_with_chunks_is_priced_as_it_says(depth: int) -> None:
    model, work = StepCosts(PROFILE), decoding(4, 10_000, depth=depth)
    mixed = decoding(4, 10_064, depth=depth, prefill_tokens=64, prefill_pairs=64 * 32)
    mixed.target_tokens += 64
    seconds = float(model.with_chunks(work, np.array([64]), 0)[0])
    assert seconds == pytest.approx(PROFILE.step_s(mixed)[1])


def test_below_the_corner_tokens_cost_little_and_beyond_it_all_they_take() -> None:
    step_s = StepCosts(CostProfile(6e-3, 2e-5, 8.0)).prices(1, 0, np.arange(2001)).step_s
    assert step_s[150] < 1.01 * step_s[0]
    assert step_s[1500] - step_s[1000] == pytest.approx(500 * 2e-5, rel=0.01)


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("base_s", 0.0),
        ("corner", 0.5),
        ("corner", 8.1),
        ("draft_pass_s", -1.0),
        ("token_s", float("nan")),
    ],
)
def test_a_bad_profile_names_its_field(field: str, value: float) -> None:
    with pytest.raises(FieldError, match=f"cost_profile.{field}"):
        msgspec.structs.replace(PROFILE, **{field: value})


def test_beyond_the_sharpest_corner_a_step_is_priced() -> None:
    """Its tokens take a thousand times as long as the weights."""
    model, work = StepCosts(CostProfile(1e-3, 1e-3, 8.0)), decoding(1000)
    seconds, gradient = model.gradient(work)
    assert seconds == pytest.approx(1.0) and np.isfinite(gradient).all()
    model.observe(StepSample(work, 0.0, 2.0))
    assert 1.0 < model.gradient(work)[0] <= 2.0


@pytest.mark.parametrize("profile", [None, PROFILE], ids=["no profile", "wrong profile"])
def test_durations_correct_the_prices(profile: CostProfile | None) -> None:
    """Prices follow a machine that becomes half as fast, too. One step in fifty takes 40 times as
    long; it moves the prices little."""
    rng, model = np.random.default_rng(0), StepCosts(profile)
    if profile is not None:
        assert errors(model).max() > 0.1, "corrections are needed"
    worst = 0.0
    for step in range(600):
        measured = sample(rng, noise=0.03)
        if step > 200 and step % 50 == 0:
            times_s = 40 * measured.draft_s, 40 * measured.target_s
            measured = StepSample(measured.work, *times_s)
        model.observe(measured)
        worst = max(worst, errors(model).max()) if step > 200 else worst
    assert worst < 0.25 and errors(model).max() < 0.08
    for _ in range(250):
        model.observe(sample(rng, scale=2.0))
    assert errors(model, scale=2.0).max() < 0.1 < errors(model).max()


@pytest.mark.parametrize("factor", [10.0, 0.1])
def test_one_fast_or_slow_step_moves_a_price_little(factor: float) -> None:
    model, rng = StepCosts(), np.random.default_rng(0)
    for _ in range(200):
        model.observe(sample(rng, noise=0.03))
    before_s = model.prices(16, 5000, np.arange(65)).step_s
    work = decoding(16, 5000)
    model.observe(StepSample(work, 0.0, factor * truth(work)[1]))
    assert model.prices(16, 5000, np.arange(65)).step_s == pytest.approx(before_s, rel=0.05)


def test_a_measurement_draws_the_price_of_its_step_nearer() -> None:
    """Prices of which the steps say nothing are at their bounds. If each of these moves the others
    by itself, a step that is faster than expected raises its own price, in one of fourteen."""
    away = steps = 0
    for seed in range(20):
        rng, model = np.random.default_rng(seed), StepCosts()
        for number in range(40):
            depth, chunk = 2 * int(number > 3), int(rng.integers(20, 90) * rng.integers(0, 2))
            chunk = (512, 64, 332)[number] if number < 3 else chunk
            work = decoding(16, 1200, depth=depth, prefill_tokens=chunk)
            work.target_tokens += chunk
            seconds = 3e-3 + 4e-5 * max(work.target_tokens - 64, 0)
            step = StepSample(work, 5e-5 * depth, seconds * float(np.exp(rng.normal(0.0, 0.1))))
            before = model.gradient(work)[0] if model.is_known else None
            model.observe(step)
            if before is not None:
                errors = np.abs(np.log(np.array([before, model.gradient(work)[0]]) / step.rest_s))
                steps, away = steps + 1, away + (errors[1] > errors[0] + 0.01)
    assert steps > 700 and away < 0.01 * steps


def test_a_stall_of_the_first_step_is_forgotten() -> None:
    model = StepCosts()
    for step in range(8):
        model.observe(StepSample(decoding(16), 0.0, 4e-3 if step else 40e-3))
    assert model.prices(16, 0, np.arange(65)).step_s[0] == pytest.approx(4e-3, rel=0.2)


def test_what_drafts_cost_is_not_the_cost_of_a_chunk() -> None:
    """Passes of the drafter and its catch-up take longer than the rest of a step."""
    chunks = []
    for draft_s in (0.0, 1.0):
        model, rng = StepCosts(), np.random.default_rng(0)
        for _ in range(300):
            mixed = prefilling(1, int(rng.integers(8, 200)))
            mixed.rows, mixed.decode_rows, mixed.target_tokens = 5, 4, mixed.target_tokens + 4
            if draft_s:
                mixed.draft_depth, mixed.ingested_tokens = 1, 500
            model.observe(StepSample(mixed, draft_s, truth(mixed)[1]))
        seconds = model.with_chunks(StepWork.decoding(4, 0), np.array([50, 100]), 0)
        chunks.append(seconds.tolist())
    assert chunks[1] == pytest.approx(chunks[0], rel=0.01)


def test_without_drafts_and_profile_a_draft_looks_cheap_and_is_tried() -> None:
    model = StepCosts()
    work = decoding(8, 3000)
    for _ in range(50):
        model.observe(StepSample(work, *truth(work)))
    prices = model.prices(8, 3000, np.arange(33))
    assert prices.step_s[0] == pytest.approx(truth(work)[1], rel=0.02)
    assert prices.step_s[8] + prices.pass_s < 1.15 * prices.step_s[0]


def test_what_steady_steps_do_not_excite_stays_as_profiled() -> None:
    """Thousands of equal steps do not move the slope. Steps without a measured duration are no
    evidence at all."""
    model, rng = StepCosts(PROFILE), np.random.default_rng(1)
    before = model.prices(16, 5000, np.arange(65))
    for _ in range(50):
        model.observe(StepSample(decoding(16, 5000, depth=2), 0.0, 0.0))
    after = model.prices(16, 5000, np.arange(65))
    assert np.array_equal(before.step_s, after.step_s) and before.pass_s == after.pass_s
    for _ in range(3000):
        target_s = before.step_s[0] * np.exp(0.03 * rng.standard_normal())
        model.observe(StepSample(decoding(16, 5000), 0.0, float(target_s)))
    assert model.prices(16, 5000, np.arange(65)).step_s == pytest.approx(before.step_s, rel=0.15)


def test_a_step_whose_rows_had_all_ended_teaches_nothing() -> None:
    """It was planned before the last tokens of its rows were known."""
    limits = PolicyLimits(1, 64, StepCosts(PROFILE))
    policy = AdaptivePolicy(LookaheadConfig(policy="adaptive", k=2), limits)
    policy.enter(0, None)
    policy.choose(RowsToPlan(slice(0, 1), np.full(1, 2, np.int32), 2))
    nothing, before = np.zeros(1, np.int32), policy.costs.prices(1, 0, np.arange(3)).step_s
    policy.observe(DraftedRows(slice(0, 1), nothing, nothing, StepSample(StepWork(), 0.0, 1e-3)))
    assert policy.costs.prices(1, 0, np.arange(3)).step_s.tolist() == before.tolist()
    assert not policy.costs.is_measured(drafts=False)
