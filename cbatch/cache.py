"""Where what was measured or made once on a machine is kept."""

from __future__ import annotations

import os
from pathlib import Path


def cache_folder(name: str) -> Path:
    """`cbatch/<name>` in the user's cache folder (XDG_CACHE_HOME, or ~/.cache). Not created."""
    base = os.environ.get("XDG_CACHE_HOME")
    return (Path(base) if base else Path.home() / ".cache") / "cbatch" / name
