"""The engine as the HTTP side sees it: it takes prompts and parameters and returns streams of
outputs."""

from __future__ import annotations

import asyncio
import logging
import math
import time
from collections.abc import AsyncIterator
from contextlib import ExitStack, closing, suppress
from functools import partial
from typing import TYPE_CHECKING

from msgspec import structs

from cbatch.core.request.errors import FieldError
from cbatch.core.request.request import Request, SamplingParams, StructuredOutputs
from cbatch.grammars import GrammarsBusyError, GrammarValidator, grammars_unsupported
from cbatch.kv_events.wire import encode_cleared
from cbatch.process.client import EngineClient
from cbatch.process.messages import Ready, Stepped
from cbatch.server.protocol.errors import ServiceDownError, ServiceError
from cbatch.server.protocol.fields import (
    AnyPrompt,
    ApiRequest,
    PendingPrompt,
    max_prompt_tokens,
)
from cbatch.server.protocol.model import ServedModel
from cbatch.server.serving.admission_queue import MAX_RETRY_AFTER_S, AdmissionQueue, Limits
from cbatch.server.serving.open_request import Deadline, OpenRequest, ending_at
from cbatch.server.serving.prompts import PromptReader, WorkerState
from cbatch.text import TextTokenizer
from cbatch.text.output_processor import Seeds, require_supported
from cbatch.workers import NoWorkerError, WorkerPool

if TYPE_CHECKING:
    from cbatch.kv_events.publisher import KVEventPublisher

TOKENIZING_GRACE_S = 2.0  # time to tokenize the prompts received before a stop signal
# Prompt lengths of the warm-up requests, in tokens. The first request of each length is slow, so
# the last length is repeated to measure the true time per prompt token.
_WARM_TOKENS = (8, 64, 256, 256)
_LONG_WARM_S = 1.0  # warm-up ends after a request that took longer, unless it is the first
_WARM_TIMEOUT_S = 60.0
_STOPPING = "the server is stopping"
_logger = logging.getLogger("cbatch")


