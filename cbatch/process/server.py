"""The engine process: scheduler, step loop and executor, controlled over a socket."""

from __future__ import annotations

import asyncio
import logging
import os
import signal
import threading
import time
from collections import Counter
from collections.abc import Callable, Collection, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple

import zmq

from cbatch.core.request.errors import FieldError
from cbatch.core.request.request import Request, StructuredOutputs
from cbatch.engine.core import COMPILING_TICK_S, EngineCore, StepOutput
from cbatch.grammars import Compiled, Grammars, grammars_unsupported
from cbatch.kv_events.wire import encode_changes
from cbatch.process.connection import Death
from cbatch.process.in_flight import InFlightJournal
from cbatch.process.messages import (
    Add,
    Cancel,
    Command,
    Event,
    Finish,
    Ready,
    Snapshot,
    StartFailed,
    Stepped,
    Watch,
    decode_command,
    encode,
)
from cbatch.process.monitor import Monitor
from cbatch.process.spawn import NO_MEMORY, take_process
from cbatch.system.heap import MEMORY_REMEDY, freeze_heap, memory_problem, trim_heap
from cbatch.system.shares import SharedLimit

MAX_GRAMMARS = 32  # compiled grammars kept at once; each may take tens of MiB
QUICK_CPU_S = 0.05  # processor time below which a grammar is quick; an ordinary schema takes 1 ms
_NICE = 10  # niceness of the thread for slow grammars, so that steps take precedence


class Waiting(NamedTuple):
    request: Request
    output: tuple[int, ...]


class GrammarQueue:
    """Compiles grammars in the order of requests, so that no step waits for compiling, and keeps
    each grammar until its last request has left. Owners share the number of grammars. Slow grammars
    have their own thread with a lower priority, so that quick grammars do not wait for them."""

    def __init__(
        self, grammars: Grammars | None, report_compiling: Callable[[Collection[str]], None]
    ) -> None:
        """`report_compiling` receives the ids of the requests whose grammars are being compiled."""
        self._grammars, self._report_compiling = grammars, report_compiling
        self._compiling: dict[str, None] = {}  # request ids
        self._lock = threading.Lock()  # guards `_compiling`
        self._waiting: dict[str, Waiting] = {}  # by request id
        self._specs: dict[str, StructuredOutputs] = {}  # of waiting and running requests, by id
        self._num_users: Counter[StructuredOutputs] = Counter()
        self._compiled: dict[StructuredOutputs, Future[Compiled]] = {}
        self._kept = SharedLimit(MAX_GRAMMARS, "grammars")
        self._owners: dict[StructuredOutputs, str | None] = {}  # of compiled grammars
        self._quick = ThreadPoolExecutor(1, "cbatch-grammars")
        self._slow = ThreadPoolExecutor(1, "cbatch-slow-grammars", _lower_priority)

    @property
    def waiting(self) -> bool:
        return bool(self._waiting)

    def enter(self, request: Request, output: tuple[int, ...]) -> None:
        """Queue a request. `output`: the tokens that a resumed request has already emitted."""
        spec = request.params.structured_outputs
        assert spec is not None
        self._waiting[request.request_id] = Waiting(request, output)
        self._specs[request.request_id] = spec
        self._num_users[spec] += 1
        self._compile_next()

    def leave(self, request_id: str) -> None:
        spec = self._specs.pop(request_id, None)
        if spec is None:
            return
        self._waiting.pop(request_id, None)
        self._num_users[spec] -= 1
        if not self._num_users[spec]:
            del self._num_users[spec]
            if spec in self._compiled:
                self._compiled.pop(spec).cancel()
                self._kept.add(-1, self._owners.pop(spec))
            self._compile_next()

    def take_ready(self) -> Iterator[tuple[Request, tuple[int, ...], BaseException | None]]:
        for request_id, (request, output) in list(self._waiting.items()):
            compiled = self._compiled.get(self._specs[request_id])
            if compiled is not None and compiled.done():
                del self._waiting[request_id]
                yield request, output, compiled.exception()

    def _compile_next(self) -> None:
        for request_id, (request, _) in self._waiting.items():
            spec, owner = self._specs[request_id], request.owner
            if spec not in self._compiled and self._kept.problem(1, owner) is None:
                self._kept.add(1, owner)
                self._owners[spec] = owner
                thread = self._quick if request.compile_s < QUICK_CPU_S else self._slow
                self._compiled[spec] = thread.submit(self._compile, spec, request_id)

    def _compile(self, spec: StructuredOutputs, request_id: str) -> Compiled:
        if self._grammars is None:
            raise grammars_unsupported()
        with self._lock:
            self._compiling[request_id] = None
            self._report_compiling(self._compiling)
        try:
            return self._grammars.compiled(spec)
        finally:
            with self._lock:
                del self._compiling[request_id]
                self._report_compiling(self._compiling)


