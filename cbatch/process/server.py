"""The engine process: scheduler, step loop and executor, controlled over a socket."""

from __future__ import annotations

import asyncio
import atexit
import logging
import multiprocessing
import os
import signal
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import zmq
from numpy.typing import NDArray

from cbatch.core.request.errors import FieldError
from cbatch.core.request.output import Ending
from cbatch.core.request.request import FinishReason, Request
from cbatch.core.scheduler.scheduler import Scheduler
from cbatch.core.scheduler.sequence import Commit
from cbatch.engine.engine import COMPILING_TICK_S
from cbatch.engine.loop import StepLoop
from cbatch.grammars import Grammars
from cbatch.kv_events.wire import encode_changes
from cbatch.process.connection import Death
from cbatch.process.grammar_queue import GrammarQueue
from cbatch.process.in_flight import InFlightJournal
from cbatch.process.messages import (
    Add,
    Cancel,
    Command,
    EngineMetrics,
    Event,
    Finish,
    Heartbeat,
    Ready,
    Snapshot,
    StartFailed,
    Stepped,
    StepTimes,
    Watch,
    decode_command,
    encode,
)
from cbatch.process.monitor import Monitor
from cbatch.system.heap import freeze_heap, give_back_free_memory

HEARTBEAT_S = 0.5  # interval of an idle engine's heartbeats.
MAX_COMMANDS = 64  # read between two steps, since reading takes time.
GRAMMAR_TICK_S = 0.005  # how often an idle engine checks for compiled grammars.
_LINGER_MS = 2000  # time to send the last messages
_logger = logging.getLogger("cbatch")


class EngineParts(NamedTuple):
    """The parts of an engine, built in its process."""

    scheduler: Scheduler
    loop: StepLoop
    drafters: tuple[str, ...] = ()
    info: dict[str, Any] = {}
    close: Callable[[], None] | None = None  # called after the last step
    grammars: Grammars | None = None  # None: structured outputs are not supported
    # Sets the counter, int64 [1], that the executor advances with every part of a step.
    report_progress: Callable[[NDArray[np.int64]], None] | None = None


Factory = Callable[[], EngineParts]  # picklable, since it is called in the new process


