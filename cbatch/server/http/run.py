"""The HTTP server of `cbatch serve`, and how it drains and stops on signals."""

from __future__ import annotations

import asyncio
import logging
import socket
from collections.abc import Callable
from types import FrameType

import uvicorn

from cbatch.server.protocol.errors import EngineLostError
from cbatch.server.serving.service import EngineService
from cbatch.system.heap import freeze_heap, lower_mmap_threshold, trim_heap

_logger = logging.getLogger("cbatch")
_TRIM_TICKS = 50  # interval of `trim_heap` while idle, in uvicorn's ticks of 0.1 s
_FLUSH_S = 5  # time for complete responses to reach their clients


class DrainingServer(uvicorn.Server):
    """A server that drains. After the first signal it rejects new requests, and stops when the open
    ones have finished or `grace_s` has passed. A second signal stops it at once. It also stops if
    the engine is lost, so that a supervisor can restart it. `on_listening` receives the port."""

    def __init__(
        self,
        config: uvicorn.Config,
        service: EngineService,
        *,
        grace_s: float,
        on_listening: Callable[[int], None],
    ) -> None:
        config.timeout_graceful_shutdown = _FLUSH_S
        super().__init__(config)
        self._service, self._grace_s, self._on_listening = service, grace_s, on_listening
        self._loop: asyncio.AbstractEventLoop | None = None
        self._draining: asyncio.Task[None] | None = None

    async def serve(self, sockets: list[socket.socket] | None = None) -> None:
        self._loop = asyncio.get_running_loop()
        await super().serve(sockets)
        if self._service.client.down is not None:
            raise EngineLostError(self._service.client.down)

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await super().startup(sockets)
        if self.started:
            freeze_heap()
            lower_mmap_threshold()
            self._on_listening(self.servers[0].sockets[0].getsockname()[1])

    async def on_tick(self, counter: int) -> bool:
        if counter % _TRIM_TICKS == 0 and not self._service.num_open:
            trim_heap()
        return await super().on_tick(counter) or self._service.client.down is not None

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        assert self._loop is not None
        self._loop.call_soon_threadsafe(self._on_signal)

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        await super().shutdown(sockets)
        if self.force_exit:  # uvicorn would only cancel the lifespan task, which logs an error
            await self.lifespan.shutdown()

    def _on_signal(self) -> None:
        num_open = self._service.num_open
        if self._draining is None:
            message = "draining: %d open requests have %g s to finish; a second signal aborts them"
            _logger.info(message, num_open, self._grace_s)
            self._draining = asyncio.create_task(self._drain())
        elif not self.force_exit:
            _logger.warning("second signal: aborting %d open requests", num_open)
            self._draining.cancel()
            self.should_exit = self.force_exit = True

    async def _drain(self) -> None:
        await self._service.drain(self._grace_s)
        self.should_exit = True
