"""Files of measured runs: a CSV table with a row per load, and the simulator's HTML page. On the
page, `running` is the number of calls in flight, including calls that wait in the server. Other
series come from the server's /metrics."""

from __future__ import annotations

import csv
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from bench.load.client.call import TimedCall
from bench.load.run.measure import read_times, records
from bench.load.run.report import MeasuredRecord, ServerSample, number_columns
from bench.load.run.sweep import Point
from sim.report.page.view import PageCollector, write_page
from sim.report.timeline import INTERVALS, Series


def write_csv(path: Path, points: Sequence[Point]) -> None:
    """Write the CSV file. Columns have the names of the JSON report; a spread has a column per
    figure, such as `ttft_s.p50`. Missing values are empty."""
    rows = []
    for load, _, report in points:
        row: dict[str, Any] = {**load.as_settings(), **number_columns(report)}
        row["failed"] = sum(report.errors.values())
        row["goodput_share"] = None if report.goodput is None else report.goodput.share
        row |= {f"met.{name}": share for name, share in report.attainment.items()}
        row["client_cpu_share"] = report.client.cpu_share
        if report.server is not None:
            row |= {f"server.{name}": n for name, n in number_columns(report.server).items()}
        rows.append(row)
    with path.open("w", newline="", encoding="utf-8") as file:
        table = csv.DictWriter(file, fieldnames=list(dict.fromkeys(n for r in rows for n in r)))
        table.writeheader()
        table.writerows(rows)


def write_points(path: Path, title: str, points: Sequence[Point]) -> None:
    """Write a page with a run per load. A load that was run several times has no time series."""
    views = []
    for load, runs, report in points:
        collector = PageCollector()
        for record in records(runs):
            if isinstance(record, MeasuredRecord):
                collector(record)
        series = series_of(runs[0].calls, runs[0].server_samples) if len(runs) == 1 else None
        words = [f"{name} {n:g}" for name, n in load.as_settings().items() if n is not None]
        views.append(collector.view(", ".join(words) or "trace", report, series))
    write_page(path, title, views)


def series_of(calls: Sequence[TimedCall], samples: Sequence[ServerSample] = ()) -> Series | None:
    """Return series over time from the first scheduled send on, with linear interpolation between
    `samples` of the server. None if no call succeeded, or if the run took no time."""
    good = [call for call in calls if call.error is None]
    if not good:
        return None
    first_s = min(call.scheduled_s for call in calls)
    edges_s = np.linspace(first_s, max(call.end_s for call in good), INTERVALS + 1)
    length_s = float(edges_s[1] - edges_s[0])
    if length_s <= 0:
        return None
    names = ("drafted_tokens", "accepted_tokens", "prompt_tokens", "prefix_hit_tokens")
    drafted, accepted, prompts, hits = (_growth(samples, name, edges_s) for name in names)
    unknown: list[float | None] = [None] * INTERVALS
    acceptance = unknown
    if drafted is not None and accepted is not None:
        pairs = zip(drafted.tolist(), accepted.tolist(), strict=True)
        acceptance = [float(f"{a / d:.5g}") if d > 0 else None for d, a in pairs]
    if prompts is not None and hits is not None:
        prompts = np.maximum(prompts - hits, 0.0)
    stamps_s, tokens = read_times(good)
    sent_s, end_s = np.array([(call.sent_s, call.end_s) for call in calls]).T
    in_flight_s = [(np.clip(edge_s, sent_s, end_s) - sent_s).sum() for edge_s in edges_s]
    return Series(
        first_s=first_s,
        length_s=length_s,
        running=_rounded(np.diff(in_flight_s) / length_s),
        waiting=_level(samples, "waiting", edges_s) or unknown,
        kv_share=_level(samples, "kv_share", edges_s) or unknown,
        output_tokens_per_s=_rounded(np.histogram(stamps_s, edges_s, weights=tokens)[0] / length_s),
        prompt_tokens_per_s=unknown if prompts is None else _rounded(prompts / length_s),
        step_s=unknown,
        drafted_per_row=unknown,
        acceptance=acceptance,
    )


# -- inside


def _level(
    samples: Sequence[ServerSample], name: str, edges_s: np.ndarray
) -> list[float | None] | None:
    """Return a gauge in the middle of each interval, or None if the server does not report it."""
    points = _points(samples, name)
    middles_s = (edges_s[:-1] + edges_s[1:]) / 2
    return None if points is None else _rounded(np.interp(middles_s, *points))


def _growth(samples: Sequence[ServerSample], name: str, edges_s: np.ndarray) -> np.ndarray | None:
    """Return a counter's growth in each interval, float64, or None if the server lacks it."""
    points = _points(samples, name)
    return None if points is None else np.diff(np.interp(edges_s, *points))


def _points(samples: Sequence[ServerSample], name: str) -> tuple[np.ndarray, np.ndarray] | None:
    """Return the times in seconds and the values of a field, or None if a value is missing."""
    values = [getattr(sample, name) for sample in samples]
    if not values or None in values:
        return None
    return np.array([sample.at_s for sample in samples]), np.array(values, np.float64)


def _rounded(values: np.ndarray) -> list[float | None]:
    return [float(f"{value:.5g}") for value in values.tolist()]
