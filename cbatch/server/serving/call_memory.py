"""The memory that open calls hold, from the first byte of a body to the last byte of the response,
with one limit for all calls."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from cbatch.server.protocol.errors import OverloadedError
from cbatch.system.shares import SharedLimit

# Bytes of each call that do not count, so that long calls cannot block short calls.
FREE_BYTES = 2**14


class MemoryBudget:
    """The limit of all calls together. `overloaded` returns the error to raise at the limit."""

    def __init__(self, limit: int, overloaded: Callable[[str, str], OverloadedError]) -> None:
        self.limit, self.overloaded = SharedLimit(limit, "bytes"), overloaded
        self.lock = threading.Lock()  # long bodies are parsed in threads

    @property
    def num_bytes(self) -> int:
        return self.limit.total


class CallMemory:
    """The bytes that one call holds. `owner` is one of several API keys."""

    def __init__(self, budget: MemoryBudget) -> None:
        self._budget, self._num_bytes = budget, 0
        self.owner: str | None = None

    def hold(self, num_bytes: int) -> None:
        """Count `num_bytes` instead of the earlier number. Raises `OverloadedError` if they are
        more, and do not fit."""
        budget, more = self._budget, max(num_bytes - FREE_BYTES, 0) - self._num_bytes
        with budget.lock:
            problem = budget.limit.problem(more, self.owner) if more > 0 else None
            if problem is None:
                budget.limit.add(more, self.owner)
                self._num_bytes += more
        if problem is not None:
            raise budget.overloaded("call_bytes", f"open calls hold {problem}")

    @contextmanager
    def sending(self, num_bytes: int) -> Iterator[None]:
        """Count bytes that wait for a client until the block ends; they cannot be refused."""
        with self._budget.lock:
            self._budget.limit.add(num_bytes, self.owner)
        try:
            yield
        finally:
            with self._budget.lock:
                self._budget.limit.add(-num_bytes, self.owner)
