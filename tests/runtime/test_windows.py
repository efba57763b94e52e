"""Draft heads that miss states of the target: they see what follows, and no text changes."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from torch import Tensor

from cbatch.core.speculation.policies import FixedPolicy
from cbatch.runtime.cpu.drafters.kinds import drafter_of
from tests.runtime.engines import run_engine, tiny_model
from tests.runtime.marks import needs_compiler
from tests.runtime.test_heads import (
    TWO_KINDS,
    CheckedEagle,
    checked_run,
    eagle1,
    eagle3,
    hard_life,
    load,
)

pytestmark = needs_compiler


class _Windowed(CheckedEagle):
    windows = 0  # drafts of sequences that the head has not seen whole

    def expected(self, slot: int, tokens: list[int], drafts: list[int]) -> Tensor:
        first, cold = int(self._windows.first_of_slot[slot]), self.cold
        self.windows += first > 0
        return cold.reference.logits(tokens[first:], cold.states(tokens)[first:], drafts)


def with_gaps(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let no row draft in six steps of twelve; in four of these no states are kept."""
    choose, steps = FixedPolicy.choose, {"n": 0}

    def choose_sometimes(policy: Any, step: Any) -> np.ndarray | None:
        steps["n"] += 1
        step_of_12 = steps["n"] % 12
        policy.keeps_states = step_of_12 >= 4
        return choose(policy, step) if step_of_12 >= 6 else None

    monkeypatch.setattr(FixedPolicy, "choose", choose_sometimes)


@pytest.mark.parametrize("make", [eagle3, eagle1])
def test_after_a_gap_the_head_sees_what_follows(make, tmp_path, monkeypatch):
    """With blocks of one token a window begins with the first state after the gap."""
    requests, settings = hard_life(monkeypatch)
    with_gaps(monkeypatch)
    settings |= {"block_size": 1, "num_blocks": 160}
    run = checked_run(make, tmp_path, requests, _Windowed, **settings)
    drafter = run.executor.drafter
    assert drafter.windows > 50
    assert drafter.wrong < 1e-4
    assert run.scheduler.stats.prefix_hit_tokens > 0
    assert run.outputs == run_engine(requests, tiny_model()).outputs


@TWO_KINDS
def test_a_gap_within_blocks_changes_no_text(make, tmp_path, monkeypatch):
    requests, settings = hard_life(monkeypatch)
    with_gaps(monkeypatch)
    target = tiny_model()
    make(tmp_path)
    head = load(tmp_path, target)
    run = run_engine(requests, target, head, drafting=drafter_of(head), **settings)
    assert run.drafted.any() and run.scheduler.stats.prefix_hit_tokens > 0
    assert run.outputs == run_engine(requests, tiny_model()).outputs
