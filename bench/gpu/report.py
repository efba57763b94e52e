"""The results of a run: one JSON document of all rows, and tables of text."""

from __future__ import annotations

import json
import os
from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from bench.gpu.cells import Row
from bench.gpu.profiled import STEP_KERNELS, STEPS

RESULTS, TABLE = "results.json", "table.txt"
CBATCH, VLLM = "cbatch", "vllm"
_MOST_KERNELS = 12
_WIDTH = 56  # largest width of a column, in characters
_COLUMNS = {
    "start": (
        "model", "drafter", "numerics", "lookahead", "implementation", "seconds", "device_mib",
        "note", "status",
    ),
    "ceilings": ("ceiling", "per_s", "unit", "best", "slowed_by"),
    "kernels": (
        "kernel", "workload", "implementation", "median_us", "limit_us", "fraction_of_limit",
        "tflop_per_s", "over_ours",
    ),
}  # fmt: skip


def write(out: Path, about: Row, rows: Sequence[Row]) -> None:
    """Write both files. Each is replaced in one operation, so a reader never sees an incomplete
    file."""
    document = json.dumps({"about": about, "rows": rows}, indent=0, default=str)
    for name, text in ((RESULTS, document), (TABLE, tables(about, rows))):
        part = out / f".{name}"
        part.write_text(text + "\n", encoding="utf-8")
        os.replace(part, out / name)


def tables(about: Row, rows: Sequence[Row]) -> str:
    """Return the tables as text, the most important first."""
    device = about.get("device") or "no GPU: a dry run, every figure is null"
    named = {"commit": about.get("commit"), **about.get("versions", {})}
    versions = [f"{name} {named[name]}" for name in ("torch", "triton", "commit") if name in named]
    measured = [r for r in rows if r["status"] == "ok"]
    parts = [
        ", ".join((device, *versions, str(about.get("date")))),
        _table("steps of an engine", _steps(measured)),
        _table("starts", [r for r in rows if r.get("what") == "start"], _COLUMNS["start"]),
        _table("streams of trained models", _streams(measured)),
        _table("correctness: tests by outcome", _outcomes(rows)),
        *(
            _table(f"kernels of a step: {setting}", lines)
            for setting, lines in _step_kernels(measured)
        ),
        *(
            _table(name, compared, _COLUMNS[name])
            for name in ("ceilings", "kernels")
            if (compared := _compared([r for r in measured if r["section"] == name]))
        ),
        _table("not measured", _missing(rows)),
    ]
    return "\n\n".join(part for part in parts if part)


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


def _streams(rows: Sequence[Row]) -> list[Row]:
    streams = [r for r in rows if r.get("what") == "streams"]
    names = "model", "drafter", "numerics", "lookahead", "batch", "tokens_per_s", "equal_texts"

    def subject(row: Row) -> tuple[str, str, int]:
        return row["model"], row["numerics"], row["batch"]

    plain = {subject(r): r["tokens_per_s"] for r in streams if r["lookahead"] == "off"}
    return [
        {name: r[name] for name in names}
        | {"/off": _ratio(r["tokens_per_s"], plain.get(subject(r)))}
        for r in streams
    ]


def _outcomes(rows: Sequence[Row]) -> list[Row]:
    """Return a count for each outcome, and a line for each test that failed."""
    tests = [r for r in rows if r["section"] == "correctness"]
    states = Counter(r["status"].partition(":")[0] for r in tests)
    outcomes: list[Row] = [{"outcome": state, "tests": n} for state, n in states.items()]
    bad = [r for r in tests if r["status"].startswith(("failed", "not finished"))]
    return outcomes + [{"outcome": r["status"], "tests": r.get("test")} for r in bad]


def _step_kernels(rows: Sequence[Row]) -> Iterator[tuple[str, list[Row]]]:
    """Yield a table for each setting: kernels of cbatch and vLLM in columns, longest first, after
    a line with the sums."""
    settings: dict[str, list[Row]] = {}
    for r in (r for r in rows if r.get("what") == STEP_KERNELS):
        setting = " ".join(str(r[name]) for name in ("model", "lookahead", "sampling", "batch"))
        lines = settings.setdefault(setting, [{} for _ in range(_MOST_KERNELS + 1)])
        us, who = f"{r['implementation']} us", r["implementation"]
        lines[0] |= {us: sum(k["us"] for k in r["kernels"]), who: "all"}
        for line, k in zip(lines[1:], r["kernels"], strict=False):
            line |= {us: k["us"], who: f"{k['calls']:g} x {k['kernel']}"}
    yield from ((setting, [line for line in lines if line]) for setting, lines in settings.items())


def _compared(rows: list[Row]) -> list[Row]:
    """Add to each row its time divided by cbatch's time for the same workload."""
    names = "kernel", "workload"
    own_us = {
        tuple(r[n] for n in names): r["median_us"]
        for r in rows
        if r.get("implementation") == CBATCH
    }
    same = [own_us.get(tuple(r.get(n) for n in names)) for r in rows]
    pairs = zip(rows, same, strict=True)
    return [r | {"over_ours": _ratio(r.get("median_us"), us)} for r, us in pairs]


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
