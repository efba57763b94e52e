"""`goodput` without one mechanism at a time."""

from __future__ import annotations

import json

import numpy as np
import pytest

from bench import ablation
from bench.ablation import MECHANISMS, Noisy, Setting, fates, main, rows_of
from cbatch.core.speculation.config import LookaheadConfig
from cbatch.core.speculation.goodput_policy import GoodputPolicy
from cbatch.core.speculation.policy import PolicyLimits
from cbatch.core.speculation.step_work import StepSample
from tests.helpers import decoding


def test_each_mechanism_matters_somewhere(capsys: pytest.CaptureFixture[str]) -> None:
    """A row for each; two of them are known to matter in so small a world, and `off` is off."""
    chosen = ["probes", "drift to the prior"]
    main(["--load", "1", "8", "--text", "turns", "wakes", "--without", *chosen, "--processes", "2"])
    rows = json.loads(capsys.readouterr().out.splitlines()[-1])["results"]
    found = {row["without"]: row for row in rows}
    fixed = [f"fixed:{k}" for k in (1, 2, 4, 8)]
    assert list(found) == ["off", "goodput", *chosen, *fixed, "the best fixed k"]
    assert found["off"]["of_off"] == found["goodput"]["of_full"] == 1
    for name in chosen:
        assert found[name]["least_of_full"] < 0.95, name
        assert found[name]["where"].startswith("8B + 1B, H100, ")


def test_a_row_is_a_geometric_mean_and_the_worst_setting() -> None:
    cells = [Setting("m", "stays", load) for load in (1, 2)]
    speeds = {("off", cells[0]): 10.0, ("off", cells[1]): 10.0}
    speeds |= {("goodput", cells[0]): 20.0, ("goodput", cells[1]): 5.0}
    row = rows_of(speeds, cells)[1]
    assert (row["of_off"], row["least_of_off"], row["there"]) == (1, 0.5, "m, stays, 2")


def test_fates_mislead() -> None:
    turns, wakes = fates("turns", 4), fates("wakes", 4)
    assert turns[0] != turns[1] and sorted(turns[0]) == sorted(turns[1])
    assert [any(each) for each in wakes] == [False, False, True, True]


@pytest.mark.parametrize("name", MECHANISMS)
def test_a_policy_without_it_is_made(name: str) -> None:
    """By the name under which the command line would look for it."""
    class_ = getattr(ablation, MECHANISMS[name].__name__)
    assert issubclass(class_, Noisy)
    class_(LookaheadConfig(policy="goodput", k=4), PolicyLimits(4, 64))


def test_what_is_measured_is_noisy_and_always_the_same() -> None:
    told: list[list[float]] = []
    for _ in range(2):
        policy = Noisy(LookaheadConfig(policy="goodput", k=4), PolicyLimits(4, 64))
        sample = StepSample(decoding(4), 0.0, 1.0)
        told.append([policy._blurred(sample).target_s for _ in range(400)])
    assert told[0] == told[1] and issubclass(Noisy, GoodputPolicy)
    usual = np.log(np.minimum(told[0], 2.0))
    assert np.std(usual[usual < 0.6]) == pytest.approx(ablation.NOISE, rel=0.15)
    assert 1 <= sum(value > 5 for value in told[0]) <= 20