class EngineServer:
    """Handles commands between steps, and sends a message for every step."""

    def __init__(
        self, parts: EngineParts, socket: zmq.Socket[bytes], journal: InFlightJournal
    ) -> None:
        self._parts = parts
        self._scheduler, self._loop = parts.scheduler, parts.loop
        self._socket = socket
        self._journal = journal
        self._rejected: list[Ending] = []
        self._grammars = GrammarQueue(parts.grammars, journal.write_compiling)
        self._step_s = 0.0
        self._freed_memory = True  # since the last step
        self._monitor: Monitor | None = None  # None: no live page is open
        self._loop.on_in_flight = journal.write
        if parts.report_progress is not None:
            parts.report_progress(journal.signs[1:])

    def run(self) -> None:
        """Run until a stop command."""
        config, parts = self._scheduler.config, self._parts
        self._send(Ready(config, parts.drafters, parts.info, parts.grammars is not None))
        while self.iterate():
            pass

    def iterate(self) -> bool:
        """Handle pending commands, then run a step if needed. Return False after a stop command."""
        if not self._handle_commands():
            return False
        if self.busy:
            self._step()
        else:
            self._send_without_step([])  # KV events, if a cancelled request left blocks
        return True

    @property
    def busy(self) -> bool:
        return bool(self._scheduler.has_work or self._scheduler.num_in_flight or self._rejected)

    def _handle_commands(self) -> bool:
        """Handle pending commands; if idle, wait for one. Return False after a stop command."""
        if not self.busy:
            timeout_s = COMPILING_TICK_S if self._loop.late.pending else HEARTBEAT_S
            timeout_s = GRAMMAR_TICK_S if self._grammars.waiting else timeout_s
            if not self._socket.poll(int(timeout_s * 1000)) and not self._grammars.waiting:
                self._send(Heartbeat(self._stats()))
                self._send_snapshot()
                if not self._freed_memory:
                    give_back_free_memory()
                self._freed_memory = True
        for _ in range(MAX_COMMANDS):
            if not self._socket.poll(0):
                break
            *names, content = self._socket.recv_multipart()
            if names:
                self._journal.begin_reading(names[0])
            continues = self._execute(decode_command(content))
            self._journal.end_reading()
            if not continues:
                return False
        for request, output, problem in self._grammars.take_ready():
            if problem is None:
                self._add(request, output)
            else:
                self._reject(request, problem)
        self._loop.admit_waiting()
        return True

    def _execute(self, command: Command) -> bool:
        now_s = time.monotonic()
        match command:
            case Add():
                for request, output in command.requests():
                    if request.params.structured_outputs is None:
                        self._add(request, output)
                    else:
                        self._grammars.enter(request, output)
            case Cancel(request_id):
                self._grammars.leave(request_id)
                self._loop.waiting.pop(request_id, None)
                self._scheduler.cancel(request_id, now_s)
            case Finish(request_id, keep_tokens):
                self._grammars.leave(request_id)
                self._loop.waiting.pop(request_id, None)
                self._scheduler.finish(request_id, keep_tokens, now_s)
            case Watch(enabled):
                self._monitor = Monitor(self._scheduler) if enabled else None
                self._send_snapshot()  # at once, as an idle engine's next heartbeat may be far
            case _:
                return False
        return True

    def _add(self, request: Request, output: tuple[int, ...]) -> None:
        try:
            self._loop.add(request, output)
        except FieldError as error:
            self._reject(request, error)

    def _reject(self, request: Request, error: BaseException) -> None:
        self._rejected.append(Ending(request.request_id, FinishReason.ERROR, str(error)))

    def _step(self) -> None:
        start_s = time.monotonic()
        self._freed_memory = False
        commit = self._loop.step()
        ended = (*(commit.finished if commit else ()), *self._scheduler.take_finished())
        endings = [Ending(end.request_id, end.reason, end.message) for end in ended]
        endings += self._rejected
        self._rejected = []
        for ending in endings:
            self._grammars.leave(ending.request_id)
        if commit is not None:
            total_s = time.monotonic() - start_s
            self._step_s += total_s
            self._send_step(commit, endings, total_s)
            if self._monitor is not None and self._monitor.due(start_s + total_s):
                self._send_snapshot()
        elif not self._send_without_step(endings) and self._scheduler.has_work:
            raise RuntimeError("the scheduler has requests that it cannot plan")

    def _send_without_step(self, endings: list[Ending]) -> bool:
        """Send endings and KV events. Return whether there were any."""
        kv_events = self._kv_events()
        if endings or kv_events:
            self._send(Stepped((), (), tuple(endings), (), None, self._stats(), kv_events))
        return bool(endings or kv_events)

    def _send_step(self, commit: Commit, endings: list[Ending], total_s: float) -> None:
        plan, result = self._loop.last_plan, self._loop.last_result
        assert plan is not None and result is not None
        if self._monitor is not None:
            self._monitor.note(plan, result, commit)
        self._send(
            Stepped(
                admitted=tuple(a.request_id for a in plan.deltas.new_sequences),
                rows=tuple(commit.updates()),
                endings=tuple(endings),
                logprobs=commit.logprobs,
                times=StepTimes(result.draft_s, result.target_s, total_s),
                stats=self._stats(),
                kv_events=self._kv_events(),
            )
        )

    def _send_snapshot(self) -> None:
        """Send a snapshot if a live page is open."""
        monitor = self._monitor
        if monitor is not None:
            begin_s = time.thread_time()
            steps, num_steps = monitor.take_steps()
            self._send(Snapshot(monitor.rows(), steps, num_steps, monitor.blocks(), self._stats()))
            monitor.on_sent(time.monotonic(), time.thread_time() - begin_s)

    def _kv_events(self) -> bytes:
        """Return the encoded KV events since the last call; empty without events."""
        changes = self._scheduler.take_cache_changes()
        size = self._scheduler.config.block_size_tokens
        return encode_changes(changes, time.time(), size) if changes else b""

    def _stats(self) -> EngineMetrics:
        scheduler, pool = self._scheduler, self._scheduler.state.pool
        return EngineMetrics(
            num_running=scheduler.num_running,
            num_waiting=scheduler.num_waiting,
            num_blocks=pool.num_blocks,
            free_blocks=pool.num_free,
            cached_blocks=pool.num_cached,
            remaining_prompt_tokens=scheduler.remaining_prompt_tokens,
            prompt_token_s=scheduler.prompt_token_s,
            step_s=self._step_s,
            plan_s=self._loop.plan_s,
            commit_s=self._loop.commit_s,
            totals=scheduler.stats,
            outlook=scheduler.state.policy.outlook,
            compiling=self._loop.late.pending,
        )

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
    """Run an engine until it is stopped. This is the main function of its process."""
    # A terminal or service manager signals the whole group; the server decides when to stop.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    threading.Thread(target=_die_with_parent, name="cbatch-parent", daemon=True).start()
    socket = connect(endpoint)
    try:
        parts = _build(factory, socket)
        if parts is not None:
            freeze_heap()
            try:
                EngineServer(parts, socket, InFlightJournal(journal_path)).run()
            finally:
                if parts.close is not None:
                    parts.close()
    finally:
        socket.close()
        zmq.Context.instance().term()


def _build(factory: Factory, socket: zmq.Socket[bytes]) -> EngineParts | None:
    """Build the engine. After a failure, send its reason and return None."""
    try:
        return factory()
    except FieldError as error:
        socket.send(encode(StartFailed(error.problem, error.field, error.remedy)))
    except Exception as error:
        # The message of a ValueError is complete; other errors may need their traceback.
        level = logging.INFO if isinstance(error, ValueError) else logging.ERROR
        _logger.log(level, "the engine did not start", exc_info=True)
        socket.send(encode(StartFailed(str(error) or repr(error))))
    return None


def _die_with_parent() -> None:
    parent = multiprocessing.parent_process()
    assert parent is not None
    parent.join()
    os._exit(1)  # at once, even within a step


class EngineProcess:
    """A process that runs `run_engine`, controlled from an event loop."""

    def __init__(self, factory: Factory, endpoint: str, journal_path: Path) -> None:
        context = multiprocessing.get_context("spawn")  # a fork would copy locked locks
        self._process = context.Process(
            target=run_engine, args=(factory, endpoint, journal_path), name="cbatch-engine"
        )
        self._process.start()
        atexit.register(self._process.kill)
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
        atexit.unregister(self._process.kill)
        status = self._process.exitcode
        self._process.close()
        if status is None or status >= 0:
            return Death(f"ended with status {status}")
        number = signal.Signals(-status)
        return Death(f"was killed by {number.name}", from_outside=number is signal.SIGKILL)

    def _on_death(self) -> None:
        asyncio.get_running_loop().remove_reader(self._process.sentinel)
        if not self.dead.done():
            self.dead.set_result(None)
