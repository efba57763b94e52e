"""Prices for the comparisons of engine and simulator: read, or measured in turns with the runs.

A machine whose speed drifts by a tenth within a minute makes every calibration of before or after
wrong by as much. So `--calibrate` lets both take turns: made-up batches for some seconds after
every run, none of which is a run that is foretold; what drifts, drifts under both.
"""

from __future__ import annotations

import argparse
import time
from pathlib import Path

import numpy as np

from cbatch import EngineOptions, load_engine
from cbatch.core.request.errors import FieldError
from cbatch.core.speculation.step_work import StepSample
from cbatch.demo import demo_paths
from cbatch.engine.engine import Engine
from cbatch.engine.info import EngineInfo
from cbatch.engine.loop import Executor
from sim.cost.calibrated import Calibration, read_calibration, write_calibration
from sim.cost.measure import Calibrator, calibration_of, designed

_STEPS = 16  # of a batch at a time
_TURN_S = 3.0  # after each run
_WARM_UP = 3  # batches


class MeasuredPrices:
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
        if self._calibrating is not None:
            self.first = self._calibrating.finish_pass()
            write_calibration(self._path, self.first)
        return self.first


class Calibrating:
    """The steps of an engine, measured a batch at a time: one after another for ever, each pass in
    an order of its own."""

    def __init__(self, engine: Engine, info: EngineInfo, seed: int = 0) -> None:
        executor, self._config = engine.loop.executor, engine.scheduler.config
        assert isinstance(executor, Executor)
        self._info, self._rng = info, np.random.default_rng(seed)
        self._calibrator = Calibrator(executor, self._config)
        fitted, held_out = designed(self._config)
        self._known: list[StepSample] = []
        self._others: list[StepSample] = []
        self._batches = [(batch, self._known) for batch in fitted]
        self._batches += [(batch, self._others) for batch in held_out]
        self._left: list[int] = []  # of this pass
        for batch in fitted[-_WARM_UP:]:
            self._calibrator.samples(batch, _STEPS, self._rng)

    def _next(self) -> None:
        self._left = self._left or self._rng.permutation(len(self._batches)).tolist()
        batch, samples = self._batches[self._left.pop()]
        samples += self._calibrator.samples(batch, _STEPS, self._rng)

    def go_on(self, seconds: float) -> None:
        """Measures for about so long."""
        until_s = time.perf_counter() + seconds
        while time.perf_counter() < until_s:
            self._next()

    def finish_pass(self) -> Calibration:
        """What all batches come to, each measured as often as any other."""
        self._next()
        while self._left:
            self._next()
        return calibration_of(self._info, self._config, self._known, self._others)
