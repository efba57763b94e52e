"""The ASGI application: `/v1/completions`, `/v1/models`, `/health`."""

from __future__ import annotations

import asyncio
import time
import uuid
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from typing import Any
from urllib.parse import quote

import msgspec
from litestar import Litestar, Request, get, post
from litestar import Response as HttpResponse
from litestar.response import Stream

from cbatch.core.errors import FieldError
from cbatch.core.request import FinishReason
from cbatch.outputs import Output, TokenLogprob
from cbatch.server.errors import OverloadedError, ServiceError
from cbatch.server.logprobs import CompletionLogprobs, Decode, prompt_logprobs
from cbatch.server.schemas import (
    CompletionCall,
    Response,
    ResponseChoice,
    Usage,
    parse_call,
)
from cbatch.server.service import EngineService
from cbatch.server.stream import OutputStream

IGNORED_HEADER = "x-cbatch-ignored-fields"
MAX_BODY_BYTES = 16 * 2**20
_encode = msgspec.json.Encoder().encode


class GenerationError(RuntimeError):
    """A choice ended with an error of its own."""


def create_app(service: EngineService, model: str) -> Litestar:
    """An application that serves one engine under the name `model`."""
    started_s = int(time.time())

    @asynccontextmanager
    async def lifespan(_: Litestar) -> AsyncIterator[None]:
        await service.start()
        yield
        await service.stop()

    @get("/health")
    async def health() -> HttpResponse[dict[str, Any]]:
        state = {"status": "ok" if service.running else "down", "requests": service.num_requests}
        return HttpResponse(state, status_code=200 if service.running else 503)

    @get("/v1/models")
    async def models() -> dict[str, Any]:
        entry = {"id": model, "object": "model", "created": started_s, "owned_by": "cbatch"}
        return {"object": "list", "data": [entry]}

    @post("/v1/embeddings")
    async def embeddings() -> HttpResponse[dict[str, Any]]:
        message = "embeddings are not supported yet; this server completes text"
        return HttpResponse(_error_body(message, "not_implemented", None), status_code=501)

    @post("/v1/completions", status_code=200)
    async def completions(request: Request[Any, Any, Any]) -> HttpResponse[bytes] | Stream:
        call = parse_call(await request.body())
        if call.model not in (None, model):
            raise FieldError("model", f"{call.model!r} is not served", f"use {model!r}")
        answer = Answer(model, call, service.decode)
        headers = {}
        if call.ignored:  # percent-encoded: a field's name is the client's, a header is ours
            headers[IGNORED_HEADER] = ", ".join(quote(name[:64]) for name in call.ignored[:16])
        stack = AsyncExitStack()
        try:
            streams = await _submit(service, call, answer.id, stack)
            if call.stream:
                events = _events(streams, call, answer, stack.pop_all())
                await anext(events)  # from here on it cancels its request however it ends
                return Stream(events, media_type="text/event-stream", headers=headers)
            await _or_disconnect(request, _gather(streams, answer))
        finally:
            await stack.aclose()
        return HttpResponse(_encode(answer.whole()), media_type="application/json", headers=headers)

    return Litestar(
        [health, models, embeddings, completions],
        lifespan=[lifespan],
        request_max_body_size=MAX_BODY_BYTES,
        exception_handlers={
            FieldError: _bad_request,
            ServiceError: _unserved,
            GenerationError: _failed(500),
            ClientGoneError: _failed(499),
        },
        openapi_config=None,
        logging_config=None,  # the program that runs the server decides about logs
    )


class Answer:
    """What has been completed so far, over the prompts and choices of one call."""

    def __init__(self, model: str, call: CompletionCall, decode: Decode) -> None:
        self._call, self._decode = call, decode
        self.id = f"cmpl-{uuid.uuid4().hex}"
        self._created = int(time.time())
        self._model = model
        self._choices: dict[int, ResponseChoice] = {}  # so far
        self._prompt_tokens = 0
        self._completion_tokens = 0

    def open(self, stream: OutputStream) -> None:
        self._prompt_tokens += len(stream.accepted.prompt_token_ids)

    def take(self, stream: OutputStream, position: int, output: Output) -> ResponseChoice:
        """The new part of a choice, which is also added to the whole. `position` is the prompt's.
        Raises `GenerationError` where the choice ended with one."""
        index = position * stream.accepted.num_choices + output.index
        whole, done = self._choices.get(index), output.finished
        part = ResponseChoice(index, output.text, stream.accepted.seed)
        if self._call.echo and whole is None:
            part.text = self._prompt_text(stream, position) + part.text
        part.logprobs = self._logprobs(stream, whole, output)
        if output.prompt_logprobs is not None:
            part.prompt_logprobs = prompt_logprobs(output.prompt_logprobs, self._decode)
        if done is not None:
            if done.finish_reason is FinishReason.ERROR:
                raise GenerationError(done.error or "the request failed")
            part.finish_reason = done.finish_reason.value
            self._completion_tokens += len(done.token_ids)
        if whole is None:
            self._choices[index] = msgspec.structs.replace(part)
        else:
            whole.extend(part)
        return part

    def _prompt_text(self, stream: OutputStream, position: int) -> str:
        prompt = self._call.prompts[position]
        if isinstance(prompt, str):
            return prompt
        return self._decode(list(stream.accepted.prompt_token_ids))

    def _logprobs(
        self, stream: OutputStream, whole: ResponseChoice | None, output: Output
    ) -> CompletionLogprobs | None:
        """Of the new tokens; with `echo` those of the prompt come before the first."""
        if output.logprobs is None:
            return None
        found: list[TokenLogprob | None] = list(output.logprobs)
        ids = list(output.token_ids)
        if self._call.echo and output.prompt_logprobs is not None:
            found = [*output.prompt_logprobs, *found]
            ids = [*stream.accepted.prompt_token_ids, *ids]
        earlier = None if whole is None else whole.logprobs
        offset = 0 if earlier is None else earlier.end_offset
        return CompletionLogprobs.of(found, ids, self._decode, offset)

    def chunk(self, *choices: ResponseChoice, usage: Usage | None = None) -> Response:
        return Response(self.id, self._created, self._model, list(choices), usage)

    def whole(self) -> Response:
        return self.chunk(*(self._choices[i] for i in sorted(self._choices)), usage=self.usage())

    def usage(self) -> Usage:
        total = self._prompt_tokens + self._completion_tokens
        return Usage(self._prompt_tokens, self._completion_tokens, total)


