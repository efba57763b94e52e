"""What all workers do: read calls of one object's methods, a JSON line each, and answer them."""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Callable
from typing import Any


def serve(start: Callable[..., Any]) -> None:
    """The first line has what `start` is called with; it is answered with the seconds that took.
    Every further line is a method and its arguments. Ends with standard input. What libraries print
    goes to standard error."""
    answers = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)
    answers.write("{}\n")  # all is imported
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
