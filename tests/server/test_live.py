"""The files of the live page and its stream, through real sockets."""

from __future__ import annotations

import asyncio
import json
import operator
import os
import re
import signal
import time
from collections.abc import Iterator
from contextlib import contextmanager
from http.client import HTTPConnection, HTTPResponse
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

import cbatch.server.http
from cbatch.engine.core import EngineMetrics
from cbatch.process import server as process
from cbatch.process.messages import BlockMap, Snapshot
from cbatch.process.monitor import Monitor
from cbatch.server.http.keys import KeyRing
from cbatch.server.http.pages import PAGE_PATHS
from cbatch.server.serving import live_feed as live_module
from cbatch.server.serving.live_feed import MAX_UNREAD, LiveFeed
from cbatch.server.serving.metrics import Metrics
from tests.process.factories import SimFactory
from tests.server.engines import PROMPT, SlowEngine, serving_process
from tests.server.http_client import Client, serving, wait_until
from tests.toy_engine import TOKENIZER, make_engine

FOLDER = Path(cbatch.server.http.__file__).parent / "page"
LONG = {"prompt": PROMPT, "max_tokens": 400, "stream": True, "seed": 3, "ignore_eos": True}
OUTSIDE = re.compile(r"(?:https?:)?//(?!www\.w3\.org/2000/svg)[\w.-]+\.\w+")


@contextmanager
def watching(client: Client, key: str | None = None) -> Iterator[HTTPResponse]:
    connection = HTTPConnection("127.0.0.1", client.port, timeout=30)
    headers = {} if key is None else {"Authorization": f"Bearer {key}"}
    connection.request("GET", "/live", headers=headers)
    try:
        yield connection.getresponse()
    finally:
        connection.close()


def frames(response: HTTPResponse, limit_s: float = 20) -> Iterator[dict[str, Any]]:
    """Yield the frames after the hello."""
    deadline_s = time.monotonic() + limit_s
    while line := response.readline():
        assert time.monotonic() < deadline_s, "it did not happen"
        if line.startswith(b"data: "):
            frame = json.loads(line.removeprefix(b"data: "))
            if "at_s" in frame:
                yield frame


def test_the_page_loads_only_its_own_files() -> None:
    names = {"page.html", "page.css", "page.js", "draw.js", "slots.js"}
    assert {path.name for path in FOLDER.iterdir()} == names
    for path in FOLDER.iterdir():
        text = path.read_text()
        assert not OUTSIDE.search(text), path
        assert not re.search(r"innerHTML|outerHTML|insertAdjacent|document\.write|eval\(", text)
    html = (FOLDER / "page.html").read_text()
    assert not re.search(r"<script>|<style|\sstyle=|\son\w+=", html), "inline: it is forbidden"
    assert OUTSIDE.search("<script src='//cdn.example.org/x.js'>") and OUTSIDE.search("http://a.b")


def test_the_page_reads_the_engine_s_metrics_at_their_places() -> None:
    """Metrics come as an array, in the order of the fields; the page reads the first of them."""
    page = (FOLDER / "page.js").read_text("utf-8")
    (pattern,) = re.findall(r"const \[([^\]]*)\] =\s*frame\.view\.stats", page)
    names = [re.sub(r"[A-Z]", lambda m: f"_{m[0].lower()}", n.strip()) for n in pattern.split(",")]
    fields = EngineMetrics.__struct_fields__
    assert len(names) > 10 and all(map(operator.contains, fields[: len(names)], names))


def test_the_page_needs_no_key_and_its_stream_does() -> None:
    with serving(make_engine(), keys=KeyRing(["secret"])) as client:
        for path in PAGE_PATHS:
            with client.open(None, path) as response:
                assert response.status == 200
                policy = response.getheader("content-security-policy", "")
                assert "default-src 'none'" in policy and "unsafe" not in policy
                kind = response.getheader("content-type", "")
                assert "javascript" in kind if path.endswith(".js") else "text/" in kind
        for key, status in ((None, 401), ("wrong", 401), ("secret", 200)):
            with watching(client, key) as response:
                assert response.status == status


def test_a_stream_is_seen_while_it_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    slow = SlowEngine(monkeypatch, max_model_len=1024, num_blocks=64, block_size=16)
    with serving(slow.engine) as client, watching(client) as response:
        assert response.getheader("content-type", "").startswith("text/event-stream")
        assert response.readline() == b"event: hello\n"
        hello = json.loads(response.readline().removeprefix(b"data: "))
        assert (hello["policy"], hello["max_lookahead"]) == ("fixed", 3)
        assert hello["has_chat_template"] is False
        with client.open(LONG | {"max_tokens": 960}) as stream:
            call = json.loads(stream.readline().removeprefix(b"data: "))["id"]
            drafted = accepted = num_looks = 0
            raw = b""
            for frame in frames(response):
                view = frame.get("view")
                if view is None or not view["slots"]:
                    continue
                raw += json.dumps(frame).encode()
                ((slot, tag, prompt_tokens, tokens, todo, belief),) = view["slots"]
                assert (slot, tag, belief) == (0, call.partition("-")[2][:6], None)
                assert prompt_tokens == len(TOKENIZER.encode(PROMPT)) and tokens > prompt_tokens
                assert todo == 1 and frame["state"] == "running"
                for slots, row_drafted, row_accepted, _ in view["steps"]:
                    assert slots == [0] and row_accepted <= row_drafted
                    drafted, accepted = drafted + row_drafted[0], accepted + row_accepted[0]
                assert sum(view["blocks"][1]) == 64 - view["stats"][3] - view["stats"][4] > 0
                num_looks += 1
                if num_looks == 5:
                    break
            assert 0 < accepted < drafted
            assert frame["generation_tokens"] > 0 and frame["between_tokens"][1] > 0
            assert PROMPT.encode() not in raw and call.encode() not in raw


