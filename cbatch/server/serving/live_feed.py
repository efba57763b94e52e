"""The data of the live page, as one stream of events. The engine sends snapshots only while a page
is open.

No event contains text of a prompt or reply. A slow page misses older events; they are not buffered.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator
from importlib.metadata import version

import msgspec
from msgspec import structs

from cbatch.engine.core import EngineMetrics
from cbatch.process.messages import BlockMap, SlotSnapshot, Snapshot, StepSnapshot
from cbatch.server.protocol.errors import OverloadedError
from cbatch.server.protocol.model import ServedModel
from cbatch.server.serving.metrics import Metrics
from cbatch.server.serving.replies import encode
from cbatch.server.serving.request_record import Histogram
from cbatch.server.serving.service import EngineService

MAX_WATCHERS = 32  # open pages
MAX_UNREAD = 2  # events buffered for a page
MAX_EVENT_INTERVAL_S = 0.5
_ID_CHARS = slice(6)  # the characters of a request's id that pages receive
Mean = tuple[float, int]  # sum in seconds, and number of values


class Hello(msgspec.Struct, frozen=True, kw_only=True):
    """Constant data, sent first."""

    model: str
    version: str
    max_model_len: int
    has_chat_template: bool
    max_num_seqs: int
    block_size: int
    policy: str
    max_lookahead: int
    drafters: tuple[str, ...]


class LiveView(msgspec.Struct, frozen=True):
    """A snapshot of the engine. `slots` are the slots in use. Inner structs become arrays."""

    slots: list[SlotSnapshot]
    steps: tuple[StepSnapshot, ...]
    num_steps: int
    blocks: BlockMap
    stats: EngineMetrics


class Frame(msgspec.Struct, frozen=True, kw_only=True):
    """One event. `view` is None if the engine has sent no new snapshot. The server's own counts
    survive restarts of the engine; the counts in `view.stats` do not."""

    at_s: float
    state: str
    queued_requests: int
    generation_tokens: int
    first_token: Mean
    between_tokens: Mean
    restarts: int
    view: LiveView | None = None


class LiveFeed:
    def __init__(self, service: EngineService, model: ServedModel, metrics: Metrics) -> None:
        self._service, self._model, self._metrics = service, model, metrics
        self._watchers: dict[int, asyncio.Queue[bytes]] = {}
        self._num_watches = 0
        self._latest: Snapshot | None = None  # None while no page is open

    async def events(self) -> AsyncIterator[bytes]:
        """Yield events until the server has stopped. The first item is empty; request it before the
        response begins, since it may raise `OverloadedError` if too many pages are open."""
        if len(self._watchers) >= MAX_WATCHERS:
            raise OverloadedError(f"{MAX_WATCHERS} pages are open; close one", 10)
        unread: asyncio.Queue[bytes] = asyncio.Queue()
        self._num_watches += 1
        number = self._num_watches
        self._watchers[number] = unread
        if len(self._watchers) == 1:
            self._service.client.watch(self._on_snapshot)
        try:
            yield b""
            yield b"event: hello\ndata: " + encode(self._hello()) + b"\n\n"
            yield self._frame(self._latest)
            while self._service.num_open or self._state not in ("stopping", "down"):
                try:
                    frame = await asyncio.wait_for(unread.get(), MAX_EVENT_INTERVAL_S)
                except TimeoutError:
                    frame = self._frame(None)
                yield frame
        finally:
            del self._watchers[number]
            if not self._watchers:
                self._service.client.watch(None)
                self._latest = None

    def _on_snapshot(self, snapshot: Snapshot) -> None:
        self._latest = snapshot
        frame = self._frame(snapshot)
        for unread in self._watchers.values():
            if unread.qsize() >= MAX_UNREAD:
                unread.get_nowait()
            unread.put_nowait(frame)

    @property
    def _state(self) -> str:
        if self._service.stopping:
            return "stopping"
        if not self._service.running:
            return "down"
        return "running" if self._service.client.up else "restarting"

    def _hello(self) -> Hello:
        engine, model = self._service.client.engine, self._model
        assert engine is not None
        config = engine.config
        return Hello(
            model=model.name,
            version=version("cbatch"),
            max_model_len=model.max_model_len,
            has_chat_template=model.has_chat_template,
            max_num_seqs=config.max_num_seqs,
            block_size=config.block_size,
            policy=config.lookahead.policy if config.default_chain else "off",
            max_lookahead=config.lookahead.k,
            drafters=config.default_chain,
        )

    def _frame(self, snapshot: Snapshot | None) -> bytes:
        service, metrics = self._service, self._metrics
        frame = Frame(
            at_s=time.monotonic(),
            state=self._state,
            queued_requests=service.queue.num_requests,
            generation_tokens=metrics.generation_tokens,
            first_token=_mean(metrics.first_token_s),
            between_tokens=_mean(metrics.inter_token_s),
            restarts=self._service.client.num_restarts,
            view=None if snapshot is None else self._view(snapshot),
        )
        return b"data: " + encode(frame) + b"\n\n"

    def _view(self, snapshot: Snapshot) -> LiveView:
        slots = [
            structs.replace(row, request_id=self._short_id(row.request_id)) for row in snapshot.rows
        ]
        return LiveView(slots, snapshot.steps, snapshot.num_steps, snapshot.blocks, snapshot.stats)

    def _short_id(self, wire_id: str | None) -> str | None:
        """Return a few characters of the request's id: enough for a page to find its own request,
        but not the full id of another client's request."""
        request_id = self._service.client.request_id(wire_id or "")
        return None if request_id is None else request_id.partition("-")[2][_ID_CHARS]


def _mean(histogram: Histogram) -> Mean:
    return (histogram.sum, histogram.count)
