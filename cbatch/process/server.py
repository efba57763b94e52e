"""The engine process: scheduler, step loop and executor, controlled over a socket."""

from __future__ import annotations

import asyncio
import logging
import signal
import threading
import time
from collections.abc import Callable
from pathlib import Path

import zmq

from cbatch.core.request.errors import FieldError
from cbatch.core.request.request import Request
from cbatch.engine.core import COMPILING_TICK_S, EngineCore, StepOutput
from cbatch.kv_events.wire import encode_changes
from cbatch.process.connection import Death
from cbatch.process.grammar_queue import GrammarQueue
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
from cbatch.system.heap import freeze_heap, trim_heap
from cbatch.system.memory_limits import MEMORY_REMEDY, memory_problem

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
        """Send a snapshot if a live page is open."""
        monitor = self._monitor
        if monitor is not None:
            begin_s = time.thread_time()
            steps, num_steps = monitor.take_steps()
            stats = self._core.metrics()
            self._send(Snapshot(monitor.rows(), steps, num_steps, monitor.blocks(), stats))
            monitor.on_sent(time.monotonic(), time.thread_time() - begin_s)

    def _kv_events(self) -> bytes:
        """Return the encoded KV events since the last call; empty without events."""
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
    """Run an engine until it is stopped."""
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
        """Release the dead process's resources, and return how it ended."""
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
