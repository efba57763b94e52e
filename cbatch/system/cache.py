"""The folder for results that are measured or built once per machine."""

from __future__ import annotations

import os
from pathlib import Path


def cache_folder(name: str) -> Path | None:
    """Return `cbatch/<name>` in the user's cache folder (XDG_CACHE_HOME, or ~/.cache). The folder
    may not exist yet. Return None for a user without a home."""
    base = os.environ.get("XDG_CACHE_HOME")
    try:
        return (Path(base) if base else Path.home() / ".cache") / "cbatch" / name
    except RuntimeError:  # no HOME, and no such user in the password file
        return None
