"""The ASGI application: the routes of the OpenAI API, and those that operators ask."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, Collection
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

from cbatch.core.request.errors import FieldError
from cbatch.server.http.errors import MediaTypeError, error_body, handlers
from cbatch.server.http.intake import BodyIntake
from cbatch.server.http.keys import KeyRing
from cbatch.server.http.limits import ConnectionLimits
from cbatch.server.http.middleware import METRICS_PATH, CallLog, CallMiddleware, call_log
from cbatch.server.http.pages import page_routes
from cbatch.server.http.streaming import events, gather, or_disconnect, submit
from cbatch.server.protocol.model import ServedModel
from cbatch.server.protocol.openapi import document
from cbatch.server.protocol.requests import (
    Call,
    CallFields,
    parse_chat,
    parse_completion,
)
from cbatch.server.serving.answer import CompletionAnswer, encode
from cbatch.server.serving.chat_answer import ChatAnswer
from cbatch.server.serving.live_feed import LiveFeed
from cbatch.server.serving.metrics import Meter, Metrics
from cbatch.server.serving.prompts import PromptReader
from cbatch.server.serving.service import EngineService

IGNORED_HEADER = "x-cbatch-ignored-fields"
DEADLINE_HEADER = "x-envoy-expected-rq-timeout-ms"  # what Envoy tells whom it passes a call to
# Reading a long body (JSON, template, tokens) would hold up every stream: a thread does it.
LONG_BODY_BYTES = 32 * 2**10
DEFAULT_LIMITS = ConnectionLimits()
LOOK = [HttpMethod.GET, HttpMethod.HEAD]
ITL_TARGET_HEADER = "x-slo-itl-ms"  # longest gap between tokens that the client asks for
Milliseconds = Annotated[int, Meta(ge=0, le=10**9)]  # 0: no limit
T = TypeVar("T")
AnyRequest = Request[Any, Any, Any]
AnyResponse = HttpResponse[bytes] | Stream
AnswerKind = type[CompletionAnswer] | type[ChatAnswer]
Parse = Callable[[bytes, ServedModel], Call]
MetricsPage = Callable[[], Awaitable[bytes]]  # in Prometheus' text format


def create_app(
    service: EngineService,
    model: ServedModel,
    *,
    keys: KeyRing | None = None,
    open_metrics: bool = False,
    cors_origins: Collection[str] = (),
    limits: ConnectionLimits = DEFAULT_LIMITS,
    metrics: Metrics | None = None,
    metrics_page: MetricsPage | None = None,
) -> CallMiddleware:
    """An application that serves one engine as `model`. A call needs one of the `keys`, if there
    are any, and so does a look at the metrics unless they are open. Pages of `cors_origins` may
    call. One of several replicas makes its `metrics` itself, and shows as `metrics_page` what all
    of them have counted."""
    metrics = metrics or Metrics(model.name, service)
    keys = keys or KeyRing()
    intake = BodyIntake(limits, service.queue.overloaded)
    prompts = service.open(model)

    @asynccontextmanager
    async def lifespan(_: Litestar) -> AsyncIterator[None]:
        await service.start()
        yield
        await service.stop()

    app = Litestar(
        [
            *_generating(Answering(service, model, metrics, intake)),
            *_describing(model, intake, prompts),
            *_watching(service, metrics_page or metrics.own_page, open_metrics or not keys),
            *_showing(LiveFeed(service, model, metrics)),
        ],
        lifespan=[lifespan],
        exception_handlers=handlers(metrics.reject),
        openapi_config=None,
        logging_config=None,  # the program that runs the server decides about logs
    )
    return CallMiddleware(
        app, keys, metrics.reject, open_metrics=open_metrics, cors_origins=cors_origins
    )


class Answering:
    """One call, from its body to its answer, whole or streamed."""

    def __init__(
        self, service: EngineService, model: ServedModel, metrics: Metrics, intake: BodyIntake
    ) -> None:
        self._service, self._model, self._metrics = service, model, metrics
        self._intake = intake

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
        call = await read(request, self._intake, lambda body: parse(body, self._model))
        answer = kind(call, self._model, meter)
        log.id, log.streamed = answer.id, call.fields.stream
        headers = {}
        if call.ignored:  # percent-encoded: a field's name is the client's, a header is ours
            headers[IGNORED_HEADER] = ", ".join(quote(name[:64]) for name in call.ignored[:16])
        stack = AsyncExitStack()
        stack.callback(meter.close)
        try:
            limit_s = deadline_s(request, call.fields)
            itl_target_s = _header_s(request, ITL_TARGET_HEADER)
            owner = AsyncExitStack()

            async def begin() -> AsyncIterator[bytes] | None:
                streams = await submit(self._service, answer, limit_s, itl_target_s, log.key, stack)
                if not call.fields.stream:
                    await gather(streams, answer)
                    return None
                told = events(streams, answer, owner)
                await anext(told)
                return told

            told = await or_disconnect(request, begin())
            if told is not None:
                owner.push_async_exit(stack.pop_all())  # it cancels its requests however it ends
                return Stream(told, media_type="text/event-stream", headers=headers)
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


def _describing(
    model: ServedModel, intake: BodyIntake, prompts: PromptReader
) -> list[HTTPRouteHandler]:
    async def in_worker(
        request: AnyRequest, task: Callable[[bytes], Awaitable[bytes]]
    ) -> HttpResponse[bytes]:
        require_json(request)
        async with intake.body(request) as body:
            return HttpResponse(await task(body), media_type=MediaType.JSON)

    @get("/v1/models")
    async def models() -> dict[str, Any]:
        return {"object": "list", "data": [model.card()]}

    @get("/v1/models/{name:path}")
    async def model_card(request: AnyRequest) -> dict[str, Any]:
        model.require(str(request.path_params["name"]).removeprefix("/"))
        return model.card()

    @post("/tokenize", status_code=200)
    async def tokenize(request: AnyRequest) -> HttpResponse[bytes]:
        return await in_worker(request, prompts.tokenize)

    @post("/detokenize", status_code=200)
    async def detokenize(request: AnyRequest) -> HttpResponse[bytes]:
        return await in_worker(request, prompts.detokenize)

    @get("/openapi.json")
    async def openapi() -> HttpResponse[bytes]:
        return json_response(document(**model.sampling_defaults))

    return [models, model_card, tokenize, detokenize, openapi]


def _watching(
    service: EngineService, page: MetricsPage, tells_load: bool
) -> list[HTTPRouteHandler]:
    @route("/health", http_method=LOOK)
    async def health() -> HttpResponse[dict[str, Any]]:
        state: dict[str, Any] = {"status": "ok" if service.running else "down"}
        if tells_load:
            state["requests"] = service.num_requests
        return HttpResponse(state, status_code=200 if service.running else 503)

    @route("/ready", http_method=LOOK)
    async def ready() -> HttpResponse[dict[str, Any]]:
        state: dict[str, Any] = {"status": "ready" if service.ready else "not ready"}
        if service.stats is not None and service.stats.compiling:
            state["compiling"] = service.stats.compiling
        return HttpResponse(state, status_code=200 if service.ready else 503)

    @route(METRICS_PATH, http_method=LOOK)
    async def metrics_page() -> HttpResponse[bytes]:
        return HttpResponse(await page(), headers={"content-type": CONTENT_TYPE_LATEST})

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
    limits_s = (fields.timeout, _header_s(request, DEADLINE_HEADER))
    return min((limit_s for limit_s in limits_s if limit_s is not None), default=None)


def _header_s(request: AnyRequest, name: str) -> float | None:
    """Return the seconds of a header in milliseconds; None without it, or for 0. Raises
    `FieldError`."""
    value = request.headers.get(name)
    if value is None:
        return None
    try:
        return msgspec.convert(value, Milliseconds, strict=False) / 1e3 or None
    except msgspec.ValidationError as error:
        raise FieldError(name, "is no number of milliseconds", str(error)) from error


async def read(request: AnyRequest, intake: BodyIntake, parse: Callable[[bytes], T]) -> T:
    """The body, as `parse` understands it. Raises what `parse` and `intake` raise."""
    require_json(request)
    async with intake.body(request) as body:
        if len(body) > LONG_BODY_BYTES:
            return await asyncio.to_thread(parse, body)
        return parse(body)


def require_json(request: AnyRequest) -> None:
    """Raises `MediaTypeError`."""
    kind = request.headers.get("content-type", "").partition(";")[0].strip().lower()
    if kind != "application/json":
        raise MediaTypeError("content-type", f"{kind!r} is not read", "send application/json")


def json_response(
    value: msgspec.Struct | dict[str, Any], headers: dict[str, str] | None = None
) -> HttpResponse[bytes]:
    return HttpResponse(encode(value), media_type=MediaType.JSON, headers=headers)
