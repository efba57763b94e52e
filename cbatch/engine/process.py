"""The engine in a process of its own: scheduler, step loop and executor behind one socket."""

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

import zmq

from cbatch.core.errors import FieldError
from cbatch.core.request import FinishReason
from cbatch.core.scheduler import Scheduler
from cbatch.core.sequence import Commit
from cbatch.engine.flight import FlightRecorder
from cbatch.engine.heap import freeze_heap
from cbatch.engine.lens import Lens
from cbatch.engine.link import Death
from cbatch.engine.loop import StepLoop
from cbatch.engine.wire import (
    Add,
    Cancel,
    Command,
    Ending,
    EngineStats,
    Event,
    Finish,
    Heartbeat,
    Ready,
    Row,
    Sight,
    StartFailed,
    Stepped,
    StepTimes,
    Watch,
    decode_command,
    encode,
)

HEARTBEAT_S = 0.5  # of an idle engine
_LINGER_MS = 2000  # last words are sent for as long as that
_logger = logging.getLogger("cbatch")


class EngineParts(NamedTuple):
    """What the composition root puts together, in the engine's process."""

    scheduler: Scheduler
    loop: StepLoop
    drafters: tuple[str, ...] = ()
    info: dict[str, Any] = {}
    close: Callable[[], None] | None = None  # called once no step runs any more
    follows_grammars: bool = False


Factory = Callable[[], EngineParts]  # picklable: it is called in the new process


class EngineServer:
    """Obeys commands between steps, and tells of every step in one message."""

    def __init__(
        self, parts: EngineParts, socket: zmq.Socket[bytes], recorder: FlightRecorder
    ) -> None:
        self._parts = parts
        self._scheduler, self._loop = parts.scheduler, parts.loop
        self._socket = socket
        self._refused: list[Ending] = []
        self._step_s = 0.0
        self._lens: Lens | None = None  # None: nobody watches
        self._loop.on_flight = recorder.write

    def run(self) -> None:
        """Until it is told to stop."""
        config, parts = self._scheduler.config, self._parts
        self._send(Ready(config, parts.drafters, parts.info, parts.follows_grammars))
        while self._obey():
            if self._busy:
                self._step()

    @property
    def _busy(self) -> bool:
        return bool(self._scheduler.has_work or self._scheduler.num_in_flight or self._refused)

    def _obey(self) -> bool:
        """Carries out the commands that wait; with nothing to do, waits for one. False: stop."""
        timeout_ms = 0 if self._busy else int(HEARTBEAT_S * 1000)
        if not self._socket.poll(timeout_ms) and not self._busy:
            self._send(Heartbeat(self._stats()))
            self._show()
        while self._socket.poll(0):
            if not self._carry_out(decode_command(self._socket.recv())):
                return False
        return True

    def _carry_out(self, command: Command) -> bool:
        now_s = time.monotonic()
        match command:
            case Add(request, output):
                try:
                    self._scheduler.add(request, now_s, output)
                except FieldError as error:
                    ending = Ending(request.request_id, FinishReason.ERROR, str(error))
                    self._refused.append(ending)
            case Cancel(request_id):
                self._scheduler.cancel(request_id, now_s)
            case Finish(request_id, keep_tokens):
                self._scheduler.finish(request_id, keep_tokens, now_s)
            case Watch(wanted):
                self._lens = Lens(self._scheduler) if wanted else None
                self._show()  # an idle engine would leave them without for a heartbeat
            case _:
                return False
        return True

    def _step(self) -> None:
        start_s = time.monotonic()
        commit = self._loop.step()
        ended = self._scheduler.take_finished()
        endings = [Ending(end.request_id, end.reason, end.message) for end in ended]
        endings += self._refused
        self._refused = []
        if commit is not None:
            total_s = time.monotonic() - start_s
            self._step_s += total_s
            self._tell(commit, endings, total_s)
            if self._lens is not None and self._lens.due(start_s + total_s):
                self._show()
        elif endings:
            self._send(Stepped((), (), tuple(endings), (), None, self._stats()))
        elif self._scheduler.has_work:
            raise RuntimeError("the scheduler has requests that it cannot plan")

    def _tell(self, commit: Commit, endings: list[Ending], total_s: float) -> None:
        plan, result = self._loop.last_plan, self._loop.last_result
        assert plan is not None and result is not None
        if self._lens is not None:
            self._lens.note(plan, result, commit)
        rows = [
            Row(request_id, tokens.tolist(), drafted, accepted)
            for request_id, tokens, drafted, accepted in commit.updates()
        ]
        endings = [Ending(e.request_id, e.reason, e.message) for e in commit.finished] + endings
        self._send(
            Stepped(
                admitted=tuple(a.request_id for a in plan.deltas.admitted),
                rows=tuple(rows),
                endings=tuple(endings),
                logprobs=commit.logprobs,
                times=StepTimes(result.draft_s, result.target_s, total_s),
                stats=self._stats(),
            )
        )

    def _show(self) -> None:
        """To those who watch."""
        lens = self._lens
        if lens is not None:
            begin_s = time.thread_time()
            steps, num_steps = lens.take_steps()
            self._send(Sight(lens.rows(), steps, num_steps, lens.blocks(), self._stats()))
            lens.looked(time.monotonic(), time.thread_time() - begin_s)

    def _stats(self) -> EngineStats:
        scheduler, pool = self._scheduler, self._scheduler.state.pool
        controller = scheduler.state.controller
        return EngineStats(
            num_running=scheduler.num_running,
            num_waiting=scheduler.num_waiting,
            num_blocks=pool.num_blocks,
            free_blocks=pool.num_free,
            cached_blocks=pool.num_cached,
            step_s=self._step_s,
            plan_s=self._loop.plan_s,
            commit_s=self._loop.commit_s,
            totals=scheduler.stats,
            outlook=None if controller is None else controller.outlook,
        )

    def _send(self, event: Event) -> None:
        self._socket.send(encode(event))


