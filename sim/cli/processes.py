"""Work on scenarios, in processes of their own."""

from __future__ import annotations

import multiprocessing
import os
import signal
from collections.abc import Callable, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from typing import TypeVar

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from cbatch.core.request.errors import FieldError
from sim.cli.scenario import Scenario

T = TypeVar("T")


def num_processes(given: int | None, num_scenarios: int) -> int:
    if given is None:
        # Those that this process may use, where the system tells.
        usable = getattr(os, "sched_getaffinity", None)
        given = len(usable(0)) if usable else os.cpu_count() or 1
    if given < 1:
        raise FieldError("--processes", f"{given} is not allowed", "use at least 1")
    return min(given, num_scenarios)


def run_scenarios(
    work: Callable[[Scenario], T], scenarios: Sequence[Scenario], processes: int
) -> list[T]:
    """`work` of each, in the order given; in this process where one is enough. A bar counts them.
    An error ends them all."""
    with _bar() as bar:
        task = bar.add_task("scenarios", total=len(scenarios))
        if processes == 1:
            return [_step(bar, task, work(scenario)) for scenario in scenarios]
        # Spawned, not forked: a child must not inherit this process's threads' locks.
        pool = ProcessPoolExecutor(
            processes, multiprocessing.get_context("spawn"), initializer=_let_interrupts_end_it
        )
        try:
            futures = [pool.submit(work, scenario) for scenario in scenarios]
            for future in as_completed(futures):
                _step(bar, task, future.result())
            return [future.result() for future in futures]
        finally:
            pool.shutdown(wait=False, cancel_futures=True)


# -- inside


def _bar() -> Progress:
    console = Console(stderr=True)
    columns = TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn()
    return Progress(
        *columns,
        TimeElapsedColumn(),
        console=console,
        disable=not console.is_terminal,
        transient=True,
    )


def _step(bar: Progress, task: object, result: T) -> T:
    bar.advance(task)  # type: ignore[arg-type]
    return result


def _let_interrupts_end_it() -> None:
    """Ctrl-C reaches every process; the first one says what happened."""
    signal.signal(signal.SIGINT, signal.SIG_DFL)
