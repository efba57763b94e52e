"""The engine client: sends requests to the engine process, keeps transcripts, restarts the engine.

A transcript is a request, its seed and its tokens so far. If the engine process dies, a new process
is started and every open sequence resumes from its transcript. HTTP clients only see a pause.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import logging
import tempfile
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

from cbatch.core.request.output import OutputRow
from cbatch.core.request.request import FinishReason, Request, SamplingParams
from cbatch.engine.core import EngineMetrics
from cbatch.process.connection import EngineLink, EngineStartError, Launch, start_error
from cbatch.process.crash_suspects import CrashSuspects, OpenSequence
from cbatch.process.messages import (
    Add,
    Cancel,
    Event,
    Finish,
    Ready,
    Snapshot,
    StartFailed,
    Stepped,
    Stop,
    Watch,
)
from cbatch.system.private import temporary_place

# Consecutive deaths of the engine without a committed token, after which the client runs a test
# request of its own. If the engine dies again, or no request was in flight at any death, it is
# given up. A death by an outside signal does not count: after it the engine is always restarted.
MAX_DEATHS_WITHOUT_TOKEN = 8
_CANARY = Request(
    request_id="", prompt=(0,), params=SamplingParams(max_tokens=1, temperature=0), seed=0
)
_FIRST_PAUSE_S, MAX_PAUSE_S = 0.1, 5.0  # pauses before restarts; doubled each time
_STOP_S = 5.0  # time for the engine to stop by itself
_logger = logging.getLogger("cbatch")
AnyEvent = TypeVar("AnyEvent", bound=Event)


class EngineClient:
    """The engine's client, for a single event loop. Not thread-safe."""

    def __init__(
        self, launch: Launch, *, start_timeout_s: float = 1800.0, hang_timeout_s: float = 120.0
    ) -> None:
        """Create a client that kills an engine which is silent for `hang_timeout_s`, or, while the
        engine starts and loads its model, for `start_timeout_s`."""
        self._launch = launch
        self._start_timeout_s, self._hang_timeout_s = start_timeout_s, hang_timeout_s
        self._open: dict[OpenSequence, None] = {}  # in order of arrival
        self._by_wire_id: dict[str, OpenSequence] = {}
        self._wire_ids = map(str, itertools.count())
        self._suspects = CrashSuspects()
        self._trial: OpenSequence | None = None  # the suspected group that runs alone
        self._canary: str | None = None  # wire id of the client's own test request
        self._link: EngineLink | None = None
        self._task: asyncio.Task[None] | None = None
        self._started: asyncio.Future[Ready]
        self._stopping = asyncio.Event()
        self._deaths_without_token = self._deaths_without_request = 0
        self._pause_s = 0.0  # before the next restart
        self.engine: Ready | None = None  # message of the latest engine
        self.stats: EngineMetrics | None = None  # the latest metrics
        self.num_starts = 0
        self.num_tokens = 0  # tokens received for open requests, from all engines
        self.down: str | None = None  # the reason why the engine is gone for good.
        self.on_step: Callable[[Stepped], None] | None = None  # an observer of steps.
        self.on_death: Callable[[], None] | None = None  # called after each engine's death.
        self._on_snapshot: Callable[[Snapshot], None] | None = None  # None: no live page

    @property
    def up(self) -> bool:
        return self._link is not None and self._link.ready

    @property
    def pid(self) -> int | None:
        return None if self._link is None else self._link.pid

    @property
    def num_open(self) -> int:
        return len(self._open)

    @property
    def num_restarts(self) -> int:
        return max(0, self.num_starts - 1)

    async def start(self) -> Ready:
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

    def add(self, sequences: Sequence[OpenSequence]) -> None:
        """Add the choices of one prompt, whose requests differ in the choice only. They are sent,
        suspected and run alone as one group. The requests must have been checked by
        `engine.config.check_request`. Raises what the transport raises; then nothing was added."""
        if self.down is not None:
            for sequence in sequences:
                sequence.on_lost(self.down)
            return
        for sequence in sequences:
            sequence.group, sequence.tokens = sequences[0], []
            self._open[sequence] = None
        if self.up and self._trial is None and self._canary is None:
            try:
                self._dispatch(sequences)
            except BaseException:
                for sequence in sequences:
                    self.cancel(sequence)
                raise

    def cancel(self, sequence: OpenSequence) -> None:
        self._close(sequence, Cancel)

    def finish(self, sequence: OpenSequence, keep_tokens: int) -> None:
        self._close(sequence, lambda wire_id: Finish(wire_id, keep_tokens))

    def _close(self, sequence: OpenSequence, command: Callable[[str], Cancel | Finish]) -> None:
        if sequence not in self._open:
            return
        wire_id = sequence.wire_id
        self._forget(sequence)
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
        """Return the public id of the request with this wire id, or None if it has ended."""
        sequence = self._by_wire_id.get(wire_id)
        return None if sequence is None else sequence.request.request_id

    # ---- commands to the engine ---------------------------------------------------------------

    def _dispatch(self, sequences: Sequence[OpenSequence]) -> None:
        assert self._link is not None
        choices = {}
        for sequence in sequences:
            wire_id = sequence.wire_id = next(self._wire_ids)
            self._by_wire_id[wire_id] = sequence
            choices[wire_id] = (sequence.request.choice, tuple(sequence.tokens))
        self._link.send(Add(sequences[0].request, choices))

    def _withdraw(self, sequence: OpenSequence) -> None:
        assert self._link is not None and sequence.wire_id is not None
        del self._by_wire_id[sequence.wire_id]
        wire_id, sequence.wire_id = sequence.wire_id, None
        self._link.send(Cancel(wire_id))

    def _dispatch_open(self) -> None:
        """Send all open sequences, or only the first suspected group if there is one."""
        if self._canary is not None:
            return
        self._trial = next(iter(self._suspects.groups), None)
        for sequence in self._open:
            if self._trial not in (None, sequence.group) and sequence.wire_id is not None:
                self._withdraw(sequence)
        for group in self._pending_groups():
            if self._trial in (None, group[0].group):
                try:
                    self._dispatch(group)
                except Exception as error:
                    self._fail(group, error)

    def _pending_groups(self) -> Iterable[list[OpenSequence]]:
        """Yield the open sequences that the engine does not have, by group."""
        for _, group in itertools.groupby(list(self._open), lambda sequence: id(sequence.group)):
            # Tested lazily, since a failed dispatch may have closed or sent other sequences.
            if pending := [s for s in group if s in self._open and s.wire_id is None]:
                yield pending

    def _continue_trials(self) -> None:
        """Try the next group, or send all sequences, if the group on trial was cleared."""
        if self._trial is not None and self.up and self._trial not in self._suspects.groups:
            self._dispatch_open()

    def _forget(self, sequence: OpenSequence) -> None:
        del self._open[sequence]
        if sequence in self._suspects.strikes:
            self._suspects.clear(sequence)
        if sequence.wire_id is not None:
            del self._by_wire_id[sequence.wire_id]
            sequence.wire_id = None

    def _notify(self, sequence: OpenSequence, handle: Callable[..., None], *event: Any) -> None:
        try:
            handle(*event)
        except Exception as error:
            self._fail([sequence], error)

    def _fail(self, sequences: Iterable[OpenSequence], error: Exception) -> None:
        for sequence in sequences:
            request_id = sequence.request.request_id
            _logger.error("request %s failed", request_id, exc_info=error)
            try:
                self.cancel(sequence)
                sequence.on_failed(error)
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
                if self._deaths_without_token >= MAX_DEATHS_WITHOUT_TOKEN:
                    self._canary = next(self._wire_ids)
                    link.send(Add(_CANARY, {self._canary: (0, ())}))
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
        sequences = self._by_wire_id
        for wire_id, cached_tokens in output.admitted.items():
            sequence = sequences.get(wire_id)
            if sequence is not None and not sequence.admitted:
                sequence.admitted = True
                self._notify(sequence, sequence.on_admitted, step_s, cached_tokens)
        for wire_id, entry in output.logprobs:
            sequence = sequences.get(wire_id)
            if sequence is not None:
                self._notify(sequence, sequence.on_logprobs, entry)
        for row in output.rows:
            sequence = sequences.get(row.request_id)
            if sequence is None:
                continue  # cancelled or finished while the step ran
            if row.tokens:
                link.committed = True
                sequence.tokens += row.tokens
                self.num_tokens += len(row.tokens)
                if sequence in self._suspects.strikes:
                    self._suspects.clear(sequence)
            if row.finish_reason is not None:
                self._forget(sequence)
            self._notify(sequence, sequence.on_step, row)

    def _check_canary(self, step: Stepped) -> None:
        """End the test if the canary has a token, which shows that the engine works."""
        rows = step.output.rows
        canary = self._canary
        if canary is not None and any(row.tokens and row.request_id == canary for row in rows):
            self._canary, self._deaths_without_token = None, 0
            self._dispatch_open()

    # ---- starts and deaths --------------------------------------------------------------------

    async def _supervise(self) -> None:
        try:
            place = temporary_place()
            with tempfile.TemporaryDirectory("", "cbatch-", place) as folder:
                while not self._stopping.is_set() and self.down is None:
                    await self._run_engine_once(Path(folder))
        except OSError as error:  # such as a full disk
            self._give_up(f"the engine cannot be started ({error}); see TMPDIR and ulimit")
        except Exception as error:
            _logger.exception("the supervisor of the engine failed")
            self._give_up(f"the supervisor of the engine failed: {error!r}")
        finally:
            if not self._started.done():
                self._started.set_exception(EngineStartError(self.down or "the engine was stopped"))

    async def _run_engine_once(self, folder: Path) -> None:
        """Run one engine from start to death, then allow a restart or give up."""
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
        fields = {"cause": death.cause, "open_requests": self.num_open, "starts": self.num_starts}
        message = "the engine %s; %d open requests are resumed"
        _logger.warning(message, death.cause, self.num_open, extra={"fields": fields})
        self._find_culprit(in_flight, death.cause)
        if link.committed:
            self._deaths_without_token = self._deaths_without_request = 0
            self._pause_s = 0.0
            return
        if not death.from_outside:
            self._deaths_without_token += 1
            self._deaths_without_request += not in_flight
        count = self._deaths_without_token
        if max(count - 1, self._deaths_without_request) >= MAX_DEATHS_WITHOUT_TOKEN:
            self._give_up(f"the engine died {count} times without a token; it {death.cause}")
            return
        self._pause_s = min(2 * self._pause_s + _FIRST_PAUSE_S, MAX_PAUSE_S)
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(self._stopping.wait(), self._pause_s)

    def _find_culprit(self, in_flight: list[str], cause: str) -> None:
        """Reset the state of requests after a death, and end the group that caused it, if known."""
        suspects = [s for s in map(self._by_wire_id.get, in_flight) if s is not None]
        for sequence in self._by_wire_id.values():
            sequence.wire_id = None
        self._by_wire_id.clear()
        self._trial = self._canary = None
        alone = len(suspects) == len(in_flight) and len({s.group for s in suspects}) == 1
        culprit = self._suspects.on_death(suspects, alone=alone)
        message = f"the engine dies whenever it runs this request; it last {cause}"
        for sequence in list(self._open):
            if sequence.group is culprit and sequence in self._open:  # not cancelled yet
                self._forget(sequence)
                row = OutputRow("", finish_reason=FinishReason.ERROR, message=message)
                self._notify(sequence, sequence.on_step, row)

    def _give_up(self, message: str) -> None:
        self.down = message
        while self._open:  # a sequence may cancel others
            sequence = next(iter(self._open))
            self._forget(sequence)
            self._notify(sequence, sequence.on_lost, message)


def _call_watcher(watcher: Callable[[AnyEvent], None], event: AnyEvent) -> None:
    """Call an observer. Its exceptions are logged, so that they do not stop the engine."""
    try:
        watcher(event)
    except Exception:
        _logger.exception("the watcher of the engine process failed")
