"""Plots of benchmark figures: lines over load, one panel per workload."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

import matplotlib

matplotlib.use("Agg")
from matplotlib import pyplot  # noqa: E402 - after the choice of a backend that needs no display

Series = Mapping[str, Sequence[tuple[float, float]]]


def save_lines(
    path: Path,
    panels: Mapping[str, Series],
    *,
    x_label: str,
    y_label: str,
    highlight: str | None = None,
) -> None:
    """Save a PNG with a panel for each entry of `panels`: named lines of (x, y), x on a log scale.

    The line named `highlight` is emphasised; a grey line marks y = 1.
    """
    figure, axes = pyplot.subplots(
        1, len(panels), figsize=(5.5 * len(panels), 4.2), sharey=True, squeeze=False
    )
    for axis, (title, series) in zip(axes[0], panels.items(), strict=True):
        axis.axhline(1, color="0.6", linewidth=1)
        colors = pyplot.get_cmap("viridis")
        for index, (name, points) in enumerate(series.items()):
            color, style = colors(index / max(len(series) - 1, 1)), {"lw": 1.1, "marker": "."}
            if name == highlight:
                color, style = "crimson", {"lw": 2.6, "marker": "o", "zorder": 3}
            axis.plot(*zip(*points, strict=True), label=name, color=color, **style)
        axis.set(title=title, xlabel=x_label, xscale="log")
        axis.set_xticks(sorted({x for points in series.values() for x, _ in points}))
        axis.get_xaxis().set_major_formatter(pyplot.ScalarFormatter())
        axis.minorticks_off()
    axes[0][0].set_ylabel(y_label)
    axes[0][-1].legend(fontsize="small", ncols=2)
    figure.tight_layout()
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=110)
    pyplot.close(figure)
