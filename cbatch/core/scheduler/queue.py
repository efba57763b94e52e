"""The waiting queue: one order, fixed when a request arrives.

Ageing lowers every waiting request's key by the same rate times the time it has waited, so the
*difference* of two keys never changes, and `static key = base + rate * arrival time` sorts the same
at every moment. Nothing is re-sorted while requests wait.

Preempted requests go before all others: they were admitted once, and their tokens are paid for.
"""

from __future__ import annotations

import bisect
from collections.abc import Iterator
from typing import Generic, TypeVar

from cbatch.core.request.request import Request
from cbatch.core.scheduler.config import QueuePolicy

Rank = tuple[float, int]  # smaller is served first; the arrival number breaks ties
T = TypeVar("T")

_DEFAULT_AGEING_PER_S = {"fcfs": 0.0, "priority": 0.0, "shortest": 64.0}


def rank_request(
    policy: QueuePolicy, ageing_per_s: float | None, request: Request, arrival: int, now_s: float
) -> Rank:
    """The request's place in line: `arrival` counts requests, `now_s` is its time of arrival."""
    ageing = _DEFAULT_AGEING_PER_S[policy] if ageing_per_s is None else ageing_per_s
    if policy == "priority":
        return (request.priority + ageing * now_s, arrival)
    if policy == "shortest":
        work_tokens = len(request.prompt) + request.params.max_tokens
        return (work_tokens + ageing * now_s, arrival)
    return (0.0, arrival)


class WaitingQueue(Generic[T]):
    """Items in service order. Ranks are unique, so items themselves are never compared."""

    def __init__(self) -> None:
        self._keys: list[tuple[bool, Rank]] = []  # (is not preempted, rank)
        self._items: list[T] = []

    def __len__(self) -> int:
        return len(self._items)

    def __iter__(self) -> Iterator[T]:
        return iter(self._items)

    def push(self, item: T, rank: Rank, *, preempted: bool = False) -> None:
        key = (not preempted, rank)
        at = bisect.bisect_left(self._keys, key)
        self._keys.insert(at, key)
        self._items.insert(at, item)

    def remove(self, rank: Rank) -> T:
        """Take the item with this rank out; it is in the queue."""
        for not_preempted in (False, True):
            key = (not_preempted, rank)
            at = bisect.bisect_left(self._keys, key)
            if at < len(self._keys) and self._keys[at] == key:
                del self._keys[at]
                return self._items.pop(at)
        raise KeyError(rank)
