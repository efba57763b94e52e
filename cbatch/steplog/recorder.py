"""The step log of a running engine, written by a background thread."""

from __future__ import annotations

import atexit
import logging
import os
import threading
from collections import deque
from pathlib import Path
from typing import Any

from msgspec import structs

from cbatch.core.scheduler.events import Configured, Event
from cbatch.steplog.step_log import encode_line, open_to_append

# Seconds between two writes. Each write takes the interpreter's lock from the engine; a write for
# each step costs 2 to 8 % of tokens/s on two cores, for each request 2 %.
WRITE_EVERY_S = 0.2
MAX_WAITING = 100_000  # events in the queue; a step makes two, each request one or two more
_logger = logging.getLogger("cbatch")


class StepRecorder:
    """Pass this recorder to a scheduler as `log`. Events are immutable, so a background thread
    encodes them. Every `WRITE_EVERY_S` it writes all that are queued with one system call. A killed
    process loses at most the events since the last write. The file is appended to; the
    configuration event marks where each engine begins.

    `models` has the fields `model`, `draft` and `options` of the configuration event.

    Recording stops with a logged error when a write fails, an event cannot be encoded, or
    `MAX_WAITING` events are queued. The records before that remain valid. Raises OSError if the
    file cannot be opened.
    """

    def __init__(
        self, path: str | Path, max_waiting: int = MAX_WAITING, models: dict[str, Any] | None = None
    ) -> None:
        self._path, self._models = Path(path), models or {}
        self._file = open_to_append(self._path)
        self._events: deque[Event] = deque()
        self._max_waiting = max_waiting
        self._closing = threading.Event()
        self._failed = False
        self._thread = threading.Thread(target=self._run, name="cbatch-recorder", daemon=True)
        self._thread.start()
        atexit.register(self.close)

    def __call__(self, event: Event) -> None:
        if self._failed:
            return
        if isinstance(event, Configured):
            event = structs.replace(event, **self._models)
        if len(self._events) >= self._max_waiting:
            self._fail(f"the disk lags by {self._max_waiting} events")
            return
        self._events.append(event)

    def __enter__(self) -> StepRecorder:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Write all queued events and close the file. Call this once, or let the process's normal
        end do it."""
        atexit.unregister(self.close)
        self._closing.set()
        self._thread.join()
        os.close(self._file)

    def _run(self) -> None:
        closed = False
        while not closed:
            closed = self._closing.wait(WRITE_EVERY_S)
            self._write([self._events.popleft() for _ in range(len(self._events))])

    def _write(self, events: list[Event]) -> None:
        try:
            content = b"".join(map(encode_line, events))
            while content and not self._failed:
                content = content[os.write(self._file, content) :]
        except Exception as error:
            self._fail(str(error))

    def _fail(self, cause: str) -> None:
        self._failed = True
        _logger.error("%s: the recording ends here: %s", self._path, cause)
