"""Progress of a batch on standard error: a bar on a terminal, elsewhere a line every 10 seconds."""

from __future__ import annotations

import time
from collections.abc import Sequence

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from cbatch.text.outputs import Output

LINE_EVERY_S = 10.0


class ProgressBar:
    """Progress bar for `total` units, by default the sequences of a batch. A context manager."""

    def __init__(self, total: int, *, unit: str = "sequences", shown: bool = True) -> None:
        self._console = Console(stderr=True, highlight=False)
        self._total, self._unit = total, unit
        self._live = shown and self._console.is_terminal
        self._shown = shown
        self._progress = Progress(
            TextColumn(unit),
            BarColumn(),
            MofNCompleteColumn(),
            TextColumn("{task.fields[rate]}"),
            TimeElapsedColumn(),
            console=self._console,
            disable=not self._live,
            transient=True,
        )
        self._task = self._progress.add_task("", total=total, rate="")
        self._started_s = self._last_line_s = time.perf_counter()
        self._num_tokens = 0
        self._num_done = 0

    def __enter__(self) -> ProgressBar:
        self._progress.start()
        self._started_s = self._last_line_s = time.perf_counter()
        return self

    def __exit__(self, *_: object) -> None:
        self._progress.stop()

    def update(self, outputs: Sequence[Output]) -> None:
        self._num_tokens += sum(len(o.token_ids) for o in outputs)
        elapsed_s = max(time.perf_counter() - self._started_s, 1e-9)
        rate = f"{self._num_tokens / elapsed_s:,.0f} tokens/s"
        self.advance(sum(o.finished is not None for o in outputs), rate)

    def advance(self, count: int = 1, rate: str = "") -> None:
        self._num_done += count
        now_s = time.perf_counter()
        if self._live:
            self._progress.update(self._task, completed=self._num_done, rate=rate)
        elif self._shown and now_s - self._last_line_s >= LINE_EVERY_S:
            self._last_line_s = now_s
            words = f"{self._num_done} of {self._total} {self._unit}"
            self._console.print(f"{words}, {rate}" if rate else words)
