"""The folder for results that are measured or built once per machine."""

from __future__ import annotations

import hashlib
import logging
import os
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TypeVar

import msgspec

Result = TypeVar("Result")

_logger = logging.getLogger("cbatch")


def cache_folder(name: str) -> Path | None:
    """Return `cbatch/<name>` in the user's cache folder (XDG_CACHE_HOME, or ~/.cache). The folder
    may not exist yet. Return None for a user without a home."""
    base = os.environ.get("XDG_CACHE_HOME")
    try:
        return (Path(base) if base else Path.home() / ".cache") / "cbatch" / name
    except RuntimeError:  # no HOME, and no such user in the password file
        return None


def cached_result(
    name: str,
    key: Mapping[str, object],
    kind: type[Result],
    measure: Callable[[], Result],
    folder: Path | None = None,
) -> Result:
    """Return the result cached in the folder `name` for `key` (all that it depends on), or measure
    and cache one. A file that cannot be read or written is logged, and is no error."""
    folder = folder or cache_folder(name)
    if folder is None:
        _logger.warning("no cache folder (set HOME or XDG_CACHE_HOME): measuring %s", name)
        return measure()
    digest = hashlib.sha256(msgspec.json.encode(dict(sorted(key.items())))).hexdigest()[:24]
    path = folder / f"{digest}.json"
    try:
        return msgspec.json.decode(path.read_bytes(), type=kind)
    except FileNotFoundError:
        _logger.info("measuring %s, to cache in %s", name, path)
    except (OSError, msgspec.MsgspecError, ValueError) as error:
        _logger.warning("%s cannot be used (%s): measuring again", path, error)
    result = measure()
    try:
        folder.mkdir(parents=True, exist_ok=True)
        part = path.with_suffix(f".{os.getpid()}.part")
        part.write_bytes(msgspec.json.format(msgspec.json.encode(result)))
        part.replace(path)
    except OSError as error:
        _logger.warning("%s could not be cached in %s: %s", name, path, error)
    return result
