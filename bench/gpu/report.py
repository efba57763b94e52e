"""Tables of text from the rows of a run."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import Any

from bench.gpu.cells import Row
from bench.gpu.timing import STEP_KERNELS, STEPS

TABLE = "table.txt"
CBATCH, VLLM = "cbatch", "vllm"
_MAX_KERNELS = 12
_WIDTH = 56  # largest width of a column, in characters
_COLUMNS = {
    "start": ("model", "drafter", "lookahead", "implementation", "seconds", "note", "status"),
    "ceilings": ("ceiling", "per_s", "unit", "best"),
    "kernels": (
        "kernel", "workload", "implementation", "median_us", "limit_us", "fraction_of_limit",
        "tflop_per_s", "over_ours",
    ),
    "step": (
        "model", "lookahead", "sampling", "batch", "implementation", "us", "calls", "kernel",
    ),
    "streams": (
        "model", "drafter", "numerics", "lookahead", "batch", "tokens_per_s", "/off", "equal_texts",
    ),
}  # fmt: skip


def tables(about: Row, rows: Sequence[Row]) -> str:
    """Return the tables as text, the most important first."""
    device = about.get("device") or "no GPU: a dry run, nothing is timed"
    named = {"commit": about.get("commit"), **about.get("versions", {})}
    versions = [f"{name} {named[name]}" for name in ("torch", "triton", "commit") if name in named]
    ok = [r for r in rows if r["status"] == "ok"]
    kernels = [r for r in ok if r["section"] == "kernels"]
    streams = [r for r in ok if r.get("what") == "streams"]
    add_ratios(
        kernels, ("kernel", "workload"), "median_us", ("implementation", CBATCH), "over_ours"
    )
    add_ratios(
        streams, ("model", "numerics", "batch"), "tokens_per_s", ("lookahead", "off"), "/off"
    )
    step_kernels = [
        {**r, **kernel}
        for r in ok
        if r.get("what") == STEP_KERNELS
        for kernel in r["kernels"][:_MAX_KERNELS]
    ]
    parts = [
        ", ".join((device, *versions, str(about.get("date")))),
        _table("steps of an engine", _steps(ok)),
        _table("starts", [r for r in rows if r.get("what") == "start"], _COLUMNS["start"]),
        _table("streams of trained models", streams, _COLUMNS["streams"]),
        _table("correctness: tests by outcome", _outcomes(rows)),
        _table("kernels of a step", step_kernels, _COLUMNS["step"]),
        _table("ceilings", [r for r in ok if r["section"] == "ceilings"], _COLUMNS["ceilings"]),
        _table("kernels", kernels, _COLUMNS["kernels"]),
        _table("not measured", _missing(rows)),
    ]
    return "\n\n".join(part for part in parts if part)


def add_ratios(
    rows: Sequence[Row], keys: Sequence[str], figure: str, base: tuple[str, str], name: str
) -> None:
    """Add to each row its figure divided by that of the row with equal keys and this label."""
    bases = {
        tuple(r.get(key) for key in keys): r.get(figure) for r in rows if r.get(base[0]) == base[1]
    }
    for r in rows:
        r[name] = _ratio(r.get(figure), bases.get(tuple(r.get(key) for key in keys)))


def _steps(rows: Sequence[Row]) -> list[Row]:
    """Return a line for each model, sampling and batch: cbatch without drafts, vLLM, with
    drafts."""
    lines: dict[tuple[Any, ...], Row] = {}
    for r in (r for r in rows if r.get("what") == STEPS):
        where = {"model": r["model"], "sampling": r["sampling"], "rows": r["batch"]}
        line = lines.setdefault(tuple(where.values()), where)
        if r["implementation"] == VLLM:
            line["vllm ms"] = r["step_ms"]
        elif r["lookahead"] == "off":
            line |= {"ms": r["step_ms"], "over limit": r.get("over_limit")}
            line["off tok/s"] = r["tokens_per_s"]
        else:
            line[f"{r['lookahead']} tok/s"] = r["tokens_per_s"]
    for line in lines.values():
        line["ours/vllm"] = _ratio(line.get("ms"), line.get("vllm ms"))
        for lookahead in ("fixed:4", "adaptive"):
            speed = line.get(f"{lookahead} tok/s")
            line[f"{lookahead}/off"] = _ratio(speed, line.get("off tok/s"))
    return list(lines.values())


def _outcomes(rows: Sequence[Row]) -> list[Row]:
    """Return a count for each outcome, and a line for each test that failed."""
    tests = [r for r in rows if r["section"] == "correctness" and "tests" not in r]
    states = Counter(r["status"].partition(":")[0] for r in tests)
    outcomes: list[Row] = [{"outcome": state, "tests": n} for state, n in states.items()]
    bad = [r for r in tests if r["status"].startswith(("failed", "error"))]
    return outcomes + [{"outcome": r["status"], "tests": r["cell"]} for r in bad]


def _missing(rows: Sequence[Row]) -> list[Row]:
    """Return the reasons for missing cells, with their number, by section."""
    states = Counter(
        (r["section"], r["status"][:120])
        for r in rows
        if r["status"] != "ok" and r["section"] != "correctness"
    )
    return [{"section": name, "status": state, "cells": n} for (name, state), n in states.items()]


def _ratio(above: float | None, below: float | None) -> float | None:
    return None if above is None or not below else above / below


def _table(title: str, rows: Sequence[Row], columns: Sequence[str] = ()) -> str:
    """Return aligned columns, by default those of any row; '' without rows."""
    if not rows:
        return ""
    names = columns or list(dict.fromkeys(name for row in rows for name in row))
    lines = [list(names)] + [[_text(row.get(name)) for name in names] for row in rows]
    widths = [max(len(line[at]) for line in lines) for at in range(len(names))]
    text = ("  ".join(c.ljust(w) for c, w in zip(line, widths, strict=True)) for line in lines)
    return "\n".join((title, *(line.rstrip() for line in text)))


def _text(value: Any) -> str:
    if value is None:
        return "-"
    return f"{value:.4g}" if isinstance(value, float) else str(value)[:_WIDTH]
