"""Prices for the comparisons of engine and simulator: read, or measured in turns with the runs.

A machine whose speed drifts by a tenth within a minute makes every calibration of before or after
wrong by as much. So `--calibrate` lets both take turns: some of the made-up batches after every
run, none of which is a run that is foretold; what drifts, drifts under both.
"""

from __future__ import annotations

import argparse
from pathlib import Path

from cbatch import EngineOptions, load_engine
from cbatch.core.request.errors import FieldError
from cbatch.core.speculation.step_work import StepSample
from cbatch.demo import demo_paths
from cbatch.engine.engine import Engine
from cbatch.engine.info import EngineInfo
from cbatch.engine.loop import Executor
from sim.cost.calibrated import Calibration, read_calibration, write_calibration
from sim.cost.measure import Calibrator, DesignedBatch, calibration_of, designed

STEPS = 16  # of a batch at a time
TURNS = 4  # until all batches were measured


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
        self.first = self._calibrating.finish()

    def after_run(self) -> None:
        if self._calibrating is not None:
            self._calibrating.turn()

    def final(self) -> Calibration:
        if self._calibrating is not None:
            self.first = self._calibrating.finish()
            write_calibration(self._path, self.first)
        return self.first


class Calibrating:
    """The steps of an engine, measured a few batches at a time, all in turn."""

    def __init__(self, engine: Engine, info: EngineInfo) -> None:
        executor, self._config = engine.loop.executor, engine.scheduler.config
        assert isinstance(executor, Executor)
        self._info, self._calibrator = info, Calibrator(executor, self._config)
        self._turns = 0
        # Batches that prices are fitted to and others, each with what was measured of them.
        self._kinds: list[tuple[list[DesignedBatch], list[StepSample]]] = [
            (batches, []) for batches in designed(self._config)
        ]

    def turn(self) -> None:
        for batches, samples in self._kinds:
            some = batches[self._turns % TURNS :: TURNS]
            samples += self._calibrator.measure(some, seed=self._turns, steps=STEPS)
        self._turns += 1

    def finish(self) -> Calibration:
        """What all batches come to, each measured as often as any other."""
        self.turn()
        while self._turns % TURNS:
            self.turn()
        (_, known), (_, others) = self._kinds
        return calibration_of(self._info, self._config, known, others)
