from __future__ import annotations

import pytest

from sim.clock import VirtualClock


def test_moves_only_when_told():
    clock = VirtualClock(5.0)
    assert clock() == clock() == 5.0
    clock.advance(0.25)
    assert clock() == 5.25


def test_advance_to_a_past_time_changes_nothing():
    clock = VirtualClock(5.0)
    clock.advance_to(3.0)
    assert clock() == 5.0
    clock.advance_to(7.0)
    assert clock() == 7.0


@pytest.mark.parametrize("duration_s", [-1.0, float("nan")])
def test_refuses_to_go_back(duration_s):
    with pytest.raises(ValueError, match="duration_s"):
        VirtualClock().advance(duration_s)
