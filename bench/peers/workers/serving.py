"""The loop of all workers: read calls of one object's methods, a JSON line each, and answer."""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Callable
from typing import Any


def serve(construct: Callable[..., Any]) -> None:
    """Serve calls on standard input until it ends. The first line has the arguments of `construct`,
    every further line a method and its arguments. Answers have the value and the seconds it took.
    Output of libraries goes to standard error."""
    answers = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)
    answers.write("{}\n")  # imports are done
    system = None
    for line in sys.stdin:
        call, started_s = json.loads(line), time.perf_counter()
        if system is None:
            system, value = construct(**call), None
        else:
            value = getattr(system, call["method"])(*call["arguments"])
        seconds = time.perf_counter() - started_s
        answers.write(json.dumps({"value": value, "seconds": seconds}) + "\n")
