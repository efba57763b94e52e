"""Output of a report: a table, and the data of a JSON line."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import msgspec
from rich.table import Table

from cbatch.core.request.errors import FieldError
from sim.report.report import Report, Spread

LABELS = {  # by field of a report
    "ttft_s": "time to first token, ms",
    "ttft_from_send_s": "  from the actual send, ms",
    "tpot_s": "time per output token, ms",
    "itl_s": "between tokens, ms",
    "chunk_gap_s": "between chunks, ms",
    "e2e_s": "end to end, ms",
    "normalised_s": "end to end per token, ms",
    "queue_s": "in the queue, ms",
}


def spread_table(name: str, report: Report, fields: Iterable[str]) -> Table:
    """Return a table with a row per field of `report`, in milliseconds."""
    table = Table(title=f"{name}, {report.kind}", title_justify="left")
    for column in ("", "mean", "p50", "p90", "p99", "max"):
        table.add_column(column, justify="right" if column else "left")
    for field in fields:
        spread: Spread = getattr(report, field)
        cells = (spread.mean, spread.p50, spread.p90, spread.p99, spread.max)
        table.add_row(LABELS[field], *("-" if c is None else f"{c * 1e3:,.2f}" for c in cells))
    return table


def summary_of(report: Report) -> dict[str, Any]:
    """Return the report as JSON data, with the number of refused requests instead of their list."""
    document: dict[str, Any] = msgspec.to_builtins(report)
    document["refused"] = len(report.refused)
    return document


def load_pyplot() -> Any:
    """Return matplotlib's `pyplot`, without a display. Raises `FieldError` if matplotlib is not
    installed."""
    try:
        import matplotlib
    except ImportError as error:
        raise FieldError("--plot", "needs matplotlib", "pip install matplotlib") from error
    matplotlib.use("Agg")
    from matplotlib import pyplot

    return pyplot
