"""From the engine's output streams to a client, who may disconnect at any moment."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable
from contextlib import AsyncExitStack
from typing import Any, TypeVar

from litestar import Request

from cbatch.server.http.errors import ClientGoneError, error_body, unforeseen
from cbatch.server.protocol.errors import GenerationError, ServiceError
from cbatch.server.serving.open_request import OutputStream, joined
from cbatch.server.serving.response_builder import DONE, ResponseBuilder, encode
from cbatch.server.serving.service import EngineService

T = TypeVar("T")


async def submit(
    service: EngineService,
    builder: ResponseBuilder[Any],
    timeout_s: float | None,
    itl_target_s: float | None,
    owner: str | None,
    stack: AsyncExitStack,
) -> list[OutputStream]:
    """Submit each prompt and return its stream. If one is rejected, `stack` closes the others."""
    api_request, streams = builder.api_request, []
    for position, prompt in enumerate(api_request.prompts):
        stream = await service.submit(
            prompt,
            api_request.params,
            request_id=f"{builder.id}-{position}",
            priority=api_request.fields.priority,
            cache_salt=api_request.fields.cache_salt,
            itl_target_s=itl_target_s,
            timeout_s=timeout_s,
            num_prompts=len(api_request.prompts),
            grammar_field=api_request.grammar_field,
            owner=owner,
            mark_ids=api_request.mark_ids,
            whole=not api_request.fields.stream,
        )
        streams.append(await stack.enter_async_context(stream))
        builder.open(stream)
    return streams


async def gather(streams: list[OutputStream], builder: ResponseBuilder[Any]) -> None:
    """Pass all outputs to `builder`, until every choice has finished."""
    async for items in joined(streams):
        for position, output in items:
            builder.take(position, output)


async def events(
    streams: list[OutputStream], builder: ResponseBuilder[Any], owner: AsyncExitStack
) -> AsyncIterator[bytes]:
    """Yield server-sent events; those of one step are joined. The first item is empty and comes
    when there is something to send, so an error before it can still become an HTTP status. `owner`
    is closed at the end, also after an error."""
    begun = False
    async with owner:
        try:
            async for items in joined(streams):
                content = b"".join([builder.event(position, output) for position, output in items])
                if content and not begun:
                    begun = True
                    yield b""
                if content:
                    yield content
            last = builder.last_event()
        except Exception as error:
            if not begun:
                raise
            builder.fail(error)
            if isinstance(error, GenerationError | ServiceError):
                body = error_body(str(error), error.kind)
            else:
                body = unforeseen(error, "a stream")
            last = b"data: " + encode(body) + b"\n\n"
        yield last + DONE


async def or_disconnect(request: Request[Any, Any, Any], work: Awaitable[T]) -> T:
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


async def _disconnected(request: Request[Any, Any, Any]) -> None:
    while (await request.receive())["type"] != "http.disconnect":
        pass