class EngineService:
    """An engine in another process, with queue and tokenizing, for the coroutines of one event
    loop."""

    def __init__(
        self,
        client: EngineClient,
        tokenizer: TextTokenizer | None,
        *,
        limits: Limits | None = None,
        seed: int | None = None,
        kv_events: KVEventPublisher | None = None,
    ) -> None:
        """With `seed`, requests without a seed get reproducible seeds. `kv_events` publishes the
        engine's KV events; the service closes it."""
        self.limits = limits or Limits()
        self.queue = AdmissionQueue(self.limits, time.monotonic, lambda: client.stats)
        self.client, self._tokenizer, self._seeds = client, tokenizer, Seeds(seed)
        self.kv_events = kv_events
        if kv_events is not None:
            client.on_step, client.on_death = self._publish, self._publish_cleared
            self._publish_cleared()  # subscribers may still list the blocks of an earlier server
        self._workers: WorkerPool | None = None
        self._grammars: GrammarValidator | None = None
        self._prompts: PromptReader | None = None
        self._submitted: dict[OpenRequest, None] = {}  # prompts that the engine has
        # Unfinished prompts, with those that are being tokenized or have their grammar validated.
        self.num_open = 0
        self._stops_at_s: float | None = None  # when grace time ends; None: not stopping
        self._idle = asyncio.Event()
        self._idle.set()
        self._warming: asyncio.Task[None] | None = None

    @property
    def running(self) -> bool:
        return self.client.engine is not None and self.client.down is None

    @property
    def stopping(self) -> bool:
        return self._stops_at_s is not None

    @property
    def ready(self) -> bool:
        warm = self._warming is None or self._warming.done()
        return self.client.up and warm and not self.stopping

    @property
    def num_requests(self) -> int:
        return len(self._submitted)

    async def start(self) -> Ready:
        return self.client.engine or await self.client.start()

    def open(self, model: ServedModel) -> PromptReader:
        engine = self.client.engine
        assert engine is not None
        supports_grammars = self._tokenizer is not None and engine.supports_grammars
        eos_ids = engine.config.eos_ids if supports_grammars else None
        setup = partial(WorkerState, model, engine.config.vocab_size, eos_ids)
        self._workers = WorkerPool(setup)
        if supports_grammars:
            self._grammars = GrammarValidator(self._workers)
        self._prompts = PromptReader(model, self._workers, self.limits, self.queue)
        return self._prompts

    def start_warming(self, *, steps: bool) -> None:
        """Run `warm` in the background. Requests that arrive meanwhile wait for it: they would
        disturb its measurement of the engine's speed."""
        self._warming = asyncio.create_task(self._warm_or_log(steps))

    async def _warm_or_log(self, steps: bool) -> None:
        try:
            await self.warm(steps=steps)
        except Exception:
            _logger.exception("the first steps failed; requests are served without them")

    async def _end_warming(self) -> None:
        if self._warming is not None:
            self._warming.cancel()
            await asyncio.wait({self._warming})

    async def warm(self, *, steps: bool = True) -> None:
        """Start the workers and, with `steps`, run requests, so that the first client need not
        wait."""
        if self._workers is not None and self._tokenizer is not None:
            await self._workers.warm()
        if not steps:
            return
        output = None if self._grammars is None else StructuredOutputs(regex="[a-z]+")
        params = SamplingParams(max_tokens=2, seed=0, structured_outputs=output)
        with suppress(FieldError, ServiceError):  # requests will report these errors
            for token, length in enumerate(_WARM_TOKENS):
                start_s, prompt = time.monotonic(), (token,) * length
                request = ApiRequest(prompts=(prompt,), params=params, timeout_s=_WARM_TIMEOUT_S)
                async for opened in self.submit(request):
                    with closing(opened):
                        async for _ in opened:
                            pass
                if token and time.monotonic() - start_s > _LONG_WARM_S:
                    return

    async def drain(self, grace_s: float) -> None:
        """Reject new requests, and wait up to `grace_s` for accepted requests. Unfinished requests
        then end with an error. Prompts not tokenized within `TOKENIZING_GRACE_S` fail."""
        self._stops_at_s = time.monotonic() + grace_s
        await self._end_warming()
        tokenizing_s = min(TOKENIZING_GRACE_S, grace_s)
        with suppress(TimeoutError):
            await asyncio.wait_for(self._idle.wait(), tokenizing_s)
        if self._workers is not None:
            await self._workers.close()
        try:
            await asyncio.wait_for(self._idle.wait(), grace_s - tokenizing_s)
        except TimeoutError:
            self.end_all(grace_s)

    def end_all(self, grace_s: float) -> None:
        self._abort_all(f"{_STOPPING}, and its grace time of {grace_s:g} s is over")

    async def stop(self) -> None:
        """Stop the engine. Streams that still run end with `ServiceDownError`."""
        self._stops_at_s = time.monotonic()
        await self._end_warming()
        self._abort_all(_STOPPING)
        await self.client.stop()
        if self.kv_events is not None:
            self.kv_events.close()
        if self._grammars is not None:
            await self._grammars.close()
        if self._workers is not None:
            await self._workers.close()

    async def submit(self, api_request: ApiRequest) -> AsyncIterator[OpenRequest]:
        """Queue the choices of each prompt, and yield its `OpenRequest`, which the caller closes.
        Raises `FieldError`, `OverloadedError` or `ServiceDownError` for a prompt not queued."""
        arrived_s = api_request.arrived_s or time.monotonic()
        deadline = Deadline.of(arrived_s, api_request.timeout_s, self.limits.timeout_s)
        for prompt in api_request.prompts:
            opened = OpenRequest(self.queue, api_request.params.n, api_request.owner)
            with ExitStack() as on_failure:
                on_failure.push(opened.resources)  # frees what `opened` has acquired
                async with ending_at(deadline):
                    await self._open(opened, api_request, prompt, deadline)
                on_failure.pop_all()
            yield opened

    async def _open(
        self,
        opened: OpenRequest,
        api_request: ApiRequest,
        prompt: AnyPrompt,
        deadline: Deadline | None,
    ) -> None:
        engine, prompts = self._require_engine(), self._prompts
        assert prompts is not None, "call open first"
        self._count_open(opened.resources)
        if self._warming is not None and asyncio.current_task() is not self._warming:
            await asyncio.wait({self._warming})
        opened.enqueue(min(max_prompt_tokens(prompt), engine.config.max_sequence_tokens))
        ids = await prompts.ids(prompt, api_request.owner)
        params = api_request.params
        if isinstance(prompt, PendingPrompt) and prompt.constrain is not None:
            params = prompt.constrain(params, ids)
        request = self._request(ids, params, api_request, engine)
        if request.params.structured_outputs is not None:
            request = await self._with_grammar(request, api_request)
        opened.place.set_tokens(len(ids))
        self.queue.require_in_time()
        self._submitted[opened] = None
        opened.resources.callback(self._submitted.pop, opened)
        opened.set_deadlines(self.limits.queue_timeout_s, deadline)
        unread_share = self.limits.max_unread_tokens // len(api_request.prompts)
        opened.begin(request, api_request, self.client, self._tokenizer, unread_share)

    def _publish(self, step: Stepped) -> None:
        if step.kv_events and self.kv_events is not None:
            self.kv_events.publish(step.kv_events)

    def _publish_cleared(self) -> None:
        if self.kv_events is not None:
            self.kv_events.publish(encode_cleared(time.time()))

    def _require_engine(self) -> Ready:
        engine = self.client.engine
        if engine is None or not self.running:
            raise ServiceDownError(self.client.down or "the engine is not running")
        if self._stops_at_s is not None:
            remaining_s = math.ceil(self._stops_at_s - time.monotonic())
            raise ServiceDownError(_STOPPING, max(1, min(MAX_RETRY_AFTER_S, remaining_s)))
        return engine

    def _request(
        self, ids: tuple[int, ...], params: SamplingParams, api_request: ApiRequest, engine: Ready
    ) -> Request:
        given, (params, seed) = params, self._seeds.seeded(params)
        request = Request(
            request_id=api_request.id,
            prompt=ids,
            params=params,
            seed=seed,
            priority=api_request.fields.priority,
            cache_salt=api_request.cache_salt,
            itl_target_s=api_request.itl_target_s,
            owner=api_request.owner,
        )
        require_supported(request, drafters=engine.drafters, has_text=self._tokenizer is not None)
        engine.config.check_request(request)
        self._seeds.count(given)
        return request

    async def _with_grammar(self, request: Request, api_request: ApiRequest) -> Request:
        params, field = request.params, api_request.grammar_field
        assert params.structured_outputs is not None
        if self._grammars is None:
            raise grammars_unsupported(field)
        try:
            grammar = await self._grammars.check(
                params.structured_outputs,
                num_choices=params.n,
                field=field,
                owner=api_request.owner,
            )
        except GrammarsBusyError as error:
            raise self.queue.overloaded("grammars", str(error)) from error
        except NoWorkerError as error:
            raise ServiceDownError(str(error), 1) from error
        params = structs.replace(params, structured_outputs=grammar.spec)
        return structs.replace(request, params=params, compile_s=grammar.compile_s)

    def _count_open(self, resources: ExitStack) -> None:
        self.num_open += 1
        self._idle.clear()
        resources.callback(self._count_closed)

    def _count_closed(self) -> None:
        self.num_open -= 1
        if not self.num_open:
            self._idle.set()

    def _abort_all(self, message: str) -> None:
        for opened in list(self._submitted):
            opened.abort(ServiceDownError(message))
