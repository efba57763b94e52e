"""Output of every benchmark: a table, and one JSON line at the end unless it goes to a terminal."""

from __future__ import annotations

import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

from rich.console import Console
from rich.table import Table

from cbatch.cli.console import TextConsole
from cbatch.cli.output import print_line
from cbatch.system.machine import describe_machine, describe_versions

# 97.5 % points of Student's t for 1 to 20 degrees of freedom. Beyond 20 the last is up to 6 % wide.
_STUDENT = (
    *(12.706, 4.303, 3.182, 2.776, 2.571, 2.447, 2.365, 2.306, 2.262, 2.228),
    *(2.201, 2.179, 2.160, 2.145, 2.131, 2.120, 2.110, 2.101, 2.093, 2.086),
)


def print_report(
    title: str,
    rows: Sequence[Mapping[str, Any]],
    *,
    notes: Sequence[str] = (),
    extra: Mapping[str, Any] | None = None,
) -> None:
    """Print `rows` as a table and `{"results": rows, "machine", "versions", **extra}` as JSON.

    All rows have the keys of the first. `notes` are lines below the table.
    """
    print_document(print_table(title, rows, notes=notes), rows, extra)


def print_document(
    console: Console, rows: Sequence[Mapping[str, Any]], extra: Mapping[str, Any] | None = None
) -> None:
    """Print only the JSON document of `print_report`, after tables that the caller has printed."""
    machine = describe_machine()
    load, cores = machine["load_1min"], machine["cores"]
    if load is not None and cores and load > cores:
        console.print(f"machine busy (load {load} on {cores} cores): times are upper bounds")
    document = {
        "results": [dict(row) for row in rows],
        "machine": machine,
        "versions": describe_versions(),
        **(extra or {}),
    }
    print_line(document)


def print_table(
    title: str, rows: Sequence[Mapping[str, Any]], *, notes: Sequence[str] = ()
) -> Console:
    """Print `rows` as a table with `notes` below it, without columns of nothing but None. Return
    the console."""
    table = Table(title=title)
    names = [name for name in rows[0] if any(row[name] is not None for row in rows)]
    for name in names:
        table.add_column(name, justify="right")
    for row in rows:
        table.add_row(*(_cell(row[name]) for name in names))
    console = TextConsole()
    console.print(table)
    for note in notes:
        console.print(note)
    return console


def rounded(value: float | None) -> float | None:
    return None if value is None else round(value, 3)


def student95(degrees: int) -> float:
    """Return half the width of a 95 % interval, in standard errors."""
    return _STUDENT[min(degrees, len(_STUDENT)) - 1]


def _cell(value: Any) -> str:
    if value is None:
        return "-"
    if isinstance(value, bool):
        return "yes" if value else "no"
    return f"{value:.4g}" if isinstance(value, float) else str(value)


class Failures:
    """Systems that failed: `words` has the error of each by its name."""

    def __init__(self) -> None:
        self.words: dict[str, str] = {}

    def __contains__(self, name: str) -> bool:
        return name in self.words

    @contextmanager
    def caught(self, name: str) -> Iterator[None]:
        """Catch an error of the system `name`, and print it at once."""
        try:
            yield
        except Exception as error:
            self.words[name] = str(error).strip() or type(error).__name__
            print(f"{name} failed: {self.words[name]}", file=sys.stderr, flush=True)

    def end(self) -> None:
        """Exit with status 1 if a system failed. Call this after the report."""
        if self.words:
            raise SystemExit(f"failed, and left out from there on: {', '.join(self.words)}")
