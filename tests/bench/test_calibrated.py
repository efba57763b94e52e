"""Prices that are measured between runs, on an engine whose steps take no time."""

from __future__ import annotations

import argparse
from pathlib import Path

import msgspec
import pytest

from bench.calibrated import _STEPS, Calibrating, Prices, add_run_options
from cbatch.calibrating import designed
from cbatch.core.errors import FieldError
from tests.bench.test_simulator_engine import engine
from tests.cli.conftest import INFO
from tests.sim.test_calibrated import calibration


def options(*arguments: str) -> argparse.Namespace:
    parser = argparse.ArgumentParser()
    add_run_options(parser)
    return parser.parse_args(arguments)


def test_every_batch_is_measured_as_often_as_any_other() -> None:
    """However long the turns are: a pass that was begun is gone through."""
    served = engine("fixed:4")
    fitted, held_out = designed(served.scheduler.config)
    calibrating = Calibrating(served, INFO)
    once = calibrating.finish_pass()
    assert (once.fitted.steps, once.held_out.steps) == (
        _STEPS * len(fitted),
        _STEPS * len(held_out),
    )
    calibrating.go_on(0.02)
    more = calibrating.finish_pass()
    passes, left = divmod(more.fitted.steps, once.fitted.steps)
    assert passes >= 2 and left == 0
    assert more.held_out.steps == passes * once.held_out.steps
    assert more.engine["max_slots"] == 4 and more.max_rows == 4


def test_prices_are_read_or_measured_but_not_both(tmp_path: Path) -> None:
    path = tmp_path / "cost.json"
    path.write_bytes(msgspec.json.encode(calibration()))
    prices = Prices(options("--cost", str(path)), 4)
    prices.after_run()
    assert prices.first == prices.final() == calibration()
    with pytest.raises(FieldError, match="leave one of them out"):
        Prices(options("--cost", str(path), "--calibrate", "--runs", "runs.json"), 4)
