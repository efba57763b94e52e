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

_ADDRESS = re.compile(r"http://127\.0\.0\.1:(\d+)")


@contextmanager
def started(options: Sequence[str], env: Mapping[str, str] | None = None) -> Iterator[int]:
    """Run `cbatch serve` on a free port with the environment variables `env`. Yields the port."""
    process = subprocess.Popen(
        [sys.executable, "-m", "cbatch.cli.main", "serve", *options, "--port", "0"],
        env=os.environ | dict(env or {}),
        stderr=subprocess.STDOUT,
        stdout=subprocess.PIPE,
        text=True,
    )
    assert process.stdout is not None
    try:
        lines = []
        for line in process.stdout:
            lines.append(line)
            address = _ADDRESS.search(line)
            if address:
                # The server would block if its further output were not read.
                threading.Thread(target=deque, args=(process.stdout, 0), daemon=True).start()
                yield int(address[1])
                return
        raise RuntimeError("the server did not start:\n" + "".join(lines))
    finally:
        process.terminate()
        process.wait()
