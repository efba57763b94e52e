"""The engine client: sends requests to the engine process, keeps transcripts, restarts the engine.

A transcript is a request, its seed and its tokens so far. If the engine process dies, a new one is
started and every open request resumes from its transcript. Its client only sees a pause.
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
from cbatch.engine.core import EngineMetrics
from cbatch.process.connection import EngineLink, EngineStartError, Launch, start_error
from cbatch.process.crash_suspects import CrashSuspects
from cbatch.process.messages import (
    Add,
    Cancel,
    Event,
    Finish,
    NewChoice,
    Ready,
    Snapshot,
    StartFailed,
    Stepped,
    Stop,
    Watch,
)
from cbatch.process.transcript import Listener, Transcript

# After this many deaths in a row without a committed token the client runs a request of its own. If
# that fails too, or no request was in flight, the engine is at fault, and not an open request.
# Deaths by outside signals do not count: the engine is restarted for as long as needed.
MAX_BARREN_DEATHS = 8
_CANARY = Request(
    request_id="", prompt=(0,), params=SamplingParams(max_tokens=1, temperature=0), seed=0
)
_FIRST_PAUSE_S, LONGEST_PAUSE_S = 0.1, 5.0  # before restarts; doubled after each barren death.
_STOP_S = 5.0  # how long the engine may take to stop by itself
_logger = logging.getLogger("cbatch")
AnyEvent = TypeVar("AnyEvent", bound=Event)


class EngineClient:
    """The engine's client, for a single event loop. Not thread-safe."""

    def __init__(
        self, launch: Launch, *, start_timeout_s: float = 1800.0, hang_timeout_s: float = 120.0
    ) -> None:
        """An engine that is silent for `hang_timeout_s` is killed; before it is ready, for
        `start_timeout_s`, since loading a model takes time."""
        self._launch = launch
        self._start_timeout_s, self._hang_timeout_s = start_timeout_s, hang_timeout_s
        self._open: dict[str, Transcript] = {}  # by request id, in order of arrival
        self._by_wire_id: dict[str, Transcript] = {}
        self._wire_ids = map(str, itertools.count())
        self._suspects = CrashSuspects()
        self._trial: str | None = None  # the suspected group that runs alone
        self._canary: str | None = None  # wire id of the client's own test request
        self._link: EngineLink | None = None
        self._task: asyncio.Task[None] | None = None
        self._started: asyncio.Future[Ready]
        self._stopping = asyncio.Event()
        self._barren_deaths, self._unexplained_deaths, self._pause_s = 0, 0, 0.0
        self.engine: Ready | None = None  # the engine's message when it was ready.
        self.stats: EngineMetrics | None = None  # the latest.
        self.num_starts = 0
        self.num_tokens = 0  # received for open requests, from all engines.
        self.down: str | None = None  # the reason why the engine is gone for good.
        self.on_step: Callable[[Stepped], None] | None = None  # an observer of steps.
        self.on_death: Callable[[], None] | None = None  # called after each engine's death.
        self._on_snapshot: Callable[[Snapshot], None] | None = None  # None: no page is open

    @property
    def up(self) -> bool:
        """True if an engine runs at this moment. Requests wait while it restarts."""
        return self._link is not None and self._link.ready

    @property
    def pid(self) -> int | None:
        """Process id of the engine."""
        return None if self._link is None else self._link.pid

    @property
    def num_open(self) -> int:
        return len(self._open)

    async def start(self) -> Ready:
        """Start the engine and wait for its model. Raises `FieldError` or `EngineStartError`."""
        self._started = asyncio.get_running_loop().create_future()
        self._task = asyncio.create_task(self._supervise())
        return await self._started

    async def stop(self) -> None:
        """End the process. Requests that are still open are dropped silently."""
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
        """Add the choices of one prompt, whose requests differ in id and choice only. They are
        sent, suspected and tried as one group. Ids must be unused, and checked by
        `engine.config.check_request`. Raises what the transport raises; then nothing was
        added."""
        if self.down is not None:
            for _, listener in choices:
                listener.on_lost(self.down)
            return
        group_id = choices[0][0].request_id
        transcripts = [Transcript(request, listener, group_id) for request, listener in choices]
        self._open |= {t.request.request_id: t for t in transcripts}
        if self.up and self._trial is None and self._canary is None:
            try:
                self._dispatch(transcripts)
            except BaseException:
                for transcript in transcripts:
                    self.cancel(transcript.request.request_id)
                raise

    def cancel(self, request_id: str) -> None:
        """Drop a request. Its slot is free before the next step."""
        self._close(request_id, Cancel)

    def finish(self, request_id: str, keep_tokens: int) -> None:
        """End a request whose text is complete: its output is its first `keep_tokens` tokens."""
        self._close(request_id, lambda wire_id: Finish(wire_id, keep_tokens))

    def _close(self, request_id: str, command: Callable[[str], Cancel | Finish]) -> None:
        transcript = self._open.get(request_id)
        if transcript is None:
            return
        wire_id = transcript.wire_id
        self._forget(transcript)
        if wire_id is not None and self._link is not None:
            self._link.send(command(wire_id))
        self._continue_trials()

    # ---- watching -----------------------------------------------------------------------------

    def watch(self, on_snapshot: Callable[[Snapshot], None] | None) -> None:
        """Call `on_snapshot` several times a second, also after a restart; None stops it."""
        self._on_snapshot = on_snapshot
        if self._link is not None and self._link.ready:
            self._link.send(Watch(on_snapshot is not None))

    def request_id(self, wire_id: str) -> str | None:
        """Return the id of the request with this wire id, None if it has ended."""
        transcript = self._by_wire_id.get(wire_id)
        return None if transcript is None else transcript.request.request_id

    # ---- commands to the engine ---------------------------------------------------------------

    def _dispatch(self, transcripts: Sequence[Transcript]) -> None:
        """Send one group's requests. After an exception, cancel them: some may have been sent."""
        assert self._link is not None
        named = {next(self._wire_ids): transcript for transcript in transcripts}
        choices = (
            NewChoice(wire_id, transcript.request.choice, tuple(transcript.tokens))
            for wire_id, transcript in named.items()
        )
        self._by_wire_id |= named
        for wire_id, transcript in named.items():
            transcript.wire_id = wire_id
        self._link.send(Add(transcripts[0].request, tuple(choices)))

    def _withdraw(self, transcript: Transcript) -> None:
        """Cancel a request in the engine, to resume it later from its transcript."""
        assert self._link is not None and transcript.wire_id is not None
        del self._by_wire_id[transcript.wire_id]
        wire_id, transcript.wire_id = transcript.wire_id, None
        self._link.send(Cancel(wire_id))

    def _dispatch_open(self) -> None:
        """Send all open requests, or only the first suspected group if there is one."""
        if self._canary is not None:
            return
        self._trial = next(iter(self._suspects.groups), None)
        for transcript in self._open.values():
            if self._trial not in (None, transcript.group_id) and transcript.wire_id is not None:
                self._withdraw(transcript)
        for group in self._pending_groups():
            if self._trial in (None, group[0].group_id):
                try:
                    self._dispatch(group)
                except Exception as error:
                    self._fail(group, error)

    def _pending_groups(self) -> Iterable[list[Transcript]]:
        """Yield the open requests that the engine does not have, by group."""
        for _, group in itertools.groupby(list(self._open.values()), lambda t: t.group_id):
            # Tested lazily, since a failed dispatch may have closed or sent other requests.
            still_open = (t for t in group if t.request.request_id in self._open)
            if pending := [t for t in still_open if t.wire_id is None]:
                yield pending

    def _continue_trials(self) -> None:
        """Try the next group, or send all requests, if the group on trial was cleared."""
        if self._trial is not None and self.up and self._trial not in self._suspects.groups:
            self._dispatch_open()

    def _forget(self, transcript: Transcript) -> None:
        request_id = transcript.request.request_id
        del self._open[request_id]
        self._suspects.clear(request_id)
        if transcript.wire_id is not None:
            del self._by_wire_id[transcript.wire_id]
            transcript.wire_id = None

    def _notify(self, transcript: Transcript, call: Callable[[], None]) -> None:
        """Call a request's listener. If it raises, only that request fails."""
        try:
            call()
        except Exception as error:
            self._fail([transcript], error)

    def _fail(self, transcripts: Iterable[Transcript], error: Exception) -> None:
        """End these requests with an error of this process."""
        for transcript in transcripts:
            request_id = transcript.request.request_id
            _logger.error("request %s failed", request_id, exc_info=error)
            try:
                self.cancel(request_id)
                transcript.listener.on_failed(error)
            except Exception:
                _logger.exception("request %s was abandoned", request_id)

    # ---- events from the engine ---------------------------------------------------------------

    def _on_event(self, link: EngineLink, event: Event) -> None:
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
                self._dispatch_open()
            case StartFailed():
                link.failure = event
            case Snapshot(stats=stats):
                self._update_stats(stats)
                if self._on_snapshot is not None:
                    _call_watcher(self._on_snapshot, event)
            case Stepped():
                self._on_step_event(link, event)
                self._check_canary(event)
                self._continue_trials()

    def _update_stats(self, stats: EngineMetrics) -> None:
        before = () if self.stats is None else self.stats.compiling
        if stats.compiling != before:
            _logger.info("still compiling: %s", "; ".join(stats.compiling) or "nothing")
        self.stats = stats

    def _on_step_event(self, link: EngineLink, step: Stepped) -> None:
        self._update_stats(step.stats)
        if self.on_step is not None:
            _call_watcher(self.on_step, step)
        output = step.output
        step_s = 0.0 if output.times is None else output.times.total_s
        for wire_id in output.admitted:
            transcript = self._by_wire_id.get(wire_id)
            if transcript is not None and not transcript.admitted:
                transcript.admitted = True
                self._notify(transcript, partial(transcript.listener.on_admitted, step_s))
        for wire_id, entry in output.logprobs:
            transcript = self._by_wire_id.get(wire_id)
            if transcript is not None:
                self._notify(transcript, partial(transcript.listener.on_logprobs, entry))
        endings = {ending.request_id: ending for ending in output.endings}
        for row in output.rows:
            transcript = self._by_wire_id.get(row.request_id)
            if transcript is None:
                continue  # cancelled or finished while the step ran
            link.committed = True
            transcript.tokens += row.tokens
            self.num_tokens += len(row.tokens)
            self._suspects.clear(transcript.request.request_id)
            ending = endings.pop(row.request_id, None)
            if ending is not None:
                self._forget(transcript)
            self._notify(transcript, partial(transcript.listener.on_step, row, ending))
        for wire_id, ending in endings.items():
            transcript = self._by_wire_id.get(wire_id)
            if transcript is not None:
                self._forget(transcript)
                self._notify(transcript, partial(transcript.listener.on_end, ending))

    def _check_canary(self, step: Stepped) -> None:
        """End the test after a token of the canary: the engine itself works."""
        rows = step.output.rows
        if self._canary is not None and any(row.request_id == self._canary for row in rows):
            self._canary, self._barren_deaths = None, 0
            self._dispatch_open()

    # ---- starts and deaths --------------------------------------------------------------------

    async def _supervise(self) -> None:
        folder = Path(tempfile.mkdtemp(prefix="cbatch-"))
        try:
            while not self._stopping.is_set() and self.down is None:
                await self._run_engine_once(folder)
        except Exception as error:
            _logger.exception("the supervisor of the engine failed")
            self._give_up(f"the supervisor of the engine failed: {error!r}")
        finally:
            if not self._started.done():
                self._started.set_exception(EngineStartError(self.down or "the engine was stopped"))
            shutil.rmtree(folder, ignore_errors=True)

    async def _run_engine_once(self, folder: Path) -> None:
        """Run one engine from start to death, and decide how to go on."""
        link = self._link = EngineLink(self._launch, folder, self.num_starts)
        self.num_starts += 1
        try:
            await link.serve(
                partial(self._on_event, link),
                start_timeout_s=self._start_timeout_s,
                hang_timeout_s=self._hang_timeout_s,
            )
        finally:
            self._link = None
            link.kill()  # dead already, unless this process failed
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
        fields = {
            "cause": death.cause,
            "open_requests": self.num_open,
            "starts": self.num_starts,
        }
        message = "the engine %s; %d open requests are resumed"
        _logger.warning(message, death.cause, self.num_open, extra={"fields": fields})
        self._blame(in_flight, death.cause)
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
        self._pause_s = min(2 * self._pause_s + _FIRST_PAUSE_S, LONGEST_PAUSE_S)
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(self._stopping.wait(), self._pause_s)

    def _blame(self, in_flight: list[str], cause: str) -> None:
        """Reset the state of requests after a death, and end the group that caused it, if known."""
        transcripts = (self._by_wire_id.get(wire_id) for wire_id in in_flight)
        groups = {t.request.request_id: t.group_id for t in transcripts if t is not None}
        for transcript in self._by_wire_id.values():
            transcript.wire_id = None
        self._by_wire_id.clear()
        self._trial = self._canary = None
        alone = len(groups) == len(in_flight) and len(set(groups.values())) == 1
        culprit = self._suspects.on_death(groups, alone=alone)
        message = f"the engine dies whenever it runs this request; it last {cause}"
        for transcript in list(self._open.values()):
            request_id = transcript.request.request_id
            if transcript.group_id == culprit and request_id in self._open:  # not cancelled yet
                self._forget(transcript)
                ending = Ending(request_id, FinishReason.ERROR, message)
                self._notify(transcript, partial(transcript.listener.on_end, ending))

    def _give_up(self, message: str) -> None:
        self.down = message
        while self._open:  # a listener may cancel other requests
            transcript = next(iter(self._open.values()))
            self._forget(transcript)
            self._notify(transcript, partial(transcript.listener.on_lost, message))


def _call_watcher(watcher: Callable[[AnyEvent], None], event: AnyEvent) -> None:
    """Call an observer. Its exceptions are logged, so that they do not stop the engine."""
    try:
        watcher(event)
    except Exception:
        _logger.exception("the watcher of the engine process failed")
