"""What every benchmark prints: a table for people, then one JSON line for programs, last."""

from __future__ import annotations

import json
import os
import platform
import sys
from collections.abc import Mapping, Sequence
from importlib.metadata import PackageNotFoundError, version
from typing import Any

from rich.console import Console
from rich.table import Table

_PACKAGES = ("cbatch", "llama-cpp-python", "numpy", "msgspec", "torch", "transformers", "triton")


def describe_machine() -> dict[str, Any]:
    """Processor, cores this process may use, load, memory, system."""
    return {
        "cpu": _cpu_model(),
        "cores": len(os.sched_getaffinity(0))
        if hasattr(os, "sched_getaffinity")
        else os.cpu_count(),
        "load_1min": round(os.getloadavg()[0], 2) if hasattr(os, "getloadavg") else None,
        "memory_gib": _memory_gib(),
        "system": platform.platform(terse=True),
    }


def describe_versions() -> dict[str, str]:
    """Python and those of our packages that are installed; nothing is imported for it."""
    found = {"python": platform.python_version()}
    for package in _PACKAGES:
        try:
            found[package] = version(package)
        except PackageNotFoundError:
            continue
    return found


def _cpu_model() -> str:
    try:
        with open("/proc/cpuinfo", encoding="utf-8") as file:
            for line in file:
                if line.startswith("model name"):
                    return line.partition(":")[2].strip()
    except OSError:
        pass
    return platform.processor() or platform.machine()


def _memory_gib() -> float | None:
    try:
        total_bytes = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    except (ValueError, OSError, AttributeError):
        return None
    return round(total_bytes / 2**30, 1)


def print_report(
    title: str,
    rows: Sequence[Mapping[str, Any]],
    *,
    notes: Sequence[str] = (),
    extra: Mapping[str, Any] | None = None,
) -> None:
    """Print `rows` as a table and `{"results": rows, "machine", "versions", **extra}` as JSON.

    All rows have the keys of the first. `notes` are lines under the table.
    """
    console = print_table(title, rows, notes=notes)
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
    print(json.dumps(document), flush=True)


def print_table(
    title: str, rows: Sequence[Mapping[str, Any]], *, notes: Sequence[str] = ()
) -> Console:
    """Print `rows` as a table, `notes` under it; returns where it went."""
    table = Table(title=title)
    for name in rows[0]:
        table.add_column(name, justify="right")
    for row in rows:
        table.add_row(*(_cell(value) for value in row.values()))
    width = None if sys.stdout.isatty() else 160
    console = Console(width=width, highlight=False)
    console.print(table)
    for note in notes:
        console.print(note, markup=False)
    return console


def rounded(value: float | None) -> float | None:
    """To three decimals, as figures are reported."""
    return None if value is None else round(value, 3)


def _cell(value: Any) -> str:
    if value is None:
        return "-"
    if isinstance(value, bool):
        return "yes" if value else "no"
    return f"{value:.4g}" if isinstance(value, float) else str(value)