def test_the_engine_is_queried_only_while_a_client_watches(monkeypatch: pytest.MonkeyPatch) -> None:
    looks, rows = [0], Monitor.rows

    def counted(monitor: Monitor) -> Any:
        looks[0] += 1
        return rows(monitor)

    monkeypatch.setattr(Monitor, "rows", counted)
    slow = SlowEngine(monkeypatch)
    short = LONG | {"stream": False, "max_tokens": 60}
    with serving(slow.engine) as client:
        client.post(short)
        assert looks == [0]
        with watching(client) as first, watching(client):
            next(frames(first))
            client.post(short | {"max_tokens": 120})
            assert looks[0] > 0
            assert looks[0] < slow.engine.scheduler.stats.steps / 2, "called for every step"

        def unseen() -> bool:
            before = looks[0]
            client.post(short)
            return looks[0] == before

        wait_until(unseen)  # once the server knows that they have left


def test_a_new_page_shows_an_idle_engine_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """The second page causes no request to the engine, and a third is too many."""
    monkeypatch.setattr(process, "HEARTBEAT_S", 25.0)
    monkeypatch.setattr(live_module, "MAX_WATCHERS", 2)
    with serving(make_engine(num_blocks=64)) as client:
        with watching(client) as first:
            view = next(frame["view"] for frame in frames(first) if frame.get("view"))
            assert view["slots"] == [] and sum(view["blocks"][1]) == 0
            with watching(client) as second, watching(client) as third:
                assert next(frames(second))["view"] == view
                assert third.status == 503 and third.getheader("retry-after") == "10"

        def admitted() -> bool:
            with watching(client) as response:
                return response.status == 200

        wait_until(admitted)


class Stub:
    """A stub of a service, and of its client."""

    stopping, running, up, num_open, num_restarts = False, True, True, 0, 0

    class queue:
        num_requests = 0

    def __init__(self) -> None:
        self.on_snapshot: Any = None
        self.client, self.engine = self, SimpleNamespace(config=make_engine().scheduler.config)

    def watch(self, on_snapshot: Any) -> None:
        self.on_snapshot = on_snapshot

    def request_id(self, wire_id: str) -> str | None:
        return {"1": "cmpl-0123456789abcdef-0"}.get(wire_id)


def snapshot(num_steps: int) -> Snapshot:
    stats = EngineMetrics(1, 0, 8, 4, 2, 0, 0.0, 0.0, 0.0, 0.0, make_engine().scheduler.stats, None)
    return Snapshot((), (), num_steps, BlockMap(1, [0] * 8, [0] * 8), stats)


def test_a_slow_page_gets_the_latest_events_until_the_server_ends() -> None:
    async def scenario() -> None:
        service: Any = Stub()
        model: Any = type("M", (), {"name": "m", "max_model_len": 9, "has_chat_template": False})
        feed = LiveFeed(service, model, Metrics("m", service))
        watcher = feed.events()
        assert await anext(watcher) == b""
        await anext(watcher), await anext(watcher)
        for number in range(100):
            service.on_snapshot(snapshot(number))
        kept = [json.loads((await anext(watcher))[6:])["view"]["num_steps"] for _ in range(2)]
        assert kept == [98, 99] and MAX_UNREAD == 2
        assert service.on_snapshot is not None
        service.stopping = True
        with pytest.raises(StopAsyncIteration):
            await anext(watcher)
        assert service.on_snapshot is None

    asyncio.run(scenario())


def test_the_feed_continues_after_the_engine_is_killed() -> None:
    factory = SimFactory(vocab_size=TOKENIZER.vocab_size, step_s=0.02)
    with (
        serving_process(factory) as served,
        watching(served.client) as response,
        served.client.open(LONG) as stream,
    ):
        stream.readline()
        seen = []
        for frame in frames(response, limit_s=60):
            if frame.get("view") and frame["view"]["steps"]:
                seen.append(frame["restarts"])
                if len(seen) == 2:
                    assert served.engine.pid is not None
                    os.kill(served.engine.pid, signal.SIGKILL)
                if frame["restarts"]:
                    break
        assert seen[:2] == [0, 0] and seen[-1] == 1
