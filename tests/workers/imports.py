"""A task that runs another task. This module imports nothing."""

from __future__ import annotations

import pickle
import sys
from typing import Any


def imports_of(task: bytes, state: Any) -> list[str]:
    """Return the modules that unpickling and running a task import."""
    before = set(sys.modules)
    pickle.loads(task)(state)
    return sorted(set(sys.modules) - before)
