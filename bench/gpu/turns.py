"""Exclusive use of the device: while a process measures, the processes of all other parts stop.

Parts of a run start concurrently, because starting needs processors and measuring needs the device.
Each part is a process group; a file in `groups` names it while it runs.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import signal
import time
from pathlib import Path
from typing import IO

_SETTLE_S = 0.05  # after this time the queued work of stopped processes is done
_POLL_S = 0.1


class DeviceTurns:
    """One process's view of the turns; `folder` is common to all parts of a run."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._groups = folder / "groups"
        self._groups.mkdir(parents=True, exist_ok=True)
        self._file: IO[str] | None = None

    def acquire(self) -> None:
        """Wait for the device, then stop the other processes."""
        if self._file is None:
            self._file = (self.folder / "turn").open("a")
            fcntl.flock(self._file, fcntl.LOCK_EX)
            self._signal_others(signal.SIGSTOP)
            time.sleep(_SETTLE_S)

    def release(self) -> None:
        """Give the device back; the other processes continue."""
        if self._file is not None:
            self._signal_others(signal.SIGCONT)
            self._file.close()
            self._file = None

    def wait_for(self, part: str) -> dict[str, float]:
        """Wait until a part has ended. Return the seconds waited."""
        began_s = time.monotonic()
        while not (self.folder / f"{part}.ended").exists():
            time.sleep(_POLL_S)
        return {"waited_s": time.monotonic() - began_s}

    # --- for the process that starts the parts ---

    def is_free(self) -> bool:
        """Return True if no process has the device to itself."""
        with (self.folder / "turn").open("a") as file:
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                return False
        return True

    def begin(self, group: int) -> None:
        (self._groups / str(group)).touch()

    def end(self, group: int) -> None:
        """Remove a group. The others continue if it had the device."""
        (self._groups / str(group)).unlink(missing_ok=True)
        if self.is_free():
            self._signal_others(signal.SIGCONT)

    def announce(self, part: str) -> None:
        """Note that a part has ended, or will not begin."""
        (self.folder / f"{part}.ended").touch()

    def _signal_others(self, number: signal.Signals) -> None:
        for path in self._groups.iterdir():
            if int(path.name) != os.getpgrp():
                with contextlib.suppress(ProcessLookupError):
                    os.killpg(int(path.name), number)
