"""The outputs of one call, from the service to whoever answers the client."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable

from cbatch.outputs import Accepted, Output
from cbatch.server.errors import ServiceError


class OutputStream:
    """The outputs of one request, as they come. Ends after every choice has finished, or raises the
    `ServiceError` that ended it.

    `close()` (or leaving the `async with`) before the end cancels what still runs.
    """

    def __init__(self, accepted: Accepted, on_close: Callable[[], None]) -> None:
        self.accepted = accepted
        self.unread_tokens = 0
        self.admitted_s: float | None = None  # `time.monotonic`: its first choice got a slot
        self._on_close = on_close
        self._outputs: asyncio.Queue[Output | ServiceError] = asyncio.Queue()
        self._num_running = accepted.num_choices

    def put(self, output: Output) -> None:
        self.unread_tokens += len(output.token_ids)
        self._outputs.put_nowait(output)

    def fail(self, error: ServiceError) -> None:
        """Ends it, after what has not been read yet."""
        self._outputs.put_nowait(error)

    def drop_unread(self) -> None:
        while not self._outputs.empty():
            self._outputs.get_nowait()
        self.unread_tokens = 0

    async def __aiter__(self) -> AsyncIterator[Output]:
        while self._num_running:
            output = await self._outputs.get()
            if isinstance(output, ServiceError):
                self._num_running = 0
                raise output
            self.unread_tokens -= len(output.token_ids)
            self._num_running -= output.finished is not None
            yield output

    async def __aenter__(self) -> OutputStream:
        return self

    async def __aexit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        if self._num_running:
            self._num_running = 0
            self._on_close()
