"""The time when a call must be done. It counts from the call's arrival, wherever the call waits."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import NamedTuple

from cbatch.server.protocol.errors import ClientDeadlineError, DeadlineError, ServiceError


class Deadline(NamedTuple):
    """`at_s` is by `time.monotonic`; `error` is what the call then ends with."""

    at_s: float
    error: ServiceError

    @classmethod
    def of(
        cls, arrived_s: float, client_s: float | None, server_s: float | None
    ) -> Deadline | None:
        """Return the deadline by the shorter limit, those of the client and of the server."""
        kinds = ((client_s, ClientDeadlineError), (server_s, DeadlineError))
        limits = [(limit_s, kind) for limit_s, kind in kinds if limit_s is not None]
        if not limits:
            return None
        limit_s, kind = min(limits, key=lambda limit: limit[0])
        return cls(arrived_s + limit_s, kind(f"the request's time of {limit_s:g} s is over"))

    @property
    def remaining_s(self) -> float:
        return self.at_s - time.monotonic()


@asynccontextmanager
async def ending_at(deadline: Deadline | None) -> AsyncIterator[None]:
    """End the block at the deadline, with its error."""
    limit = asyncio.timeout(None if deadline is None else deadline.remaining_s)
    try:
        async with limit:
            yield
    except TimeoutError:
        if deadline is None or not limit.expired():
            raise
        raise deadline.error from None