def connect(endpoint: str) -> zmq.Socket[bytes]:
    """The engine's end of the socket. A reader that falls behind holds the engine up once some
    thousand steps wait for it."""
    socket: zmq.Socket[bytes] = zmq.Context.instance().socket(zmq.PAIR)
    socket.linger = _LINGER_MS
    socket.connect(endpoint)
    return socket


def run_engine(factory: Factory, endpoint: str, flight_path: Path) -> None:
    """The life of an engine process."""
    # The whole group gets these from a terminal or a service manager; its owner decides.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    threading.Thread(target=_die_with_parent, name="cbatch-parent", daemon=True).start()
    socket = connect(endpoint)
    try:
        parts = _make(factory, socket)
        if parts is not None:
            freeze_heap()
            try:
                EngineServer(parts, socket, FlightRecorder(flight_path)).run()
            finally:
                if parts.close is not None:
                    parts.close()
    finally:
        socket.close()
        zmq.Context.instance().term()


def _make(factory: Factory, socket: zmq.Socket[bytes]) -> EngineParts | None:
    """None: it failed, and the owner has been told why."""
    try:
        return factory()
    except FieldError as error:
        socket.send(encode(StartFailed(error.problem, error.field, error.remedy)))
    except Exception as error:
        # An error of ours says all in its message; any other may need its traceback.
        level = logging.INFO if isinstance(error, ValueError) else logging.ERROR
        _logger.log(level, "the engine did not start", exc_info=True)
        socket.send(encode(StartFailed(str(error) or repr(error))))
    return None


def _die_with_parent() -> None:
    parent = multiprocessing.parent_process()
    assert parent is not None
    parent.join()
    os._exit(1)  # at once, whatever the step is doing


class EngineProcess:
    """A process that runs `run_engine`, for the event loop of its owner."""

    def __init__(self, factory: Factory, endpoint: str, flight_path: Path) -> None:
        context = multiprocessing.get_context("spawn")  # forked threads and locks are nobody's
        self._process = context.Process(
            target=run_engine, args=(factory, endpoint, flight_path), name="cbatch-engine"
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
        """Once it is dead."""
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
