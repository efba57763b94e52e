from __future__ import annotations

import json

import numpy as np
import pytest

from bench.load.run.report import read_reports
from sim.report.report import Spread, weighted_percentiles
from tests.sim import test_replay


@pytest.mark.parametrize("seed", range(5))
def test_weighted_percentiles_are_those_of_the_repeated_values(seed: int) -> None:
    rng = np.random.default_rng(seed)
    values = rng.choice([0.1, 0.2, 0.25, 7.0], 30) + rng.random(30) * (seed % 2)
    weights = rng.integers(1, 9, 30)
    percents = (0.0, 50.0, 90.0, 99.0, 100.0)
    expected = np.percentile(np.repeat(values, weights), percents)
    assert weighted_percentiles(values, weights, percents) == pytest.approx(expected, rel=1e-12)


def test_spread_of_nothing_and_of_one() -> None:
    assert Spread.of(np.zeros(0)).mean is None and Spread.of(np.zeros(0)).count == 0
    one = Spread.of(np.array([2.5]))
    assert (one.mean, one.p50, one.p99, one.max) == (2.5, 2.5, 2.5, 2.5)


def test_schema_has_the_names_of_the_load_tester() -> None:
    report = test_replay.run(test_replay.OpenLoop(test_replay.workload(10)))
    document = json.loads(test_replay.to_json(report))
    assert document["schema"] == "cbatch-report" and document["version"] == 1
    assert {"requests", "duration_s", "output_tokens_per_s"} <= set(document)
    for name in ("ttft_s", "tpot_s", "itl_s", "e2e_s"):
        assert {"mean", "p50", "p90", "p99"} <= set(document[name])
    assert read_reports(test_replay.to_json(report)) == ([report], [""])
    with pytest.raises(ValueError, match="version 2"):
        read_reports(json.dumps(document | {"version": 2}).encode())
