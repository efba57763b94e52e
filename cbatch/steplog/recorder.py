"""The step log of an engine that serves: written beside its steps, never in them."""

from __future__ import annotations

import logging
import os
import queue
import threading
from pathlib import Path

from cbatch.core.scheduler.events import Event
from cbatch.steplog.step_log import encode_line, open_to_append

MAX_WAITING = 100_000  # events; a step has two, and one for each request that comes or goes
_logger = logging.getLogger("cbatch")


class StepRecorder:
    """Pass it to a scheduler as `log`. Events are frozen: a thread writes them down meanwhile, what
    has gathered at a time with one call of the system, so that whatever kills the process costs the
    last few at most. It appends: the configuration, with which every engine begins, tells where.

    A disk that fails, or falls `MAX_WAITING` events behind, ends the recording with a word in the
    log; what is written until then is whole. Raises OSError if the file cannot be opened.
    """

    def __init__(self, path: str | Path, max_waiting: int = MAX_WAITING) -> None:
        self._path = Path(path)
        self._file = open_to_append(self._path)
        self._events: queue.Queue[Event | None] = queue.Queue(max_waiting)
        self._failed = False
        self._thread = threading.Thread(target=self._run, name="cbatch-recorder", daemon=True)
        self._thread.start()

    def __call__(self, event: Event) -> None:
        if self._failed:
            return
        try:
            self._events.put_nowait(event)
        except queue.Full:
            self._fail(f"the disk is {self._events.maxsize} events behind")

    def __enter__(self) -> StepRecorder:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Everything is written. Once."""
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
