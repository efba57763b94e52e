"""The engine seen from the process that owns its clients: requests, their transcripts, restarts.

A transcript is a request, its seed and its tokens so far. When the engine process dies another one
is started, and every open request goes on from its transcript: its client sees a pause.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import logging
import shutil
import tempfile
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Protocol

from msgspec import structs

from cbatch.core.errors import FieldError
from cbatch.core.plan import TokenLogprobs
from cbatch.core.request import FinishReason, Request
from cbatch.engine.evidence import Evidence
from cbatch.engine.link import EngineLink, Launch
from cbatch.engine.wire import (
    Add,
    Cancel,
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
    Stop,
    Watch,
)

# Deaths in a row without one committed token: it is the engine, not a request. Those that come from
# outside say nothing about either; after them it is started again for as long as it takes.
MAX_BARREN_DEATHS = 8
_FIRST_PAUSE_S, _LONGEST_PAUSE_S = 0.1, 5.0  # before an engine that died so is started again
_STOP_S = 5.0
_logger = logging.getLogger("cbatch")


class EngineStartError(ValueError):
    """The engine could not be started; says why."""


class Listener(Protocol):
    """Whoever waits for a request. Called on the event loop. Nothing follows an ending, or a cancel
    or finish by its owner."""

    def on_admitted(self, ago_s: float) -> None:
        """It has left the queue, so long ago: a step is told of when it is over. Once, whatever
        happens to the engine later."""

    def on_logprobs(self, entry: TokenLogprobs) -> None:
        """Of the prompt, or of the tokens that come next."""

    def on_step(self, row: Row, ending: Ending | None) -> None:
        """New tokens, and the end if it came with them."""

    def on_end(self, ending: Ending) -> None: ...

    def on_lost(self, message: str) -> None:
        """The engine is gone for good."""


class _Transcript:
    def __init__(self, request: Request, listener: Listener) -> None:
        self.request = request
        self.listener = listener
        self.tokens: list[int] = []
        self.wire_id: str | None = None  # its name in the running engine, if it is there
        self.admitted = False


class EngineClient:
    """Not thread-safe: everything happens on one event loop."""

    def __init__(
        self, launch: Launch, *, start_timeout_s: float = 1800.0, hang_timeout_s: float = 120.0
    ) -> None:
        """An engine that is silent for `hang_timeout_s` is taken to hang in a step; loading the
        model may take `start_timeout_s`."""
        self._launch = launch
        self._start_timeout_s, self._hang_timeout_s = start_timeout_s, hang_timeout_s
        self._open: dict[str, _Transcript] = {}  # by request id, in order of arrival
        self._by_wire_id: dict[str, _Transcript] = {}
        self._wire_ids = map(str, itertools.count())
        self._evidence = Evidence()
        self._trial: str | None = None  # the request that runs alone
        self._link: EngineLink | None = None
        self._task: asyncio.Task[None] | None = None
        self._started: asyncio.Future[Ready]
        self._stopping = asyncio.Event()
        self._barren_deaths, self._pause_s = 0, 0.0
        self.engine: Ready | None = None  # what it said when it was ready
        self.stats: EngineStats | None = None  # its last word
        self.num_starts = 0
        self.num_tokens = 0  # that came for requests that were open, from all engines together
        self.down: str | None = None  # why it is gone for good
        self.on_step: Callable[[Stepped], None] | None = None  # for metrics
        self._on_sight: Callable[[Sight], None] | None = None  # None: nobody watches

    @property
    def up(self) -> bool:
        """Whether an engine runs steps at this moment. While one restarts, requests wait."""
        return self._link is not None and self._link.ready

    @property
    def pid(self) -> int | None:
        """The engine process."""
        return None if self._link is None else self._link.pid

    @property
    def num_open(self) -> int:
        return len(self._open)

    async def start(self) -> Ready:
        """Waits until the model is loaded. Raises `FieldError` or `EngineStartError`."""
        self._started = asyncio.get_running_loop().create_future()
        self._task = asyncio.create_task(self._supervise())
        return await self._started

    async def stop(self) -> None:
        """Ends the process. What is open is dropped: its owner has dealt with it."""
        self._stopping.set()
        if self._task is None:
            return
        if self._link is not None and self._link.ready:
            self._link.send(Stop())
            await asyncio.wait({self._task}, timeout=_STOP_S)
        if self._link is not None:
            self._link.kill()
        await self._task

    # ---- requests -----------------------------------------------------------------------------

    def add(self, request: Request, listener: Listener) -> None:
        """Its id is the caller's, and free. The caller has asked `engine.config.check_request`."""
        if self.down is not None:
            listener.on_lost(self.down)
            return
        transcript = _Transcript(request, listener)
        self._open[request.request_id] = transcript
        if self.up and self._trial is None:
            self._dispatch(transcript)

    def cancel(self, request_id: str) -> None:
        """Forgets it; its slot is free before the next step."""
        self._close(request_id, Cancel)

    def finish(self, request_id: str, keep_tokens: int) -> None:
        """The same, where the text ended: its output is its first `keep_tokens` tokens."""
        self._close(request_id, lambda wire_id: Finish(wire_id, keep_tokens))

    def _close(self, request_id: str, command: Callable[[str], Cancel | Finish]) -> None:
        transcript = self._open.get(request_id)
        if transcript is None:
            return
        wire_id = transcript.wire_id
        self._forget(transcript)
        if wire_id is not None and self._link is not None:
            self._link.send(command(wire_id))
        self._go_on_trying()

    # ---- watching -----------------------------------------------------------------------------

    def watch(self, on_sight: Callable[[Sight], None] | None) -> None:
        """From now on, also after a restart, `on_sight` is told of the engine several times a
        second; None: no longer."""
        self._on_sight = on_sight
        if self._link is not None and self._link.ready:
            self._link.send(Watch(on_sight is not None))

    def request_id(self, wire_id: str) -> str | None:
        """Who runs under that name in the running engine; None: it has ended."""
        transcript = self._by_wire_id.get(wire_id)
        return None if transcript is None else transcript.request.request_id

    # ---- what the engine is given to do -------------------------------------------------------

    def _dispatch(self, transcript: _Transcript) -> None:
        assert self._link is not None
        wire_id = next(self._wire_ids)
        transcript.wire_id = wire_id
        self._by_wire_id[wire_id] = transcript
        named = structs.replace(transcript.request, request_id=wire_id)
        self._link.send(Add(named, tuple(transcript.tokens)))

    def _withdraw(self, transcript: _Transcript) -> None:
        """It will go on later, from its transcript."""
        assert self._link is not None and transcript.wire_id is not None
        del self._by_wire_id[transcript.wire_id]
        self._link.send(Cancel(transcript.wire_id))
        transcript.wire_id = None

    def _distribute(self) -> None:
        """Gives the engine everything that is open; a suspect, if there is one, alone."""
        self._trial = next(iter(self._evidence.suspects), None)
        for request_id, transcript in self._open.items():
            wanted = self._trial in (None, request_id)
            if not wanted and transcript.wire_id is not None:
                self._withdraw(transcript)
        for request_id, transcript in self._open.items():
            if self._trial in (None, request_id) and transcript.wire_id is None:
                self._dispatch(transcript)

    def _go_on_trying(self) -> None:
        """The next suspect, or everyone, once the one that runs alone is cleared."""
        if self._trial is not None and self.up and self._trial not in self._evidence.suspects:
            self._distribute()

    def _forget(self, transcript: _Transcript) -> None:
        request_id = transcript.request.request_id
        del self._open[request_id]
        self._evidence.clear(request_id)
        if transcript.wire_id is not None:
            del self._by_wire_id[transcript.wire_id]
            transcript.wire_id = None

    # ---- what the engine says -----------------------------------------------------------------

    def _take(self, link: EngineLink, event: Event) -> None:
        match event:
            case Ready():
                link.ready = True
                self.engine = event
                if not self._started.done():
                    self._started.set_result(event)
                if self._on_sight is not None:
                    link.send(Watch(True))
                self._distribute()
            case StartFailed():
                link.failure = event
            case Heartbeat(stats):
                self.stats = stats
            case Sight(stats=stats):
                self.stats = stats
                if self._on_sight is not None:
                    self._on_sight(event)
            case Stepped():
                self._take_step(link, event)
                self._go_on_trying()

    def _take_step(self, link: EngineLink, step: Stepped) -> None:
        self.stats = step.stats
        if self.on_step is not None:
            self.on_step(step)
        step_s = 0.0 if step.times is None else step.times.total_s
        for wire_id in step.admitted:
            transcript = self._by_wire_id.get(wire_id)
            if transcript is not None and not transcript.admitted:
                transcript.admitted = True
                transcript.listener.on_admitted(step_s)
        for wire_id, entry in step.logprobs:
            if wire_id in self._by_wire_id:
                self._by_wire_id[wire_id].listener.on_logprobs(entry)
        endings = {ending.request_id: ending for ending in step.endings}
        for row in step.rows:
            transcript = self._by_wire_id.get(row.request_id)
            if transcript is None:
                continue  # its owner ended it while the step ran
            link.committed = True
            transcript.tokens += row.tokens
            self.num_tokens += len(row.tokens)
            self._evidence.clear(transcript.request.request_id)
            ending = endings.pop(row.request_id, None)
            if ending is not None:
                self._forget(transcript)
            transcript.listener.on_step(row, ending)
        for wire_id, ending in endings.items():
            transcript = self._by_wire_id.get(wire_id)
            if transcript is not None:
                self._forget(transcript)
                transcript.listener.on_end(ending)

    # ---- life and death -----------------------------------------------------------------------

    async def _supervise(self) -> None:
        folder = Path(tempfile.mkdtemp(prefix="cbatch-"))
        try:
            while not self._stopping.is_set() and self.down is None:
                await self._live_once(folder)
        except Exception as error:
            _logger.exception("the engine's keeper failed")
            self._give_up(f"the engine's keeper failed: {error!r}")
        finally:
            if not self._started.done():
                self._started.set_exception(EngineStartError(self.down or "the engine was stopped"))
            shutil.rmtree(folder, ignore_errors=True)

    async def _live_once(self, folder: Path) -> None:
        """An engine from its start to its death, and what follows from that."""
        link = self._link = EngineLink(self._launch, folder, self.num_starts)
        self.num_starts += 1
        try:
            await link.serve(
                partial(self._take, link),
                start_timeout_s=self._start_timeout_s,
                hang_timeout_s=self._hang_timeout_s,
            )
        finally:
            self._link = None
            link.kill()  # dead already, but for a failure of ours
            in_flight = link.recorder.read()
            death = link.close()
        if self._stopping.is_set():
            return
        if not self._started.done():
            self.down = f"the engine {death.cause}"
            self._started.set_exception(_start_error(link.failure, death.cause))
            return
        told = {"cause": death.cause, "open_requests": self.num_open, "starts": self.num_starts}
        message = "the engine %s; %d open requests are resumed"
        _logger.warning(message, death.cause, self.num_open, extra={"fields": told})
        self._judge(in_flight, death.cause)
        if link.committed:
            self._barren_deaths, self._pause_s = 0, 0.0
            return
        self._barren_deaths += not death.from_outside
        if self._barren_deaths >= MAX_BARREN_DEATHS:
            count = self._barren_deaths
            self._give_up(f"the engine died {count} times without a token; it {death.cause}")
            return
        self._pause_s = min(2 * self._pause_s + _FIRST_PAUSE_S, _LONGEST_PAUSE_S)
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(self._stopping.wait(), self._pause_s)

    def _judge(self, in_flight: list[str], cause: str) -> None:
        """Nothing runs any more. The guilty one, if the evidence has found it, ends."""
        known = (self._by_wire_id.get(wire_id) for wire_id in in_flight)
        names = [transcript.request.request_id for transcript in known if transcript is not None]
        for transcript in self._by_wire_id.values():
            transcript.wire_id = None
        self._by_wire_id.clear()
        self._trial = None
        guilty = self._evidence.on_death(names, alone=len(in_flight) == 1)
        if guilty is not None:
            transcript = self._open[guilty]
            self._forget(transcript)
            message = f"the engine dies whenever it runs this request; the last one {cause}"
            transcript.listener.on_end(Ending(guilty, FinishReason.ERROR, message))

    def _give_up(self, message: str) -> None:
        self.down = message
        while self._open:  # whoever is told may cancel others
            transcript = next(iter(self._open.values()))
            self._forget(transcript)
            transcript.listener.on_lost(message)


def _start_error(failure: StartFailed | None, cause: str) -> ValueError:
    if failure is not None and failure.field is not None and failure.remedy is not None:
        return FieldError(failure.field, failure.message, failure.remedy)
    return EngineStartError(f"the engine {cause}" if failure is None else failure.message)
