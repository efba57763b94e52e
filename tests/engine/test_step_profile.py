"""Step costs measured at start-up: the fit, the measured steps, and the cache file."""

from __future__ import annotations

import logging
from pathlib import Path

import msgspec
import pytest

from cbatch.core.prices.cost_profile import CostProfile
from cbatch.core.prices.step_work import StepWork
from cbatch.core.scheduler.config import SchedulerConfig
from cbatch.engine.prices.shapes import can_profile, shapes_for
from cbatch.engine.prices.startup import profile_costs
from cbatch.runtime.cpu.drafters.draft_model import DraftModel
from cbatch.system.cache import cached_result
from sim.executor.acceptance import PositionAcceptance
from sim.executor.fake import FakeExecutor
from tests.checking.cost import LinearCost
from tests.helpers import decoding, prefilling
from tests.runtime.engines import RecordingExecutor, make_request, run_engine, tiny_model

CONFIG = SchedulerConfig(
    num_blocks=4096, max_num_seqs=64, max_model_len=1200, draft_context_tokens=1200
)


class Machine(FakeExecutor):
    """A step costs 5 ms, 0.1 ms a token, 0.05 ms a row and 1 us a context token. The drafter costs
    0.7 ms, 1 ms a pass and 0.02 ms a token."""

    def __init__(self, slower: float = 1.0) -> None:
        acceptance = PositionAcceptance([0.5], max_num_seqs=64)
        super().__init__(max_num_seqs=64, cost=self, acceptance=acceptance)
        self._slower, self.spent_s = slower, 0.0
        self._linear = LinearCost(
            base_s=5e-3,
            token_s=1e-4,
            row_s=5e-5,
            context_token_s=1e-6,
            draft_pass_s=1e-3,
            draft_token_s=2e-5,
        )

    def step_s(self, work: StepWork) -> tuple[float, float, float]:
        draft_s, target_s, host_s = self._linear.step_s(work)
        draft_s, target_s = draft_s + 7e-4 * (work.draft_depth > 0), self._slower * target_s
        self.spent_s += draft_s + target_s
        return draft_s, target_s, host_s

    def reset(self) -> None:
        pass


@pytest.mark.parametrize("slots", [8, 64])
def test_the_fit_finds_the_prices_of_a_known_machine(slots):
    config = msgspec.structs.replace(CONFIG, max_num_seqs=slots)
    machine = Machine()
    profile = profile_costs(machine, config, budget_s=8.0)
    assert profile.corner < 1.1
    for rows, depth, context in ((1, 0, 64), (4, 0, 2000), (8, 3, 512), (3, 1, 192)):
        work = decoding(rows, context, depth=depth)
        draft_s, target_s, _ = profile.step_s(work)
        expected = machine.step_s(work)
        assert target_s == pytest.approx(expected[1], rel=0.05)
        assert draft_s == pytest.approx(expected[0], rel=0.3, abs=1e-5)
    mixed = prefilling(1, 400)
    assert profile.step_s(mixed)[1] == pytest.approx(machine.step_s(mixed)[1], rel=0.03)


def test_a_large_model_is_measured_for_a_few_seconds_too() -> None:
    """All shapes together take minutes. The first ones say what a long prompt takes."""
    machine = Machine(slower=40.0)
    profile = profile_costs(machine, CONFIG, budget_s=3.0)
    assert 3.0 < machine.spent_s < 6.0
    for work in (decoding(1, 64), decoding(8, 512, depth=3), prefilling(1, 400)):
        expected_s = machine.step_s(work)[1]
        assert profile.step_s(work)[1] == pytest.approx(expected_s, rel=0.3)


def test_shapes_fit_slots_pool_and_context():
    small = SchedulerConfig(
        num_blocks=12, max_num_seqs=4, max_model_len=90, max_num_batched_tokens=9
    )
    shapes = shapes_for(small)
    assert shapes and all(s.num_drafts == 0 for s in shapes), "without a draft"
    assert max(s.rows for s in shapes) == 2, "two sequences of 66 tokens fill 12 blocks"
    assert max(s.tokens for s in shapes) == 8
    assert can_profile(small) and not can_profile(
        msgspec.structs.replace(CONFIG, max_model_len=64, draft_context_tokens=64)
    )


def test_a_profile_is_measured_and_leaves_no_state():
    target, draft = tiny_model(), tiny_model(noise=0.3)
    config = SchedulerConfig(
        num_blocks=256,
        block_size=4,
        max_num_seqs=8,
        max_model_len=target.config.max_position_tokens,
        vocab_size=target.config.vocab_size,
        draft_context_tokens=draft.config.max_position_tokens,
    )
    executor = RecordingExecutor(
        target, num_blocks=256, block_size=4, max_num_seqs=8, drafter=DraftModel(draft)
    )
    profile = profile_costs(executor, config, budget_s=0.3)
    assert profile.base_s > 0 and profile.token_s > 0
    assert profile.draft_pass_s + profile.draft_token_s > 0
    requests = [make_request(f"r{i}", [3 * i + 1, 7, 11], max_tokens=20) for i in range(3)]
    run = run_engine(requests, target, draft, lookahead="fixed:3", executor=executor)
    assert run.outputs == run_engine(requests, target).outputs


def test_a_profile_is_cached_by_its_conditions(tmp_path, caplog):
    made: list[CostProfile] = []

    def measure() -> CostProfile:
        made.append(CostProfile(1.5 + len(made)))
        return made[-1]

    def cached(key: dict[str, str], folder: Path = tmp_path) -> CostProfile:
        return cached_result("costs", key, CostProfile, measure, folder)

    caplog.set_level(logging.WARNING, logger="cbatch")
    key = {"model": "a", "cpu": "x"}
    first = cached(key)
    assert cached(dict(reversed(key.items()))) == first
    assert cached({**key, "cpu": "y"}) != first and len(made) == 2
    for path in tmp_path.glob("*.json"):
        path.write_text('{"base_s": [1')
    cached(key)
    assert len(made) == 3 and "measuring again" in caplog.text
    assert cached(key) == made[-1], "the broken file was replaced"
    (tmp_path / "file").touch()
    assert cached(key, tmp_path / "file" / "costs") == made[-1]
    assert len(made) == 4 and "could not be cached" in caplog.text
