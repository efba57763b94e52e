"""Output that programs read: the JSON line at the end of a command, files, exit statuses."""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path
from typing import Any, TypeGuard

from cbatch.core.request.errors import FieldError

FAILED = 2  # exit status for bad input, the same as argparse's
INTERRUPTED = 130  # exit status after Ctrl-C, as shells report SIGINT
STDOUT = Path("-")  # value of `--json` for standard output


def add_json_option(group: argparse._ActionsContainer, what: str = "the figures") -> None:
    text = f"write {what} to FILE; -: print one line of JSON, as without a terminal"
    group.add_argument("--json", type=Path, metavar="FILE", help=text)


def print_figures(document: Any, place: Path | None) -> None:
    if is_file_path(place):
        place.write_text(json.dumps(document) + "\n", encoding="utf-8")
    print_line(document, place)


def print_line(document: Any, place: Path | None = None) -> None:
    """Print `document` as one line of JSON, the last line of a command. On a terminal, which has
    shown the figures in a table, it is printed only if `place` is `STDOUT`."""
    if place == STDOUT or not sys.stdout.isatty():
        print(json.dumps(document), flush=True)


def is_file_path(place: Path | None) -> TypeGuard[Path]:
    return place is not None and place != STDOUT


def require_place(option: str, path: Path | None) -> None:
    """Check that `path` can be a file, so that a command fails before its work, not after it.
    Raises `FieldError` for a directory, or a folder that does not exist."""
    if path is not None and (path.is_dir() or not path.parent.is_dir()):
        raise FieldError(option, f"{path} cannot be a file", "name one in a folder that exists")
