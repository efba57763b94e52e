"""What each mechanism of `goodput` is worth, by simulation: `python -m bench.ablation`.

Every mechanism is taken out on its own (a class here has the policy without it) and serves the same
requests, at every load, on machines whose prices are known and with texts whose acceptance is: one
that stays, one that changes, and two that are made to mislead. `of_off` is tokens a second over
those without drafts, `of_full` over the whole policy: the geometric mean over all cells, and the
least with where it was. Simulated, so the same on every machine; the time that the policy itself
takes is not in it.

With `--cost` and `--fates` it is a machine's own prices and what was found of real drafts. How much
the whole policy loses to the best k of each cell, which nobody knows before, is what `of_full` says
of `the best fixed k`; with `--exact` without what noise does to prices.
"""

from __future__ import annotations

import argparse
import json
import tempfile
from collections.abc import Sequence
from concurrent.futures import ProcessPoolExecutor
from itertools import product
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from msgspec import structs
from rich.progress import track

from bench.report import print_report, rounded
from bench.simulated import tokens_per_s
from cbatch.core.speculation.config import LookaheadConfig
from cbatch.core.speculation.cost_model import StepPrices
from cbatch.core.speculation.draft_allocation import LookaheadDecision
from cbatch.core.speculation.goodput_policy import GoodputPolicy
from cbatch.core.speculation.policy import PlannedRows, PolicyLimits, Shadow
from cbatch.core.speculation.step_work import StepSample

LOADS = (1, 2, 4, 8, 16, 32, 64, 128)
REQUESTS, EACH = 24, 3  # requests of a cell, and more for each in flight
NOISE, STALLS, STALL = 0.1, 1 / 64, 10.0  # of log seconds; how many steps take how long
# By name what `--acceptance` of the simulator takes; the others are written to files.
TEXTS = {"stays": "beta:0.6,3", "changes": "drift:0.9,0.2,64", "hopeless": "0.1"}
FATES = ("turns", "wakes")


