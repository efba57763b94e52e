"""One engine process as its owner holds it: the process, the socket to it, its journal."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple, Protocol

import zmq
import zmq.asyncio

from cbatch.core.request.errors import FieldError
from cbatch.process.in_flight import InFlightJournal
from cbatch.process.messages import Command, Event, StartFailed, decode_event, frames_of

TICK_S = 0.25  # between two looks at a silent engine
_DRAIN_MS = 20  # what a dead engine sent may still be on its way for as long


class EngineStartError(ValueError):
    """The engine could not be started; says why."""


class Death(NamedTuple):
    """`cause` follows "the engine". `from_outside`: by a signal that nothing in the process itself
    sends, but an operator does, or a system short of memory."""

    cause: str
    from_outside: bool = False


class Handle(Protocol):
    """What runs an engine: `EngineProcess`, or a thread in tests."""

    dead: asyncio.Future[None]

    @property
    def pid(self) -> int | None: ...

    def kill(self) -> None: ...

    def reap(self) -> Death:
        """Once it is dead."""


Launch = Callable[[str, Path], Handle]  # the socket's address, the journal's file


class EngineLink:
    """`serve` until the engine is dead, then `close`."""

    def __init__(self, launch: Launch, folder: Path, number: int) -> None:
        journal_path = folder / f"{number}.journal"
        endpoint = f"ipc://{folder}/{number}.sock"
        self.journal = InFlightJournal.create(journal_path)
        self._paths = (journal_path, folder / f"{number}.sock")
        self._socket = zmq.asyncio.Context.instance().socket(zmq.PAIR)
        self._socket.linger = 0
        self._socket.sndhwm = 0  # commands are bounded by the requests that they are about
        self._socket.bind(endpoint)
        self._engine = launch(endpoint, journal_path)
        self.ready = False
        self.committed = False  # any token
        self.failure: StartFailed | None = None
        self._hung_s: float | None = None
        self._num_heard = 0

    @property
    def pid(self) -> int | None:
        return self._engine.pid

    def send(self, command: Command) -> None:
        """Does not wait. To an engine that is gone it is lost, like all else that it was told."""
        frames = frames_of(command)
        sent = asyncio.ensure_future(self._socket.send_multipart(frames, zmq.DONTWAIT))
        if sent.done() and not isinstance(sent.exception(), zmq.Again):
            sent.result()

    def kill(self) -> None:
        self._engine.kill()

    async def serve(
        self, on_event: Callable[[Event], None], *, start_timeout_s: float, hang_timeout_s: float
    ) -> None:
        """Hands on what the engine says until it is dead. One that gives no sign of life for too
        long is killed: before it is ready, and then in a part of a step. Silence is counted in
        ticks of this process, so that a machine that slept, both processes with it, is none."""
        reader = asyncio.create_task(self._read(on_event))
        silent_s, signs = 0.0, self._signs()
        try:
            while not self._engine.dead.done():
                await asyncio.wait(
                    {reader, self._engine.dead}, timeout=TICK_S, return_when=asyncio.FIRST_COMPLETED
                )
                if reader.done():
                    reader.result()
                before, signs = signs, self._signs()
                silent_s = silent_s + TICK_S if before == signs else 0.0
                if silent_s >= (hang_timeout_s if self.ready else start_timeout_s):
                    self._hung_s = silent_s
                    self.kill()
        finally:
            reader.cancel()
        await asyncio.wait({reader})
        while await self._socket.poll(_DRAIN_MS):
            on_event(decode_event(await self._socket.recv()))

    def _signs(self) -> tuple[int, ...]:
        return (self._num_heard, *self.journal.signs.tolist())

    async def _read(self, on_event: Callable[[Event], None]) -> None:
        while True:
            content = await self._socket.recv()
            self._num_heard += 1
            on_event(decode_event(content))

    def close(self) -> Death:
        """Of a dead engine."""
        death = self._engine.reap()
        self._socket.close()
        self.journal.close()
        for path in self._paths:
            path.unlink(missing_ok=True)
        if self.failure is not None:
            return Death(f"did not start: {self.failure.message}")
        if self._hung_s is not None:
            return Death(f"gave no sign of life for {self._hung_s:.0f} s")
        return death


def start_error(failure: StartFailed | None, cause: str) -> ValueError:
    if failure is not None and failure.field is not None and failure.remedy is not None:
        return FieldError(failure.field, failure.message, failure.remedy)
    return EngineStartError(f"the engine {cause}" if failure is None else failure.message)
