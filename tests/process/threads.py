"""An engine with its socket in a thread, so that a test can inspect it."""

from __future__ import annotations

import asyncio
import threading
from pathlib import Path

from cbatch.engine.core import EngineCore
from cbatch.process.connection import Death
from cbatch.process.in_flight import InFlightJournal
from cbatch.process.server import EngineServer, connect


class EngineThread:
    """A `Handle` of a thread. It cannot be killed, but dies of an exception in its loop."""

    pid = None

    def __init__(self, core: EngineCore, endpoint: str, journal: Path) -> None:
        self._core = core
        self._where = (endpoint, journal)
        self._owner = asyncio.get_running_loop()
        self.dead: asyncio.Future[None] = self._owner.create_future()
        self.error: Exception | None = None
        threading.Thread(target=self._run, daemon=True).start()

    def _run(self) -> None:
        endpoint, journal = self._where
        socket = connect(endpoint)
        try:
            EngineServer(self._core, socket, InFlightJournal(journal)).run()
        except Exception as error:
            self.error = error
        finally:
            socket.close()
            self._owner.call_soon_threadsafe(self.dead.set_result, None)

    def kill(self) -> None:
        pass

    def reap(self) -> Death:
        return Death(f"failed: {self.error!r}")
