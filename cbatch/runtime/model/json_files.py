"""JSON files of a checkpoint, and what is raised for files that cannot be served."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any


class ModelError(ValueError):
    """A checkpoint that cannot be served; the message names the file, the field and the remedy."""


class UnsupportedModelError(ModelError):
    """For what is whole, but nothing that our own pass computes."""


def require_file(file: Path) -> None:
    """Raise ModelError for a pipe, a device or a folder: to read one may never end."""
    if file.exists() and not file.is_file():
        raise ModelError(f"{file}: is no regular file; give the model's own")


def read_json_object(file: Path) -> dict[str, Any]:
    """Raise ModelError for a file that holds no JSON object."""
    require_file(file)
    try:
        values = json.loads(file.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as err:
        raise ModelError(f"{file}: cannot be read as JSON ({err})") from None
    if not isinstance(values, dict):
        raise ModelError(f"{file}: must hold a JSON object, got {type(values).__name__}")
    return values
