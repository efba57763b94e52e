"""Where what was measured or made once on a machine is kept."""

from __future__ import annotations

import os
from pathlib import Path


def cache_folder(name: str) -> Path | None:
    """`cbatch/<name>` in the user's cache folder (XDG_CACHE_HOME, or ~/.cache), which nobody has
    created or checked; None for a user without a home."""
    base = os.environ.get("XDG_CACHE_HOME")
    try:
        return (Path(base) if base else Path.home() / ".cache") / "cbatch" / name
    except RuntimeError:  # no HOME, and no such user in the password file
        return None
