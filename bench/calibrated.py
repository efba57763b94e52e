"""Prices for the comparisons of engine and simulator: read, or measured in turns with the runs.

A machine whose speed drifts by a tenth within a minute makes every calibration of before or after
wrong by as much. So `--calibrate` lets both take turns: made-up batches for some seconds after
every run, none of which is a run that is foretold; what drifts, drifts under both.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Iterator
from pathlib import Path

import numpy as np

from cbatch import EngineOptions, load_engine
from cbatch.calibrating import Calibrator, calibration_of, designed
from cbatch.core.errors import FieldError
from cbatch.demo import demo_paths
from cbatch.engine.loop import Executor
from cbatch.info import EngineInfo
from cbatch.stepwise import Engine
from sim.calibrated import Calibration, StepSample, read_calibration, write_calibration

_STEPS = 16  # of a batch at a time
_TURN_S = 3.0  # after each run
_WARM_UP = 3  # batches


class Calibrating:
    """The steps of an engine, measured a batch at a time."""

    def __init__(self, engine: Engine, info: EngineInfo, seed: int = 0) -> None:
        executor, self._config = engine.loop.executor, engine.scheduler.config
        self._info = info
        assert isinstance(executor, Executor)
        self._calibrator = Calibrator(executor, self._config)
        self._fitted, self._held_out = designed(self._config)
        self._rng = np.random.default_rng(seed)
        self._known: list[StepSample] = []
        self._others: list[StepSample] = []
        self._turn = self._batches()
        for batch in self._fitted[-_WARM_UP:]:
            self._calibrator.samples(batch, _STEPS, self._rng)

    def _batches(self) -> Iterator[int]:
        """One after another for ever, each pass in an order of its own; yields how many are left
        of it."""
        every = [(batch, self._known) for batch in self._fitted]
        every += [(batch, self._others) for batch in self._held_out]
        while True:
            for done, i in enumerate(self._rng.permutation(len(every)), start=1):
                batch, samples = every[i]
                samples += self._calibrator.samples(batch, _STEPS, self._rng)
                yield len(every) - done

    def go_on(self, seconds: float) -> None:
        """Measures for about so long."""
        until_s = time.perf_counter() + seconds
        while time.perf_counter() < until_s:
            next(self._turn)

    def finish_pass(self) -> Calibration:
        """What all batches come to, each measured as often as any other."""
        while next(self._turn):
            pass
        return calibration_of(self._info, self._config, self._known, self._others)


class Prices:
    """Of `--cost`: as the file has them, or measured meanwhile and written to it."""

    def __init__(self, args: argparse.Namespace, max_slots: int) -> None:
        """Raises `FieldError` for options that contradict one another."""
        self._path: Path = args.cost
        self._calibrating: Calibrating | None = None
        if not args.calibrate:
            self.first = read_calibration(self._path)
            return
        if args.runs is not None:
            remedy = "leave one of them out"
            raise FieldError("--calibrate", "there are no turns to take with --runs", remedy)
        options = EngineOptions(max_slots=max_slots, prefix_cache=False, tokenizer="none", seed=0)
        self._calibrating = Calibrating(*load_engine(*demo_paths(), options))
        self.first = self._calibrating.finish_pass()

    def after_run(self) -> None:
        if self._calibrating is not None:
            self._calibrating.go_on(_TURN_S)

    def final(self) -> Calibration:
        if self._calibrating is None:
            return self.first
        found = self._calibrating.finish_pass()
        write_calibration(self._path, found)
        return found


def add_run_options(parser: argparse.ArgumentParser) -> None:
    """Prices, and where runs are kept: of whatever foretells what the engine did."""
    parser.add_argument("--cost", type=Path, required=True, help="of cbatch calibrate")
    parser.add_argument(
        "--calibrate", action="store_true", help="measure prices between the runs, for --cost"
    )
    parser.add_argument("--out", type=Path, help="keep what was measured")
    parser.add_argument("--runs", type=Path, help="foretell what was kept, without an engine")
