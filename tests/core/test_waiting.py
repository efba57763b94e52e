"""Service order: policies, ageing, preempted ones first."""

from __future__ import annotations

import pytest

from cbatch.core.config import QueuePolicy
from cbatch.core.request import Request, SamplingParams
from cbatch.core.waiting import WaitingQueue, rank_request


def request(name: str, prompt_tokens: int = 1, max_tokens: int = 1, priority: int = 0) -> Request:
    return Request(
        request_id=name,
        prompt=(1,) * prompt_tokens,
        params=SamplingParams(max_tokens=max_tokens),
        seed=0,
        priority=priority,
    )


def order(
    policy: QueuePolicy, ageing_per_s: float | None, arrivals: list[tuple[float, Request]]
) -> list[str]:
    queue: WaitingQueue[str] = WaitingQueue()
    for number, (now_s, item) in enumerate(arrivals):
        queue.push(item.request_id, rank_request(policy, ageing_per_s, item, number, now_s))
    return list(queue)


def test_first_come_first_served() -> None:
    arrivals = [(0.0, request("a", 9)), (1.0, request("b", 1, priority=-5)), (1.0, request("c"))]
    assert order("fcfs", None, arrivals) == ["a", "b", "c"]


def test_priority_goes_by_level_then_by_arrival() -> None:
    arrivals = [(0.0, request("a", priority=1)), (1.0, request("b")), (2.0, request("c"))]
    assert order("priority", None, arrivals) == ["b", "c", "a"]


def test_shortest_counts_prompt_and_output() -> None:
    arrivals = [(0.0, request("long", 10, 1)), (0.0, request("also", 1, 30)), (0.0, request("s"))]
    assert order("shortest", 0.0, arrivals) == ["s", "long", "also"]


@pytest.mark.parametrize(
    ("policy", "waiter", "late"),
    [
        ("priority", request("waiter", priority=5), request("late", priority=0)),
        ("shortest", request("waiter", 50, 50), request("late", 1, 1)),
    ],
)
def test_ageing_lets_a_waiter_pass_later_arrivals(
    policy: QueuePolicy, waiter: Request, late: Request
) -> None:
    rate = 1.0
    gap_s = 200.0
    assert order(policy, rate, [(0.0, waiter), (1.0, late)]) == ["late", "waiter"]
    assert order(policy, rate, [(0.0, waiter), (gap_s, late)]) == ["waiter", "late"]
    assert order(policy, 0.0, [(0.0, waiter), (gap_s, late)]) == ["late", "waiter"]


def test_preempted_requests_go_first_in_their_own_order() -> None:
    queue: WaitingQueue[str] = WaitingQueue()
    queue.push("new", (0.0, 0))
    queue.push("later victim", (0.0, 7), preempted=True)
    queue.push("earlier victim", (0.0, 3), preempted=True)
    assert list(queue) == ["earlier victim", "later victim", "new"]
    assert queue.remove((0.0, 7)) == "later victim"
    assert queue.remove((0.0, 0)) == "new"
    assert list(queue) == ["earlier victim"]
    with pytest.raises(KeyError):
        queue.remove((0.0, 0))
