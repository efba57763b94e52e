"""Handling of one API request, from its body to its whole or streamed response. The client may
disconnect at any moment."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import ExitStack
from typing import Annotated, Any, TypeVar
from urllib.parse import quote
from uuid import uuid4

import msgspec
from litestar import MediaType, Request, post
from litestar import Response as HttpResponse
from litestar.handlers import HTTPRouteHandler
from litestar.response import Stream
from msgspec import Meta, structs

from cbatch.core.request.errors import FieldError
from cbatch.server.http.errors import ClientGoneError, stream_error_body
from cbatch.server.http.intake import BodyIntake
from cbatch.server.http.middleware import record_of
from cbatch.server.protocol.model import ServedModel
from cbatch.server.protocol.requests import ApiRequest, parse_chat, parse_completion
from cbatch.server.protocol.translation import renamed
from cbatch.server.serving.chat_builder import ChatBuilder
from cbatch.server.serving.open_request import (
    Deadline,
    Heartbeat,
    OpenRequest,
    ending_at,
    merged_outputs,
)
from cbatch.server.serving.response_builder import CompletionBuilder, ResponseBuilder, encode
from cbatch.server.serving.service import EngineService
from cbatch.system.shares import NoPlaceError, Places

IGNORED_HEADER = "x-cbatch-ignored-fields"
DEADLINE_HEADER = "x-envoy-expected-rq-timeout-ms"  # the gateway's timeout, sent by Envoy
ITL_TARGET_HEADER = "x-slo-itl-ms"  # the client's target for the longest gap between tokens
# Parsing a longer body could delay every stream, so a thread does it.
LONG_BODY_BYTES = 32 * 2**10
PARSER_WAIT_S = 30.0  # longest wait before a long body is parsed
# A body with one of these may refer to a stored conversation, and be long: a thread parses it too.
STORED_FIELDS = (b'"previous_response_id"', b'"id"')
Milliseconds = Annotated[int, Meta(ge=0, le=10**9)]  # 0: no limit
T = TypeVar("T")
AnyRequest = Request[Any, Any, Any]
AnyResponse = HttpResponse[bytes] | Stream
Parse = Callable[[bytes, ServedModel], ApiRequest]


class CompletionHandler:
    """Serves requests of any API: `parse` turns a body into an `ApiRequest`, and a builder turns
    the outputs into the API's response or its events."""

    def __init__(self, service: EngineService, model: ServedModel, intake: BodyIntake) -> None:
        self._service, self._model, self._intake = service, model, intake
        # Parsing holds the interpreter lock, so that two threads at once would delay every stream.
        self._parser = Places(1)

    def routes(self) -> list[HTTPRouteHandler]:
        @post("/v1/completions", status_code=200)
        async def completions(request: AnyRequest) -> AnyResponse:
            return await self.respond(request, parse_completion, CompletionBuilder)

        @post("/v1/chat/completions", status_code=200)
        async def chat_completions(request: AnyRequest) -> AnyResponse:
            return await self.respond(request, parse_chat, ChatBuilder)

        return [completions, chat_completions]

    async def respond(
        self, request: AnyRequest, parse: Parse, builder_type: type[ResponseBuilder[Any]]
    ) -> AnyResponse:
        record = record_of(request)
        record.generates = True
        try:
            self._service.queue.require_room(owner=record.memory.owner)
            api_request = await self.read(request, parse)
            unique = f"{uuid4().hex[:16]}_" if builder_type.new_ids else ""
            record.id = f"{builder_type.id_prefix}{unique}{record.request_id}"
            record.streamed = api_request.fields.stream
            api_request = structs.replace(
                api_request,
                id=record.id,
                itl_target_s=header_s(request, ITL_TARGET_HEADER),
                owner=record.memory.owner,
                key_salt=record.key_salt,
            )
            try:
                return await self._respond(request, builder_type(api_request, self._model, record))
            except FieldError as error:
                raise renamed(error, builder_type.field_names) from error
        except Exception as error:
            record.fail(error)
            raise

    async def read(self, request: AnyRequest, parse: Parse) -> ApiRequest:
        """Return the parsed body, with the call's time limit. Raises what `parse` and the intake
        raise, and `DeadlineError`."""
        record, timeout_s = record_of(request), header_s(request, DEADLINE_HEADER)
        server_s = self._service.limits.timeout_s
        async with ending_at(Deadline.of(record.began_s, timeout_s, server_s)):
            body = await self._intake.body(request)
            if len(body) <= LONG_BODY_BYTES and not any(field in body for field in STORED_FIELDS):
                api_request = parse(body, self._model)
            else:
                try:
                    async with self._parser.place(record.memory.owner, PARSER_WAIT_S):
                        api_request = await asyncio.to_thread(parse, body, self._model)
                except NoPlaceError as error:
                    problem = f"long bodies wait to be parsed; {error}"
                    raise self._service.queue.overloaded("bodies", problem) from error
        record.memory.hold(api_request.num_bytes)
        limits_s = [each for each in (timeout_s, api_request.fields.timeout) if each is not None]
        timeout_s = min(limits_s, default=None)
        return structs.replace(api_request, timeout_s=timeout_s, arrived_s=record.began_s)

    async def _respond(self, request: AnyRequest, builder: ResponseBuilder[Any]) -> AnyResponse:
        ignored, headers = [*builder.api_request.ignored[:16]], {}
        fields = builder.api_request.fields
        if fields.priority and self._service.config.queue_policy != "priority":
            ignored.append("priority")
        if ignored:  # the client chose these names, so they are percent-encoded
            headers[IGNORED_HEADER] = ", ".join(quote(name[:64]) for name in ignored)
        if fields.stream:
            chunks = self._events(builder)
            await or_disconnect(request, anext(chunks))
            return event_stream(chunks, headers)
        await or_disconnect(request, self._gather(builder))
        return json_response(builder.full_response(), headers)

    async def _submit(self, builder: ResponseBuilder[Any], stack: ExitStack) -> list[OpenRequest]:
        """Queue the request's prompts. Closing `stack` cancels the choices that still run."""
        stack.callback(builder.record.close)
        opened_requests = []
        async for opened in self._service.submit(builder.api_request):
            stack.callback(opened.close)
            builder.open(opened)
            opened_requests.append(opened)
        builder.record.memory.hold(builder.api_request.num_bytes)
        return opened_requests

    async def _gather(self, builder: ResponseBuilder[Any]) -> None:
        """Pass all outputs to `builder`, until every choice has finished."""
        with ExitStack() as stack:
            async for items in merged_outputs(await self._submit(builder, stack)):
                for position, output in items:
                    builder.take(position, output)

    async def _events(self, builder: ResponseBuilder[Any]) -> AsyncIterator[bytes]:
        """Yield server-sent events, those of one step as one item. The first item is empty. An
        error before it can still become an HTTP status. It follows when the prompts are queued, or
        without heartbeats, when there is a first event."""
        begun = False
        with ExitStack() as stack:
            try:
                opened = await self._submit(builder, stack)
                interval_s = self._service.limits.sse_heartbeat_s
                heartbeat = Heartbeat(interval_s)
                stack.callback(heartbeat.close)
                if interval_s:
                    begun = True
                    yield b""
                    yield builder.first_events()
                async for items in merged_outputs(opened, heartbeat):
                    content = b"".join([builder.event(at, output) for at, output in items])
                    if not content and heartbeat.due:
                        content = builder.ping
                    if content and not begun:
                        begun = True
                        yield b""
                    if content:
                        yield content
                        heartbeat.record_sent()
                last = builder.last_event()
            except Exception as error:
                if not begun:
                    raise
                builder.record.fail(error)
                last = builder.error_event(stream_error_body(error))
            yield last


