"""Nothing that a process loads before it serves is gone through again and again while it does."""

from __future__ import annotations

import asyncio
import gc
import weakref
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import uvicorn

from cbatch.engine.heap import freeze_heap
from cbatch.server import run
from cbatch.server.run import DrainingServer
from tests.engine.factories import FrozenFactory
from tests.engine.watching import running


@pytest.fixture(autouse=True)
def thawed() -> Iterator[None]:
    gc.unfreeze()
    yield
    gc.unfreeze()


class Ring:
    """Garbage that only a full collection finds."""

    def __init__(self) -> None:
        self.itself = self


def test_a_collection_passes_over_what_was_there_and_finds_what_came_later() -> None:
    held: list[Any] = [[] for _ in range(20_000)]
    before = weakref.ref(Ring())
    seen = len(gc.get_objects())
    freeze_heap()
    assert before() is None, "garbage was kept for good"
    assert len(gc.get_objects()) < seen / 10 and len(held) == 20_000
    later = weakref.ref(Ring())
    assert later() is not None
    gc.collect()
    assert later() is None


def frozen_at_start() -> int:
    """Objects that a server's process has set aside by the time it tells that it listens."""
    told: list[int] = []

    async def app(scope: Any, receive: Any, send: Any) -> None:
        raise AssertionError("nobody calls")

    async def scene() -> None:
        config = uvicorn.Config(app, port=0, log_level="warning", lifespan="off")
        service: Any = SimpleNamespace(down=None)

        def on_listening(_: int) -> None:
            told.append(gc.get_freeze_count())
            server.should_exit = True

        server = DrainingServer(config, service, grace_s=0, on_listening=on_listening)
        await server.serve()

    asyncio.run(scene())
    (count,) = told
    return count


def test_a_server_freezes_before_it_serves(monkeypatch: pytest.MonkeyPatch) -> None:
    assert frozen_at_start() > 10_000
    gc.unfreeze()
    monkeypatch.setattr(run, "freeze_heap", lambda: None)
    assert frozen_at_start() == 0


def test_an_engine_freezes_before_it_serves(tmp_path: Path) -> None:
    async def scene() -> None:
        async with running(FrozenFactory(str(tmp_path / "count"))):
            pass

    asyncio.run(scene())
    assert int((tmp_path / "count").read_text()) > 10_000
