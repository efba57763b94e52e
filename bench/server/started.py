"""The demo server in a process of its own."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import threading
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager

ADDRESS = re.compile(r"http://127\.0\.0\.1:(\d+)")


@contextmanager
def started(words: Sequence[str], more: Mapping[str, str] | None = None) -> Iterator[int]:
    """Run `cbatch serve` on a free port with the environment variables `more`. Yields the port."""
    process = subprocess.Popen(
        [sys.executable, "-m", "cbatch.cli.main", "serve", *words, "--port", "0"],
        env=os.environ | dict(more or {}),
        stderr=subprocess.STDOUT,
        stdout=subprocess.PIPE,
        text=True,
    )
    assert process.stdout is not None
    try:
        lines = []
        for line in process.stdout:
            lines.append(line)
            address = ADDRESS.search(line)
            if address:
                # The server would block if its further output were not read.
                threading.Thread(target=deque, args=(process.stdout, 0), daemon=True).start()
                yield int(address[1])
                return
        raise RuntimeError("the server did not start:\n" + "".join(lines))
    finally:
        process.terminate()
        process.wait()
