"""How far a batch is, on standard error: a bar on a terminal, elsewhere a line now and then."""

from __future__ import annotations

import time
from collections.abc import Sequence

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from cbatch.text.outputs import Output

LINE_EVERY_S = 10.0


class ProgressBar:
    """Counts sequences and tokens. `total` is in sequences; used as a context manager."""

    def __init__(self, total: int, *, shown: bool = True) -> None:
        self._console = Console(stderr=True)
        self._total = total
        self._live = shown and self._console.is_terminal
        self._shown = shown
        self._progress = Progress(
            TextColumn("{task.description}"),
            BarColumn(),
            MofNCompleteColumn(),
            TextColumn("{task.fields[rate]}"),
            TimeElapsedColumn(),
            console=self._console,
            disable=not self._live,
            transient=True,
        )
        self._task = self._progress.add_task("completing", total=total, rate="")
        self._started_s = self._line_s = time.perf_counter()
        self._num_tokens = 0
        self._num_done = 0

    def __enter__(self) -> ProgressBar:
        self._progress.start()
        self._started_s = self._line_s = time.perf_counter()
        return self

    def __exit__(self, *_: object) -> None:
        self._progress.stop()

    def update(self, outputs: Sequence[Output]) -> None:
        self._num_tokens += sum(len(o.token_ids) for o in outputs)
        self._num_done += sum(o.finished is not None for o in outputs)
        now_s = time.perf_counter()
        rate = f"{self._num_tokens / max(now_s - self._started_s, 1e-9):,.0f} tokens/s"
        if self._live:
            self._progress.update(self._task, completed=self._num_done, rate=rate)
        elif self._shown and now_s - self._line_s >= LINE_EVERY_S:
            self._line_s = now_s
            self._console.print(f"{self._num_done} of {self._total} sequences, {rate}")
