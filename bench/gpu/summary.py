"""Tables for people, plots, and one JSON document of everything."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from bench.gpu.cells import Row
from bench.gpu.grid import ATTENTION
from bench.gpu.targets import verdicts
from bench.report import print_table

RESULTS = "results.json"
Sections = Mapping[str, Mapping[str, Row]]  # rows of each section, by cell

_COLUMNS = {
    "limits": ("ceiling", "per_s", "unit", "samples", "status"),
    "correctness": ("kernel", "case", "what", "found", "allowed", "status"),
    "kernels": (
        "kernel", "workload", "implementation", "median_us", "low_us", "high_us", "limit_us",
        "fraction_of_limit", "tflop_per_s", "method", "status",
    ),
    "sweep": ("heads", "page_tokens", "tile", "split_tokens", "median_us", "status"),
    "engine": (
        "model", "batch", "lookahead", "implementation", "tokens_per_s", "tokens_a_row", "step_ms",
        "limit_ms", "over_limit", "status",
    ),
}  # fmt: skip


def print_sections(sections: Sections, about: Row) -> None:
    for name, rows in sections.items():
        shown = [{c: _shown(row.get(c)) for c in _COLUMNS[name]} for row in rows.values()]
        if shown:
            print_table(f"{name}: {where(about)}", shown)
    print_table("what must hold", [v._asdict() for v in verdicts_of(sections)])


def where(about: Row) -> str:
    """One line that names device and versions."""
    versions = about["versions"]
    device = about["device"] or f"no GPU, {about['world']}"
    names = ("torch", "triton")
    return ", ".join((device, *(f"{n} {versions[n]}" for n in names if n in versions)))


def verdicts_of(sections: Sections) -> list[Any]:
    return verdicts(*(sections.get(name, {}) for name in ("correctness", "kernels", "engine")))


def _shown(value: Any) -> Any:
    """A figure of each workload, or the fields of a tile, in one cell of a table."""
    if not isinstance(value, Mapping):
        return value
    return ", ".join(
        f"{key} {'unmeasured' if v is None else f'{v:.4g}'}" for key, v in value.items()
    )


def document(sections: Sections, about: Row) -> Row:
    return {
        "about": about,
        "targets": [verdict._asdict() for verdict in verdicts_of(sections)],
        **{name: list(rows.values()) for name, rows in sections.items()},
    }


def write_document(out: Path, found: Row) -> None:
    (out / RESULTS).write_text(json.dumps(found, indent=1) + "\n")


def save_plots(out: Path, sections: Sections) -> list[Path]:
    """Of whatever was measured: attention as fractions of the limit, the engine's speed. Without
    matplotlib there are none."""
    try:
        from bench.plot import save_bars, save_lines
    except ImportError:
        return []
    made = []
    fractions = _fractions(sections.get("kernels", {}))
    if fractions:
        path = out / "attention.png"
        save_bars(path, fractions, y_label="fraction of the limit", highlight="cbatch")
        made.append(path)
    speeds = _speeds(sections.get("engine", {}))
    if speeds:
        path = out / "engine.png"
        save_lines(path, speeds, x_label="batch", y_label="tokens/s", highlight="goodput")
        made.append(path)
    return made


def _fractions(kernels: Mapping[str, Row]) -> dict[str, dict[str, float]]:
    """By implementation, then workload."""
    found: dict[str, dict[str, float]] = {}
    for row in kernels.values():
        value = row.get("fraction_of_limit")
        if row.get("kernel") == "attention" and value is not None:
            found.setdefault(row["implementation"], {})[row["workload"]] = value
    order = {name: at for at, name in enumerate(ATTENTION)}
    return {
        name: dict(sorted(values.items(), key=lambda pair: order.get(pair[0], len(order))))
        for name, values in found.items()
    }


def _speeds(engine: Mapping[str, Row]) -> dict[str, dict[str, list[tuple[float, float]]]]:
    """By model, then lookahead or peer: (batch, tokens/s)."""
    found: dict[str, dict[str, list[tuple[float, float]]]] = {}
    for row in engine.values():
        if row.get("tokens_per_s") is None:
            continue
        ours = row["implementation"] == "cbatch"
        name = row["lookahead"] if ours else row["implementation"]
        points = found.setdefault(row["model"], {}).setdefault(name, [])
        points.append((row["batch"], row["tokens_per_s"]))
    return {m: {n: sorted(points) for n, points in lines.items()} for m, lines in found.items()}
