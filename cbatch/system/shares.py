"""Sharing of what is scarce among owners, such as API keys. What has no owner is not limited to a
share."""

from __future__ import annotations

import asyncio
from collections import Counter, deque
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress


class SharedLimit:
    """A limit on the sum of amounts. An owner takes at most twice what it leaves free: alone two
    thirds of the limit, so that there is room for others. Its first amount only has to fit."""

    def __init__(self, limit: int, unit: str) -> None:
        self.limit, self.total, self.unit = limit, 0, unit
        self._by_owner: Counter[str | None] = Counter()

    def problem(self, amount: int, owner: str | None) -> str | None:
        own, free = self._by_owner[owner], self.limit - self.total - amount
        if free < 0:
            return f"{self.total} of {self.limit} {self.unit}"
        if owner is not None and own and own + amount > 2 * free:
            return f"{own} of {self.limit} {self.unit} are of this key, and others need room"
        return None

    def add(self, amount: int, owner: str | None) -> None:
        self.total += amount
        self._by_owner[owner] += amount


class NoPlaceError(RuntimeError):
    """No place became free in time."""


class Places:
    """Places for the coroutines of one event loop. Owners take turns, those with the fewest places
    first, and none takes the last place."""

    def __init__(self, num_places: int) -> None:
        self._num_places = self._num_free = num_places
        self._used: Counter[str | None] = Counter()
        self._waiting: dict[str | None, deque[asyncio.Future[None]]] = {}  # next owner first

    def num_open(self, owner: str | None) -> int:
        return self._used[owner] + len(self._waiting.get(owner, ()))

    @asynccontextmanager
    async def place(self, owner: str | None, wait_s: float) -> AsyncIterator[None]:
        """Have a place while the block runs. Raises `NoPlaceError` after `wait_s`."""
        place = asyncio.get_running_loop().create_future()
        self._waiting.setdefault(owner, deque()).append(place)
        self._give()
        try:
            try:
                async with asyncio.timeout(wait_s):
                    await place
            except TimeoutError:
                raise NoPlaceError(f"all places have been taken for {wait_s:g} s") from None
            yield
        finally:
            if place.done() and not place.cancelled():
                self._num_free += 1
                self._used[owner] -= 1
                self._give()
            else:
                self._leave(owner, place)

    def _give(self) -> None:
        max_used = max(self._num_places - 1, 1)
        while self._num_free:
            owners = [o for o in self._waiting if o is None or self._used[o] < max_used]
            if not owners:
                return
            owner = min(owners, key=self._used.__getitem__)
            place = self._waiting[owner][0]
            self._leave(owner, place)
            if not place.cancelled():
                self._num_free -= 1
                self._used[owner] += 1
                place.set_result(None)

    def _leave(self, owner: str | None, place: asyncio.Future[None]) -> None:
        """Remove a waiting place. The owner's next one waits for the turns of all others."""
        places = self._waiting.pop(owner, deque())
        with suppress(ValueError):
            places.remove(place)
        if places:
            self._waiting[owner] = places
