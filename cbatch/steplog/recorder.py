"""The step log of a running engine, written by a background thread."""

from __future__ import annotations

import logging
import os
import queue
import threading
from pathlib import Path
from typing import Any

from msgspec import structs

from cbatch.core.scheduler.events import Configured, Event
from cbatch.steplog.step_log import encode_line, open_to_append

MAX_WAITING = 100_000  # events in the queue; a step makes two, each request one or two more
_logger = logging.getLogger("cbatch")


class StepRecorder:
    """Pass this recorder to a scheduler as `log`. Events are immutable, so a background thread
    encodes them, and writes all that are queued with one system call. A killed process therefore
    loses the last few events at most. The file is appended to; the configuration event marks where
    each engine begins.

    `models` has the fields `model`, `draft` and `options` of the configuration event.

    Recording stops with a logged error when a write fails or `MAX_WAITING` events are queued. The
    records before that remain valid. Raises OSError if the file cannot be opened.
    """

    def __init__(
        self, path: str | Path, max_waiting: int = MAX_WAITING, models: dict[str, Any] | None = None
    ) -> None:
        self._path, self._models = Path(path), models or {}
        self._file = open_to_append(self._path)
        self._events: queue.Queue[Event | None] = queue.Queue(max_waiting)
        self._failed = False
        self._thread = threading.Thread(target=self._run, name="cbatch-recorder", daemon=True)
        self._thread.start()

    def __call__(self, event: Event) -> None:
        if self._failed:
            return
        if isinstance(event, Configured):
            event = structs.replace(event, **self._models)
        try:
            self._events.put_nowait(event)
        except queue.Full:
            self._fail(f"the disk lags by {self._events.maxsize} events")

    def __enter__(self) -> StepRecorder:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Write all queued events and close the file. Call this once."""
        self._events.put(None)
        self._thread.join()
        os.close(self._file)

    def _run(self) -> None:
        last = False
        while not last:
            lines = []
            event = self._events.get()
            while event is not None:
                lines.append(encode_line(event))
                try:
                    event = self._events.get_nowait()
                except queue.Empty:
                    break
            last = event is None
            self._write(b"".join(lines))

    def _write(self, content: bytes) -> None:
        try:
            while content and not self._failed:
                content = content[os.write(self._file, content) :]
        except OSError as error:
            self._fail(str(error))

    def _fail(self, cause: str) -> None:
        self._failed = True
        _logger.error("%s: the recording ends here: %s", self._path, cause)
