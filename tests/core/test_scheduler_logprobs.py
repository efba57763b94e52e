"""Log probabilities pass through the scheduler to their owners; what they require of a plan."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from msgspec import structs

from cbatch.core.request.logprobs import TokenLogprobs
from cbatch.core.scheduler.plan import StepPlan, StepResult
from tests.checking.executor import SimExecutor
from tests.helpers import World, make_config, make_request


def entry(slot: int, position: int) -> TokenLogprobs:
    return TokenLogprobs(
        slot, position, np.zeros(1, np.float32), np.zeros((1, 0), np.int32), np.zeros((1, 0))
    )


@pytest.fixture
def reporting(monkeypatch: pytest.MonkeyPatch) -> None:
    """An executor that reports an entry for every row, numbered by its slot and step."""
    execute = SimExecutor.execute

    def report(self: SimExecutor, plan: StepPlan, **options: Any) -> StepResult:
        result = execute(self, plan, **options)
        entries = tuple(entry(slot, plan.step_id) for slot in plan.slots.tolist())
        return structs.replace(result, logprobs=entries)

    monkeypatch.setattr(SimExecutor, "execute", report)


@pytest.mark.parametrize("depth", [0, 1])
def test_entries_go_to_the_owners_of_their_rows(reporting: None, depth: int) -> None:
    world = World(make_config(max_num_seqs=3, lookahead="fixed:2"), depth=depth)
    for i in range(6):
        world.add(make_request(f"r{i}", 4 + i, max_tokens=3 + 2 * i))
    world.step()
    world.scheduler.cancel("r1", world.clock())  # its row may be in flight
    world.run()
    assert world.finished["r1"].reason.value == "cancelled"
    for commit in world.commits:
        names = [name for name, _ in commit.logprobs]
        owners = [owner.request.request_id for owner in commit.owners]
        assert names == owners
        assert all(entries.first_position == commit.step_id for _, entries in commit.logprobs)
    assert sum(len(commit.logprobs) for commit in world.commits) > 20


def test_a_wanted_prompt_is_computed_from_its_beginning() -> None:
    prompt = list(range(20))
    world = World()
    world.add(make_request("first", prompt, max_tokens=2))
    world.run()
    world.add(make_request("wants", prompt, max_tokens=2, prompt_logprobs=0))
    world.add(make_request("choice", prompt, max_tokens=2, prompt_logprobs=0, choice=1))
    world.add(make_request("plain", prompt, max_tokens=2))
    world.run()
    admitted = {a.request_id: a for plan in world.plans for a in plan.deltas.new_sequences}
    assert admitted["wants"].kv_len_tokens == 0 and admitted["wants"].computes_prompt
    for name in ("choice", "plain"):
        assert admitted[name].kv_len_tokens == 16 and not admitted[name].computes_prompt
    world.assert_reference()


def test_a_preempted_output_needs_its_prompt_no_more() -> None:
    world = World(make_config(num_blocks=14, max_num_seqs=2, max_model_len=48))
    requests = [make_request(f"r{i}", 16, max_tokens=24, prompt_logprobs=0) for i in range(2)]
    world.add(*requests)
    world.run()
    assert world.scheduler.stats.preemptions > 0
    again = [a for plan in world.plans for a in plan.deltas.new_sequences][2:]
    assert again and all(not a.computes_prompt for a in again)
    assert any(a.kv_len_tokens > 0 for a in again)
