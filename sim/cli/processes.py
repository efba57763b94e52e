"""Runs scenarios in parallel processes."""

from __future__ import annotations

import multiprocessing
import os
import signal
from collections.abc import Callable, Sequence
from concurrent.futures import ProcessPoolExecutor
from functools import partial
from typing import TypeVar

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from cbatch.core.request.errors import FieldError

S = TypeVar("S")
T = TypeVar("T")


def num_processes(given: int | None, num_scenarios: int) -> int:
    """Return the number of processes: `given` (--processes), by default the number of usable cores,
    but at most `num_scenarios`. Raises `FieldError`."""
    if given is None:
        affinity = getattr(os, "sched_getaffinity", None)  # Linux only
        given = len(affinity(0)) if affinity else os.cpu_count() or 1
    if given < 1:
        raise FieldError("--processes", f"{given} is not allowed", "use at least 1")
    return min(given, num_scenarios)


def counting_bar() -> Progress:
    """Return a progress bar that counts; it is shown only on a terminal."""
    console = Console(stderr=True)
    return Progress(
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TimeElapsedColumn(),
        console=console,
        disable=not console.is_terminal,
        transient=True,
    )


def run_scenarios(work: Callable[[S], T], scenarios: Sequence[S], processes: int) -> list[T]:
    """Return the results of `work` in order of `scenarios`, with a progress bar. With `processes` =
    1 the work runs in this process. The first exception cancels the rest and is raised."""
    with counting_bar() as bar:
        track = partial(bar.track, total=len(scenarios), description="scenarios")
        if processes == 1:
            return list(track(map(work, scenarios)))
        # Spawn: a forked child could inherit a lock that another thread of this process holds.
        pool = ProcessPoolExecutor(
            processes, multiprocessing.get_context("spawn"), initializer=_exit_on_interrupt
        )
        try:
            return list(track(pool.map(work, scenarios)))
        finally:
            pool.shutdown(wait=False, cancel_futures=True)


def _exit_on_interrupt() -> None:
    """Let Ctrl-C end a worker without a traceback. The parent also gets SIGINT, and reports it."""
    signal.signal(signal.SIGINT, signal.SIG_DFL)
