from __future__ import annotations

import pytest

from cbatch.engine.evidence import Evidence


def test_strikes_lead_to_trials_and_a_token_clears() -> None:
    evidence = Evidence()
    assert evidence.on_death(["a", "b"], alone=False) is None
    assert evidence.suspects == []
    evidence.clear("a")
    assert evidence.on_death(["a", "b"], alone=False) is None
    assert evidence.suspects == ["b"], "a had committed a token in between"
    evidence.clear("b")
    assert evidence.suspects == []


def test_the_guilty_one_dies_alone_twice_and_after_all_others() -> None:
    evidence = Evidence()
    for _ in range(2):
        evidence.on_death(["a", "b", "c"], alone=False)
    assert evidence.on_death(["a"], alone=True) is None, "it may have come from outside"
    assert evidence.suspects == ["b", "c", "a"]
    evidence.clear("b")
    evidence.clear("c")
    assert evidence.on_death(["a"], alone=True) == "a"


def test_nobody_is_convicted_in_company() -> None:
    evidence = Evidence()
    assert not any(evidence.on_death(["a", "b"], alone=False) for _ in range(20))
    assert evidence.on_death([], alone=False) is None


@pytest.mark.parametrize("deaths", [1, 2])
def test_a_lone_request_has_three_lives(deaths: int) -> None:
    evidence = Evidence()
    for _ in range(deaths):
        assert evidence.on_death(["a"], alone=True) is None
    if deaths == 2:
        assert evidence.on_death(["a"], alone=True) == "a"
