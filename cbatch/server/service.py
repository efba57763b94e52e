"""What the HTTP side asks of the engine: text and parameters in, streams of outputs back."""

from __future__ import annotations

import asyncio
import math
import time
from collections.abc import Callable

from cbatch.choices import Seeds, choice_requests, token_ids
from cbatch.core.config import SchedulerConfig
from cbatch.core.errors import FieldError
from cbatch.core.request import Request, SamplingParams, StructuredOutputs
from cbatch.engine.client import EngineClient
from cbatch.engine.wire import EngineStats, Ready, Sight
from cbatch.grammars import Grammars, require_grammars
from cbatch.outputs import Accepted
from cbatch.server.admission import LONGEST_RETRY_S, Admission, Limits
from cbatch.server.calls import OpenCall
from cbatch.server.errors import ServiceDownError
from cbatch.server.prompts import AnyPrompt, PendingPrompt, most_tokens
from cbatch.server.stream import OutputStream
from cbatch.text import TextTokenizer

_LONG_PROMPT_CHARS = 10_000  # tokenising more than this would hold up everyone's stream
LEAST_UNREAD_TOKENS = 64  # for each choice, so that one long step is no slow reader
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
        self._grammars: Grammars | None = None
        self._calls: dict[str, OpenCall] = {}  # by the caller's request id
        self._num_open = 0  # and those that are being tokenised
        self._stops_at_s: float | None = None  # at the latest; None: it goes on
        self._idle = asyncio.Event()
        self._idle.set()

    @property
    def running(self) -> bool:
        """Alive: the engine runs, or is being started again."""
        return self._client.engine is not None and self.down is None

    @property
    def down(self) -> str | None:
        """Why the engine is gone for good, if it is."""
        return self._client.down

    @property
    def ready(self) -> bool:
        """Whether a request sent now would be served at once, or soon."""
        return self._client.up and self._stops_at_s is None

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
        if self._stops_at_s is not None:
            return "stopping"
        if not self.running:
            return "down"
        return "running" if self._client.up else "restarting"

    @property
    def over(self) -> bool:
        """It is stopping, or has no engine to go on with, and nothing runs any more."""
        ending = self._stops_at_s is not None or self.down is not None
        return ending and not self._num_open

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
        engine = self._client.engine or await self._client.start()
        tokenizer = self._tokenizer
        if self._grammars is None and tokenizer is not None and engine.follows_grammars:
            config = engine.config
            self._grammars = Grammars(lambda: tokenizer, config.vocab_size, config.eos_ids)
            await asyncio.to_thread(self._grammars.prepare)
        return engine

    async def drain(self, grace_s: float) -> None:
        """Accepts nothing more; what was accepted has `grace_s` to finish, the rest is ended and
        told so."""
        self._stops_at_s = time.monotonic() + grace_s
        try:
            await asyncio.wait_for(self._idle.wait(), grace_s)
        except TimeoutError:
            self._abort_all(f"{_STOPPING}, and its grace time of {grace_s:g} s is over")

    async def stop(self) -> None:
        """Ends the engine; streams that still run end with `ServiceDownError`."""
        self._stops_at_s = time.monotonic()
        self._abort_all(_STOPPING)
        await self._client.stop()

    async def require_grammar(self, asked: StructuredOutputs, field: str) -> None:
        """Raises `FieldError` about `field`, as the client called it, for what the engine could not
        follow. `submit` would say the same, but compiles where all streams wait for it."""
        await asyncio.to_thread(require_grammars(self._grammars, field).check, asked, field)

    async def submit(
        self,
        prompt: AnyPrompt,
        params: SamplingParams,
        *,
        request_id: str,
        priority: int = 0,
        timeout_s: float | None = None,
        num_prompts: int = 1,
    ) -> OutputStream:
        """Raises `FieldError`, `OverloadedError` or `ServiceDownError`; then nothing was queued.
        `timeout_s` is for the whole request, beside the server's own limit. The `num_prompts` of
        one call share what may be left unread."""
        engine = self._require_engine()
        reserved_tokens = min(most_tokens(prompt), engine.config.max_sequence_tokens)
        place = self.queue.reserve(params.n, reserved_tokens)
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
        share = self.limits.max_unread_tokens // num_prompts
        most_unread = max(share, LEAST_UNREAD_TOKENS * params.n)
        call = OpenCall(accepted, self._client, place, most_unread, on_over=self._forget)
        self._calls[request_id] = call
        call.set_deadlines(self.limits, timeout_s, self.queue)
        call.begin(requests, self._tokenizer)
        return call.stream

    def _require_engine(self) -> Ready:
        """Raises `ServiceDownError`."""
        engine = self._client.engine
        if engine is None or not self.running:
            raise ServiceDownError(self.down or "the engine is not running")
        if self._stops_at_s is not None:
            left_s = math.ceil(self._stops_at_s - time.monotonic())
            raise ServiceDownError(_STOPPING, max(1, min(LONGEST_RETRY_S, left_s)))
        return engine

    async def _token_ids(self, prompt: AnyPrompt) -> tuple[int, ...]:
        if isinstance(prompt, PendingPrompt):
            is_long = prompt.num_bytes > _LONG_PROMPT_CHARS
            return await asyncio.to_thread(prompt.make) if is_long else prompt.make()
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
            grammars=self._grammars,
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
