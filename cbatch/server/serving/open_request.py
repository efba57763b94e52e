"""A running API request: its choices in the engine, its place in the queue, its deadlines, and the
stream of outputs to the HTTP side."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import ExitStack
from typing import Any

from cbatch.core.request.output import Ending, OutputRow
from cbatch.core.request.request import Request
from cbatch.process.client import EngineClient
from cbatch.server.protocol.errors import (
    ClientDeadlineError,
    DeadlineError,
    ServiceDownError,
    ServiceError,
    SlowReaderError,
)
from cbatch.server.serving.admission_queue import AdmissionQueue, Limits, QueueTicket
from cbatch.text import TextTokenizer
from cbatch.text.output_processor import LiveChoice
from cbatch.text.outputs import Accepted, Output


class OutputStream:
    """The outputs of one prompt as they arrive. Iteration ends after all choices have finished, or
    raises the `ServiceError` that ended the request. Unread outputs are buffered here and nowhere
    else.

    `close()`, or leaving `async with`, cancels the choices that still run.
    """

    def __init__(self, accepted: Accepted, on_close: Callable[[], None]) -> None:
        self.accepted = accepted
        self.unread_tokens = 0
        self.admitted_s: float | None = None  # `time.monotonic` when the first choice got a slot
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
        """End the stream with an error, after the outputs that are still unread."""
        self._error = error
        self._news.set()

    def drop_unread(self) -> None:
        self._unread = []
        self.unread_tokens = 0

    def announce_to(self, news: asyncio.Event) -> None:
        """Set the event `news` from now on whenever there are outputs to take."""
        self._news = news
        news.set()

    def take(self) -> list[Output]:
        """Return all unread outputs."""
        taken, self._unread = self._unread, []
        self.unread_tokens = 0
        for output in taken:
            if output.finished is not None:
                self._num_running -= 1
        return taken

    def ended(self) -> bool:
        """Return whether all outputs were taken. Raises the `ServiceError` that ended the
        stream."""
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


Item = tuple[int, Output]  # with the index of its stream


async def joined(streams: Sequence[OutputStream]) -> AsyncIterator[list[Item]]:
    """Yield the outputs of all streams as they arrive, those of one step together. Raises the first
    `ServiceError` that ended a stream, after the outputs before it."""
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


class OpenRequest:
    """A prompt's running choices. They end by themselves, or by `abort`. `holds` releases
    everything that this object has acquired. The caller closes it on failure, unless `keep` was
    called."""

    def __init__(
        self,
        accepted: Accepted,
        client: EngineClient,
        ticket: QueueTicket,
        max_unread_tokens: int,
        holds: ExitStack,
    ) -> None:
        self.stream = OutputStream(accepted, lambda: self.abort(None))
        self.client = client
        self._ticket = ticket
        self._holds = holds
        self._max_unread_tokens = max_unread_tokens
        self._running: dict[str, None] = {}  # engine request ids of the choices that run
        self._queue_timer: asyncio.TimerHandle | None = None
        self._over = False

    def begin(
        self, requests: list[Request], tokenizer: TextTokenizer | None, **options: Any
    ) -> None:
        """Send the choices to the engine. `options` are those of `LiveChoice`."""
        choices = [(r, ServedChoice(self, r, tokenizer, **options)) for r in requests]
        self._running = dict.fromkeys(r.request_id for r in requests)
        self._holds.callback(self._cancel)
        self.client.add(choices)

    def keep(self) -> None:
        """Take over `holds` from the caller, after a successful `begin`."""
        self._holds = self._holds.pop_all()

    def set_deadlines(self, limits: Limits, timeout_s: float | None, queue: AdmissionQueue) -> None:
        """Start the timers. `timeout_s` is the client's limit; the shorter limit counts."""
        loop = asyncio.get_running_loop()
        if limits.queue_timeout_s is not None:
            message = f"no slot became free within {limits.queue_timeout_s:g} s"
            self._queue_timer = loop.call_later(
                limits.queue_timeout_s,
                lambda: self.abort(queue.overloaded("queue_timeout", message)),
            )
            self._holds.callback(self._queue_timer.cancel)
        kinds = ((timeout_s, ClientDeadlineError), (limits.timeout_s, DeadlineError))
        deadlines = [(seconds, kind) for seconds, kind in kinds if seconds is not None]
        if deadlines:
            limit_s, kind = min(deadlines, key=lambda deadline: deadline[0])
            error = kind(f"the request's time of {limit_s:g} s is over")
            self._holds.callback(loop.call_later(limit_s, self.abort, error).cancel)

    def on_admitted(self, ago_s: float) -> None:
        if self.stream.admitted_s is None:
            self.stream.admitted_s = time.monotonic() - ago_s
        self._ticket.leave_one()
        if self._queue_timer is not None:
            self._queue_timer.cancel()

    def deliver(self, core_id: str, output: Output) -> None:
        self.stream.put(output)
        if output.finished is not None:
            del self._running[core_id]
            if not self._running:
                self._over = True
                self._holds.close()
        elif self.stream.unread_tokens > self._max_unread_tokens:
            unread = self.stream.unread_tokens
            self.stream.drop_unread()
            self.abort(SlowReaderError(f"the client has left {unread} tokens unread"))

    def abort(self, error: ServiceError | None) -> None:
        """Cancel the running choices. None: the client has left, so there is no error to report."""
        if self._over:
            return
        self._over = True
        with self._holds:
            if error is not None:
                self.stream.fail(error)

    def _cancel(self) -> None:
        with ExitStack() as cancels:  # cancels all of them even if one raises
            for core_id in self._running:
                cancels.callback(self.client.cancel, core_id)


class ServedChoice(LiveChoice):
    """A choice that runs in the engine process. Its events are passed on to its `OpenRequest`."""

    def __init__(
        self,
        open_request: OpenRequest,
        request: Request,
        tokenizer: TextTokenizer | None,
        **options: Any,
    ) -> None:
        super().__init__(request, open_request.stream.accepted.request_id, tokenizer, **options)
        self._open_request = open_request

    def on_admitted(self, ago_s: float) -> None:
        self._open_request.on_admitted(ago_s)

    def on_step(self, row: OutputRow, ending: Ending | None) -> None:
        output = self.extend(row, ending)
        if output.finished is not None and ending is None:
            self._open_request.client.finish(self.request.request_id, self.num_tokens)
        self._open_request.deliver(self.request.request_id, output)

    def on_end(self, ending: Ending) -> None:
        self._open_request.deliver(self.request.request_id, self.end(ending.reason, ending.message))

    def on_lost(self, message: str) -> None:
        self._open_request.abort(ServiceDownError(message))

    def on_failed(self, error: Exception) -> None:
        self._open_request.abort(ServiceError(f"the request failed: {error!r}"))
