"""Handling of one API request, from its body to its whole or streamed response. The client may
disconnect at any moment. Bodies are read with limits on time, size, and memory of all calls."""

from __future__ import annotations

import asyncio
import gzip
import re
import zlib
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import ExitStack
from functools import partial
from io import BytesIO
from typing import Annotated, Any, TypeVar, cast
from urllib.parse import quote
from uuid import uuid4

import msgspec
from litestar import MediaType, Request, post
from litestar import Response as HttpResponse
from litestar.handlers import HTTPRouteHandler
from litestar.response import Stream
from litestar.types import HTTPReceiveMessage
from msgspec import Meta

from cbatch.core.request.errors import FieldError
from cbatch.server.http.errors import (
    BodyTooLongError,
    ClientGoneError,
    MediaTypeError,
    stream_error_body,
)
from cbatch.server.http.limits import ConnectionLimits
from cbatch.server.http.middleware import record_of
from cbatch.server.protocol.errors import BodyTimeoutError, OverloadedError
from cbatch.server.protocol.fields import ApiRequest
from cbatch.server.protocol.model import ServedModel
from cbatch.server.protocol.requests import parse_chat, parse_completion
from cbatch.server.protocol.translation import renamed
from cbatch.server.serving.admission_queue import CallMemory, MemoryBudget
from cbatch.server.serving.chat_encoder import ChatEncoder
from cbatch.server.serving.open_request import (
    Deadline,
    Heartbeat,
    OpenRequest,
    ending_at,
    merged_outputs,
)
from cbatch.server.serving.replies import CompletionEncoder, Encoder, Replies, encode
from cbatch.server.serving.service import EngineService
from cbatch.system.shares import NoPlaceError, Places

IGNORED_HEADER = "x-cbatch-ignored-fields"
DEADLINE_HEADER = "x-envoy-expected-rq-timeout-ms"  # the gateway's timeout, sent by Envoy
ITL_TARGET_HEADER = "x-slo-itl-ms"  # the client's target for the longest gap between tokens
# Parsing a longer body could delay every stream, so a thread does it.
LONG_BODY_BYTES = 32 * 2**10
PARSER_WAIT_S = 30.0  # longest wait before a long body is parsed
PARSED = 2  # what a body holds while it is read and parsed, as a multiple of its bytes
_JSON_SUFFIX = re.compile(r"application/[\w.!#$&^-]+\+json")  # RFC 6839
# A body with one of these may refer to a stored conversation, and be long: a thread parses it too.
STORED_FIELDS = (b'"previous_response_id"', b'"id"')
Milliseconds = Annotated[int, Meta(ge=0, le=10**9)]  # 0: no limit
T = TypeVar("T")
AnyRequest = Request[Any, Any, Any]
AnyResponse = HttpResponse[bytes] | Stream
Parse = Callable[..., ApiRequest]  # such as `parse_chat`


class BodyIntake:
    """Reader of request bodies. `memory` is the budget of all calls; `overloaded` returns the error
    to raise at the limit."""

    def __init__(
        self, limits: ConnectionLimits, overloaded: Callable[[str, str], OverloadedError]
    ) -> None:
        self._limits = limits
        self.memory = MemoryBudget(limits.max_held_bytes, overloaded)

    async def body(self, request: AnyRequest) -> bytes:
        """Read and decompress a JSON body, and count its memory. Raises `MediaTypeError`,
        `BodyTimeoutError`, `OverloadedError`, `ClientGoneError`, `BodyTooLongError` or
        `FieldError`."""
        kind = request.headers.get("content-type", "").partition(";")[0].strip().lower()
        if kind != "application/json" and not _JSON_SUFFIX.fullmatch(kind):
            problem = f"{kind!r} is not supported" if kind else "is missing"
            raise MediaTypeError("content-type", problem, "send application/json")
        coding = request.headers.get("content-encoding", "identity").strip().lower()
        if coding not in ("identity", "gzip", "x-gzip"):
            raise MediaTypeError(
                "content-encoding", f"{coding!r} is not supported", "send gzip or none"
            )
        limit_s, memory = self._limits.request_timeout_s, record_of(request).memory
        try:
            async with asyncio.timeout(limit_s):
                content = await self._read(request, memory)
                if coding != "identity":  # in a thread, since few bytes can expand to many
                    content = await asyncio.to_thread(self._decompressed, content)
                    memory.hold(PARSED * len(content))
        except TimeoutError as error:
            raise BodyTimeoutError(f"the body took longer than {limit_s:g} s") from error
        return content

    async def _read(self, request: AnyRequest, memory: CallMemory) -> bytes:
        announced = request.headers.get("content-length", "")
        self._require_short(int(announced) if announced.isdecimal() else 0)
        content, more = bytearray(), True
        while more:
            message = cast(HTTPReceiveMessage, await request.receive())
            if message["type"] == "http.disconnect":
                raise ClientGoneError("the client disconnected during its call")
            content += message.get("body", b"")
            self._require_short(len(content))
            memory.hold(PARSED * len(content))
            more = message.get("more_body", False)
        return bytes(content)

    def _decompressed(self, content: bytes) -> bytes:
        try:
            with gzip.GzipFile(fileobj=BytesIO(content)) as file:
                whole = file.read(self._limits.max_body_bytes + 1)
        except (OSError, EOFError, zlib.error) as error:
            raise FieldError("body", f"is not gzip ({error})", "send gzip or none") from error
        self._require_short(len(whole))
        return whole

    def _require_short(self, num_bytes: int) -> None:
        limit = self._limits.max_body_bytes
        if num_bytes > limit:
            raise BodyTooLongError("body", f"has more than {limit} bytes", "send less")


