"""The loop of all workers: read calls of one object's methods, a JSON line each, and answer."""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Callable
from typing import Any


def serve(start: Callable[..., Any]) -> None:
    """Serve calls on standard input until it ends. The first line has the arguments of `start`, and
    is answered with the seconds it took. Every further line has a method and its arguments. Output
    of libraries goes to standard error."""
    answers = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)
    answers.write("{}\n")  # imports are done
    started_s = time.perf_counter()
    system = None
    for line in sys.stdin:
        call = json.loads(line)
        if system is None:
            started_s = time.perf_counter()
            system = start(**call)
            value = time.perf_counter() - started_s
        else:
            value = getattr(system, call["method"])(*call["arguments"])
        answers.write(json.dumps({"value": value}) + "\n")
