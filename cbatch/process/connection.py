"""The client's side of one engine process: its handle, its socket and its journal."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple, Protocol

import zmq
import zmq.asyncio

from cbatch.core.request.errors import FieldError, InputError
from cbatch.process.in_flight import InFlightJournal
from cbatch.process.messages import Command, Event, StartFailed, decode_event, frames_of
from cbatch.system.heap import address_space_note

TICK_S = 0.25  # interval of the checks for a hanging engine
_DRAIN_MS = 20  # maximum wait for each remaining message of a dead engine


class EngineStartError(InputError):
    """The engine could not be started. The message says why."""


class Death(NamedTuple):
    """How an engine ended. `cause` completes "the engine ...". `from_outside`: it was killed by a
    signal from an operator, or from a system short of memory."""

    cause: str
    from_outside: bool = False


class Handle(Protocol):
    """A running engine: `EngineProcess`, or a thread in tests."""

    dead: asyncio.Future[None]

    @property
    def pid(self) -> int | None: ...

    def kill(self) -> None: ...

    def reap(self) -> Death:
        """Release the dead engine's resources, and return how it ended."""


Launch = Callable[[str, Path], Handle]  # arguments: socket address, journal path


class EngineLink:
    """The connection to one engine. Call `serve` until the engine is dead, then `close`."""

    def __init__(self, launch: Launch, folder: Path, number: int) -> None:
        journal_path = folder / f"{number}.journal"
        endpoint = f"ipc://{folder}/{number}.sock"
        self.journal = InFlightJournal.create(journal_path)
        self._paths = (journal_path, folder / f"{number}.sock")
        self._socket = zmq.asyncio.Context.instance().socket(zmq.PAIR)
        self._socket.linger = 0
        self._socket.sndhwm = 0  # unlimited; open requests bound the number of commands
        self._socket.bind(endpoint)
        self._engine = launch(endpoint, journal_path)
        self.ready = False
        self.committed = False  # the engine has committed a token
        self.failure: StartFailed | None = None
        self._hung_s: float | None = None
        self._num_events = 0

    @property
    def pid(self) -> int | None:
        return self._engine.pid

    def send(self, command: Command) -> None:
        """Send a command without waiting. It is lost if the engine is dead."""
        frames = frames_of(command)
        sent = asyncio.ensure_future(self._socket.send_multipart(frames, zmq.DONTWAIT))
        if sent.done() and not isinstance(sent.exception(), zmq.Again):
            sent.result()

    def kill(self) -> None:
        self._engine.kill()

    async def serve(
        self, on_event: Callable[[Event], None], *, start_timeout_s: float, hang_timeout_s: float
    ) -> None:
        """Pass events to `on_event` until the engine is dead. An engine without progress is killed
        after `start_timeout_s` while it starts, and after `hang_timeout_s` later. The time is
        counted in ticks of this process, so that a suspended machine does not count as a hang."""
        reader = asyncio.create_task(self._read(on_event))
        silent_s, progress = 0.0, self._progress()
        try:
            while not self._engine.dead.done():
                await asyncio.wait(
                    {reader, self._engine.dead}, timeout=TICK_S, return_when=asyncio.FIRST_COMPLETED
                )
                if reader.done():
                    reader.result()
                before, progress = progress, self._progress()
                silent_s = silent_s + TICK_S if before == progress else 0.0
                if silent_s >= (hang_timeout_s if self.ready else start_timeout_s):
                    self._hung_s = silent_s
                    self.kill()
        finally:
            reader.cancel()
        await asyncio.wait({reader})
        while await self._socket.poll(_DRAIN_MS):
            on_event(decode_event(await self._socket.recv()))

    def _progress(self) -> tuple[int, ...]:
        return (self._num_events, *self.journal.progress.tolist())

    async def _read(self, on_event: Callable[[Event], None]) -> None:
        while True:
            content = await self._socket.recv()
            self._num_events += 1
            on_event(decode_event(content))

    def close(self) -> Death:
        death = self._engine.reap()
        self._socket.close()
        self.journal.close()
        for path in self._paths:
            path.unlink(missing_ok=True)
        if self.failure is not None:
            return Death(f"did not start: {self.failure.message}")
        if self._hung_s is not None:
            return Death(f"did not respond for {self._hung_s:.0f} s")
        return death


def start_error(failure: StartFailed | None, cause: str) -> ValueError:
    if failure is not None and failure.field is not None and failure.remedy is not None:
        return FieldError(failure.field, failure.message, failure.remedy)
    if failure is None:
        return EngineStartError(f"the engine {cause}{address_space_note()}")
    return EngineStartError(failure.message)
