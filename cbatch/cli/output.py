"""What commands leave for programs: JSON at their end, files, and an exit status."""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path
from typing import Any, TypeGuard

from cbatch.core.request.errors import FieldError

INTERRUPTED = 130  # exit status, as shells report SIGINT
STDOUT = Path("-")


def add_json_option(group: argparse._ActionsContainer, what: str = "the figures") -> None:
    text = f"write {what}; -: end with a line of JSON on a terminal, as a pipe is given it"
    group.add_argument("--json", type=Path, metavar="FILE", help=text)


def print_figures(document: Any, place: Path | None) -> None:
    """Write `document` to `place`, the value of `--json`, if it is a file, and print its line."""
    if names_file(place):
        place.write_text(json.dumps(document) + "\n", encoding="utf-8")
    print_line(document, place)


def print_line(document: Any, place: Path | None = None) -> None:
    """Print `document` as a line of JSON, the last of a command. On a terminal, where a table has
    said the same, only if `place` asks for it."""
    if place == STDOUT or not sys.stdout.isatty():
        print(json.dumps(document), flush=True)


def names_file(place: Path | None) -> TypeGuard[Path]:
    return place is not None and place != STDOUT


def require_place(option: str, path: Path | None) -> None:
    """Raises `FieldError` if no file can be there: before the work, not after it."""
    if path is not None and (path.is_dir() or not path.parent.is_dir()):
        raise FieldError(option, f"{path} cannot be a file", "name one in a folder that exists")
