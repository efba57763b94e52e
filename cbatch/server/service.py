"""What the HTTP side asks of the engine: text and parameters in, streams of outputs back."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable

from cbatch.choices import Prompt, Seeds, choice_requests, token_ids
from cbatch.core.config import SchedulerConfig
from cbatch.core.errors import FieldError
from cbatch.core.request import Request, SamplingParams
from cbatch.engine.client import EngineClient
from cbatch.engine.wire import EngineStats, Ready, Sight
from cbatch.outputs import Accepted
from cbatch.server.admission import Admission, Limits
from cbatch.server.calls import OpenCall
from cbatch.server.errors import ServiceDownError
from cbatch.server.stream import OutputStream
from cbatch.text import TextTokenizer

_LONG_PROMPT_CHARS = 10_000  # tokenising more than this would hold up everyone's stream
_STOPPING = "the server is stopping"


class EngineService:
    """The text side of an engine in another process, for the coroutines of one event loop."""

    def __init__(
        self,
        client: EngineClient,
        tokenizer: TextTokenizer | None,
        *,
        limits: Limits | None = None,
        seed: int | None = None,
    ) -> None:
        """`seed` makes the seeds drawn for requests without one reproducible."""
        self.limits = limits or Limits()
        self.queue = Admission(self.limits, time.monotonic)
        self._client, self._tokenizer, self._seeds = client, tokenizer, Seeds(seed)
        self._calls: dict[str, OpenCall] = {}  # by the caller's request id
        self._num_open = 0  # and those that are being tokenised
        self._stopping = False
        self._idle = asyncio.Event()
        self._idle.set()

    @property
    def running(self) -> bool:
        """Alive: the engine runs, or is being started again."""
        return self._client.engine is not None and self._client.down is None

    @property
    def ready(self) -> bool:
        """Whether a request sent now would be served at once, or soon."""
        return self._client.up and not self._stopping

    @property
    def num_requests(self) -> int:
        return len(self._calls)

    @property
    def stats(self) -> EngineStats | None:
        """Of the engine's last step or heartbeat; totals begin anew when it is restarted."""
        return self._client.stats

    @property
    def num_restarts(self) -> int:
        """How often the engine has been started again after it died."""
        return max(0, self._client.num_starts - 1)

    @property
    def state(self) -> str:
        """For people."""
        if self._stopping:
            return "stopping"
        if not self.running:
            return "down"
        return "running" if self._client.up else "restarting"

    @property
    def over(self) -> bool:
        """It is stopping, and nothing runs any more."""
        return self._stopping and not self._num_open

    @property
    def config(self) -> SchedulerConfig:
        """Of the engine, which has been started."""
        assert self._client.engine is not None
        return self._client.engine.config

    def watch(self, on_sight: Callable[[Sight], None] | None) -> None:
        """See `EngineClient.watch`."""
        self._client.watch(on_sight)

    def request_id(self, wire_id: str) -> str | None:
        """Of what the running engine calls so."""
        return self._client.request_id(wire_id)

    async def start(self) -> Ready:
        """Waits for the engine, once. Raises `FieldError` or `EngineStartError`."""
        return self._client.engine or await self._client.start()

    async def drain(self, grace_s: float) -> None:
        """Accepts nothing more; what was accepted has `grace_s` to finish, the rest is ended and
        told so."""
        self._stopping = True
        try:
            await asyncio.wait_for(self._idle.wait(), grace_s)
        except TimeoutError:
            self._abort_all(f"{_STOPPING}, and its grace time of {grace_s:g} s is over")

    async def stop(self) -> None:
        """Ends the engine; streams that still run end with `ServiceDownError`."""
        self._stopping = True
        self._abort_all(_STOPPING)
        await self._client.stop()

    async def submit(
        self,
        prompt: Prompt,
        params: SamplingParams,
        *,
        request_id: str,
        priority: int = 0,
        timeout_s: float | None = None,
    ) -> OutputStream:
        """Raises `FieldError`, `OverloadedError` or `ServiceDownError`; then nothing was queued.
        `timeout_s` is for the whole request, beside the server's own limit."""
        engine = self._client.engine
        if engine is None or not self.running:
            raise ServiceDownError(self._client.down or "the engine is not running")
        if self._stopping:
            raise ServiceDownError(_STOPPING)
        most_tokens = len(prompt.encode()) if isinstance(prompt, str) else len(prompt)
        most_tokens = min(most_tokens, engine.config.max_sequence_tokens)
        place = self.queue.reserve(params.n, most_tokens)
        self._num_open += 1
        self._idle.clear()
        try:
            ids = await self._token_ids(prompt)
            requests = self._requests(ids, params, engine, request_id, priority)
        except BaseException:
            place.release()
            self._close_one()
            raise
        place.settle(len(ids))
        accepted = Accepted(request_id, ids, requests[0].seed, params.n)
        most_unread = self.limits.max_unread_tokens
        call = OpenCall(accepted, self._client, place, most_unread, on_over=self._forget)
        self._calls[request_id] = call
        call.set_deadlines(self.limits, timeout_s, self.queue)
        call.begin(requests, self._tokenizer)
        return call.stream

    async def _token_ids(self, prompt: Prompt) -> tuple[int, ...]:
        if isinstance(prompt, str) and len(prompt) > _LONG_PROMPT_CHARS:
            return await asyncio.to_thread(token_ids, prompt, self._tokenizer)
        return token_ids(prompt, self._tokenizer)

    def _requests(
        self,
        ids: tuple[int, ...],
        params: SamplingParams,
        engine: Ready,
        request_id: str,
        priority: int,
    ) -> list[Request]:
        if request_id in self._calls:
            raise FieldError("request_id", f"{request_id!r} is running", "use another")
        requests = choice_requests(
            request_id,
            ids,
            params,
            seed=self._seeds.of(params),
            priority=priority,
            drafters=engine.drafters,
            has_text=self._tokenizer is not None,
        )
        engine.config.check_request(requests[0])
        return requests

    def _forget(self, request_id: str) -> None:
        del self._calls[request_id]
        self._close_one()

    def _close_one(self) -> None:
        self._num_open -= 1
        if not self._num_open:
            self._idle.set()

    def _abort_all(self, message: str) -> None:
        for call in list(self._calls.values()):
            call.abort(ServiceDownError(message))
