"""The outputs of one prompt, from the service to whoever answers the client."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Sequence

from cbatch.outputs import Accepted, Output
from cbatch.server.errors import ServiceError


class OutputStream:
    """The outputs of one request, as they come. Ends after every choice has finished, or with the
    `ServiceError` that ended it. What is not read yet lies here and nowhere else.

    `close()` (or leaving the `async with`) before the end cancels what still runs.
    """

    def __init__(self, accepted: Accepted, on_close: Callable[[], None]) -> None:
        self.accepted = accepted
        self.unread_tokens = 0
        self.admitted_s: float | None = None  # `time.monotonic`: its first choice got a slot
        self._on_close = on_close
        self._unread: list[Output] = []
        self._error: ServiceError | None = None
        self._num_running = accepted.num_choices
        self._news = asyncio.Event()

    def put(self, output: Output) -> None:
        self.unread_tokens += len(output.token_ids)
        self._unread.append(output)
        self._news.set()

    def fail(self, error: ServiceError) -> None:
        """Ends it, after what has not been read yet."""
        self._error = error
        self._news.set()

    def drop_unread(self) -> None:
        self._unread = []
        self.unread_tokens = 0

    def announce_to(self, news: asyncio.Event) -> None:
        """Sets `news` whenever there is something to take, from now on."""
        self._news = news
        news.set()

    def take(self) -> list[Output]:
        """Everything that is unread."""
        taken, self._unread = self._unread, []
        self.unread_tokens = 0
        for output in taken:
            if output.finished is not None:
                self._num_running -= 1
        return taken

    def ended(self) -> bool:
        """Whether everything was taken. Raises the `ServiceError` that ended it."""
        if self._unread:
            return False
        if self._error is not None and self._num_running:
            self._num_running = 0
            raise self._error
        return not self._num_running

    async def __aiter__(self) -> AsyncIterator[Output]:
        async for items in joined([self]):
            for _, output in items:
                yield output

    async def __aenter__(self) -> OutputStream:
        return self

    async def __aexit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        if self._num_running:
            self._num_running = 0
            self._on_close()


Item = tuple[int, Output]  # of the stream at this position


async def joined(streams: Sequence[OutputStream]) -> AsyncIterator[list[Item]]:
    """The outputs of all streams as they come, those of one step together. Raises the first
    `ServiceError` that ended one, after all that came before it."""
    news = asyncio.Event()
    for stream in streams:
        stream.announce_to(news)
    while True:
        await news.wait()
        news.clear()
        items = [(at, output) for at, stream in enumerate(streams) for output in stream.take()]
        if items:
            yield items
        if all([stream.ended() for stream in streams]):
            return
