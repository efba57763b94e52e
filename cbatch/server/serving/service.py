"""What the HTTP side asks of the engine: text and parameters in, streams of outputs back."""

from __future__ import annotations

import asyncio
import math
import time
from collections.abc import Callable
from contextlib import ExitStack, suppress
from functools import partial
from typing import TYPE_CHECKING

from msgspec import structs

from cbatch.core.request.errors import FieldError
from cbatch.core.request.request import Request, SamplingParams, StructuredOutputs
from cbatch.core.scheduler.config import SchedulerConfig
from cbatch.core.scheduler.recorded_pool import CacheCleared
from cbatch.grammars import FIELD, GrammarsBusyError, GrammarValidator, ValidatedGrammar, not_served
from cbatch.kv_events.wire import encode_changes
from cbatch.process.client import EngineClient
from cbatch.process.messages import EngineMetrics, Ready, Snapshot, Stepped
from cbatch.server.protocol.errors import ServiceDownError, ServiceError
from cbatch.server.protocol.model import ServedModel
from cbatch.server.protocol.requests import AnyPrompt, PendingPrompt, most_tokens
from cbatch.server.serving.admission_queue import LONGEST_RETRY_S, AdmissionQueue, Limits
from cbatch.server.serving.call import OpenCall, OutputStream
from cbatch.server.serving.prompts import PromptReader, WorkerState
from cbatch.text import TextTokenizer
from cbatch.text.output_processor import Seeds, choice_requests
from cbatch.text.outputs import Accepted
from cbatch.workers import PoolClosedError, WorkerPool

if TYPE_CHECKING:
    from cbatch.kv_events.publisher import KVEventPublisher

