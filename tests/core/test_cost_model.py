"""Prices of steps: a profile gives their shape, the durations of real steps correct them."""

from __future__ import annotations

import msgspec
import numpy as np
import pytest
from cbatch.core.prices.cost_model import OnlineCostModel

from cbatch.core.prices.cost_profile import CostProfile
from cbatch.core.prices.step_work import StepSample, StepWork
from cbatch.core.request.errors import FieldError
from cbatch.core.speculation.adaptive_policy import AdaptivePolicy
from cbatch.core.speculation.config import LookaheadConfig
from cbatch.core.speculation.policy import PolicyLimits
from tests.helpers import DraftedRows, RowsToPlan, decoding

PROFILE = CostProfile(
    tokens=(1, 8, 9, 16, 64, 512),
    target_s=(5e-3, 5e-3, 6e-3, 6e-3, 5.9e-3, 15e-3),  # a stair at 8, and a fall that is noise
    context_token_s=1e-7,
    row_s=1e-5,
    draft_pass_s=4e-4,
    draft_token_s=5e-6,
)


def truth(work: StepWork, scale: float = 1.0) -> tuple[float, float]:
    """Duration in seconds on a machine that the profile does not describe: a straight line."""
    draft_s = 8e-4 * work.draft_depth + 1e-5 * work.draft_tokens
    target_s = 4e-3 + 5e-5 * work.target_tokens + 2e-7 * work.context_tokens
    return scale * draft_s, scale * target_s


def sample(rng: np.random.Generator, *, noise: float = 0.0, scale: float = 1.0) -> StepSample:
    work = decoding(16, int(rng.integers(2000, 9000)), depth=int(rng.integers(0, 5)))
    return StepSample(work, *(np.exp(noise * rng.standard_normal(2)) * truth(work, scale)).tolist())


def errors(model: OnlineCostModel, scale: float = 1.0) -> np.ndarray:
    """Return relative errors of the prices of whole steps of 16 rows and 0 to 4 drafts a row."""
    prices = model.prices(16, 5000, 64)
    estimates = [prices.step_s[16 * d] + prices.pass_s * d for d in range(5)]
    works = [decoding(16, 5000, depth=d) for d in range(5)]
    return np.abs(np.array(estimates) / [sum(truth(work, scale)) for work in works] - 1)


def test_a_profile_is_priced_as_measured_and_linear_beyond() -> None:
    prices = OnlineCostModel(PROFILE, max_tokens=600).prices(4, 10_000, 508)
    points = [1, 8, 9, 16, 64, 512]
    table = np.array([5e-3, 5e-3, 6e-3, 6e-3, 6e-3, 15e-3]) + 1e-5 * np.array(points)
    expected = np.interp(np.arange(4, 513), points, table) + 10_000 * 1e-7
    assert prices.step_s == pytest.approx(expected, rel=0.1)  # 8 and 9 are one point
    assert prices.pass_s == pytest.approx(4e-4 + 4 * 5e-6)
    table = PROFILE.table(1024)
    assert table[1024] == pytest.approx(15e-3 + 512 * (15e-3 - 6e-3) / 448)
    assert (np.diff(table) >= 0).all()
    with pytest.raises(IndexError, match="max_tokens"):
        OnlineCostModel(PROFILE, max_tokens=100).prices(90, 0, 11)


@pytest.mark.parametrize(
    ("field", "value", "name"),
    [
        ("tokens", (1,), "tokens"),
        ("tokens", (8, 4, 9, 16, 64, 512), "tokens"),
        ("target_s", (1e-3, 2e-3), "target_s"),
        ("target_s", (0.0, 1.0, 1.0, 1.0, 1.0, 1.0), "target_s"),
        ("draft_pass_s", -1.0, "slopes"),
        ("row_s", float("nan"), "slopes"),
    ],
)
def test_a_bad_profile_names_its_field(field: str, value: object, name: str) -> None:
    with pytest.raises(FieldError, match=f"cost_profile.{name}"):
        msgspec.structs.replace(PROFILE, **{field: value})


@pytest.mark.parametrize("profile", [None, PROFILE], ids=["no profile", "wrong profile"])
def test_durations_correct_the_prices(profile: CostProfile | None) -> None:
    """Prices follow a machine that becomes half as fast, too. One step in fifty takes 40 times as
    long; it moves the prices little."""
    rng, model = np.random.default_rng(0), OnlineCostModel(profile, max_tokens=600)
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
    assert worst < 0.15 and errors(model).max() < 0.08
    for _ in range(250):
        model.observe(sample(rng, scale=2.0))
    assert errors(model, scale=2.0).max() < 0.1 < errors(model).max()


