"""The engine in a thread of its own, and asynchronous streams of its outputs."""

from __future__ import annotations

import asyncio
import logging
import queue
import threading
from collections.abc import AsyncIterator, Callable
from functools import partial

from cbatch.core.request import SamplingParams
from cbatch.outputs import Output
from cbatch.server.errors import ServiceDownError
from cbatch.stepwise import Accepted, Engine, Prompt

_logger = logging.getLogger("cbatch")


class OutputStream:
    """The outputs of one request, as they come. Ends after every choice has finished.

    `close()` (or leaving the `async with`) before the end cancels what still runs.
    """

    def __init__(self, accepted: Accepted, cancel: Callable[[str], None]) -> None:
        self.accepted = accepted
        self._cancel = cancel
        self._outputs: asyncio.Queue[Output | None] = asyncio.Queue()
        self._num_running = accepted.num_choices

    def put(self, output: Output | None) -> None:
        """From the event loop's thread. None: the engine is gone."""
        self._outputs.put_nowait(output)

    async def __aiter__(self) -> AsyncIterator[Output]:
        while self._num_running:
            output = await self._outputs.get()
            if output is None:
                self._num_running = 0
                raise ServiceDownError("the engine stopped while the request ran")
            self._num_running -= output.finished is not None
            yield output

    async def __aenter__(self) -> OutputStream:
        return self

    async def __aexit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        if self._num_running:
            self._num_running = 0
            self._cancel(self.accepted.request_id)


class EngineService:
    """Drives an engine in a background thread for the coroutines of one event loop."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self._commands: queue.SimpleQueue[Callable[[], object] | None] = queue.SimpleQueue()
        self._streams: dict[str, OutputStream] = {}  # touched by the event loop's thread only
        self._loop: asyncio.AbstractEventLoop | None = None
        self._thread = threading.Thread(target=self._drive, name="cbatch-engine", daemon=True)
        self._down = False

    @property
    def running(self) -> bool:
        return self._thread.is_alive() and not self._down

    @property
    def ready(self) -> bool:
        """Whether a request sent now would be served."""
        return self.running

    def decode(self, ids: list[int]) -> str:
        """Text of token ids; empty where the engine has no tokenizer."""
        tokenizer = self._engine.tokenizer
        return "" if tokenizer is None else tokenizer.decode(ids)

    @property
    def num_requests(self) -> int:
        return len(self._streams)

    async def start(self) -> None:
        self._loop = asyncio.get_running_loop()
        self._thread.start()

    async def stop(self) -> None:
        """Ends the thread; streams that still run end with `ServiceDownError`."""
        self._commands.put(None)
        await asyncio.to_thread(self._thread.join)

    async def submit(
        self, prompt: Prompt, params: SamplingParams, *, request_id: str, priority: int = 0
    ) -> OutputStream:
        """Raises what `Engine.add` raises, and then nothing was queued."""
        loop = asyncio.get_running_loop()
        answer: asyncio.Future[OutputStream] = loop.create_future()

        def add() -> None:
            try:
                accepted = self._engine.add(
                    prompt, params, request_id=request_id, priority=priority
                )
            except Exception as error:
                loop.call_soon_threadsafe(self._refuse, answer, error)
            else:
                loop.call_soon_threadsafe(self._open, answer, accepted)

        if not self.running:
            raise ServiceDownError("the engine is not running")
        self._commands.put(add)
        return await answer

    # ---- on the event loop's thread -----------------------------------------------------------

    def _open(self, answer: asyncio.Future[OutputStream], accepted: Accepted) -> None:
        if answer.cancelled():  # the client left before its request was accepted
            self._cancel(accepted.request_id)
            return
        stream = OutputStream(accepted, self._cancel)
        self._streams[accepted.request_id] = stream
        answer.set_result(stream)

    def _refuse(self, answer: asyncio.Future[OutputStream], error: Exception) -> None:
        if not answer.cancelled():
            answer.set_exception(error)

    def _cancel(self, request_id: str) -> None:
        self._streams.pop(request_id, None)
        self._commands.put(partial(self._engine.cancel, request_id))

    def _deliver(self, outputs: list[Output], ended: frozenset[str]) -> None:
        for output in outputs:
            stream = self._streams.get(output.request_id)
            if stream is not None:
                stream.put(output)
        for request_id in ended:
            self._streams.pop(request_id, None)

    def _fail_all(self) -> None:
        self._down = True
        for stream in self._streams.values():
            stream.put(None)
        self._streams.clear()

    # ---- on the engine's thread ---------------------------------------------------------------

    def _drive(self) -> None:
        assert self._loop is not None
        try:
            while self._obey():
                outputs = self._engine.step()
                if outputs:
                    done = {o.request_id for o in outputs if o.finished is not None}
                    ended = frozenset(r for r in done if not self._engine.is_running(r))
                    self._loop.call_soon_threadsafe(self._deliver, outputs, ended)
        except Exception:
            _logger.exception("the engine stopped")
        self._loop.call_soon_threadsafe(self._fail_all)

    def _obey(self) -> bool:
        """Carries out the commands that wait; with nothing to do, waits for one. False: stop."""
        while True:
            try:
                command = self._commands.get(block=not self._engine.has_work)
            except queue.Empty:
                return True
            if command is None:
                return False
            command()