def _lower_priority() -> None:
    with suppress(OSError, AttributeError):  # not all systems have priorities of threads
        os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), _NICE)


HEARTBEAT_S = 0.5  # interval of heartbeats from an idle engine
MAX_COMMANDS = 64  # between two steps, since reading commands delays the next step
GRAMMAR_TICK_S = 0.005  # interval at which an idle engine checks for compiled grammars
_LINGER_MS = 2000  # time to send the last messages at exit
_logger = logging.getLogger("cbatch")
Factory = Callable[[], EngineCore]  # picklable, since it is called in the new process


class EngineServer:
    """Executes the client's commands between steps, and sends the output of every step."""

    def __init__(
        self, core: EngineCore, socket: zmq.Socket[bytes], journal: InFlightJournal
    ) -> None:
        self._core = core
        self._socket = socket
        self._journal = journal
        self._grammars = GrammarQueue(core.grammars, journal.write_compiling)
        self._trimmed = True  # the heap was trimmed after the last step
        self._monitor: Monitor | None = None  # None: no live page is open
        core.loop.on_in_flight = journal.write
        # Executors with short steps report no progress within a step, and lack this method.
        report_progress = getattr(core.executor, "report_progress", None)
        if report_progress is not None:
            report_progress(journal.progress[1:])

    def run(self) -> None:
        """Run until a stop command."""
        core, supports_grammars = self._core, self._core.grammars is not None
        self._send(Ready(core.scheduler.config, core.drafters, core.info, supports_grammars))
        threading.Thread(target=core.on_ready, name="cbatch-on-ready", daemon=True).start()
        while self.iterate():
            pass

    def iterate(self) -> bool:
        """Handle pending commands, then run a step if needed. Return False after a stop command."""
        if not self._handle_commands():
            return False
        self._step()
        return True

    def _handle_commands(self) -> bool:
        """Handle pending commands; if idle, wait for one. Return False after a stop command."""
        if not self._core.busy:
            timeout_s = COMPILING_TICK_S if self._core.background_kernels.pending else HEARTBEAT_S
            timeout_s = GRAMMAR_TICK_S if self._grammars.waiting else timeout_s
            if not self._socket.poll(int(timeout_s * 1000)) and not self._grammars.waiting:
                self._send(Stepped(StepOutput(), self._core.metrics()))
                self._send_snapshot()
                if not self._trimmed:
                    trim_heap()
                self._trimmed = True
        for _ in range(MAX_COMMANDS):
            if not self._socket.poll(0):
                break
            *encoded_ids, content = self._socket.recv_multipart()  # see `frames_of`
            if encoded_ids:
                self._journal.begin_reading(encoded_ids[0])
            continues = self._execute(decode_command(content))
            self._journal.end_reading()
            if not continues:
                return False
        for request, output, problem in self._grammars.take_ready():
            if problem is None:
                self._add(request, output)
            else:
                self._core.reject(request.request_id, problem)
        return True

    def _execute(self, command: Command) -> bool:
        match command:
            case Add():
                for request, output in command.requests():
                    if request.params.structured_outputs is None:
                        self._add(request, output)
                    else:
                        self._grammars.enter(request, output)
            case Cancel(request_id):
                self._grammars.leave(request_id)
                self._core.cancel(request_id)
            case Finish(request_id, keep_tokens):
                self._grammars.leave(request_id)
                self._core.finish(request_id, keep_tokens)
            case Watch(enabled):
                self._monitor = Monitor(self._core.scheduler) if enabled else None
                self._send_snapshot()  # an idle engine sends the next with a heartbeat
            case _:
                return False
        return True

    def _add(self, request: Request, output: tuple[int, ...]) -> None:
        try:
            self._core.add(request, output)
        except FieldError as error:
            self._core.reject(request.request_id, error)

    def _step(self) -> None:
        output = self._core.step()
        for row in output.rows:
            if row.finish_reason is not None:
                self._grammars.leave(row.request_id)
        kv_events = self._kv_events()
        if output.times or output.rows or kv_events:
            self._send(Stepped(output, self._core.metrics(), kv_events))
        if output.times is None:
            return
        self._trimmed = False
        if self._monitor is not None and self._core.loop.last is not None:
            self._monitor.on_commit(*self._core.loop.last)
            if self._monitor.due(time.monotonic()):
                self._send_snapshot()

    def _send_snapshot(self) -> None:
        monitor = self._monitor
        if monitor is not None:
            begin_s = time.thread_time()
            steps, num_steps = monitor.take_steps()
            stats = self._core.metrics()
            self._send(Snapshot(monitor.rows(), steps, num_steps, monitor.blocks(), stats))
            monitor.on_sent(time.monotonic(), time.thread_time() - begin_s)

    def _kv_events(self) -> bytes:
        changes = self._core.scheduler.take_cache_changes()
        size = self._core.scheduler.config.block_size
        return encode_changes(changes, time.time(), size) if changes else b""

    def _send(self, event: Event) -> None:
        self._socket.send(encode(event))


