"""How well `goodput` foresees which drafts survive: `python -m bench.calibration`.

The demo pair answers real prompts with a constant number of requests in flight. In each step, for
every row and depth that was drafted, the survival that the controller believed in is kept beside
what came of it. Per depth these are sorted by prediction and cut into bins of equal size; the error
is the mean over bins, by their size, of |mean predicted - observed share|. A perfect prediction
would show `by_chance`, the error that the coins alone leave in bins of that size. No timing: a busy
machine does no harm, though k follows measured durations and so no two runs are quite alike.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from typing import Any

import numpy as np

from bench.lookahead import WORKLOADS, ClosedLoop, make_prompts
from bench.report import print_report, rounded
from cbatch import EngineOptions, SamplingParams, load_engine
from cbatch.core import lookahead
from cbatch.core.plan import StepResult
from cbatch.core.sequence import Commit
from cbatch.demo import demo_paths
from cbatch.stepwise import Engine

DEEPEST = 8
MODES = ("greedy", "rejection", "coupled")
BINS = 10  # a depth


class Beliefs:
    """Stands before the `commit` of an engine's scheduler: what was believed, what came of it."""

    def __init__(self, engine: Engine) -> None:
        self.predicted: list[np.ndarray] = []  # float64 [rows, DEEPEST], NaN where not drafted
        self.survived: list[np.ndarray] = []  # bool, the same shape
        self._state = engine.scheduler.state
        self._commit = engine.scheduler.commit
        engine.scheduler.commit = self._take  # type: ignore[method-assign]

    def _take(self, result: StepResult, now_s: float) -> Commit:
        controller = self._state.controller
        assert controller is not None
        rows = np.flatnonzero(result.num_drafted)
        if len(rows):
            slots = self._state.flights[0].plan.slots[rows]
            accepted, trials = controller.estimate[:, slots]
            depth = np.arange(1, DEEPEST + 1)
            predicted = lookahead.survival(accepted, trials, DEEPEST).copy()
            predicted[depth > result.num_drafted[rows, None]] = np.nan
            self.predicted.append(predicted)
            self.survived.append(depth <= result.num_accepted[rows, None])
        return self._commit(result, now_s)

    def pairs(self) -> tuple[np.ndarray, np.ndarray]:
        """What was predicted and what was observed, float64 [rows, DEEPEST] each."""
        return np.concatenate(self.predicted), np.concatenate(self.survived).astype(float)


def error_by_depth(predicted: np.ndarray, observed: np.ndarray) -> list[tuple[int, float, float]]:
    """For each depth, drafts that were made, the weighted absolute error, and what it would be by
    chance. The arguments are those of `Beliefs.pairs`."""
    found = []
    for column, outcomes in zip(predicted.T, observed.T, strict=True):
        made = ~np.isnan(column)
        order = np.argsort(column[made], kind="stable")
        count = len(order)
        error = chance = 0.0
        for part in np.array_split(order, BINS):
            if not len(part):
                continue
            mean, share = column[made][part].mean(), outcomes[made][part].mean()
            error += len(part) * abs(mean - share)
            # Mean absolute deviation of a normal law, of the variance that a binomial has.
            chance += np.sqrt(2 / np.pi * len(part) * mean * (1 - mean))
        found.append((count, error / max(count, 1), chance / max(count, 1)))
    return found


def measure(workload: str, mode: str, args: argparse.Namespace) -> dict[str, Any]:
    options = EngineOptions(
        lookahead=f"goodput:{DEEPEST}",
        dtype="float32",
        max_slots=args.batch,
        prefix_cache=False,
        tokenizer="none",
        seed=0,
    )
    engine = load_engine(*demo_paths(), options)[0]
    beliefs = Beliefs(engine)
    params = SamplingParams(temperature=0.0)
    if mode != "greedy":
        params = SamplingParams(temperature=args.temperature, verification=mode)
    prompts = make_prompts(workload, demo_paths()[0])
    loop = ClosedLoop(engine, prompts, args.batch, args.output_tokens, params)
    loop.start()
    speculation = loop.run(args.tokens).speculation
    loop.stop()
    predicted, observed = beliefs.pairs()
    by_depth = error_by_depth(predicted, observed)
    total = sum(count for count, _, _ in by_depth)
    made = ~np.isnan(predicted)
    return {
        "workload": workload,
        "mode": mode,
        "batch": args.batch,
        "drafts": total,
        "steps_with_drafts": rounded(speculation.drafting_share),
        "predicted": rounded(float(predicted[made].mean())),
        "observed": rounded(float(observed[made].mean())),
        "error": rounded(sum(count * error for count, error, _ in by_depth) / total),
        "by_chance": rounded(sum(count * chance for count, _, chance in by_depth) / total),
        **{f"d{j + 1}": rounded(error) for j, (_, error, _) in enumerate(by_depth) if j < 4},
    }


def parse(argv: Sequence[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--workload", nargs="+", choices=WORKLOADS[:3], default=list(WORKLOADS[:3]))
    parser.add_argument("--mode", nargs="+", choices=MODES, default=list(MODES))
    parser.add_argument("--batch", type=int, default=4, help="requests in flight")
    parser.add_argument("--tokens", type=int, default=20_000, help="of output, for each row")
    parser.add_argument("--output-tokens", type=int, default=64, help="of an answer, on average")
    parser.add_argument("--temperature", type=float, default=0.8)
    return parser.parse_args(argv)


def main() -> None:
    args = parse()
    rows = [measure(workload, mode, args) for workload in args.workload for mode in args.mode]
    weights = [row["drafts"] for row in rows]
    errors = [row["error"] for row in rows]
    print_report(
        "calibration of predicted survival: demo pair, goodput",
        rows,
        notes=(f"error over all: {np.average(errors, weights=weights):.3f}; d1 to d4: by depth",),
    )


if __name__ == "__main__":
    main()