async def or_disconnect(request: AnyRequest, work: Awaitable[T]) -> T:
    """Await `work`, but cancel it if the client disconnects, which the framework does not do."""
    task = asyncio.ensure_future(work)
    disconnected = asyncio.ensure_future(_disconnected(request))
    try:
        await asyncio.wait({task, disconnected}, return_when=asyncio.FIRST_COMPLETED)
        if not task.done():
            raise ClientGoneError("the client closed the connection")
        return await task
    finally:
        for future in (task, disconnected):
            future.cancel()


async def _disconnected(request: AnyRequest) -> None:
    while (await request.receive())["type"] != "http.disconnect":
        pass


def header_s(request: AnyRequest, name: str) -> float | None:
    """Convert a header from ms to seconds, None if absent or 0. Raises `FieldError`."""
    value = request.headers.get(name)
    if value is None:
        return None
    try:
        return msgspec.convert(value, Milliseconds, strict=False) / 1e3 or None
    except msgspec.ValidationError as error:
        raise FieldError(name, "is not a number of milliseconds", str(error)) from error


def event_stream(events: AsyncIterator[bytes], headers: dict[str, str] | None = None) -> Stream:
    """Return a stream that no cache may keep and no proxy (nginx) may hold back."""
    fixed = {"cache-control": "no-cache", "x-accel-buffering": "no"}
    return Stream(events, media_type="text/event-stream", headers=fixed | (headers or {}))


def json_response(
    value: msgspec.Struct | dict[str, Any], headers: dict[str, str] | None = None
) -> HttpResponse[bytes]:
    return HttpResponse(encode(value), media_type=MediaType.JSON, headers=headers)