def connect(endpoint: str) -> zmq.Socket[bytes]:
    """Return the engine's end of the socket. If the reader is slow, sending blocks after some
    thousand queued messages."""
    socket: zmq.Socket[bytes] = zmq.Context.instance().socket(zmq.PAIR)
    socket.linger = _LINGER_MS
    socket.connect(endpoint)
    return socket


def run_engine(factory: Factory, endpoint: str, journal_path: Path) -> None:
    socket = connect(endpoint)
    try:
        core = _build(factory, socket)
        if core is not None:
            freeze_heap()
            with core.resources:
                EngineServer(core, socket, InFlightJournal(journal_path)).run()
    finally:
        socket.close()
        zmq.Context.instance().term()


def _build(factory: Factory, socket: zmq.Socket[bytes]) -> EngineCore | None:
    """Build the engine. After a failure, send its reason and return None."""
    try:
        return factory()
    except FieldError as error:
        socket.send(encode(StartFailed(error.problem, error.field, error.remedy)))
    except Exception as error:
        if problem := memory_problem(error):
            socket.send(encode(StartFailed(problem, "memory", MEMORY_REMEDY)))
            return None
        # The message of a ValueError is complete; other errors may need their traceback.
        level = logging.INFO if isinstance(error, ValueError) else logging.ERROR
        _logger.log(level, "the engine did not start", exc_info=True)
        socket.send(encode(StartFailed(str(error) or repr(error))))
    return None


class EngineProcess:
    """A process that runs `run_engine`, controlled from an event loop."""

    def __init__(self, factory: Factory, endpoint: str, journal_path: Path) -> None:
        self._spawned = take_process()
        self._process = self._spawned.process
        self._spawned.run(run_engine, factory, endpoint, journal_path)
        loop = asyncio.get_running_loop()
        self.dead: asyncio.Future[None] = loop.create_future()
        loop.add_reader(self._process.sentinel, self._on_death)

    @property
    def pid(self) -> int | None:
        return self._process.pid

    def kill(self) -> None:
        if not self.dead.done():
            self._process.kill()

    def reap(self) -> Death:
        self._process.join()
        status = self._process.exitcode
        self._spawned.close()
        if status == NO_MEMORY:
            return Death("has not enough memory")
        if status is None or status >= 0:
            return Death(f"ended with status {status}")
        number = signal.Signals(-status)
        return Death(f"was killed by {number.name}", from_outside=number is signal.SIGKILL)

    def _on_death(self) -> None:
        asyncio.get_running_loop().remove_reader(self._process.sentinel)
        if not self.dead.done():
            self.dead.set_result(None)
