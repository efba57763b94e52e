"""Tables of a run's rows, with the ratios of what is compared."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

from bench.gpu.cells import Row

_MAX_KERNELS = 12
# By kind of row: keys, figure, and the labels of the row that a ratio is relative to, its name.
_RATIOS = (
    ("steps", ("model", "sampling", "batch", "lookahead"), "step_ms", "vllm", "over_vllm"),
    ("steps", ("model", "sampling", "batch"), "tokens_per_s", "off", "over_off"),
    ("streams", ("model", "numerics", "batch"), "tokens_per_s", "off", "over_off"),
    ("kernels", ("kernel", "workload"), "median_us", "cbatch", "over_ours"),
)
_COLUMNS = {  # by kind of row: the columns of its table
    "steps": (
        "model", "sampling", "batch", "lookahead", "implementation", "step_ms", "over_limit",
        "over_vllm", "tokens_per_s", "over_off",
    ),
    "start": ("model", "implementation", "seconds", "note", "status"),
    "streams": (
        "model", "drafter", "numerics", "lookahead", "batch", "tokens_per_s", "over_off",
        "equal_texts",
    ),
    "host time": (
        "lookahead", "requests", "host_us", "plan_us", "submit_us", "wait_us", "commit_us",
        "tokens", "us_per_token", "graphs",
    ),
    "tests by outcome": ("outcome", "tests"),
    "kernels of a step": (
        "model", "lookahead", "sampling", "batch", "implementation", "us", "calls", "kernel",
    ),
    "ceilings": ("ceiling", "per_s", "unit", "best"),
    "kernels": (
        "kernel", "workload", "implementation", "median_us", "limit_us", "fraction_of_limit",
        "tflop_per_s", "over_ours",
    ),
    "not measured": ("section", "status", "cells"),
}  # fmt: skip


def tables(rows: Sequence[Row]) -> dict[str, list[Row]]:
    """Return the rows of each table by its title, the most important first. Adds ratios to
    `rows`."""
    kinds: dict[str, list[Row]] = {}
    for row in rows:
        if row["status"] == "ok" or row.get("what") == "start":
            kinds.setdefault(row.get("what", row["section"]), []).append(row)
    for kind, keys, figure, base, name in _RATIOS:
        _add_ratios(kinds.get(kind, ()), keys, figure, base, name)
    kinds["kernels of a step"] = [
        {**row, **kernel}
        for row in kinds.get("kernels of a step", ())
        for kernel in row["kernels"][:_MAX_KERNELS]
    ]
    tests = [r for r in rows if r["section"] == "correctness" and "tests" not in r]
    outcomes = Counter(row["status"].partition(":")[0] for row in tests)
    kinds["tests by outcome"] = [{"outcome": state, "tests": n} for state, n in outcomes.items()]
    failed = [row for row in tests if row["status"].startswith(("failed", "error"))]
    kinds["tests by outcome"] += [{"outcome": r["status"], "tests": r["cell"]} for r in failed]
    missing = Counter(
        (row["section"], row["status"][:120])
        for row in rows
        if row["status"] != "ok" and row["section"] != "correctness"
    )
    kinds["not measured"] = [
        {"section": name, "status": state, "cells": n} for (name, state), n in missing.items()
    ]
    return {
        title: [{name: row.get(name) for name in columns} for row in kinds[title]]
        for title, columns in _COLUMNS.items()
        if kinds.get(title)
    }


def _add_ratios(
    rows: Sequence[Row], keys: Sequence[str], figure: str, base: str, name: str
) -> None:
    """Add to each row its figure divided by that of the row with equal keys which has the label
    `base`."""
    bases = {
        tuple(row.get(key) for key in keys): row.get(figure)
        for row in rows
        if base in (row.get("lookahead"), row.get("implementation"))
        and (base == "vllm" or row.get("implementation") == "cbatch")
    }
    for row in rows:
        value, other = row.get(figure), bases.get(tuple(row.get(key) for key in keys))
        row[name] = None if value is None or not other else value / other
