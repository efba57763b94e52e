"""The processes of `WorkerPool`: a fork server, and the workers that it forks.

The fork server loads the shared state, such as a tokenizer, once. Workers share its memory
and start in milliseconds, so a worker that died in a task is replaced at once.
"""

from __future__ import annotations

import gc
import os
import pickle
import resource
import signal
import socket
import struct
import sys
import traceback
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple

LENGTH, PID = struct.Struct("<I"), struct.Struct("<i")  # length of a message, process id
DONE, RAISED, DIED = range(3)  # kinds of answers: with a result, an exception, an exit status
_OUT_OF_MEMORY = 1  # exit status of a worker.
_NICE = 10  # niceness of a worker whose tasks are `aside`


class TaskLimits(NamedTuple):
    """Limits of one task: `cpu_s` of processor time, and `memory_bytes` on top of the worker's
    present memory. With `aside` the worker has a lower priority than the engine's steps."""

    cpu_s: float
    memory_bytes: int
    aside: bool = False


def main() -> None:
    """Serve the control socket, whose descriptor is the argument, until it is closed. A message
    with a socket forks a worker for it; a message with a process id kills that worker. At the end
    all workers are killed."""
    for signal_number in (signal.SIGINT, signal.SIGTERM):  # from a terminal or a service manager
        signal.signal(signal_number, signal.SIG_IGN)  # the server closes the socket after its tasks
    control = socket.socket(fileno=int(sys.argv[1]))
    state = pickle.load(sys.stdin.buffer)()
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    gc.freeze()  # a collection would write to the shared memory, and so copy it
    workers: dict[int, socket.socket] = {}
    signal.signal(signal.SIGCHLD, lambda *_: _reap(workers))
    sys.stdout.buffer.write(b"\n")
    sys.stdout.buffer.flush()
    while True:
        message, files, *_ = socket.recv_fds(control, PID.size, 1)
        if not message:
            break
        signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGCHLD])
        if files:
            connection = socket.socket(fileno=files[0])
            pid = os.fork()
            if not pid:
                for inherited in (control, *workers.values()):
                    inherited.close()
                _work(connection, state)
            workers[pid] = connection
        elif PID.unpack(message)[0] in workers:
            os.kill(PID.unpack(message)[0], signal.SIGKILL)
        signal.pthread_sigmask(signal.SIG_UNBLOCK, [signal.SIGCHLD])
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    for pid in workers:
        os.kill(pid, signal.SIGKILL)


def _reap(workers: dict[int, socket.socket]) -> None:
    """Send each ended worker's exit status to its client."""
    while True:
        try:
            pid, status = os.waitpid(-1, os.WNOHANG)
        except ChildProcessError:
            return
        if not pid:
            return
        with workers.pop(pid) as connection, suppress(OSError), connection.makefile("wb") as file:
            _send(file, pickle.dumps((DIED, os.waitstatus_to_exitcode(status))))


def _work(connection: socket.socket, state: Any) -> None:
    """Run tasks until the client closes the connection. Does not return."""
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, [signal.SIGCHLD])
    try:
        with connection.makefile("rb") as tasks, connection.makefile("wb") as answers:
            _send(answers, pickle.dumps((DONE, os.getpid())))
            while header := tasks.read(LENGTH.size):
                limits, task = pickle.loads(tasks.read(LENGTH.unpack(header)[0]))
                if limits.aside and os.getsid(0) != os.getpid():
                    os.setsid()  # Linux divides processor time by session first, then by `nice`
                    os.nice(_NICE)
                _limit_memory(limits.memory_bytes)
                signal.setitimer(signal.ITIMER_PROF, limits.cpu_s)  # SIGPROF ends the process
                answer = _answer(task, state)
                signal.setitimer(signal.ITIMER_PROF, 0)
                _send(answers, answer)
    finally:
        os._exit(_OUT_OF_MEMORY)


def _answer(task: Callable[[Any], Any], state: Any) -> bytes:
    try:
        return pickle.dumps((DONE, task(state)))
    except MemoryError:
        os._exit(_OUT_OF_MEMORY)
    except Exception as error:
        error.add_note(traceback.format_exc())
        return pickle.dumps((RAISED, error))
    except BaseException as error:  # a Rust panic is not an Exception
        return pickle.dumps((RAISED, RuntimeError(repr(error))))


def _send(file: BinaryIO, content: bytes) -> None:
    file.write(LENGTH.pack(len(content)) + content)
    file.flush()


def _limit_memory(num_bytes: int) -> None:
    """Limit address space to `num_bytes` more than the process uses now."""
    try:
        pages = int(Path("/proc/self/statm").read_text().split()[0])
    except OSError:
        return  # not Linux, so the limit would have no effect
    limit_bytes = pages * resource.getpagesize() + num_bytes
    resource.setrlimit(resource.RLIMIT_AS, (limit_bytes, resource.RLIM_INFINITY))


if __name__ == "__main__":
    main()
