"""Summary of a run of `cbatch generate` or `cbatch demo`: a table to read, and JSON figures."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import msgspec
from rich.console import Console
from rich.table import Table

from cbatch.cli.output import print_figures
from cbatch.engine.engine import EngineStats
from cbatch.engine.info import EngineInfo
from cbatch.system.machine import describe_machine, describe_versions

BAR_WIDTH = 30  # characters of a bar for 100 %


class BatchRun(msgspec.Struct, frozen=True):
    """A finished run. `elapsed_s` starts after the engine is loaded."""

    info: EngineInfo
    stats: EngineStats
    batch: int  # maximum number of sequences that ran at once
    num_requests: int
    num_errors: int
    elapsed_s: float

    @property
    def tokens_per_s(self) -> float | None:
        return self.stats.output_tokens / self.elapsed_s if self.elapsed_s > 0 else None

    def result(self) -> dict[str, Any]:
        rate = self.tokens_per_s
        mean = self.stats.speculation.mean_accepted_tokens
        return {
            "system": "cbatch",
            "lookahead": self.info.lookahead,
            "batch": self.batch,
            "dtype": self.info.dtype,
            "output_tokens_per_s": None if rate is None else round(rate, 1),
            "mean_accepted_tokens": None if mean is None else round(mean, 3),
        }


def print_summary(run: BatchRun, console: Console) -> None:
    speculation = run.stats.speculation
    table = Table(title="Summary", show_header=False, title_justify="left")
    table.add_column(style="bold")
    table.add_column(justify="right")
    for name, value in (
        ("requests", f"{run.num_requests} ({run.num_errors} with an error)"),
        ("output tokens", f"{run.stats.output_tokens:,}"),
        ("steps", f"{run.stats.steps:,}"),
        ("seconds", f"{run.elapsed_s:.2f}"),
        ("output tokens/s", _number(run.tokens_per_s, ",.0f")),
        ("lookahead", run.info.lookahead),
        ("mean accepted length", _number(speculation.mean_accepted_tokens, ".2f")),
        ("acceptance", _number(speculation.acceptance, ".1%")),
        ("batch_invariant", "yes" if run.info.batch_invariant else "no"),
    ):
        table.add_row(name, value)
    console.print(table)
    if speculation.drafted_tokens:
        console.print(_histogram(speculation.k_histogram, speculation.steps))


def print_results(runs: Sequence[BatchRun], json_file: Path | None) -> None:
    document = {
        "results": [run.result() for run in runs],
        "machine": describe_machine(),
        "versions": describe_versions(),
    }
    print_figures(document, json_file)


def _histogram(steps_by_k: dict[int, int], total: int) -> Table:
    table = Table(title="Lookahead k, by sequence and step", title_justify="left")
    table.add_column("k", justify="right")
    table.add_column("steps", justify="right")
    table.add_column("share")
    for k in range(max(steps_by_k) + 1):
        steps = steps_by_k.get(k, 0)
        share = steps / total
        table.add_row(str(k), f"{steps:,}", f"{'█' * round(share * BAR_WIDTH)} {share:.1%}")
    return table


def _number(value: float | None, spec: str) -> str:
    return "-" if value is None else format(value, spec)
