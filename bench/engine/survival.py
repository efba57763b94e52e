"""How well `goodput` foresees which drafts survive: `python -m bench.engine.survival`.

The demo pair answers real prompts with a constant number of requests in flight. In each step, for
every row and depth that was drafted, the survival that the policy believed in is kept beside
what came of it. Sorted by prediction and cut into ten bins of equal size, these give the `error`:
the mean over bins of |mean predicted - observed share| (expected calibration error). `by_depth` is
the same with a bin for each depth, weighed by its drafts; `by_both` with ten bins for each depth.
Coins alone leave something in every bin: `by_chance` is what they leave in the `error`. No timing:
a busy machine does no harm, though k follows measured durations, so no two runs are quite alike.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np

from bench.lookahead import WORKLOADS, EndlessLoop, make_prompts
from bench.report import print_report, rounded
from cbatch import EngineOptions, SamplingParams, load_engine
from cbatch.core.scheduler.plan import StepResult
from cbatch.core.scheduler.sequence import Commit
from cbatch.core.speculation.goodput_policy import GoodputPolicy
from cbatch.demo import demo_paths
from cbatch.engine.engine import Engine

DEEPEST = 8
MODES = ("greedy", "rejection", "coupled")
BINS = 10


class Beliefs:
    """Stands before the `commit` of an engine's scheduler: what was believed, what came of it."""

    def __init__(self, engine: Engine) -> None:
        self.predicted: list[np.ndarray] = []  # float64 [rows, DEEPEST], NaN where not drafted
        self.survived: list[np.ndarray] = []  # bool, the same shape
        self._state = engine.scheduler.state
        self._commit = engine.scheduler.commit
        engine.scheduler.commit = self._take  # type: ignore[method-assign]

    def _take(self, result: StepResult, now_s: float) -> Commit:
        policy = self._state.policy
        assert isinstance(policy, GoodputPolicy)
        rows = np.flatnonzero(result.num_drafted)
        if len(rows):
            slots = self._state.flights[0].plan.slots[rows]
            depth = np.arange(1, DEEPEST + 1)
            predicted = policy.survival(slots, DEEPEST).copy()
            predicted[depth > result.num_drafted[rows, None]] = np.nan
            self.predicted.append(predicted)
            self.survived.append(depth <= result.num_accepted[rows, None])
        return self._commit(result, now_s)

    def pairs(self) -> tuple[np.ndarray, np.ndarray]:
        """What was predicted and what was observed, float64 [rows, DEEPEST] each."""
        return np.concatenate(self.predicted), np.concatenate(self.survived).astype(float)


class Errors(NamedTuple):
    error: float
    by_chance: float
    by_depth: float
    by_both: float


def errors_of(predicted: np.ndarray, observed: np.ndarray) -> Errors:
    """Of what `Beliefs.pairs` gives."""
    made = ~np.isnan(predicted)
    columns = [(predicted[m, j], observed[m, j]) for j, m in enumerate(made.T)]
    total = int(np.count_nonzero(made))
    error, chance = _misses(predicted[made], observed[made], BINS)
    by_depth, by_both = (sum(_misses(*column, bins)[0] for column in columns) for bins in (1, BINS))
    return Errors(error / total, chance / total, by_depth / total, by_both / total)


def _misses(predicted: np.ndarray, observed: np.ndarray, bins: int) -> tuple[float, float]:
    """Sum over bins, times their size, of |mean predicted - observed share|; and what that would be
    on average if the outcomes were independent coins of the predicted chances."""
    error = chance = 0.0
    for part in np.array_split(np.argsort(predicted, kind="stable"), bins):
        if len(part):
            mean = float(predicted[part].mean())
            error += len(part) * abs(mean - float(observed[part].mean()))
            # The mean absolute deviation of a normal law with the variance of a binomial one.
            chance += float(np.sqrt(2 / np.pi * len(part) * mean * (1 - mean)))
    return error, chance


def measure(workload: str, mode: str, args: argparse.Namespace) -> dict[str, Any]:
    most: dict[str, Any] = {"prefix_cache": False, "tokenizer": "none", "seed": 0}
    options = EngineOptions(
        lookahead=f"goodput:{DEEPEST}", dtype="float32", max_slots=args.batch, **most
    )
    engine = load_engine(*demo_paths(), options)[0]
    beliefs = Beliefs(engine)
    params = SamplingParams(temperature=0.0)
    if mode != "greedy":
        params = SamplingParams(temperature=args.temperature, verification=mode)
    prompts = make_prompts(workload, demo_paths()[0])
    loop = EndlessLoop(engine, prompts, args.batch, args.output_tokens, params)
    loop.start()
    speculation = loop.run(args.tokens).speculation
    loop.stop()
    predicted, observed = beliefs.pairs()
    made = ~np.isnan(predicted)
    return {
        "workload": workload,
        "mode": mode,
        "batch": args.batch,
        "drafts": int(np.count_nonzero(made)),
        "steps_with_drafts": rounded(speculation.drafting_share),
        "predicted": rounded(float(predicted[made].mean())),
        "observed": rounded(float(observed[made].mean())),
        **{k: rounded(v) for k, v in errors_of(predicted, observed)._asdict().items()},
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
    errors, weights = ([row[name] for row in rows] for name in ("error", "drafts"))
    notes = (f"error over all: {np.average(errors, weights=weights):.3f}",)
    print_report("calibration of predicted survival: demo pair, goodput", rows, notes=notes)


if __name__ == "__main__":
    main()