def fates(text: str, requests: int) -> list[list[int]]:
    """For each request whether drafts of its tokens are right. `turns`: until something is believed
    of it, then not, and so on. `wakes`: never in the first half of all requests, then nearly ever,
    so that what was learnt is wrong of everybody."""
    if text == "turns":
        turns = [1] * 48 + [0] * 48 + [1] * 160 + [0] * 160
        return [turns[32 * each % 416 :] + turns[: 32 * each % 416] for each in range(requests)]
    good = [int(each % 10 > 0) for each in range(500)]
    return [[0] if each < requests // 2 else good for each in range(requests)]


class Noisy(GoodputPolicy):
    """Steps are measured as on a machine that does other things, too."""

    def __init__(self, config: LookaheadConfig, limits: PolicyLimits) -> None:
        super().__init__(config, limits)
        self._noise, told = np.random.default_rng(0), self.costs.observe
        self.costs.observe = lambda sample: told(self._blurred(sample))  # type: ignore[method-assign]

    def _blurred(self, sample: StepSample) -> StepSample:
        draft, target = np.exp(NOISE * self._noise.standard_normal(2)).tolist()
        stall = STALL if self._noise.random() < STALLS else 1.0
        return structs.replace(
            sample, draft_s=draft * sample.draft_s, target_s=stall * target * sample.target_s
        )


class _Changed(Noisy):
    """With other settings."""

    settings: dict[str, float] = {}

    def __init__(self, config: LookaheadConfig, limits: PolicyLimits) -> None:
        super().__init__(structs.replace(config, **self.settings), limits)


class NoHysteresis(_Changed):
    settings = {"switch_gain": 0.0}


class NoProbes(Noisy):
    """While speculation is off for all."""

    def _probe(self, step: PlannedRows) -> None:
        pass


class NoPlainSteps(Noisy):
    def _let_stand(self, found: LookaheadDecision, disturbed: bool) -> None:
        super()._let_stand(found, disturbed)
        if self.drafting:
            self._tried_at = self._steps


class NoDrift(_Changed):
    settings = {"idle_drift": 1 - 1e-12}


class NoShadow(Noisy):
    def _observe_shadow(self, shadow: Shadow) -> None:
        pass


class NoNewcomers(Noisy):
    """Deaf to others that come, and to other loads."""

    def _disturbed(self, num_rows: int) -> bool:
        return False


class NoPatience(Noisy):
    """A decision stands for as few steps as possible."""

    def _let_stand(self, found: LookaheadDecision, disturbed: bool) -> None:
        super()._let_stand(found, disturbed=True)


class NoDepths(Noisy):
    def __init__(self, config: LookaheadConfig, limits: PolicyLimits) -> None:
        super().__init__(config, limits)
        self._depths.observe = lambda *_: None  # type: ignore[method-assign]


class NoFleet(Noisy):
    """Requests begin at the configured prior, whatever those before them did."""

    def _tell_fleet(self, gained: np.ndarray, trials: np.ndarray) -> None:
        pass


class NoWeights(Noisy):
    def _best(self, *args: Any) -> tuple[LookaheadDecision, StepPrices]:
        self._decision = None
        return super()._best(*args)


class NoDebts(Noisy):
    def _without_late_rows(self, lag: Any, room: Any, values: Any, prices: Any) -> Any:
        return values, 0.0


MECHANISMS = {
    "hysteresis": NoHysteresis,
    "probes": NoProbes,
    "plain steps": NoPlainSteps,
    "drift to the prior": NoDrift,
    "shadow scores": NoShadow,
    "newcomers": NoNewcomers,
    "decisions that stand": NoPatience,
    "correction by depth": NoDepths,
    "prior of the fleet": NoFleet,
    "weights": NoWeights,
    "debts": NoDebts,
}


class Setting(NamedTuple):
    machine: str
    text: str
    load: int

    def __str__(self) -> str:
        return f"{self.machine}, {Path(self.text).stem}, {self.load}"


def simulated(policy: str, setting: Setting, cost: str | None, requests: int = REQUESTS) -> float:
    """Output tokens a second. A text that has no other name is a file of `bench.fates`."""
    machine = {"draft_model": "llama-3.2-1b"} if cost is None else {"cost": cost}
    num_requests, acceptance = requests + EACH * setting.load, TEXTS.get(setting.text)
    with tempfile.TemporaryDirectory() as folder:
        if acceptance is None:
            recorded = Path(setting.text)
            if setting.text in FATES:
                recorded = Path(folder) / "fates.json"
                recorded.write_text(json.dumps(fates(setting.text, num_requests)))
            acceptance = f"recorded:{recorded}"
        return tokens_per_s(
            policy,
            setting.load,
            num_requests,
            acceptance=acceptance,
            max_slots=max(LOADS),
            **machine,
        )


def _simulated(task: tuple[str, Setting, str | None, int]) -> float:
    return simulated(*task)


def rows_of(
    speeds: dict[tuple[str, Setting], float], cells: Sequence[Setting]
) -> list[dict[str, Any]]:
    """A row for the whole policy, one for each mechanism that is missing, and `fixed`'s."""
    rows = []
    for policy in dict.fromkeys(policy for policy, _ in speeds):
        of_off, of_full = (
            np.array([speeds[policy, cell] / speeds[base, cell] for cell in cells])
            for base in ("off", "goodput")
        )
        rows.append(
            {
                "without": policy,
                "of_off": rounded(float(np.exp(np.log(of_off).mean()))),
                "least_of_off": rounded(float(of_off.min())),
                "there": str(cells[int(of_off.argmin())]),
                "of_full": rounded(float(np.exp(np.log(of_full).mean()))),
                "least_of_full": rounded(float(of_full.min())),
                "where": str(cells[int(of_full.argmin())]),
            }
        )
    return rows


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(prog="python -m bench.ablation", description=__doc__)
    parser.add_argument("--load", type=int, nargs="+", default=LOADS)
    parser.add_argument("--text", nargs="*", choices=(*TEXTS, *FATES), default=[*TEXTS, *FATES])
    parser.add_argument(
        "--fates", nargs="*", default=[], metavar="FILE", help="of `bench.fates`: more texts"
    )
    parser.add_argument(
        "--cost", nargs="*", default=[], metavar="FILE", help="of `cbatch calibrate`: more machines"
    )
    parser.add_argument("--recorded", action="store_true", help="no machine but those of --cost")
    parser.add_argument("--exact", action="store_true", help="steps are measured without noise")
    parser.add_argument("--without", nargs="*", choices=MECHANISMS, default=list(MECHANISMS))
    parser.add_argument("--fixed", type=int, nargs="+", default=[1, 2, 4, 8], metavar="K")
    help_ = f"of a cell, besides {EACH} for each in flight (default: {REQUESTS})"
    parser.add_argument("--requests", type=int, default=REQUESTS, metavar="N", help=help_)
    parser.add_argument("--processes", type=int)
    args = parser.parse_args(argv)
    machines: dict[str, str | None] = {} if args.recorded else {"8B + 1B, H100": None}
    machines |= {Path(file).stem: file for file in args.cost}
    # Run as a program, this module has another name.
    classes = {name: f"bench.ablation:{MECHANISMS[name].__name__}" for name in args.without}
    policies = {"off": "off", "goodput": "goodput" if args.exact else "bench.ablation:Noisy"}
    policies |= classes | {f"fixed:{k}": f"fixed:{k}" for k in args.fixed}
    texts = [*args.text, *args.fates]
    cells = [Setting(*each) for each in product(machines, texts, args.load)]
    keys = list(product(policies, cells))
    tasks = [(policies[p], cell, machines[cell.machine], args.requests) for p, cell in keys]
    with ProcessPoolExecutor(args.processes) as pool:
        found = pool.map(_simulated, tasks)
        speeds = dict(zip(keys, track(found, "simulating", len(keys)), strict=True))
    best = {c: max(speeds[p, c] for p in policies if p == "off" or p[:5] == "fixed") for c in cells}
    speeds |= {("the best fixed k", cell): best[cell] for cell in cells}
    print_report("ablation", rows_of(speeds, cells))


if __name__ == "__main__":
    main()
