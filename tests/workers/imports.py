"""A task that runs another; imports nothing itself."""

from __future__ import annotations

import pickle
import sys
from typing import Any


def imports_of(task: bytes, state: Any) -> list[str]:
    """Return the modules that a pickled task imports, with all it needs to be read."""
    before = set(sys.modules)
    pickle.loads(task)(state)
    return sorted(set(sys.modules) - before)
