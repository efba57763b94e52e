"""Measured runs on the simulator's page. `running` counts calls under way, as their client sees
them: those that wait in the server too. Of what only the server knows, its /metrics are drawn."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np

from bench.load.client.call import TimedCall
from bench.load.run.measure import records
from bench.load.run.report import MeasuredRecord, ServerSample
from bench.load.run.runner import OfferedLoad
from bench.load.run.sweep import Point
from sim.report.page.view import PageCollector, RunView, write_page
from sim.report.timeline import INTERVALS, Series


def write_points(path: Path, title: str, points: Sequence[Point]) -> None:
    """A run for each load."""
    write_page(path, title, [view(point) for point in points])


def view(point: Point) -> RunView:
    """Over time it is drawn if it is one run, not repeats."""
    collector = PageCollector()
    for record in records(point.runs):
        if isinstance(record, MeasuredRecord):
            collector(record)
    run = point.runs[0]
    series = series_of(run.calls, run.server_samples) if len(point.runs) == 1 else None
    return collector.view(_name(point.load), point.report, series)


def series_of(calls: Sequence[TimedCall], looks: Sequence[ServerSample] = ()) -> Series | None:
    """From the first scheduled send on; None if no call succeeded or all came in no time. Between
    two `looks` at the server its figures are taken to change evenly."""
    good = [call for call in calls if call.error is None]
    if not good:
        return None
    first_s = min(call.scheduled_s for call in calls)
    edges_s = np.linspace(first_s, max(call.end_s for call in good), INTERVALS + 1)
    length_s = float(edges_s[1] - edges_s[0])
    if length_s <= 0:
        return None
    nothing: list[float | None] = [None] * INTERVALS
    drafted, accepted = (
        _growth(looks, name, edges_s) for name in ("drafted_tokens", "accepted_tokens")
    )
    acceptance = nothing
    if drafted is not None and accepted is not None:
        pairs = zip(drafted.tolist(), accepted.tolist(), strict=True)
        acceptance = [float(f"{a / d:.5g}") if d > 0 else None for d, a in pairs]
    prompts = _growth(looks, "prompt_tokens", edges_s)
    return Series(
        first_s=first_s,
        length_s=length_s,
        running=_short(np.diff(_seconds_under_way(calls, edges_s)) / length_s),
        waiting=_level(looks, "waiting", edges_s) or nothing,
        kv_share=_level(looks, "kv_share", edges_s) or nothing,
        output_tokens_per_s=_short(_tokens(good, edges_s) / length_s),
        prompt_tokens_per_s=nothing if prompts is None else _short(prompts / length_s),
        step_s=nothing,
        drafted_per_row=nothing,
        acceptance=acceptance,
    )


# -- inside


def _name(load: OfferedLoad) -> str:
    words = [f"{name} {value:g}" for name, value in load.words().items() if value is not None]
    return ", ".join(words) or "trace"


def _tokens(good: Sequence[TimedCall], edges_s: np.ndarray) -> np.ndarray:
    """That came in each interval, float64; whole answers come with their end."""
    stamps_s = [s for call in good for s in (call.chunk_s or [call.end_s])]
    tokens = [n for c in good for n in (c.told_tokens() if c.chunk_s else [c.output_tokens])]
    return np.histogram(stamps_s, edges_s, weights=np.asarray(tokens, np.float64))[0]


def _seconds_under_way(calls: Sequence[TimedCall], edges_s: np.ndarray) -> np.ndarray:
    """Of all calls together, up to each edge."""
    sent_s, end_s = np.array([(call.sent_s, call.end_s) for call in calls]).T
    return np.array([(np.clip(edge_s, sent_s, end_s) - sent_s).sum() for edge_s in edges_s])


def _level(
    looks: Sequence[ServerSample], name: str, edges_s: np.ndarray
) -> list[float | None] | None:
    """Of a gauge, in the middle of each interval; None if nobody looked, or the server has none."""
    told = _told(looks, name)
    return None if told is None else _short(np.interp((edges_s[:-1] + edges_s[1:]) / 2, *told))


def _growth(looks: Sequence[ServerSample], name: str, edges_s: np.ndarray) -> np.ndarray | None:
    """Of a counter, in each interval, float64; None as for a gauge."""
    told = _told(looks, name)
    return None if told is None else np.diff(np.interp(edges_s, *told))


def _told(looks: Sequence[ServerSample], name: str) -> tuple[np.ndarray, np.ndarray] | None:
    values = [getattr(look, name) for look in looks]
    if not values or None in values:
        return None
    return np.array([look.at_s for look in looks]), np.array(values, np.float64)


def _short(values: np.ndarray) -> list[float | None]:
    return [float(f"{value:.5g}") for value in values.tolist()]