class CompletionHandler:
    """Serves requests of any API: `parse` turns a body into an `ApiRequest`, and an encoder
    turns the outputs into the API's response or its events."""

    def __init__(self, service: EngineService, model: ServedModel, intake: BodyIntake) -> None:
        self._service, self._model, self._intake = service, model, intake
        # Parsing holds the interpreter lock, so that two threads at once would delay every stream.
        self._parser = Places(1)

    def routes(self) -> list[HTTPRouteHandler]:
        @post("/v1/completions", status_code=200)
        async def completions(request: AnyRequest) -> AnyResponse:
            return await self.respond(request, parse_completion, CompletionEncoder)

        @post("/v1/chat/completions", status_code=200)
        async def chat_completions(request: AnyRequest) -> AnyResponse:
            return await self.respond(request, parse_chat, ChatEncoder)

        return [completions, chat_completions]

    async def respond(
        self, request: AnyRequest, parse: Parse, encoder_type: type[Encoder]
    ) -> AnyResponse:
        record = record_of(request)
        record.generates = True
        try:
            self._service.queue.require_room(owner=record.memory.owner)
            unique = f"{uuid4().hex[:16]}_" if encoder_type.new_ids else ""
            response_id = f"{encoder_type.id_prefix}{unique}{record.request_id}"
            itl_target_s = header_s(request, ITL_TARGET_HEADER)
            call = {"id": response_id, "itl_target_s": itl_target_s, "key_salt": record.key_salt}
            api_request = await self.read(request, partial(parse, **call))
            record.id, record.streamed = response_id, api_request.fields.stream
            encoder = encoder_type(Replies(api_request, self._model, record))
            try:
                return await self._respond(request, encoder)
            except FieldError as error:
                raise renamed(error, encoder_type.field_names) from error
        except Exception as error:
            record.fail(error)
            raise

    async def read(self, request: AnyRequest, parse: Parse) -> ApiRequest:
        """Return the parsed body, with the call's time limit. Raises what `parse` and the intake
        raise, and `DeadlineError`."""
        record, timeout_s = record_of(request), header_s(request, DEADLINE_HEADER)
        server_s, owner = self._service.limits.timeout_s, record.memory.owner
        parse = partial(parse, timeout_s=timeout_s, arrived_s=record.began_s, owner=owner)
        async with ending_at(Deadline.of(record.began_s, timeout_s, server_s)):
            body = await self._intake.body(request)
            if len(body) <= LONG_BODY_BYTES and not any(field in body for field in STORED_FIELDS):
                api_request = parse(body, self._model)
            else:
                try:
                    async with self._parser.place(owner, PARSER_WAIT_S):
                        api_request = await asyncio.to_thread(parse, body, self._model)
                except NoPlaceError as error:
                    problem = f"long bodies wait to be parsed; {error}"
                    raise self._service.queue.overloaded("bodies", problem) from error
        record.memory.hold(api_request.num_bytes)
        return api_request

    async def _respond(self, request: AnyRequest, encoder: Encoder) -> AnyResponse:
        api_request = encoder.replies.api_request
        ignored, fields, headers = [*api_request.ignored[:16]], api_request.fields, {}
        if fields.priority:
            engine = self._service.client.engine
            if engine is None or engine.config.queue_policy != "priority":
                ignored.append("priority")
        if ignored:  # the client chose these names, so they are percent-encoded
            headers[IGNORED_HEADER] = ", ".join(quote(name[:64]) for name in ignored)
        if fields.stream:
            chunks = self._events(encoder)
            await or_disconnect(request, anext(chunks))
            return event_stream(chunks, headers)
        await or_disconnect(request, self._gather(encoder))
        return json_response(encoder.full_response(), headers)

    async def _submit(self, encoder: Encoder, stack: ExitStack) -> list[OpenRequest]:
        replies = encoder.replies
        stack.callback(replies.record.close)
        async for opened in self._service.submit(replies.api_request):
            stack.callback(opened.close)
            replies.open(opened)
        replies.record.memory.hold(replies.api_request.num_bytes)
        return replies.opened

    async def _gather(self, encoder: Encoder) -> None:
        with ExitStack() as stack:
            async for items in merged_outputs(await self._submit(encoder, stack)):
                for position, output in items:
                    encoder.take(position, output)

    async def _events(self, encoder: Encoder) -> AsyncIterator[bytes]:
        """Yield server-sent events, those of one step as one item. The first item is empty. An
        error before it can still become an HTTP status. It follows when the prompts are queued, or
        without heartbeats, when there is a first event."""
        begun = False
        with ExitStack() as stack:
            try:
                opened = await self._submit(encoder, stack)
                interval_s = self._service.limits.sse_heartbeat_s
                heartbeat = Heartbeat(interval_s)
                stack.callback(heartbeat.close)
                if interval_s:
                    begun = True
                    yield b""
                    yield encoder.first_events()
                async for items in merged_outputs(opened, heartbeat):
                    content = b"".join([encoder.event(at, output) for at, output in items])
                    if not content and heartbeat.due:
                        content = encoder.ping
                    if content and not begun:
                        begun = True
                        yield b""
                    if content:
                        yield content
                        heartbeat.record_sent()
                last = encoder.last_event()
            except Exception as error:
                if not begun:
                    raise
                encoder.replies.record.fail(error)
                last = encoder.error_event(stream_error_body(error))
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
