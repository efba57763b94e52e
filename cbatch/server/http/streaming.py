"""From the engine's streams to a client, who may leave at any moment."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable
from contextlib import AsyncExitStack
from typing import Any, TypeVar

from litestar import Request

from cbatch.server.http.errors import ClientGoneError, error_body, unforeseen
from cbatch.server.protocol.errors import GenerationError, ServiceError
from cbatch.server.serving.answer import DONE, Answer, encode
from cbatch.server.serving.call import OutputStream, joined
from cbatch.server.serving.service import EngineService

T = TypeVar("T")


async def submit(
    service: EngineService,
    answer: Answer[Any],
    timeout_s: float | None,
    itl_target_s: float | None,
    owner: str | None,
    stack: AsyncExitStack,
) -> list[OutputStream]:
    """A stream for each prompt, `owner`'s. If one is refused, `stack` closes those before it."""
    call, streams = answer.call, []
    for position, prompt in enumerate(call.prompts):
        stream = await service.submit(
            prompt,
            call.params,
            request_id=f"{answer.id}-{position}",
            priority=call.fields.priority,
            cache_salt=call.fields.cache_salt,
            itl_target_s=itl_target_s,
            timeout_s=timeout_s,
            num_prompts=len(call.prompts),
            grammar_field=call.grammar_field,
            owner=owner,
            mark_ids=call.mark_ids,
            whole=not call.fields.stream,
        )
        streams.append(await stack.enter_async_context(stream))
        answer.open(stream)
    return streams


async def gather(streams: list[OutputStream], answer: Answer[Any]) -> None:
    """Until every choice has finished."""
    async for items in joined(streams):
        for position, output in items:
            answer.take(position, output)


async def events(
    streams: list[OutputStream], answer: Answer[Any], owner: AsyncExitStack
) -> AsyncIterator[bytes]:
    """Server-sent events; those of one step go out together. The first item is empty and comes once
    there is something to tell: what goes wrong before it is raised, and can still be a status.
    `owner` is closed however this ends."""
    begun = False
    async with owner:
        try:
            async for items in joined(streams):
                told = b"".join([answer.event(position, output) for position, output in items])
                if told and not begun:
                    begun = True
                    yield b""
                if told:
                    yield told
            last = answer.last_event()
        except Exception as error:
            if not begun:
                raise
            answer.fail(error)
            if isinstance(error, GenerationError | ServiceError):
                body = error_body(str(error), error.kind)
            else:
                body = unforeseen(error, "a stream")
            last = b"data: " + encode(body) + b"\n\n"
        yield last + DONE


async def or_disconnect(request: Request[Any, Any, Any], work: Awaitable[T]) -> T:
    """Awaits `work`, but gives it up if the client leaves: no framework cancels a plain handler."""
    task = asyncio.ensure_future(work)
    gone = asyncio.ensure_future(_disconnected(request))
    try:
        await asyncio.wait({task, gone}, return_when=asyncio.FIRST_COMPLETED)
        if not task.done():
            raise ClientGoneError("the client closed the connection")
        return await task
    finally:
        for each in (task, gone):
            each.cancel()


async def _disconnected(request: Request[Any, Any, Any]) -> None:
    while (await request.receive())["type"] != "http.disconnect":
        pass
