"""The ASGI application: the routes of the OpenAI API, and those that operators ask."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import AsyncExitStack, asynccontextmanager
from importlib.metadata import version
from typing import Annotated, Any, TypeVar
from urllib.parse import quote

import msgspec
from litestar import HttpMethod, Litestar, MediaType, Request, get, post, route
from litestar import Response as HttpResponse
from litestar.handlers import HTTPRouteHandler
from litestar.response import Stream
from msgspec import Meta
from prometheus_client import CONTENT_TYPE_LATEST

from cbatch.core.errors import FieldError
from cbatch.server.answer import ChatAnswer, CompletionAnswer, encode
from cbatch.server.bodies import (
    Call,
    CallFields,
    DetokenizeFields,
    TokenizeFields,
    conversation,
    decode_object,
    parse_chat,
    parse_completion,
    take_fields,
    template_variables,
)
from cbatch.server.calllog import CallLog, call_log
from cbatch.server.faults import MediaTypeError, error_body, handlers
from cbatch.server.gate import Gate
from cbatch.server.keys import KeyRing
from cbatch.server.live import LiveFeed
from cbatch.server.metrics import Meter, Metrics
from cbatch.server.model import ServedModel
from cbatch.server.openapi import document
from cbatch.server.pages import page_routes
from cbatch.server.schemas import Detokenized, Tokenized
from cbatch.server.service import EngineService
from cbatch.server.streaming import events, gather, or_disconnect, submit

IGNORED_HEADER = "x-cbatch-ignored-fields"
DEADLINE_HEADER = "x-envoy-expected-rq-timeout-ms"  # what Envoy tells whom it passes a call to
MAX_BODY_BYTES = 8 * 2**20
# Reading a long body (JSON, template, tokens) would hold up every stream: a thread does it.
LONG_BODY_BYTES = 32 * 2**10
LOOK = [HttpMethod.GET, HttpMethod.HEAD]
Milliseconds = Annotated[int, Meta(ge=0, le=10**9)]  # 0: no limit
T = TypeVar("T")
AnyRequest = Request[Any, Any, Any]
AnyResponse = HttpResponse[bytes] | Stream
AnswerKind = type[CompletionAnswer] | type[ChatAnswer]
Parse = Callable[[bytes, ServedModel], Call]


def create_app(
    service: EngineService,
    model: ServedModel,
    *,
    keys: KeyRing | None = None,
    max_body_bytes: int = MAX_BODY_BYTES,
) -> Gate:
    """An application that serves one engine as `model`. A call needs one of the `keys`, if there
    are any."""
    metrics = Metrics(model.name, service)

    @asynccontextmanager
    async def lifespan(_: Litestar) -> AsyncIterator[None]:
        await service.start()
        yield
        await service.stop()

    app = Litestar(
        [
            *_generating(Answering(service, model, metrics)),
            *_describing(model),
            *_watching(service, metrics),
            *_showing(LiveFeed(service, model, metrics)),
        ],
        lifespan=[lifespan],
        request_max_body_size=max_body_bytes,
        exception_handlers=handlers(metrics.reject),
        openapi_config=None,
        logging_config=None,  # the program that runs the server decides about logs
    )
    return Gate(app, keys or KeyRing(), metrics.reject)


class Answering:
    """One call, from its body to its answer, whole or streamed."""

    def __init__(self, service: EngineService, model: ServedModel, metrics: Metrics) -> None:
        self._service, self._model, self._metrics = service, model, metrics

    async def __call__(self, request: AnyRequest, parse: Parse, kind: AnswerKind) -> AnyResponse:
        log = call_log(request)
        log.meter = meter = Meter(self._metrics)
        try:
            return await self._answer(request, parse, kind, meter, log)
        except Exception as error:
            log.fail(error)
            raise

    async def _answer(
        self, request: AnyRequest, parse: Parse, kind: AnswerKind, meter: Meter, log: CallLog
    ) -> AnyResponse:
        self._service.queue.require_room()
        call = await read(request, lambda body: parse(body, self._model))
        if call.params.structured_outputs is not None:
            asked, field = call.params.structured_outputs, call.grammar_field
            await self._service.require_grammar(asked, field)
        answer = kind(call, self._model, meter)
        log.id, log.streamed = answer.id, call.fields.stream
        headers = {}
        if call.ignored:  # percent-encoded: a field's name is the client's, a header is ours
            headers[IGNORED_HEADER] = ", ".join(quote(name[:64]) for name in call.ignored[:16])
        stack = AsyncExitStack()
        stack.callback(meter.close)
        try:
            streams = await submit(self._service, answer, deadline_s(request, call.fields), stack)
            if call.fields.stream:
                owner = AsyncExitStack()
                told = events(streams, answer, owner)
                await or_disconnect(request, anext(told))
                owner.push_async_exit(stack.pop_all())  # it cancels its requests however it ends
                return Stream(told, media_type="text/event-stream", headers=headers)
            await or_disconnect(request, gather(streams, answer))
        finally:
            await stack.aclose()
        return json_response(answer.whole(), headers)


def _generating(answer: Answering) -> list[HTTPRouteHandler]:
    @post("/v1/completions", status_code=200)
    async def completions(request: AnyRequest) -> AnyResponse:
        return await answer(request, parse_completion, CompletionAnswer)

    @post("/v1/chat/completions", status_code=200)
    async def chat_completions(request: AnyRequest) -> AnyResponse:
        return await answer(request, parse_chat, ChatAnswer)

    @post("/v1/embeddings")
    async def embeddings() -> HttpResponse[dict[str, Any]]:
        message = "embeddings are not supported yet; this server completes text"
        return HttpResponse(error_body(message, "not_implemented"), status_code=501)

    return [completions, chat_completions, embeddings]


def _describing(model: ServedModel) -> list[HTTPRouteHandler]:
    @get("/v1/models")
    async def models() -> dict[str, Any]:
        return {"object": "list", "data": [model.card()]}

    @get("/v1/models/{name:path}")
    async def model_card(request: AnyRequest) -> dict[str, Any]:
        model.require(str(request.path_params["name"]).removeprefix("/"))
        return model.card()

    @post("/tokenize", status_code=200)
    async def tokenize(request: AnyRequest) -> HttpResponse[bytes]:
        return json_response(await read(request, lambda body: _tokenize(body, model)))

    @post("/detokenize", status_code=200)
    async def detokenize(request: AnyRequest) -> HttpResponse[bytes]:
        return json_response(await read(request, lambda body: _detokenize(body, model)))

    @get("/openapi.json")
    async def openapi() -> HttpResponse[bytes]:
        return json_response(document())

    return [models, model_card, tokenize, detokenize, openapi]


def _watching(service: EngineService, metrics: Metrics) -> list[HTTPRouteHandler]:
    @route("/health", http_method=LOOK)
    async def health() -> HttpResponse[dict[str, Any]]:
        state = {"status": "ok" if service.running else "down", "requests": service.num_requests}
        return HttpResponse(state, status_code=200 if service.running else 503)

    @route("/ready", http_method=LOOK)
    async def ready() -> HttpResponse[dict[str, Any]]:
        state = {"status": "ready" if service.ready else "not ready"}
        return HttpResponse(state, status_code=200 if service.ready else 503)

    @route("/metrics", http_method=LOOK)
    async def metrics_page() -> HttpResponse[bytes]:
        return HttpResponse(metrics.page(), headers={"content-type": CONTENT_TYPE_LATEST})

    @get("/version")
    async def version_() -> dict[str, str]:
        return {"version": version("cbatch")}

    return [health, ready, metrics_page, version_]


def _showing(feed: LiveFeed) -> list[HTTPRouteHandler]:
    @get("/live")
    async def live() -> Stream:
        events = feed.events()
        await anext(events)  # from here on it stops watching however it ends
        return Stream(events, media_type="text/event-stream", headers={"cache-control": "no-store"})

    return [live, *page_routes()]


def deadline_s(request: AnyRequest, fields: CallFields) -> float | None:
    """What the client or the gateway before it leaves for the call. Raises `FieldError`."""
    told, gateway_s = request.headers.get(DEADLINE_HEADER), 0.0
    if told is not None:
        try:
            gateway_s = msgspec.convert(told, Milliseconds, strict=False) / 1e3
        except msgspec.ValidationError as error:
            raise FieldError(DEADLINE_HEADER, "is no number of milliseconds", str(error)) from error
    given = [each_s for each_s in (fields.timeout, gateway_s or None) if each_s is not None]
    return min(given, default=None)


async def read(request: AnyRequest, parse: Callable[[bytes], T]) -> T:
    """The body, as `parse` understands it. Raises what `parse` raises."""
    kind = request.headers.get("content-type", "").partition(";")[0].strip().lower()
    if kind != "application/json":
        raise MediaTypeError("content-type", f"{kind!r} is not read", "send application/json")
    body = await request.body()
    if len(body) > LONG_BODY_BYTES:
        return await asyncio.to_thread(parse, body)
    return parse(body)


def json_response(
    value: msgspec.Struct | dict[str, Any], headers: dict[str, str] | None = None
) -> HttpResponse[bytes]:
    return HttpResponse(encode(value), media_type=MediaType.JSON, headers=headers)


def _tokenize(body: bytes, model: ServedModel) -> Tokenized:
    fields = take_fields(decode_object(body), TokenizeFields)
    model.require(fields.model)
    if (fields.prompt is None) == (fields.messages is None):
        raise FieldError("prompt", "and `messages` exclude each other", "send one of them")
    text, special = fields.prompt, fields.prompt is not None
    if text is None:
        text = model.render(
            conversation(fields.messages),
            add_generation_prompt=fields.add_generation_prompt,
            variables=template_variables(fields.chat_template_kwargs),
        )
    if fields.add_special_tokens is not None:
        special = fields.add_special_tokens
    ids = model.tokenizer.encode(text, add_special_tokens=special)
    words = [model.tokenizer.raw.id_to_token(i) or "" for i in ids]
    shown = words if fields.return_token_strs else None
    return Tokenized(len(ids), model.max_model_tokens, ids, shown)


def _detokenize(body: bytes, model: ServedModel) -> Detokenized:
    fields = take_fields(decode_object(body), DetokenizeFields)
    model.require(fields.model)
    size = model.tokenizer.vocab_size
    if not all(0 <= i < size for i in fields.tokens):
        raise FieldError("tokens", "hold an id out of range", f"use ids in [0, {size})")
    return Detokenized(model.tokenizer.decode(fields.tokens, skip_special_tokens=False))
