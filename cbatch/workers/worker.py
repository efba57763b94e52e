"""The processes of `WorkerPool`: a fork server, and the workers that it forks.

The fork server loads the shared state, such as a tokenizer, once. Workers share its memory
and start in milliseconds, so a worker that died in a task is replaced at once.
"""

from __future__ import annotations

import gc
import mmap
import os
import pickle
import resource
import select
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
# Kinds of answers: with a result; an exception; an exit status and the number of tasks begun.
DONE, RAISED, DIED = range(3)
_OUT_OF_MEMORY = 1  # exit status of a worker.
_NICE = 10  # niceness of a worker whose tasks are `aside`


class TaskLimits(NamedTuple):
    """Limits of one task: `cpu_s` of processor time, and `memory_bytes` on top of the worker's
    present memory. With `aside` the worker has a lower priority than the engine's steps."""

    cpu_s: float
    memory_bytes: int
    aside: bool = False


class _Child(NamedTuple):
    """A worker, as the fork server knows it. `tasks_begun` is a counter in shared memory."""

    connection: socket.socket
    tasks_begun: mmap.mmap


def main() -> None:
    """Serve the control socket, whose descriptor is the argument, until it is closed. A message
    with a socket forks a worker for it; a message with a process id kills that worker. At the end
    all workers are killed."""
    # From a terminal or a service manager.
    for signal_number in (signal.SIGINT, signal.SIGTERM, signal.SIGQUIT):
        signal.signal(signal_number, signal.SIG_IGN)  # the server closes the socket after its tasks
    control = socket.socket(fileno=int(sys.argv[1]))
    state = pickle.load(sys.stdin.buffer)()
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    gc.freeze()  # a collection would write to the shared memory, and so copy it
    children: dict[int, _Child] = {}
    # A signal writes to `wakeup`, so that one that arrives just before `select` ends the wait too.
    ended, wakeup = socket.socketpair()
    wakeup.setblocking(False)
    signal.set_wakeup_fd(wakeup.fileno(), warn_on_full_buffer=False)
    signal.signal(signal.SIGCHLD, lambda *_: None)
    control.send(b"\n")
    while True:
        ready, _, _ = select.select([control, ended], [], [])
        if ended in ready:
            ended.recv(2**12)
            _reap(children)
        if control not in ready:
            continue
        message, files, *_ = socket.recv_fds(control, PID.size, 1)
        if not message:
            break
        if files:
            connections = [child.connection for child in children.values()]
            connection = socket.socket(fileno=files[0])
            try:
                child = _Child(connection, mmap.mmap(-1, LENGTH.size))
                pid = os.fork()
            except OSError as error:  # no more processes, or no memory
                with connection, suppress(OSError), connection.makefile("wb") as file:
                    _send(file, pickle.dumps((RAISED, error)))
                continue
            if not pid:
                signal.set_wakeup_fd(-1)
                signal.signal(signal.SIGCHLD, signal.SIG_DFL)
                for inherited in (control, ended, wakeup, *connections):
                    inherited.close()
                _work(child, state)
            children[pid] = child
        elif PID.unpack(message)[0] in children:
            os.kill(PID.unpack(message)[0], signal.SIGKILL)
    for pid in children:
        os.kill(pid, signal.SIGKILL)


def _reap(children: dict[int, _Child]) -> None:
    """Send to each ended worker's client the exit status and the number of tasks begun."""
    while children:
        pid, status = os.waitpid(-1, os.WNOHANG)
        if not pid:
            return
        connection, tasks_begun = children.pop(pid)
        with connection, tasks_begun, suppress(OSError), connection.makefile("wb") as file:
            ending = os.waitstatus_to_exitcode(status), *LENGTH.unpack(tasks_begun[:])
            _send(file, pickle.dumps((DIED, ending)))


def _work(child: _Child, state: Any) -> None:
    """Run tasks until the client closes the connection. Does not return."""
    connection, num_begun = child.connection, 0
    try:
        with connection.makefile("rb") as tasks, connection.makefile("wb") as answers:
            _send(answers, pickle.dumps((DONE, os.getpid())))
            while header := tasks.read(LENGTH.size):
                num_begun += 1
                child.tasks_begun[:] = LENGTH.pack(num_begun)
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
        with suppress(Exception):
            content = pickle.dumps((RAISED, error))
            pickle.loads(content)  # not all exceptions can be made again
            return content
        return pickle.dumps((RAISED, RuntimeError(repr(error))))
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
