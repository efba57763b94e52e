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
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from pathlib import Path
from typing import TypeVar

from cbatch.core.request.output import Ending
from cbatch.core.request.request import FinishReason, Request, SamplingParams
from cbatch.process.connection import EngineLink, EngineStartError, Launch, start_error
from cbatch.process.crash_suspects import CrashSuspects
from cbatch.process.messages import (
    Add,
    Cancel,
    EngineMetrics,
    Event,
    Finish,
    Heartbeat,
    NewChoice,
    Ready,
    Snapshot,
    StartFailed,
    Stepped,
    Stop,
    Watch,
)
from cbatch.process.transcript import Listener, Transcript

# After so many deaths in a row without one committed token a request of our own tells whether it is
# the engine, or those that are open; where nobody was in flight, it is. Deaths that come from
# outside say nothing about either; after them it is started again for as long as it takes.
MAX_BARREN_DEATHS = 8
_CANARY = Request(
    request_id="", prompt=(0,), params=SamplingParams(max_tokens=1, temperature=0), seed=0
)
_FIRST_PAUSE_S, _LONGEST_PAUSE_S = 0.1, 5.0  # before an engine that died so is started again
_STOP_S = 5.0
_logger = logging.getLogger("cbatch")
AnyEvent = TypeVar("AnyEvent", bound=Event)


