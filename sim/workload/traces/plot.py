"""A plot of a trace: its rate over time, its lengths, the gaps between arrivals."""

from __future__ import annotations

from collections import Counter
from pathlib import Path

import numpy as np

from sim.report.display import load_pyplot
from sim.workload.traces.statistics import MINUTE_S, TraceSummary


def save_plot(path: Path, title: str, summary: TraceSummary) -> None:
    """Save a PNG with three panels. Raises `FieldError` if matplotlib is not installed."""
    pyplot = load_pyplot()
    figure, (rate, lengths, gaps) = pyplot.subplots(1, 3, figsize=(15, 4.2))
    minutes = np.arange(max(summary.per_minute) + 1)
    per_second = [summary.per_minute.get(int(minute), 0) / MINUTE_S for minute in minutes]
    rate.step(minutes, per_second, where="post", color="crimson")
    rate.set(title="arrivals", xlabel="minutes", ylabel="requests per second", ylim=(0, None))
    for name, counts, color in (
        ("prompt", summary.prompt_counts, "tab:blue"),
        ("output", summary.output_counts, "tab:orange"),
    ):
        lengths.step(*_cumulated(counts), where="post", label=name, color=color)
    lengths.set(title="lengths", xlabel="tokens", ylabel="share at most this long", xscale="log")
    lengths.legend()
    gaps_s = np.sort(summary.gaps_s)
    if len(gaps_s):
        mean_s = max(float(gaps_s.mean()), 1e-12)
        shares = np.arange(len(gaps_s), 0, -1) / len(gaps_s)
        gaps.step(gaps_s / mean_s, shares, where="post", color="tab:green", label="trace")
        ahead = np.linspace(0, max(float(gaps_s[-1]) / mean_s, 1.0), 200)
        gaps.plot(ahead, np.exp(-ahead), color="0.5", linestyle="--", label="Poisson")
        gaps.legend()
    gaps.set(
        title="gaps", xlabel="of the mean gap", ylabel="share at least this long", yscale="log"
    )
    gaps.set_ylim(bottom=0.5 / max(len(gaps_s), 1))
    figure.suptitle(title)
    figure.tight_layout()
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=110)
    pyplot.close(figure)


def _cumulated(counts: Counter[int]) -> tuple[list[int], np.ndarray]:
    values = sorted(counts)
    shares = np.cumsum([counts[value] for value in values])
    return values, shares / shares[-1]
