"""What the live page is fed with: one stream of events, and the engine looked at only while
somebody watches.

Nothing of anybody's text is told. Each watcher is sent the latest; what it cannot take in time is
dropped, never kept.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from importlib.metadata import version

import msgspec

from cbatch.process.messages import BlockMap, EngineMetrics, SeenStep, Snapshot
from cbatch.server.protocol.errors import OverloadedError
from cbatch.server.protocol.model import ServedModel
from cbatch.server.serving.answer import encode
from cbatch.server.serving.metrics import Histogram, Metrics
from cbatch.server.serving.service import EngineService

MOST_WATCHERS = 32
MOST_UNREAD = 2  # frames kept for a watcher
QUIET_S = 0.5  # a frame is sent at least so often, whatever the engine does
_CALL_CHARS = slice(6)
Mean = tuple[float, int]  # a sum so far, in seconds, and of how many
# slot, call, prompt tokens, known tokens, tokens to compute, estimated acceptance
Slot = tuple[int, str | None, int, int, int, float | None]


class Hello(msgspec.Struct, frozen=True, kw_only=True):
    """What does not change, sent first."""

    model: str
    version: str
    max_model_tokens: int
    chats: bool
    max_slots: int
    block_size_tokens: int
    policy: str
    max_lookahead: int
    drafters: tuple[str, ...]


class LiveView(msgspec.Struct, frozen=True):
    """Into the engine. Structs of the wire are arrays of their fields; `slots` are those in use."""

    slots: list[Slot]
    steps: tuple[SeenStep, ...]
    num_steps: int
    blocks: BlockMap
    stats: EngineMetrics


class Frame(msgspec.Struct, frozen=True, kw_only=True):
    """`look` is missing where the engine has had nothing to tell. Totals are the server's own and
    survive the engine, unlike those in `look.stats`."""

    at_s: float
    state: str
    queued_requests: int
    generation_tokens: int
    first_token: Mean
    between_tokens: Mean
    restarts: int
    look: LiveView | None = None


class LiveFeed:
    def __init__(self, service: EngineService, model: ServedModel, metrics: Metrics) -> None:
        self._service, self._model, self._metrics = service, model, metrics
        self._watchers: dict[int, asyncio.Queue[bytes]] = {}
        self._num_watches = 0
        self._latest: Snapshot | None = None  # while somebody watches

    async def events(self) -> AsyncIterator[bytes]:
        """Until the server has stopped, or the watcher leaves. Ask for the first item, which is
        empty, before the answer begins: `OverloadedError` where too many watch already."""
        if len(self._watchers) >= MOST_WATCHERS:
            raise OverloadedError(f"{MOST_WATCHERS} pages are open; close one", 10)
        unread: asyncio.Queue[bytes] = asyncio.Queue()
        self._num_watches += 1
        number = self._num_watches
        self._watchers[number] = unread
        if len(self._watchers) == 1:
            self._service.watch(self._on_snapshot)
        try:
            yield b""
            yield b"event: hello\ndata: " + encode(self._hello()) + b"\n\n"
            yield self._frame(self._latest)
            while not self._service.over:
                try:
                    frame = await asyncio.wait_for(unread.get(), QUIET_S)
                except TimeoutError:
                    frame = self._frame(None)
                yield frame
        finally:
            del self._watchers[number]
            if not self._watchers:
                self._service.watch(None)
                self._latest = None

    def _on_snapshot(self, snapshot: Snapshot) -> None:
        self._latest = snapshot
        frame = self._frame(snapshot)
        for unread in self._watchers.values():
            if unread.qsize() >= MOST_UNREAD:
                unread.get_nowait()
            unread.put_nowait(frame)

    def _hello(self) -> Hello:
        config, model = self._service.config, self._model
        return Hello(
            model=model.name,
            version=version("cbatch"),
            max_model_tokens=model.max_model_tokens,
            chats=model.chats,
            max_slots=config.max_slots,
            block_size_tokens=config.block_size_tokens,
            policy=config.lookahead.policy if config.default_chain else "off",
            max_lookahead=config.lookahead.k,
            drafters=config.default_chain,
        )

    def _frame(self, snapshot: Snapshot | None) -> bytes:
        service, metrics = self._service, self._metrics
        frame = Frame(
            at_s=metrics.clock(),
            state=service.state,
            queued_requests=service.queue.num_requests,
            generation_tokens=metrics.generation_tokens,
            first_token=_mean(metrics.first_token_s),
            between_tokens=_mean(metrics.between_s),
            restarts=service.num_restarts,
            look=None if snapshot is None else self._look(snapshot),
        )
        return b"data: " + encode(frame) + b"\n\n"

    def _look(self, snapshot: Snapshot) -> LiveView:
        slots = [
            (row.slot, self._call(row.request_id), row.prompt_tokens, row.tokens, row.todo, belief)
            for row in snapshot.rows
            for belief in [None if row.belief is None else round(row.belief, 3)]
        ]
        return LiveView(slots, snapshot.steps, snapshot.num_steps, snapshot.blocks, snapshot.stats)

    def _call(self, wire_id: str) -> str | None:
        """A few characters of the call's id, which the server made up: enough for a page to find
        its own call, too few to name another's."""
        request_id = self._service.request_id(wire_id)
        return None if request_id is None else request_id.partition("-")[2][_CALL_CHARS]


def _mean(histogram: Histogram) -> Mean:
    return (histogram.sum, histogram.count)
