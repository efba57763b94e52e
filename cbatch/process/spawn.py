"""Processes for engines. One may start before its engine is described, so that it imports torch
while the server imports its own modules. This module imports little, to start it soon."""

from __future__ import annotations

import atexit
import gc
import importlib
import multiprocessing
import os
import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from multiprocessing.connection import Connection

from cbatch.system.heap import share_malloc_arena
from cbatch.system.machine import memory_problem

IMPORTS = ("torch", "cbatch.engine.build", "cbatch.process.factory", "cbatch.process.server")
NO_MEMORY = 112  # exit status of a process that has too little memory to report it
_early: list[SpawnedProcess] = []  # at most one, that no engine has taken yet


class SpawnedProcess:
    """A process that imports `imports`, then waits for the arguments of `run_engine`."""

    def __init__(self, imports: tuple[str, ...] = ()) -> None:
        context = multiprocessing.get_context("spawn")  # a fork would copy locked locks
        receiver, self._sender = context.Pipe(duplex=False)
        self.process = context.Process(target=_run, args=(receiver, imports), name="cbatch-engine")
        with receiver:
            self.process.start()
        atexit.register(self.process.kill)

    def run_engine(self, *arguments: object) -> None:
        with self._sender, suppress(BrokenPipeError):  # it has died; its sentinel reports this
            self._sender.send(arguments)

    def close(self) -> None:
        """Release the resources of a process that has ended."""
        self._sender.close()
        atexit.unregister(self.process.kill)
        self.process.close()


@contextmanager
def early_process() -> Iterator[None]:
    """Start a process, which the first engine in this context takes. Without an engine it is
    killed at the end."""
    with suppress(OSError):  # the start of the engine will report it
        _early.append(SpawnedProcess(IMPORTS))
    try:
        yield
    finally:
        end_early_process()


def end_early_process() -> None:
    """Kill the process that waits for an engine, if there is one."""
    while _early:
        unused = _early.pop()
        unused.process.kill()
        unused.process.join()
        unused.close()


def take_process() -> SpawnedProcess:
    """Return the process that waits for an engine, or a new one."""
    return _early.pop() if _early else SpawnedProcess()


def _run(receiver: Connection, imports: tuple[str, ...]) -> None:
    """Run an engine until it is stopped. This is the main function of its process."""
    # A terminal or service manager signals all processes; the server decides when to stop.
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGQUIT):
        signal.signal(number, signal.SIG_IGN)
    share_malloc_arena()
    threading.Thread(target=_die_with_parent, name="cbatch-parent", daemon=True).start()
    gc.disable()  # a seventh of the time of the imports; `freeze_heap` collects
    for name in imports:
        with suppress(Exception):  # raised again when the engine is built
            importlib.import_module(name)
    try:
        with receiver:
            arguments = receiver.recv()
        from cbatch.process.server import run_engine
    except EOFError:  # there is no engine to run
        return
    except Exception as error:
        if memory_problem(error):
            os._exit(NO_MEMORY)
        raise
    run_engine(*arguments)


def _die_with_parent() -> None:
    parent = multiprocessing.parent_process()
    assert parent is not None
    parent.join()
    os._exit(1)  # at once, even within a step
