"""ServeGen's windows (Xiang et al. 2026): for each client and each ten minutes a rate, the
distribution of the gaps between its requests, and histograms of their lengths. Requests are drawn
from these.

A folder holds `chunk-<client>-trace.csv` (window start in s, rate per s, CV, distribution, its
shape, its scale; no header) and `chunk-<client>-dataset.json` (by the start of a longer window:
histograms by field, written as Python dictionaries in strings).
"""

from __future__ import annotations

import ast
import bisect
import heapq
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from sim.workload.arrivals import Law, unit_gaps
from sim.workload.traces.files import TraceRow, json_object, read_lines
from sim.workload.traces.formats import Raw
from sim.workload.traces.request import TraceError

WINDOW_S = 600.0
_DEEP = (RecursionError, MemoryError)  # raised by Python's parser for deeply nested brackets
_COLUMNS = ("window_s", "rate", "cv", "law", "shape", "scale")
_LAWS: dict[str, Law] = {"Gamma": "gamma", "Weibull": "weibull", "Exponential": "gamma"}


class Window(NamedTuple):
    line: int
    start_s: float
    rate_per_s: float
    law: Law
    shape: float


def read_windows(folder: Path, seed: int) -> Iterator[Raw]:
    """Yield requests of all clients in order of arrival. Memory holds one window of each client,
    and the text of the histograms."""
    traces = sorted(folder.glob("chunk-*-trace.csv"), key=lambda path: (len(path.name), path.name))
    if not traces:
        raise TraceError(
            folder, None, "folder", "has no chunk-*-trace.csv", "name a folder of ServeGen windows"
        )
    streams = np.random.SeedSequence(seed).spawn(len(traces))
    clients = [
        _client(path, np.random.default_rng(stream))
        for path, stream in zip(traces, streams, strict=True)
    ]
    return heapq.merge(*clients, key=lambda raw: raw.stamp)


def _client(path: Path, rng: np.random.Generator) -> Iterator[Raw]:
    dataset_path = path.with_name(path.name.replace("-trace.csv", "-dataset.json"))
    text = "\n".join(text for _, text in read_lines(dataset_path))
    dataset = json_object(dataset_path, 1, text)
    session = path.name.split("-")[1]
    if not all(start.isdecimal() for start in dataset):
        raise TraceError(dataset_path, 1, "windows", "are not named by seconds", "fix the names")
    starts = sorted(int(start) for start in dataset)  # a histogram covers several windows
    for window in _windows(path):
        at = bisect.bisect_right(starts, window.start_s)
        histograms = dataset[str(starts[at - 1])] if at else None
        if not histograms:
            continue  # its requests have no histogram
        prompts_of = _histogram(dataset_path, histograms, "input_tokens")
        outputs_of = _histogram(dataset_path, histograms, "output_tokens")
        if prompts_of is None or outputs_of is None:
            continue
        times_s = _times_s(window, rng)
        prompts = rng.choice(prompts_of[0], size=len(times_s), p=prompts_of[1])
        outputs = rng.choice(outputs_of[0], size=len(times_s), p=outputs_of[1])
        columns = times_s.tolist(), prompts.tolist(), outputs.tolist()
        for stamp_s, prompt_tokens, output_tokens in zip(*columns, strict=True):
            other_fields = {"session": session}
            yield Raw(window.line, stamp_s, prompt_tokens, output_tokens, other_fields)


def _windows(path: Path) -> Iterator[Window]:
    for number, text in read_lines(path):
        cells = text.split(",")
        if len(cells) != len(_COLUMNS):
            raise TraceError(
                path, number, "columns", f"{len(cells)} cells", f"give {', '.join(_COLUMNS)}"
            )
        row = TraceRow(path, number, dict(zip(_COLUMNS, cells, strict=True)))
        if not cells[3] or row.stamp("rate") == 0:
            continue  # the client sent no requests in this window
        law = _LAWS.get(cells[3])
        if law is None:
            raise row.fail("law", f"{cells[3]!r} is unknown", f"use {', '.join(_LAWS)}")
        shape = 1.0 if cells[3] == "Exponential" else row.number("shape")
        if shape <= 0:
            raise row.fail("shape", f"{shape} is not positive", "give a positive number")
        yield Window(number, row.stamp("window_s"), row.stamp("rate"), law, shape)


def _times_s(window: Window, rng: np.random.Generator) -> np.ndarray:
    """Return arrival times drawn from the window's distribution and rate, float64, ascending."""
    expected = window.rate_per_s * WINDOW_S
    parts: list[np.ndarray] = []
    reached_s = 0.0
    while reached_s < WINDOW_S:
        count = int(expected + 4 * expected**0.5) + 8
        gaps_s = unit_gaps(window.law, window.shape, rng, count) / window.rate_per_s
        times_s = reached_s + np.cumsum(gaps_s)
        parts.append(times_s)
        reached_s = float(times_s[-1])
    times_s = np.concatenate(parts)
    inside: np.ndarray = times_s[times_s < WINDOW_S] + window.start_s
    return inside


def _histogram(
    path: Path, fields: dict[str, Any], field: str
) -> tuple[np.ndarray, np.ndarray] | None:
    """Return values and their shares, which sum to 1; None for an empty histogram."""
    if field not in fields:
        raise TraceError(path, 1, field, "is missing", "give input_tokens and output_tokens")
    try:
        shares_by_value = ast.literal_eval(fields[field])
        values = np.asarray(list(shares_by_value), dtype=np.int64)
        shares = np.asarray(list(shares_by_value.values()), dtype=np.float64)
    except (ValueError, SyntaxError, TypeError, AttributeError, ArithmeticError, *_DEEP) as error:
        raise TraceError(
            path, 1, field, "is not a histogram", "write {tokens: share, ...}"
        ) from error
    if not len(values):
        return None
    if not np.isfinite(shares).all() or shares.min() < 0 or shares.sum() <= 0 or values.min() < 0:
        raise TraceError(path, 1, field, "has negative or no shares", "fix the histogram")
    return values, shares / shares.sum()
