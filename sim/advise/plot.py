"""The page of plots of `cbatch advise`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy as np

from cbatch.rerun.drafters import Fates
from sim.advise.scenarios import Row
from sim.report.display import load_pyplot


def save_plots(
    path: Path, title: str, rows: Sequence[Row], labels: Sequence[str], fates: Mapping[str, Fates]
) -> None:
    """Save a page: the scenarios, the best first, and for each drafter the share of positions at
    which at least 1, 2, ... drafts are accepted. Raises `FieldError` without matplotlib."""
    pyplot = load_pyplot()
    figure, (rates, gaps, depths) = pyplot.subplots(1, 3, figsize=(17, 3 + 0.3 * len(rows)))
    colors, places = ["crimson", *["tab:blue"] * (len(rows) - 1)], np.arange(len(rows))
    for axes, name, scale, title_of_axes, unit in (
        (rates, "tokens_per_s", 1.0, "throughput", "output tokens per second"),
        (gaps, "tpot_p95_s", 1e3, "p95 time per output token", "milliseconds"),
    ):
        axes.barh(places, [scale * (row[name] or 0.0) for row in rows], color=colors)
        axes.set_yticks(places, labels if axes is rates else [""] * len(rows), fontsize=8)
        axes.invert_yaxis()
        axes.set(title=title_of_axes, xlabel=unit)
    for drafter, (_, accepted) in fates.items():
        depth = np.arange(1, int(accepted.max(initial=1)) + 1)
        depths.plot(depth, [np.mean(accepted >= d) for d in depth], marker="o", label=drafter)
    depths.set(title="accepted drafts", xlabel="at least", ylabel="share of positions", ylim=(0, 1))
    if fates:
        depths.legend()
    figure.suptitle(title)
    figure.tight_layout()
    figure.savefig(path, dpi=110)
    pyplot.close(figure)
