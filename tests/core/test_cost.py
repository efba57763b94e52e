"""The price list: a profile gives its shape, the durations of real steps correct it."""

from __future__ import annotations

import msgspec
import numpy as np
import pytest

from cbatch.core.cost import CostModel, CostProfile, StepLoad
from cbatch.core.errors import FieldError
from tests.helpers import decode_load

PROFILE = CostProfile(
    tokens=(1, 8, 9, 16, 64, 512),
    target_s=(5e-3, 5e-3, 6e-3, 6e-3, 5.9e-3, 15e-3),  # a stair at 8, and a fall that is noise
    context_token_s=1e-7,
    row_s=1e-5,
    draft_pass_s=4e-4,
    draft_token_s=5e-6,
)


def truth(load: StepLoad, scale: float = 1.0) -> tuple[float, float]:
    """Seconds of a machine that the profile does not describe: a straight line."""
    draft_s = 8e-4 * load.depth + 1e-5 * load.draft_tokens
    target_s = 4e-3 + 5e-5 * load.target_tokens + 2e-7 * load.context_tokens
    return scale * draft_s, scale * target_s


def random_load(rng: np.random.Generator, rows: int = 16) -> StepLoad:
    depth = int(rng.integers(0, 5))
    return decode_load(rows, rows * depth, depth, int(rng.integers(2000, 9000)))


def errors(model: CostModel, rows: int = 16, context_tokens: int = 5000) -> np.ndarray:
    """Relative errors of whole steps of 0 to 4 drafts a row."""
    prices = model.prices(rows, rows, context_tokens, 4 * rows)
    found = [prices.step_s[rows * d] + prices.pass_s * d for d in range(5)]
    loads = [decode_load(rows, rows * d, d, context_tokens) for d in range(5)]
    return np.abs(np.array(found) / [sum(truth(load)) for load in loads] - 1)


def test_a_profile_is_priced_as_measured() -> None:
    prices = CostModel(PROFILE, max_tokens=600).prices(4, 4, 10_000, 508)
    fixed_s = 10_000 * 1e-7 + 4e-5
    expected = np.interp(np.arange(4, 513), [1, 8, 9, 64, 512], [5e-3, 5e-3, 6e-3, 6e-3, 15e-3])
    assert prices.step_s == pytest.approx(expected + fixed_s + 5e-6 * np.arange(509))
    assert prices.pass_s == pytest.approx(4e-4)


def test_beyond_the_last_point_it_is_linear() -> None:
    table = PROFILE.table(1024)
    assert table[1024] == pytest.approx(15e-3 + 512 * (15e-3 - 6e-3) / 448)
    assert (np.diff(table) >= 0).all()


def test_a_profile_survives_a_file() -> None:
    assert msgspec.json.decode(msgspec.json.encode(PROFILE), type=CostProfile) == PROFILE


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("tokens", (1,)),
        ("tokens", (8, 4, 9, 16, 64, 512)),
        ("target_s", (1e-3, 2e-3)),
        ("target_s", (0.0, 1.0, 1.0, 1.0, 1.0, 1.0)),
        ("draft_pass_s", -1.0),
        ("row_s", float("nan")),
    ],
)
def test_a_bad_profile_names_its_field(field: str, value: object) -> None:
    name = field if field in ("tokens", "target_s") else "slopes"
    with pytest.raises(FieldError, match=f"cost_profile.{name}"):
        msgspec.structs.replace(PROFILE, **{field: value})


@pytest.mark.parametrize("profile", [None, PROFILE], ids=["no profile", "wrong profile"])
def test_durations_correct_the_prices(profile: CostProfile | None) -> None:
    rng = np.random.default_rng(0)
    model = CostModel(profile, max_tokens=600)
    for _ in range(300):
        load = random_load(rng)
        noise = np.exp(0.03 * rng.standard_normal(2))
        model.observe(load, *(np.array(truth(load)) * noise))
    assert errors(model).max() < 0.03
    if profile is not None:  # and they were needed
        assert errors(CostModel(profile, max_tokens=600)).max() > 0.1


def test_without_drafts_and_profile_a_draft_looks_cheap_and_is_tried() -> None:
    model = CostModel(max_tokens=600)
    for _ in range(50):
        load = decode_load(8, 0, 0, 3000)
        model.observe(load, *truth(load))
    prices = model.prices(8, 8, 3000, 32)
    assert prices.step_s[0] == pytest.approx(truth(load)[1], rel=0.02)
    assert prices.step_s[32] + 4 * prices.pass_s < 1.3 * prices.step_s[0]


def test_before_anything_is_known_a_price_is_still_a_price() -> None:
    assert (CostModel(max_tokens=600).prices(8, 8, 3000, 32).step_s > 0).all()


def test_what_steady_steps_do_not_excite_stays_as_profiled() -> None:
    """Thousands of equal steps; recursive least squares with forgetting would lose the slope."""
    model = CostModel(PROFILE, max_tokens=600)
    rng = np.random.default_rng(1)
    before = model.prices(16, 16, 5000, 64).step_s
    for _ in range(3000):
        target_s = before[0] * np.exp(0.03 * rng.standard_normal())
        model.observe(decode_load(16, 0, 0, 5000), 0.0, float(target_s))
    after = model.prices(16, 16, 5000, 64).step_s
    assert after == pytest.approx(before, rel=0.05)


@pytest.mark.parametrize("clip", [3.0, 1e9], ids=["clipped", "not clipped"])
def test_stalls_do_not_move_the_prices(clip: float, monkeypatch: pytest.MonkeyPatch) -> None:
    """One step in fifty takes 40 times as long; without clipping the test below would see it."""
    monkeypatch.setattr("cbatch.core.cost._Fit.CLIP", clip)
    rng = np.random.default_rng(2)
    model = CostModel(max_tokens=600)
    worst = 0.0
    for step in range(600):
        load = random_load(rng)
        stall = 40.0 if step > 200 and step % 50 == 0 else 1.0
        model.observe(load, *(stall * np.array(truth(load)) * np.exp(0.03 * rng.normal(size=2))))
        worst = max(worst, errors(model).max()) if step > 200 else worst
    assert (worst < 0.1) == (clip == 3.0), f"worst error {worst:.3f}"


def test_a_machine_that_slows_down_is_followed() -> None:
    rng = np.random.default_rng(3)
    model = CostModel(PROFILE, max_tokens=600)
    for step in range(400):
        load = random_load(rng)
        model.observe(load, *truth(load, scale=1.0 if step < 150 else 2.0))
    found = model.prices(16, 16, 5000, 64)
    for depth in range(5):
        expected = sum(truth(decode_load(16, 16 * depth, depth, 5000), 2.0))
        assert found.step_s[16 * depth] + depth * found.pass_s == pytest.approx(expected, rel=0.05)


def test_unmeasured_durations_are_no_evidence() -> None:
    model = CostModel(PROFILE, max_tokens=600)
    before = model.prices(16, 16, 5000, 64)
    for _ in range(50):
        model.observe(decode_load(16, 32, 2, 5000), 0.0, 0.0)
    after = model.prices(16, 16, 5000, 64)
    assert np.array_equal(before.step_s, after.step_s) and before.pass_s == after.pass_s


def test_prices_end_with_the_table() -> None:
    with pytest.raises(IndexError, match="max_tokens"):
        CostModel(PROFILE, max_tokens=100).prices(8, 90, 0, 11)
