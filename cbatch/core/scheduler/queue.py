"""The waiting queue, in an order that is fixed when a request arrives.

Ageing subtracts rate * waiting time from the key of every waiting request, so the *difference* of
two keys never changes. `static key = base + rate * arrival time` gives the same order at any time,
and waiting requests are never sorted again.

Preempted requests go before all others: their tokens were computed once already.
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
    """Return the sort key of a request: `arrival` is its number, `now_s` its time of arrival."""
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
        index = bisect.bisect_left(self._keys, key)
        self._keys.insert(index, key)
        self._items.insert(index, item)

    def remove(self, rank: Rank) -> T:
        """Remove and return the item with this rank. Raises `KeyError` if there is none."""
        for not_preempted in (False, True):
            key = (not_preempted, rank)
            index = bisect.bisect_left(self._keys, key)
            if index < len(self._keys) and self._keys[index] == key:
                del self._keys[index]
                return self._items.pop(index)
        raise KeyError(rank)
