"""A prompt that is being served: its place in the queue, its choices in the engine, its deadlines,
and its outputs for the HTTP side."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Sequence
from contextlib import ExitStack, asynccontextmanager
from typing import NamedTuple

from msgspec import structs

from cbatch.core.request.output import OutputRow
from cbatch.core.request.request import Request
from cbatch.process.client import EngineClient
from cbatch.process.crash_suspects import OpenSequence
from cbatch.server.protocol.errors import (
    ClientDeadlineError,
    DeadlineError,
    ServiceDownError,
    ServiceError,
    SlowReaderError,
)
from cbatch.server.protocol.fields import ApiRequest
from cbatch.server.serving.admission_queue import AdmissionQueue, Place
from cbatch.text import TextTokenizer
from cbatch.text.output_processor import LiveChoice
from cbatch.text.outputs import Output

MIN_UNREAD_TOKENS = 64  # lower bound of `max_unread_tokens` per choice


class Deadline(NamedTuple):
    """The time when a call must be done, by `time.monotonic`, and the error that then ends it. It
    counts from the call's arrival, wherever the call waits."""

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
    limit = asyncio.timeout(None if deadline is None else deadline.remaining_s)
    try:
        async with limit:
            yield
    except TimeoutError:
        if deadline is None or not limit.expired():
            raise
        raise deadline.error from None


class OpenRequest:
    """One prompt of an API request, and its outputs as they arrive. Iteration ends after all
    choices have finished, or raises the `ServiceError` that ended the request. Unread outputs are
    buffered only here. `close()` cancels the choices that still run.

    `begin` sets `request`, the request of the first choice. Closing `resources` releases everything
    that this object has acquired.
    """

    request: Request
    place: Place  # in the queue

    def __init__(self, queue: AdmissionQueue, num_choices: int, owner: str | None = None) -> None:
        self.num_choices, self._owner = num_choices, owner
        self.unread_tokens = 0
        self.admitted_s: float | None = None  # `time.monotonic` when the first choice got a slot
        self.cached_tokens = 0  # prompt tokens that the first choice had in the prefix cache
        self.resources = ExitStack()
        self._queue = queue
        self._queue_timer: asyncio.TimerHandle | None = None
        self._running: dict[ServedChoice, None] = {}
        self._over = False
        self._unread: list[Output] = []
        self._num_unfinished = num_choices  # choices whose last output has not been taken
        self._error: ServiceError | None = None
        self._has_outputs = asyncio.Event()

    # ---- before the engine --------------------------------------------------------------------

    def enqueue(self, prompt_tokens: int) -> None:
        place = self._queue.reserve(self.num_choices, prompt_tokens, self._owner)
        self.place = self.resources.enter_context(place)

    def set_deadlines(self, queue_timeout_s: float | None, deadline: Deadline | None) -> None:
        loop = asyncio.get_running_loop()
        if queue_timeout_s is not None:
            message = f"no slot became free within {queue_timeout_s:g} s"
            self._queue_timer = loop.call_later(
                queue_timeout_s,
                lambda: self.abort(self._queue.overloaded("queue_timeout", message)),
            )
            self.resources.callback(self._queue_timer.cancel)
        if deadline is not None:
            timer = loop.call_later(deadline.remaining_s, self.abort, deadline.error)
            self.resources.callback(timer.cancel)

    def begin(
        self,
        request: Request,
        api_request: ApiRequest,
        client: EngineClient,
        tokenizer: TextTokenizer | None,
        max_unread_tokens: int,
    ) -> None:
        self.request, self.client = request, client
        self._max_unread_tokens = max(max_unread_tokens, MIN_UNREAD_TOKENS * self.num_choices)
        for i in range(self.num_choices):
            choice = ServedChoice(
                structs.replace(request, choice=i),
                request.request_id,
                tokenizer,
                mark_ids=api_request.mark_ids,
                accumulate=not api_request.fields.stream,
            )
            choice.open_request = self
            self._running[choice] = None
        self.resources.callback(self._cancel)
        client.add(list(self._running))

    # ---- events -------------------------------------------------------------------------------

    def on_admitted(self, ago_s: float, cached_tokens: int) -> None:
        """Free the queue place of a choice that got its slot `ago_s` seconds ago. The first choice
        also frees the reserved prompt tokens."""
        if self.admitted_s is None:
            self.admitted_s = time.monotonic() - ago_s
            self.cached_tokens = cached_tokens
        self.place.leave()
        if self._queue_timer is not None:
            self._queue_timer.cancel()

    def deliver(self, choice: ServedChoice, output: Output) -> None:
        self.put(output)
        if output.finished is not None:
            del self._running[choice]
            if not self._running:
                self._over = True
                self.resources.close()
        elif self.unread_tokens > self._max_unread_tokens:
            error = SlowReaderError(f"the client has left {self.unread_tokens} tokens unread")
            self.take()
            self.abort(error)

    def abort(self, error: ServiceError | None) -> None:
        """Cancel the running choices. `error` is None if the client has left."""
        if self._over:
            return
        self._over = True
        with self.resources:
            if error is not None:
                self.fail(error)

    def _cancel(self) -> None:
        with ExitStack() as cancels:  # cancels all choices even if one cancellation raises
            for choice in self._running:
                cancels.callback(self.client.cancel, choice)

    # ---- outputs ------------------------------------------------------------------------------

    def put(self, output: Output) -> None:
        self.unread_tokens += len(output.token_ids)
        self._unread.append(output)
        self._has_outputs.set()

    def fail(self, error: ServiceError) -> None:
        """End the outputs with an error, after those that are still unread."""
        self._error = error
        self._has_outputs.set()

    def share_event(self, has_outputs: asyncio.Event) -> None:
        """Set `has_outputs` now, and whenever an output or the final error arrives."""
        self._has_outputs = has_outputs
        has_outputs.set()

    def take(self) -> list[Output]:
        taken, self._unread = self._unread, []
        self.unread_tokens = 0
        for output in taken:
            self._num_unfinished -= output.finished is not None
        return taken

    def ended(self) -> bool:
        """Return whether all outputs were taken. Raises the `ServiceError` that ended them."""
        if self._unread:
            return False
        if self._error is not None and self._num_unfinished:
            self._num_unfinished = 0
            raise self._error
        return not self._num_unfinished

    async def __aiter__(self) -> AsyncIterator[Output]:
        async for items in merged_outputs([self]):
            for _, output in items:
                yield output

    def close(self) -> None:
        if self._num_unfinished:
            self._num_unfinished = 0
            self.abort(None)


