"""A call on its way: its choices in the engine, place in the queue, deadlines and stream."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable

from cbatch.choices import LiveChoice, joined
from cbatch.core.plan import TokenLogprobs
from cbatch.core.request import Request
from cbatch.engine.client import EngineClient
from cbatch.engine.wire import Ending, Row
from cbatch.outputs import Accepted, Output
from cbatch.server.admission import Admission, Limits, Place
from cbatch.server.errors import (
    ClientDeadlineError,
    DeadlineError,
    ServiceDownError,
    ServiceError,
    SlowReaderError,
)
from cbatch.server.stream import OutputStream
from cbatch.text import TextTokenizer

_logger = logging.getLogger("cbatch")


class OpenCall:
    """Over once every choice has ended, or with `abort`; then `on_over` is called."""

    def __init__(
        self,
        accepted: Accepted,
        client: EngineClient,
        place: Place,
        max_unread_tokens: int,
        on_over: Callable[[str], None],
    ) -> None:
        self.stream = OutputStream(accepted, lambda: self.abort(None))
        self._client, self._place, self._on_over = client, place, on_over
        self._max_unread_tokens = max_unread_tokens
        self._running: dict[str, None] = {}  # core ids of choices that have not ended
        self._queue_timer: asyncio.TimerHandle | None = None
        self._timer: asyncio.TimerHandle | None = None
        self._over = False

    def begin(self, requests: list[Request], tokenizer: TextTokenizer | None) -> None:
        group_id = self.stream.accepted.request_id
        self._running = dict.fromkeys(request.request_id for request in requests)
        for request in requests:
            live = LiveChoice(request, group_id, tokenizer)
            self._client.add(request, _ChoiceListener(self, live, self._client))

    def set_deadlines(self, limits: Limits, timeout_s: float | None, queue: Admission) -> None:
        """From now on. `timeout_s` is the client's own; the shorter one counts."""
        loop = asyncio.get_running_loop()
        if limits.queue_timeout_s is not None:
            message = f"no slot became free within {limits.queue_timeout_s:g} s"
            self._queue_timer = loop.call_later(
                limits.queue_timeout_s,
                lambda: self.abort(queue.overloaded("queue_timeout", message)),
            )
        kinds = ((timeout_s, ClientDeadlineError), (limits.timeout_s, DeadlineError))
        given = [(each_s, kind) for each_s, kind in kinds if each_s is not None]
        if given:
            limit_s, kind = min(given, key=lambda each: each[0])
            error = kind(f"the request's time of {limit_s:g} s is over")
            self._timer = loop.call_later(limit_s, self.abort, error)

    def on_admitted(self, ago_s: float) -> None:
        if self.stream.admitted_s is None:
            self.stream.admitted_s = time.monotonic() - ago_s
        self._place.leave_one()
        if self._queue_timer is not None:
            self._queue_timer.cancel()

    def deliver(self, core_id: str, output: Output) -> None:
        self.stream.put(output)
        if output.finished is not None:
            del self._running[core_id]
            if not self._running:
                self._end()
        elif self.stream.unread_tokens > self._max_unread_tokens:
            unread = self.stream.unread_tokens
            self.stream.drop_unread()
            self.abort(SlowReaderError(f"the client has left {unread} tokens unread"))

    def abort(self, error: ServiceError | None) -> None:
        """Ends what still runs. None: the client has left, nobody is to be told."""
        if self._over:
            return
        for core_id in self._running:
            self._client.cancel(core_id)
        if error is not None:
            self.stream.fail(error)
        self._end()

    def _end(self) -> None:
        self._over = True
        for timer in (self._queue_timer, self._timer):
            if timer is not None:
                timer.cancel()
        self._place.release()
        self._on_over(self.stream.accepted.request_id)


class _ChoiceListener:
    """From the engine's tokens to outputs with text."""

    def __init__(self, call: OpenCall, live: LiveChoice, client: EngineClient) -> None:
        self._call, self._live, self._client = call, live, client
        self._logprobs: TokenLogprobs | None = None  # of the tokens that come next

    def on_admitted(self, ago_s: float) -> None:
        self._call.on_admitted(ago_s)

    def on_logprobs(self, entry: TokenLogprobs) -> None:
        if not self._live.take_prompt_logprobs(entry):
            self._logprobs = entry

    def on_step(self, row: Row, ending: Ending | None) -> None:
        live = self._live
        try:
            output = live.extend(row.tokens, row.num_drafted, row.num_accepted, self._logprobs)
            self._logprobs = None
            if output.finished is not None:
                self._client.finish(live.core_id, len(live.tokens))
            elif ending is not None:
                output = joined(output, live.end(ending.reason, ending.message))
        except Exception as error:  # of the text side: it must not stop the other requests
            _logger.exception("request %s", live.group_id)
            self._call.abort(ServiceError(f"its text could not be decoded: {error!r}"))
        else:
            self._call.deliver(live.core_id, output)

    def on_end(self, ending: Ending) -> None:
        self._call.deliver(self._live.core_id, self._live.end(ending.reason, ending.message))

    def on_lost(self, message: str) -> None:
        self._call.abort(ServiceDownError(message))
