"""The comparison of the simulator with an engine, here with engines whose steps take no time."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from bench.simulator import compare
from cbatch.core.scheduler.scheduler import Scheduler
from cbatch.engine.core import EngineCore
from cbatch.engine.engine import Engine
from cbatch.text.outputs import Output
from sim.workload.sources import OpenLoop
from sim.workload.traces.request import TraceRequest
from tests.checking.executor import SimExecutor
from tests.checking.models import ModelledAcceptance
from tests.helpers import VOCAB_SIZE, make_config
from tests.sim.test_calibrated import calibration

PROMPTS = [[1 + i, *range(7)] for i in range(5)]
SIZES = {
    "num_blocks": 200,
    "block_size": 4,
    "max_num_seqs": 4,
    "max_model_len": 128,
    "max_num_batched_tokens": 64,
    "draft_context_tokens": 128,
}
COST: Any = calibration(engine=SIZES, draft="d")


def engine(lookahead: str) -> Engine:
    config = make_config(lookahead=lookahead, **SIZES)
    executor = SimExecutor(
        num_blocks=config.num_blocks,
        block_size=config.block_size,
        max_num_seqs=config.max_num_seqs,
        vocab_size=VOCAB_SIZE,
        acceptance=ModelledAcceptance(0.7),
        draft_context_tokens=config.draft_context_tokens,
        drafter=config.default_chain,
    )
    return Engine(EngineCore(Scheduler(config), executor), seed=0)


def requests(count: int, gap_s: float) -> list[TraceRequest]:
    return [
        TraceRequest(arrival_s=i * gap_s, prompt_tokens=8, output_tokens=9) for i in range(count)
    ]


def step(tokens: int, drafted: int, accepted: int) -> Output:
    return Output("r", 0, "", tuple(range(tokens)), drafted, accepted)


@pytest.mark.parametrize(
    ("steps", "acceptances"),
    [
        ([step(3, 4, 2), step(1, 4, 0)], [1, 1, 1, 0, 0]),  # replaced tokens were drafted wrongly
        ([step(3, 2, 2)], [1, 1, 1, 1]),  # nothing is known of the last
        ([step(1, 0, 0)], [1, 0]),  # a lookup without a guess
        ([step(2, 4, 2)], [1, 1, 1]),  # cut after the second draft
    ],
)
def test_acceptances_are_read_off_outputs(steps: list[Output], acceptances: list[int]) -> None:
    assert compare.acceptances_of([step(1, 0, 0), *steps]) == acceptances


def test_recorded_fates_are_those_of_the_drafts() -> None:
    """The scripted acceptance is a coin by position."""
    recorded = compare.record_acceptances(engine("fixed:8"), PROMPTS)
    assert len(recorded) == len(PROMPTS) and {len(f) for f in recorded} == {
        compare.ACCEPTANCE_TOKENS
    }
    model = ModelledAcceptance(0.7)
    same = [
        model.num_accepted(str(i), 0, 0, len(PROMPTS[i]) + at, 1) == acceptances[at]
        for i, acceptances in enumerate(recorded)
        for at in range(1, 64)
    ]
    assert np.mean(same) > 0.98 and 0.5 < np.mean(recorded) < 0.9


def test_a_run_is_compared_with_its_simulation() -> None:
    """A run that went as the simulator predicts has no error; one twice as slow, of which arrivals
    are too, is out of bounds."""
    simulated, cases = compare.SimulatedEngine(COST, [[1, 0, 1]]), []
    for policy, factors in (("off", (1.0, 1.0, 1.0)), ("fixed:4", (2.0, 2.2))):
        case = compare.Case(policy, 0.4, requests(20, 0.02))
        run = simulated.replay(OpenLoop(case.requests), policy)
        case.runs = [
            [
                compare.ServedRequest(
                    r.arrival_s * f, r.output_tokens, r.ttft_s * f, (r.tpot_s or 0) * f, r.e2e_s * f
                )
                for r in run
            ]
            for f in factors
        ]
        cases.append(case)
    rows = compare.rows_of(simulated, cases)
    assert len(rows) == 10
    for row in rows:
        if row["lookahead"] == "off":
            assert row["within"] and abs(row["error"]) < 1e-3 and row["spread"] == 0
        else:
            assert not row["within"] and row["spread"] == pytest.approx(0.2 / 2.1, abs=0.01)


def test_loads_are_shares_of_what_a_policy_serves() -> None:
    args = compare.parse(["--policy", "off", "fixed:4", "--seconds", "1"])
    simulated = compare.SimulatedEngine(COST, [[1] * 8])  # every draft is accepted
    cases = compare.make_cases(simulated, PROMPTS, args)
    assert [(c.policy, c.load) for c in cases[:3]] == [("off", load) for load in (0.4, 0.8, 2.0)]
    rates = {(c.policy, c.load): len(c.requests) / (c.requests[-1].arrival_s or 1.0) for c in cases}
    assert rates["off", 2.0] > 2 * rates["off", 0.4]
    assert rates["fixed:4", 0.8] > rates["off", 0.8]
    over = cases[2].requests
    assert [r.prompt_tokens for r in over] == [8] * len(over)
    ends_s = [record.arrival_s + record.e2e_s for record in simulated.replay(OpenLoop(over), "off")]
    assert max(ends_s) > 1.5 * over[-1].arrival_s
