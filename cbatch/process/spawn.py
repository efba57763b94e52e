"""Processes for engines. One may start before its engine is described, so that it imports torch
while the server imports its own modules. This module imports little, so that it starts soon."""

from __future__ import annotations

import atexit
import gc
import multiprocessing
import os
import runpy
import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from multiprocessing.connection import Connection

from cbatch.system.heap import memory_problem, share_malloc_arena

_IMPORTS = "cbatch.process.engine_imports"
NO_MEMORY = 112  # exit status of a process that has too little memory to report it
_early: list[SpawnedProcess] = []  # at most one, that no engine has taken yet


class SpawnedProcess:
    """A process that waits for a call. If it is `early`, it first imports an engine's modules."""

    def __init__(self, *, early: bool = False) -> None:
        context = multiprocessing.get_context("spawn")  # a fork would copy locked locks
        receiver, self._sender = context.Pipe(duplex=False)
        self.process = context.Process(target=_run, args=(receiver, early), name="cbatch-engine")
        with receiver:
            self.process.start()
        atexit.register(self.process.kill)

    def run(self, function: Callable[..., None], *arguments: object) -> None:
        """Call a function in the process, which imports the modules of function and arguments."""
        with self._sender, suppress(BrokenPipeError):  # it has died; its sentinel reports this
            self._sender.send((function, *arguments))

    def close(self) -> None:
        self._sender.close()
        atexit.unregister(self.process.kill)
        self.process.close()


@contextmanager
def early_process() -> Iterator[None]:
    """Start a process, which the first engine in this context takes. Without an engine it is
    killed at the end."""
    with suppress(OSError):  # the start of the engine will report it
        _early.append(SpawnedProcess(early=True))
    try:
        yield
    finally:
        end_early_process()


def end_early_process() -> None:
    while _early:
        unused = _early.pop()
        unused.process.kill()
        unused.process.join()
        unused.close()


def take_process() -> SpawnedProcess:
    return _early.pop() if _early else SpawnedProcess()


def _run(receiver: Connection, early: bool) -> None:
    """Run the call that arrives. This is the main function of the process."""
    # A terminal or service manager signals all processes; the server decides when to stop.
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGQUIT):
        signal.signal(number, signal.SIG_IGN)
    share_malloc_arena()
    threading.Thread(target=_die_with_parent, name="cbatch-parent", daemon=True).start()
    gc.disable()  # a seventh of the time of the imports; `freeze_heap` collects
    if early:
        with suppress(Exception):  # raised again when the engine is built
            runpy.run_module(_IMPORTS)
    try:
        with receiver:
            function, *arguments = receiver.recv()
    except EOFError:  # there is no engine to run
        return
    except Exception as error:
        if memory_problem(error):
            os._exit(NO_MEMORY)
        raise
    function(*arguments)


def _die_with_parent() -> None:
    parent = multiprocessing.parent_process()
    assert parent is not None
    parent.join()
    os._exit(1)  # at once, even within a step
