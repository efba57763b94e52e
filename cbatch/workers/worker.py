"""The processes of `WorkerPool`: a fork server, and the workers that it forks.

The fork server reads once what tasks work on, such as a tokenizer. A worker shares that memory and
starts in milliseconds, so that one which a task has ended is replaced at once.
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

LENGTH, PID = struct.Struct("<I"), struct.Struct("<i")
DONE, RAISED, DIED = range(3)  # what an answer tells: a result, an exception, an exit status
_OUT_OF_MEMORY = 1  # exit status
_NICE = 10


class TaskLimits(NamedTuple):
    """Of one task: seconds of processor time, and bytes beyond those the worker has before. A task
    `aside` lets the engine's steps go first."""

    cpu_s: float
    memory_bytes: int
    aside: bool = False


def main() -> None:
    """Fork a worker for every socket that comes over the control socket, whose number is the
    argument; kill the worker whose id comes without one; end all at its end."""
    for each in (signal.SIGINT, signal.SIGTERM):  # of a terminal, or a service manager
        signal.signal(each, signal.SIG_IGN)  # the server ends it, once its tasks are done
    control = socket.socket(fileno=int(sys.argv[1]))
    state = pickle.load(sys.stdin.buffer)()
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    gc.freeze()  # a collection would write to memory that is shared
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
                for each in (control, *workers.values()):
                    each.close()
                _work(connection, state)
            workers[pid] = connection
        elif PID.unpack(message)[0] in workers:
            os.kill(PID.unpack(message)[0], signal.SIGKILL)
        signal.pthread_sigmask(signal.SIG_UNBLOCK, [signal.SIGCHLD])
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    for pid in workers:
        os.kill(pid, signal.SIGKILL)


def _reap(workers: dict[int, socket.socket]) -> None:
    """Tell the clients of workers that have ended how they did."""
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
            while head := tasks.read(LENGTH.size):
                limits, task = pickle.loads(tasks.read(LENGTH.unpack(head)[0]))
                if limits.aside and os.getsid(0) != os.getpid():
                    os.setsid()  # Linux shares processors out by session, and then by `nice`
                    os.nice(_NICE)
                _limit_memory(limits.memory_bytes)
                signal.setitimer(signal.ITIMER_PROF, limits.cpu_s)  # the signal ends the process
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
    except BaseException as error:  # a panic of Rust
        return pickle.dumps((RAISED, RuntimeError(repr(error))))


def _send(file: BinaryIO, content: bytes) -> None:
    file.write(LENGTH.pack(len(content)) + content)
    file.flush()


def _limit_memory(num_bytes: int) -> None:
    """From what the process takes now."""
    try:
        pages = int(Path("/proc/self/statm").read_text().split()[0])
    except OSError:
        return  # not Linux, where address space is not limited either
    limit_bytes = pages * resource.getpagesize() + num_bytes
    resource.setrlimit(resource.RLIMIT_AS, (limit_bytes, resource.RLIM_INFINITY))


if __name__ == "__main__":
    main()