Item = tuple[int, Output]  # index of the prompt, and its output


class Heartbeat:
    """Sets `wake` when a stream has sent nothing for `interval_s`; 0: never. `due` is then true,
    until `record_sent`."""

    def __init__(self, interval_s: float) -> None:
        self.wake, self.due = asyncio.Event(), False
        self._interval_s, self._loop = interval_s, asyncio.get_running_loop()
        self._timer: asyncio.TimerHandle | None = None
        self.record_sent()
        if interval_s:
            self._check()

    def record_sent(self) -> None:
        self._sent_s, self.due = self._loop.time(), False

    def close(self) -> None:
        if self._timer is not None:
            self._timer.cancel()

    def _check(self) -> None:
        """Timer callback. A timer per stream is cheaper than one for each output."""
        remaining_s = self._sent_s + self._interval_s - self._loop.time()
        if remaining_s <= 0:
            self.due, remaining_s = True, self._interval_s
            self.wake.set()
        self._timer = self._loop.call_later(remaining_s, self._check)


async def merged_outputs(
    opened: Sequence[OpenRequest], heartbeat: Heartbeat | None = None
) -> AsyncIterator[list[Item]]:
    """Yield the outputs of all prompts as they arrive, those of one step together, and an empty
    list when `heartbeat` is due. Raises the first `ServiceError` that ended a prompt, after all
    earlier outputs."""
    has_outputs = asyncio.Event() if heartbeat is None else heartbeat.wake
    for request in opened:
        request.share_event(has_outputs)
    while True:
        await has_outputs.wait()
        has_outputs.clear()
        items = [(at, output) for at, request in enumerate(opened) for output in request.take()]
        if items or (heartbeat is not None and heartbeat.due):
            yield items
        if all([request.ended() for request in opened]):
            return


class ServedChoice(LiveChoice, OpenSequence):
    """A choice that runs in the engine process. Its events are passed on to its `OpenRequest`."""

    open_request: OpenRequest

    def on_admitted(self, ago_s: float, cached_tokens: int) -> None:
        self.open_request.on_admitted(ago_s, cached_tokens)

    def on_step(self, row: OutputRow) -> None:
        output = self.extend(row)
        if output.finished is not None and row.finish_reason is None:
            self.open_request.client.finish(self, self.num_tokens)
        self.open_request.deliver(self, output)

    def on_lost(self, message: str) -> None:
        self.open_request.abort(ServiceDownError(message))

    def on_failed(self, error: Exception) -> None:
        self.open_request.abort(ServiceError(f"the request failed: {error!r}"))