def test_one_step_without_drafts_among_many_with_them_tells_what_they_cost() -> None:
    """As every other step drafts the same number of tokens, only that step can separate the
    costs."""
    model, drafting, plain = OnlineCostModel(max_tokens=600), decoding(16, depth=4), decoding(16)
    for _ in range(200):
        model.observe(StepSample(drafting, 1e-3, 12e-3))
    prices = model.prices(16, 0, 64)
    assert prices.step_s[0] > 0.9 * prices.step_s[64], "nothing is known"
    model.observe(StepSample(plain, 0.0, 4e-3))
    for _ in range(200):
        model.observe(StepSample(drafting, 1e-3, 12e-3))
    prices = model.prices(16, 0, 64)
    assert prices.step_s[0] / prices.step_s[64] == pytest.approx(1 / 3, rel=0.05)
    assert prices.pass_s / prices.step_s[64] == pytest.approx(0.25 / 12, rel=0.05)


@pytest.mark.parametrize("first", ["stall", "fast"])
def test_a_stall_is_forgotten_at_once_and_lifts_nothing(first: str) -> None:
    """The first step of a kind took ten times as long. The next step of the same kind corrects the
    price, and so do faster steps of more tokens."""
    model = OnlineCostModel(max_tokens=600)
    for step in range(3):
        stalled = step == 0 and first == "stall"
        model.observe(StepSample(decoding(16), 0.0, 40e-3 if stalled else 4e-3))
    assert model.prices(16, 0, 64).step_s[0] == pytest.approx(4e-3, rel=0.2)
    model = OnlineCostModel(max_tokens=600)
    model.observe(StepSample(decoding(16), 0.0, 40e-3))
    model.observe(StepSample(decoding(16, depth=4), 0.0, 5e-3))
    step_s = model.prices(16, 0, 64).step_s
    assert step_s[0] == pytest.approx(step_s[64]) and (np.diff(step_s) >= 0).all()


def test_without_drafts_and_profile_a_draft_looks_cheap_and_is_tried() -> None:
    model = OnlineCostModel(max_tokens=600)
    assert (model.prices(8, 3000, 32).step_s > 0).all(), "a price before anything is known"
    work = decoding(8, 3000)
    for _ in range(50):
        model.observe(StepSample(work, *truth(work)))
    prices = model.prices(8, 3000, 32)
    assert prices.step_s[0] == pytest.approx(truth(work)[1], rel=0.02)
    assert prices.step_s[8] + prices.pass_s < 1.15 * prices.step_s[0]


def test_what_steady_steps_do_not_excite_stays_as_profiled() -> None:
    """Thousands of equal steps do not move the slope. Steps without a measured duration are no
    evidence at all."""
    model, rng = OnlineCostModel(PROFILE, max_tokens=600), np.random.default_rng(1)
    before = model.prices(16, 5000, 64)
    for _ in range(50):
        model.observe(StepSample(decoding(16, 5000, depth=2), 0.0, 0.0))
    after = model.prices(16, 5000, 64)
    assert np.array_equal(before.step_s, after.step_s) and before.pass_s == after.pass_s
    for _ in range(3000):
        target_s = before.step_s[0] * np.exp(0.03 * rng.standard_normal())
        model.observe(StepSample(decoding(16, 5000), 0.0, float(target_s)))
    assert model.prices(16, 5000, 64).step_s == pytest.approx(before.step_s, rel=0.15)


def test_a_step_whose_rows_had_all_ended_teaches_nothing() -> None:
    """It was planned before the last tokens of its rows were known."""
    profile = CostProfile((1, 64), (2e-3, 3e-3))
    policy = AdaptivePolicy(LookaheadConfig(policy="adaptive", k=2), PolicyLimits(1, 64, profile))
    policy.enter(0, None)
    policy.choose(RowsToPlan(slice(0, 1), np.full(1, 2, np.int32), 2))
    nothing, before = np.zeros(1, np.int32), policy.costs.prices(1, 0, 2).step_s
    policy.observe(DraftedRows(slice(0, 1), nothing, nothing, StepSample(StepWork(), 0.0, 1e-3)))
    assert policy.costs.prices(1, 0, 2).step_s.tolist() == before.tolist()
    assert not policy.costs.is_measured(0)
