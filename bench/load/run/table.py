"""CSV file of reports, with a row per load."""

from __future__ import annotations

import csv
from collections.abc import Sequence
from pathlib import Path

from bench.load.run.report import Measured, ServerCounters
from bench.load.run.sweep import Point
from sim.report.report import Spread

Cell = float | int | str | None


def write_csv(path: Path, points: Sequence[Point]) -> None:
    """Write the CSV file. Columns have the names of the JSON report; a spread has a column per
    figure, such as `ttft_s.p50`. Missing values are empty."""
    rows = [row_of(point) for point in points]
    with path.open("w", newline="", encoding="utf-8") as file:
        table = csv.DictWriter(file, fieldnames=list(dict.fromkeys(n for r in rows for n in r)))
        table.writeheader()
        table.writerows(rows)


def row_of(point: Point) -> dict[str, Cell]:
    report = point.report
    row: dict[str, Cell] = dict(point.load.words())
    row |= _cells(report)
    row["failed"] = sum(report.errors.values())
    row["goodput_share"] = None if report.goodput is None else report.goodput.share
    row |= {f"met.{name}": share for name, share in report.attainment.items()}
    row["client_cpu_share"] = report.client.cpu_share
    if report.server is not None:
        row |= {f"server.{name}": value for name, value in _cells(report.server).items()}
    return row


def _cells(report: Measured | ServerCounters) -> dict[str, Cell]:
    """Return the fields that are numbers or spreads."""
    row: dict[str, Cell] = {}
    for name in report.__struct_fields__:
        value = getattr(report, name)
        if isinstance(value, Spread):
            for cut in ("mean", "p50", "p90", "p99", "max"):
                row[f"{name}.{cut}"] = getattr(value, cut)
        elif isinstance(value, int | float) and not isinstance(value, bool):
            row[name] = value
    return row
