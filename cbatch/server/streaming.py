"""From the engine's streams to a client, who may leave at any moment."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Coroutine
from contextlib import AsyncExitStack
from typing import Any

from litestar import Request

from cbatch.outputs import Output
from cbatch.server.answer import DONE, Answer, encode
from cbatch.server.errors import ServiceError
from cbatch.server.faults import ClientGoneError, GenerationError, error_body
from cbatch.server.service import EngineService
from cbatch.server.stream import OutputStream

MAX_WAITING = 1024  # outputs joined at most
Item = tuple[int, Output]  # of the prompt at this position


async def submit(
    service: EngineService, answer: Answer[Any], stack: AsyncExitStack
) -> list[OutputStream]:
    """A stream for each prompt. If one is refused, `stack` closes those before it."""
    call, streams = answer.call, []
    for position, prompt in enumerate(call.prompts):
        stream = await service.submit(
            prompt,
            call.params,
            request_id=f"{answer.id}-{position}",
            priority=call.fields.priority,
        )
        streams.append(await stack.enter_async_context(stream))
        answer.open(stream)
    return streams


async def gather(streams: list[OutputStream], answer: Answer[Any]) -> None:
    """Until every choice has finished."""
    async for items in _batches(streams):
        for position, output in items:
            answer.take(position, output)


async def events(
    streams: list[OutputStream], answer: Answer[Any], stack: AsyncExitStack
) -> AsyncIterator[bytes]:
    """Server-sent events; those of one step go out together. The first item is empty, and asked
    for before the answer begins: from there on `stack` is closed however this ends."""
    async with stack:
        yield b""
        try:
            async for items in _batches(streams):
                if told := b"".join([answer.event(position, output) for position, output in items]):
                    yield told
        except (GenerationError, ServiceError) as error:
            yield b"data: " + encode(error_body(str(error), "server_error")) + b"\n\n" + DONE
            return
        yield answer.last_event() + DONE


async def _batches(streams: list[OutputStream]) -> AsyncIterator[list[Item]]:
    """The outputs of all streams as they come, those of one step together."""
    if len(streams) == 1 and streams[0].accepted.num_choices == 1:
        async for output in streams[0]:  # one output a step: nothing to join
            yield [(0, output)]
        return
    waiting: list[Item] = []
    news, room = asyncio.Event(), asyncio.Event()

    async def pump(position: int, stream: OutputStream) -> None:
        async for output in stream:
            waiting.append((position, output))
            news.set()
            while len(waiting) >= MAX_WAITING:  # the rest waits where the service bounds it
                room.clear()
                await room.wait()

    pumps = [asyncio.create_task(pump(at, stream)) for at, stream in enumerate(streams)]
    everything = asyncio.gather(*pumps)
    everything.add_done_callback(lambda _: news.set())
    try:
        while True:
            await news.wait()
            news.clear()
            ended = everything.done()
            if waiting:
                ready, waiting[:] = waiting[:], []
                room.set()
                yield ready
            if ended:
                everything.result()  # raises what a stream raised
                return
    finally:
        for each in pumps:  # `everything` is over with the first that raised, the others are not
            each.cancel()


async def or_disconnect(request: Request[Any, Any, Any], work: Coroutine[Any, Any, None]) -> None:
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