class EngineClient:
    """Not thread-safe: everything happens on one event loop."""

    def __init__(
        self, launch: Launch, *, start_timeout_s: float = 1800.0, hang_timeout_s: float = 120.0
    ) -> None:
        """An engine that is silent for `hang_timeout_s` is taken to hang in a step; loading the
        model may take `start_timeout_s`."""
        self._launch = launch
        self._start_timeout_s, self._hang_timeout_s = start_timeout_s, hang_timeout_s
        self._open: dict[str, Transcript] = {}  # by request id, in order of arrival
        self._by_wire_id: dict[str, Transcript] = {}
        self._wire_ids = map(str, itertools.count())
        self._suspects = CrashSuspects()
        self._trial: str | None = None  # the call that runs alone
        self._canary: str | None = None  # what the running engine calls the request of our own
        self._link: EngineLink | None = None
        self._task: asyncio.Task[None] | None = None
        self._started: asyncio.Future[Ready]
        self._stopping = asyncio.Event()
        self._barren_deaths, self._unexplained_deaths, self._pause_s = 0, 0, 0.0
        self.engine: Ready | None = None  # what it said when it was ready
        self.stats: EngineMetrics | None = None  # its last word
        self.num_starts = 0
        self.num_tokens = 0  # that came for requests that were open, from all engines together
        self.down: str | None = None  # why it is gone for good
        self.on_step: Callable[[Stepped], None] | None = None  # for those who look on
        self.on_death: Callable[[], None] | None = None  # of each engine
        self._on_snapshot: Callable[[Snapshot], None] | None = None  # None: nobody watches

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

    def add(self, choices: Sequence[tuple[Request, Listener]]) -> None:
        """Those of one call, alike but for id and choice; they are sent, suspected and tried
        together. The ids are the caller's, and free, and it has asked
        `engine.config.check_request`. Raises what the transport does not take; then nothing was
        added."""
        if self.down is not None:
            for _, listener in choices:
                listener.on_lost(self.down)
            return
        call_id = choices[0][0].request_id
        added = [Transcript(request, listener, call_id) for request, listener in choices]
        self._open |= {each.request.request_id: each for each in added}
        if self.up and self._trial is None and self._canary is None:
            try:
                self._dispatch(added)
            except BaseException:
                for each in added:
                    self.cancel(each.request.request_id)
                raise

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

    def watch(self, on_snapshot: Callable[[Snapshot], None] | None) -> None:
        """From now on, also after a restart, `on_snapshot` is told of the engine several times a
        second; None: no longer."""
        self._on_snapshot = on_snapshot
        if self._link is not None and self._link.ready:
            self._link.send(Watch(on_snapshot is not None))

    def request_id(self, wire_id: str) -> str | None:
        """Who runs under that name in the running engine; None: it has ended."""
        transcript = self._by_wire_id.get(wire_id)
        return None if transcript is None else transcript.request.request_id

    # ---- what the engine is given to do -------------------------------------------------------

    def _dispatch(self, transcripts: Sequence[Transcript]) -> None:
        """Of one call. If it raises they are to be cancelled: they may have been sent."""
        assert self._link is not None
        named = {next(self._wire_ids): transcript for transcript in transcripts}
        choices = (
            NewChoice(wire_id, each.request.choice, tuple(each.tokens))
            for wire_id, each in named.items()
        )
        self._by_wire_id |= named
        for wire_id, transcript in named.items():
            transcript.wire_id = wire_id
        self._link.send(Add(transcripts[0].request, tuple(choices)))

    def _withdraw(self, transcript: Transcript) -> None:
        """It will go on later, from its transcript."""
        assert self._link is not None and transcript.wire_id is not None
        del self._by_wire_id[transcript.wire_id]
        wire_id, transcript.wire_id = transcript.wire_id, None
        self._link.send(Cancel(wire_id))

    def _distribute(self) -> None:
        """Gives the engine everything that is open; a suspect, if there is one, alone."""
        if self._canary is not None:
            return
        self._trial = next(iter(self._suspects.calls), None)
        for transcript in self._open.values():
            if self._trial not in (None, transcript.call_id) and transcript.wire_id is not None:
                self._withdraw(transcript)
        for call in self._waiting_calls():
            if self._trial in (None, call[0].call_id):
                try:
                    self._dispatch(call)
                except Exception as error:
                    self._fail(call, error)

    def _waiting_calls(self) -> Iterable[list[Transcript]]:
        for _, call in itertools.groupby(list(self._open.values()), lambda each: each.call_id):
            # Looked at as late as this: one that failed before may have let the others go on.
            held = (each for each in call if each.request.request_id in self._open)
            if waiting := [each for each in held if each.wire_id is None]:
                yield waiting

    def _go_on_trying(self) -> None:
        """The next suspect, or everyone, once the one that runs alone is cleared."""
        if self._trial is not None and self.up and self._trial not in self._suspects.calls:
            self._distribute()

    def _forget(self, transcript: Transcript) -> None:
        request_id = transcript.request.request_id
        del self._open[request_id]
        self._suspects.clear(request_id)
        if transcript.wire_id is not None:
            del self._by_wire_id[transcript.wire_id]
            transcript.wire_id = None

    def _tell(self, transcript: Transcript, tell: Callable[[], None]) -> None:
        """A word to its listener."""
        try:
            tell()
        except Exception as error:
            self._fail([transcript], error)

    def _fail(self, transcripts: Iterable[Transcript], error: Exception) -> None:
        """They end here, and nothing else does."""
        for transcript in transcripts:
            request_id = transcript.request.request_id
            _logger.error("request %s failed", request_id, exc_info=error)
            try:
                self.cancel(request_id)
                transcript.listener.on_failed(error)
            except Exception:
                _logger.exception("request %s was given up", request_id)

    # ---- what the engine says -----------------------------------------------------------------

    def _take(self, link: EngineLink, event: Event) -> None:
        match event:
            case Ready():
                link.ready = True
                self.engine = event
                if not self._started.done():
                    self._started.set_result(event)
                if self._on_snapshot is not None:
                    link.send(Watch(True))
                if self._barren_deaths >= MAX_BARREN_DEATHS:
                    self._canary = next(self._wire_ids)
                    link.send(Add(_CANARY, (NewChoice(self._canary),)))
                self._distribute()
            case StartFailed():
                link.failure = event
            case Heartbeat(stats):
                self._note(stats)
            case Snapshot(stats=stats):
                self._note(stats)
                if self._on_snapshot is not None:
                    _watched(self._on_snapshot, event)
            case Stepped():
                self._take_step(link, event)
                self._hear_canary(event)
                self._go_on_trying()

    def _note(self, stats: EngineMetrics) -> None:
        before = () if self.stats is None else self.stats.compiling
        if stats.compiling != before:
            _logger.info("still compiling: %s", "; ".join(stats.compiling) or "nothing")
        self.stats = stats

    def _take_step(self, link: EngineLink, step: Stepped) -> None:
        self._note(step.stats)
        if self.on_step is not None:
            _watched(self.on_step, step)
        step_s = 0.0 if step.times is None else step.times.total_s
        for wire_id in step.admitted:
            transcript = self._by_wire_id.get(wire_id)
            if transcript is not None and not transcript.admitted:
                transcript.admitted = True
                self._tell(transcript, partial(transcript.listener.on_admitted, step_s))
        for wire_id, entry in step.logprobs:
            transcript = self._by_wire_id.get(wire_id)
            if transcript is not None:
                self._tell(transcript, partial(transcript.listener.on_logprobs, entry))
        endings = {ending.request_id: ending for ending in step.endings}
        for row in step.rows:
            transcript = self._by_wire_id.get(row.request_id)
            if transcript is None:
                continue  # its owner ended it while the step ran
            link.committed = True
            transcript.tokens += row.tokens
            self.num_tokens += len(row.tokens)
            self._suspects.clear(transcript.request.request_id)
            ending = endings.pop(row.request_id, None)
            if ending is not None:
                self._forget(transcript)
            self._tell(transcript, partial(transcript.listener.on_step, row, ending))
        for wire_id, ending in endings.items():
            transcript = self._by_wire_id.get(wire_id)
            if transcript is not None:
                self._forget(transcript)
                self._tell(transcript, partial(transcript.listener.on_end, ending))

    def _hear_canary(self, step: Stepped) -> None:
        """The engine serves: it is not what it died of."""
        if self._canary is not None and any(row.request_id == self._canary for row in step.rows):
            self._canary, self._barren_deaths = None, 0
            self._distribute()

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
            in_flight = link.journal.read()
            death = link.close()
            if self.on_death is not None:
                self.on_death()
        if self._stopping.is_set():
            return
        if not self._started.done():
            self.down = f"the engine {death.cause}"
            self._started.set_exception(start_error(link.failure, death.cause))
            return
        told = {"cause": death.cause, "open_requests": self.num_open, "starts": self.num_starts}
        message = "the engine %s; %d open requests are resumed"
        _logger.warning(message, death.cause, self.num_open, extra={"fields": told})
        self._judge(in_flight, death.cause)
        if link.committed:
            self._barren_deaths, self._unexplained_deaths, self._pause_s = 0, 0, 0.0
            return
        if not death.from_outside:
            self._barren_deaths += 1
            self._unexplained_deaths += not in_flight
        if max(self._barren_deaths - 1, self._unexplained_deaths) >= MAX_BARREN_DEATHS:
            count = self._barren_deaths
            self._give_up(f"the engine died {count} times without a token; it {death.cause}")
            return
        self._pause_s = min(2 * self._pause_s + _FIRST_PAUSE_S, _LONGEST_PAUSE_S)
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(self._stopping.wait(), self._pause_s)

    def _judge(self, in_flight: list[str], cause: str) -> None:
        """Nothing runs any more. The culprit, if it is found, ends."""
        known = (self._by_wire_id.get(wire_id) for wire_id in in_flight)
        calls = {each.request.request_id: each.call_id for each in known if each is not None}
        for transcript in self._by_wire_id.values():
            transcript.wire_id = None
        self._by_wire_id.clear()
        self._trial = self._canary = None
        alone = len(calls) == len(in_flight) and len(set(calls.values())) == 1
        culprit = self._suspects.on_death(calls, alone=alone)
        message = f"the engine dies whenever it runs this request; the last one {cause}"
        for transcript in list(self._open.values()):
            request_id = transcript.request.request_id
            if transcript.call_id == culprit and request_id in self._open:  # nobody cancelled it
                self._forget(transcript)
                ending = Ending(request_id, FinishReason.ERROR, message)
                self._tell(transcript, partial(transcript.listener.on_end, ending))

    def _give_up(self, message: str) -> None:
        self.down = message
        while self._open:  # whoever is told may cancel others
            transcript = next(iter(self._open.values()))
            self._forget(transcript)
            self._tell(transcript, partial(transcript.listener.on_lost, message))


def _watched(watcher: Callable[[AnyEvent], None], event: AnyEvent) -> None:
    """Those who only look on must not stop what they look at."""
    try:
        watcher(event)
    except Exception:
        _logger.exception("an engine's watcher failed")
