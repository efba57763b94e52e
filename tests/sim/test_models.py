from __future__ import annotations

import pytest

from sim.models import ModelledAcceptance, ScriptedAcceptance, StepCost


def test_modelled_acceptance_has_its_probability():
    model = ModelledAcceptance(0.7, {"hard": 0.2})
    for name, probability in (("easy", 0.7), ("hard", 0.2)):
        accepted = rejected = 0
        for position in range(0, 40_000, 4):
            a = model.num_accepted(name, 1, 0, position, 4)
            accepted += a
            rejected += a < 4
        deviation = (probability * (1 - probability) / (accepted + rejected)) ** 0.5
        assert abs(accepted / (accepted + rejected) - probability) < 5 * deviation


def test_modelled_acceptance_of_a_position_does_not_depend_on_k():
    model = ModelledAcceptance(0.5)
    for position in range(200):
        deep = model.num_accepted("a", 1, 0, position, 8)
        assert [model.num_accepted("a", 1, 0, position, k) for k in range(8)] == [
            min(deep, k) for k in range(8)
        ]


def test_script_goes_step_by_step_and_repeats_its_last_entry():
    script = ScriptedAcceptance({"a": [2, 0, 9]})
    assert [script.num_accepted("a", 0, 0, 5, 4) for _ in range(5)] == [2, 0, 4, 4, 4]


@pytest.mark.parametrize("more", [(11, 100, 2), (10, 101, 2), (10, 100, 3)])
def test_cost_grows_with_tokens_context_and_rows(more):
    cost = StepCost()
    assert cost.target_s(*more) > cost.target_s(10, 100, 2)
    assert cost.draft_s(0, 0) == 0 < cost.draft_s(1, 1) < cost.draft_s(2, 2)
