from __future__ import annotations

import pytest

from cbatch.process.crash_suspects import CrashSuspects


def test_strikes_lead_to_trials_and_a_token_clears() -> None:
    suspects = CrashSuspects()
    assert suspects.on_death({"a": "a", "b": "b"}, alone=False) is None
    assert suspects.calls == []
    suspects.clear("a")
    assert suspects.on_death({"a": "a", "b": "b"}, alone=False) is None
    assert suspects.calls == ["b"], "a had committed a token in between"
    suspects.clear("b")
    assert suspects.calls == []


def test_the_culprit_dies_alone_twice_and_after_all_others() -> None:
    suspects = CrashSuspects()
    for _ in range(2):
        suspects.on_death({"a": "a", "b": "b", "c": "c"}, alone=False)
    assert suspects.on_death({"a": "a"}, alone=True) is None, "it may have come from outside"
    assert suspects.calls == ["b", "c", "a"]
    suspects.clear("b")
    suspects.clear("c")
    assert suspects.on_death({"a": "a"}, alone=True) == "a"


def test_nobody_is_convicted_in_company() -> None:
    suspects = CrashSuspects()
    assert not any(suspects.on_death({"a": "a", "b": "b"}, alone=False) for _ in range(20))
    assert suspects.on_death({}, alone=False) is None


@pytest.mark.parametrize("deaths", [1, 2])
def test_a_lone_request_has_three_lives(deaths: int) -> None:
    suspects = CrashSuspects()
    for _ in range(deaths):
        assert suspects.on_death({"a": "a"}, alone=True) is None
    if deaths == 2:
        assert suspects.on_death({"a": "a"}, alone=True) == "a"


def test_a_call_is_tried_as_one_and_its_requests_are_cleared_one_by_one() -> None:
    suspects = CrashSuspects()
    call = {"a": "call", "b": "call"}
    for _ in range(2):
        assert suspects.on_death({**call, "c": "c"}, alone=False) is None
        suspects.clear("b")
    assert suspects.calls == ["call", "c"]
    assert suspects.on_death(call, alone=True) is None
    assert suspects.calls == ["c", "call"], "it has died alone once"
    suspects.clear("b")
    assert suspects.on_death(call, alone=True) == "call"
    for name in call:
        suspects.clear(name)
    assert suspects.calls == ["c"]
    assert suspects.on_death(call, alone=True) is None, "it begins anew"