async def _submit(
    service: EngineService, call: CompletionCall, call_id: str, stack: AsyncExitStack
) -> list[OutputStream]:
    """A stream for each prompt. If one is refused, `stack` closes those before it."""
    streams = []
    for position, prompt in enumerate(call.prompts):
        stream = await service.submit(
            prompt, call.params, request_id=f"{call_id}-{position}", priority=call.priority
        )
        streams.append(await stack.enter_async_context(stream))
    return streams


async def _merged(streams: list[OutputStream]) -> AsyncIterator[tuple[int, OutputStream, Output]]:
    """The outputs of all streams as they come, with the position of their prompt."""
    if len(streams) == 1:
        async for output in streams[0]:
            yield 0, streams[0], output
        return
    merged: asyncio.Queue[tuple[int, OutputStream, Output] | None] = asyncio.Queue()

    async def pump(position: int, stream: OutputStream) -> None:
        async for output in stream:
            merged.put_nowait((position, stream, output))

    tasks = [asyncio.create_task(pump(at, stream)) for at, stream in enumerate(streams)]
    everything = asyncio.gather(*tasks)
    everything.add_done_callback(lambda _: merged.put_nowait(None))
    try:
        while (item := await merged.get()) is not None:
            yield item
        everything.result()  # raises what a stream raised
    finally:
        everything.cancel()


async def _gather(streams: list[OutputStream], answer: Answer) -> None:
    for stream in streams:
        answer.open(stream)
    async for position, stream, output in _merged(streams):
        answer.take(stream, position, output)


async def _events(
    streams: list[OutputStream], call: CompletionCall, answer: Answer, stack: AsyncExitStack
) -> AsyncIterator[bytes]:
    """Server-sent events, after an empty first item. Closing the generator (the client left) closes
    `stack`, which cancels what still runs; one that was never started could not be closed."""
    async with stack:
        yield b""
        for stream in streams:
            answer.open(stream)
        try:
            async for position, stream, output in _merged(streams):
                part = answer.take(stream, position, output)
                if part.text or part.finish_reason or part.logprobs:
                    yield _event(answer.chunk(part))
        except (GenerationError, ServiceError) as error:
            yield _event(_error_body(str(error), "server_error", None))
        else:
            if call.include_usage:
                yield _event(answer.chunk(usage=answer.usage()))
        yield b"data: [DONE]\n\n"


def _event(body: Any) -> bytes:
    return b"data: " + _encode(body) + b"\n\n"


class ClientGoneError(RuntimeError):
    """The client closed the connection before its answer was ready."""


async def _or_disconnect(request: Request[Any, Any, Any], work: Any) -> None:
    """Awaits `work`, but gives it up if the client leaves: no framework cancels a plain handler."""
    task = asyncio.ensure_future(work)
    gone = asyncio.ensure_future(_disconnected(request))
    try:
        await asyncio.wait({task, gone}, return_when=asyncio.FIRST_COMPLETED)
        if not task.done():
            raise ClientGoneError("the client closed the connection")
        await task
    finally:
        for each in (task, gone):
            each.cancel()


async def _disconnected(request: Request[Any, Any, Any]) -> None:
    while (await request.receive())["type"] != "http.disconnect":
        pass


def _error_body(message: str, kind: str, field: str | None) -> dict[str, Any]:
    return {"error": {"message": message, "type": kind, "param": field, "code": None}}


def _bad_request(_: Request[Any, Any, Any], error: FieldError) -> HttpResponse[dict[str, Any]]:
    return HttpResponse(
        _error_body(str(error), "invalid_request_error", error.field), status_code=400
    )


def _unserved(_: Request[Any, Any, Any], error: ServiceError) -> HttpResponse[dict[str, Any]]:
    headers = {}
    if isinstance(error, OverloadedError):
        headers["retry-after"] = str(error.retry_after_s)
    body = _error_body(str(error), "server_error", None)
    return HttpResponse(body, status_code=error.status, headers=headers)


def _failed(status: int) -> Any:
    def handler(_: Request[Any, Any, Any], error: Exception) -> HttpResponse[dict[str, Any]]:
        return HttpResponse(_error_body(str(error), "server_error", None), status_code=status)

    return handler
