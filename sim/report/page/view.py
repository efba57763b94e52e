"""The data of the page: a run's report, and samples of its requests and its timeline."""

from __future__ import annotations

import math
from array import array
from importlib import resources
from pathlib import Path
from typing import Any

import msgspec
import numpy as np

from sim.report.report import Record, Report
from sim.report.timeline import Series

QUANTILES = 201  # values of each quantile curve
MAX_POINTS = 2_000  # requests drawn one by one

_PLACE = "/*data*/"  # placeholder in page.js


class Points(msgspec.Struct, frozen=True, kw_only=True):
    """A sample of requests, evenly spaced if there are more than `MAX_POINTS`; columns of equal
    length, times in seconds."""

    num_requests: int  # finished
    arrival_s: list[float]
    prompt_tokens: list[int]
    output_tokens: list[int]
    queue_s: list[float]
    ttft_s: list[float]
    tpot_s: list[float | None]
    e2e_s: list[float]


_COLUMNS = Points.__struct_fields__[1:]


class RunView(msgspec.Struct, frozen=True, kw_only=True):
    name: str
    report: Report
    quantiles: dict[str, list[float]]  # by measure, `QUANTILES` values at equal steps from 0 to 1
    points: Points | None
    series: Series | None


class PageCollector:
    """Callback for records, which collects seven numbers of each record during a run."""

    def __init__(self) -> None:
        self._columns = {name: array("d") for name in _COLUMNS}

    def __call__(self, record: Record) -> None:
        for name, column in self._columns.items():
            value = getattr(record, name)
            column.append(np.nan if value is None else value)

    def view(self, name: str, report: Report, series: Series | None = None) -> RunView:
        columns = {name: np.asarray(column) for name, column in self._columns.items()}
        return RunView(
            name=name,
            report=report,
            quantiles={
                measure: quantiles_of(columns[measure])
                for measure in ("ttft_s", "tpot_s", "e2e_s", "queue_s")
            },
            points=_points(columns),
            series=series,
        )


def quantiles_of(values: np.ndarray) -> list[float]:
    """Return the quantiles at `QUANTILES` equal steps from 0 to 1; NaN values are left out.
    Return an empty list if no value remains."""
    present = values[~np.isnan(values)]
    if not len(present):
        return []
    return [_short(cut) for cut in np.quantile(present, np.linspace(0, 1, QUANTILES)).tolist()]


def write_page(path: Path, title: str, runs: list[RunView]) -> None:
    """Write the page; the other runs are compared with the first one."""
    path.write_text(page(title, runs), encoding="utf-8")


def page(title: str, runs: list[RunView]) -> str:
    def text(name: str) -> str:
        return resources.files("sim.report.page").joinpath(name).read_text(encoding="utf-8")

    data = msgspec.json.encode({"title": title, "runs": runs}).decode()
    # Inside a script element only "</" and "<!--" could end it, and both begin with "<".
    data = data.replace("<", "\\u003c")
    script = text("page.js").replace(_PLACE, data)
    return text("page.html").replace("/*style*/", text("page.css")).replace("/*script*/", script)


def _points(columns: dict[str, np.ndarray]) -> Points | None:
    count = len(columns["arrival_s"])
    if not count:
        return None
    picked = np.unique(np.linspace(0, count - 1, min(count, MAX_POINTS)).round().astype(np.intp))
    order = picked[np.argsort(columns["arrival_s"][picked], kind="stable")]

    def cells(name: str) -> list[Any]:
        values = columns[name][order].tolist()
        if name.endswith("_tokens"):
            return list(map(int, values))
        return [None if math.isnan(value) else _short(value) for value in values]

    return Points(num_requests=count, **{name: cells(name) for name in _COLUMNS})


def _short(value: float) -> float:
    return float(f"{value:.6g}")