LEAST_UNREAD_TOKENS = 64  # for each choice, so that one long step is no slow reader
READING_S = 2.0  # from a stop signal on, for prompts that are being read
# Prompts before the first call, each unless the one before took longer than `_LONG_WARM_S`: the
# first of a size takes longer than others, and the last shows how fast prompts can be read.
_WARM_TOKENS, _LONG_WARM_S, _WARM_S = (8, 64, 256, 256), 1.0, 60.0
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
        kv_events: KVEventPublisher | None = None,
    ) -> None:
        """`seed` makes the seeds drawn for requests without one reproducible. What the engines tell
        of their prefix caches goes to `kv_events`; it is closed with the service."""
        self.limits = limits or Limits()
        self.queue = AdmissionQueue(self.limits, time.monotonic, lambda: client.stats)
        self._client, self._tokenizer, self._seeds = client, tokenizer, Seeds(seed)
        self.kv_events = kv_events
        if kv_events is not None:
            client.on_step, client.on_death = self._publish, self._publish_cleared
            self._publish_cleared()  # to who followed a server that was here before
        self._workers: WorkerPool | None = None
        self._grammars: GrammarValidator | None = None
        self._prompts: PromptReader | None = None
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
    def num_open(self) -> int:
        """These, and the calls whose prompt or grammar is still being read."""
        return self._num_open

    @property
    def stats(self) -> EngineMetrics | None:
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

    def watch(self, on_snapshot: Callable[[Snapshot], None] | None) -> None:
        """See `EngineClient.watch`."""
        self._client.watch(on_snapshot)

    def request_id(self, wire_id: str) -> str | None:
        """Of what the running engine calls so."""
        return self._client.request_id(wire_id)

    async def start(self) -> Ready:
        """Waits for the engine, once. Raises `FieldError` or `EngineStartError`."""
        return self._client.engine or await self._client.start()

    def open(self, model: ServedModel) -> PromptReader:
        """Prompts are read as `model` does, from now on. The engine has been started."""
        engine = self._client.engine
        assert engine is not None
        follows_grammars = self._tokenizer is not None and engine.follows_grammars
        eos_ids = engine.config.eos_ids if follows_grammars else None
        setup = partial(WorkerState, model, engine.config.vocab_size, eos_ids)
        self._workers = WorkerPool(setup)
        if follows_grammars:
            self._grammars = GrammarValidator(self._workers)
        self._prompts = PromptReader(model, self._workers, self.limits, self.queue)
        return self._prompts

    async def warm(self, *, steps: bool = True) -> None:
        """Start what the first call would wait for: workers and, with `steps`, a request's way
        through the engine."""
        if self._workers is not None and self._tokenizer is not None:
            await self._workers.warm()
        if not steps:
            return
        output = None if self._grammars is None else StructuredOutputs(regex="[a-z]+")
        params = SamplingParams(max_tokens=2, seed=0, structured_outputs=output)
        with suppress(FieldError, ServiceError):  # clients are told what is wrong
            for token, length in enumerate(_WARM_TOKENS):
                start_s, prompt = time.monotonic(), (token,) * length
                async for _ in await self.submit(prompt, params, request_id="", timeout_s=_WARM_S):
                    pass
                if token and time.monotonic() - start_s > _LONG_WARM_S:
                    return

    async def drain(self, grace_s: float) -> None:
        """Accepts nothing more; what was accepted has `grace_s` to finish, the rest is ended and
        told so. A prompt that is being read has `READING_S`."""
        self._stops_at_s = time.monotonic() + grace_s
        reading_s = min(READING_S, grace_s)
        with suppress(TimeoutError):
            await asyncio.wait_for(self._idle.wait(), reading_s)
        if self._workers is not None:
            await self._workers.close()
        try:
            await asyncio.wait_for(self._idle.wait(), grace_s - reading_s)
        except TimeoutError:
            self.end_all(grace_s)

    def end_all(self, grace_s: float) -> None:
        """Whatever has not finished in so much time is told that it is over."""
        self._abort_all(f"{_STOPPING}, and its grace time of {grace_s:g} s is over")

    async def stop(self) -> None:
        """Ends the engine; streams that still run end with `ServiceDownError`."""
        self._stops_at_s = time.monotonic()
        self._abort_all(_STOPPING)
        await self._client.stop()
        if self.kv_events is not None:
            self.kv_events.close()
        if self._grammars is not None:
            await self._grammars.close()
        if self._workers is not None:
            await self._workers.close()

    async def submit(
        self,
        prompt: AnyPrompt,
        params: SamplingParams,
        *,
        request_id: str,
        priority: int = 0,
        cache_salt: str | None = None,
        itl_target_s: float | None = None,
        timeout_s: float | None = None,
        num_prompts: int = 1,
        grammar_field: str = FIELD,
        owner: str | None = None,
        mark_ids: frozenset[int] | None = None,
        whole: bool = True,
    ) -> OutputStream:
        """Raises `FieldError`, `OverloadedError` or `ServiceDownError`; then nothing was queued.
        `timeout_s` is for the whole request, beside the server's own limit. The `num_prompts` of
        one call share what may be left unread. `grammar_field` is what the client called the
        structured outputs, and `owner` who may have only so many of them compiled at once;
        `mark_ids`, `whole`: see `LiveChoice`."""
        engine, prompts = self._require_engine(), self._prompts
        assert prompts is not None, "open comes first"
        with ExitStack() as holds:
            self._open_one(holds)
            reserved_tokens = min(most_tokens(prompt), engine.config.max_sequence_tokens)
            ticket = self.queue.reserve(params.n, reserved_tokens)
            holds.callback(ticket.release)
            ids = await prompts.ids(prompt)
            params = within(params, prompt, ids)
            requests = self._requests(ids, params, engine, request_id, priority, cache_salt)
            if itl_target_s is not None:
                requests = [structs.replace(r, itl_target_s=itl_target_s) for r in requests]
            if params.structured_outputs is not None:
                tried = await self._tried(params, grammar_field, owner)
                quick = structs.replace(params, structured_outputs=tried.spec)
                given = {"params": quick, "compile_s": tried.compile_s}
                requests = [structs.replace(each, **given) for each in requests]
            if request_id in self._calls:
                raise FieldError("request_id", f"{request_id!r} is running", "use another")
            ticket.settle(len(ids))
            self.queue.require_in_time()
            accepted = Accepted(request_id, ids, requests[0].seed, params.n)
            share = self.limits.max_unread_tokens // num_prompts
            most_unread = max(share, LEAST_UNREAD_TOKENS * params.n)
            call = OpenCall(accepted, self._client, ticket, most_unread, holds)
            self._calls[request_id] = call
            holds.callback(self._calls.pop, request_id)
            call.set_deadlines(self.limits, timeout_s, self.queue)
            call.begin(requests, self._tokenizer, mark_ids=mark_ids, whole=whole)
            call.keep()
        return call.stream

    def _publish(self, step: Stepped) -> None:
        if step.kv_events and self.kv_events is not None:
            self.kv_events.publish(step.kv_events)

    def _publish_cleared(self) -> None:
        if self.kv_events is not None:
            self.kv_events.publish(encode_changes([CacheCleared()], time.time()))

    def _require_engine(self) -> Ready:
        """Raises `ServiceDownError`."""
        engine = self._client.engine
        if engine is None or not self.running:
            raise ServiceDownError(self.down or "the engine is not running")
        if self._stops_at_s is not None:
            left_s = math.ceil(self._stops_at_s - time.monotonic())
            raise ServiceDownError(_STOPPING, max(1, min(LONGEST_RETRY_S, left_s)))
        return engine

    def _requests(
        self,
        ids: tuple[int, ...],
        params: SamplingParams,
        engine: Ready,
        request_id: str,
        priority: int,
        cache_salt: str | None,
    ) -> list[Request]:
        requests = choice_requests(
            request_id,
            ids,
            params,
            seed=self._seeds.of(params),
            priority=priority,
            cache_salt=cache_salt,
            drafters=engine.drafters,
            has_text=self._tokenizer is not None,
        )
        engine.config.check_request(requests[0])
        return requests

    async def _tried(
        self, params: SamplingParams, field: str, owner: str | None
    ) -> ValidatedGrammar:
        """Raises `FieldError` for a grammar that the engine could not follow, `OverloadedError`."""
        assert params.structured_outputs is not None
        if self._grammars is None:
            raise not_served(field)
        try:
            return await self._grammars.check(
                params.structured_outputs, num_choices=params.n, field=field, owner=owner
            )
        except GrammarsBusyError as error:
            raise self.queue.overloaded("grammars", str(error)) from error
        except PoolClosedError as error:
            raise ServiceDownError(_STOPPING) from error

    def _open_one(self, holds: ExitStack) -> None:
        self._num_open += 1
        self._idle.clear()
        holds.callback(self._close_one)

    def _close_one(self) -> None:
        self._num_open -= 1
        if not self._num_open:
            self._idle.set()

    def _abort_all(self, message: str) -> None:
        for call in list(self._calls.values()):
            call.abort(ServiceDownError(message))


def within(params: SamplingParams, prompt: AnyPrompt, ids: tuple[int, ...]) -> SamplingParams:
    """Return the parameters with the grammar around a structured output that the prompt implies."""
    output = params.structured_outputs
    if output is None or not isinstance(prompt, PendingPrompt) or prompt.around is None:
        return params
    around = prompt.around(ids) if output.around is None else output.around
    return structs.replace(params, structured_outputs=structs.replace(output, around=around))
