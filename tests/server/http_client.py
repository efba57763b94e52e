"""A server on a real socket, and just enough of a client to see what goes over it."""

from __future__ import annotations

import http.client
import json
import socket
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager
from functools import partial
from typing import Any

import uvicorn

from cbatch.server.app import create_app
from cbatch.server.metrics import snapshot_of
from cbatch.server.model import ServedModel
from cbatch.server.service import EngineService
from cbatch.stepwise import Engine
from cbatch.text import ChatTemplate

MODEL = "toy"
COMPLETIONS, CHAT = "/v1/completions", "/v1/chat/completions"


class Client:
    """Each call opens a connection of its own."""

    def __init__(self, port: int) -> None:
        self.port = port

    def post(
        self, body: dict[str, Any] | bytes, path: str = COMPLETIONS
    ) -> tuple[int, dict[str, Any], dict[str, str]]:
        """(status, decoded answer, headers)"""
        with self.open(body, path) as response:
            headers = {name.lower(): value for name, value in response.getheaders()}
            return response.status, json.loads(response.read()), headers

    def stream(self, body: dict[str, Any], path: str = COMPLETIONS) -> list[dict[str, Any]]:
        """The events of a stream that ends as it must."""
        with self.open(body | {"stream": True}, path) as response:
            raw = response.read().decode()
            assert response.status == 200, raw
            assert response.getheader("content-type", "").startswith("text/event-stream")
        events = raw.split("\n\n")
        assert events[-2:] == ["data: [DONE]", ""]
        return [json.loads(event.removeprefix("data: ")) for event in events[:-2]]

    def get(self, path: str) -> tuple[int, dict[str, Any]]:
        with self.open(None, path) as response:
            return response.status, json.loads(response.read())

    @contextmanager
    def open(
        self, body: dict[str, Any] | bytes | None, path: str = COMPLETIONS
    ) -> Iterator[http.client.HTTPResponse]:
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=60)
        raw = json.dumps(body).encode() if isinstance(body, dict) else body
        method = "GET" if raw is None else "POST"
        connection.request(method, path, raw, {"Content-Type": "application/json"})
        with closing(connection), connection.getresponse() as response:
            yield response


@contextmanager
def serving(
    engine: Engine, *, chat_template: ChatTemplate | None = None, **options: Any
) -> Iterator[Client]:
    """Serves the engine on a free port until the block ends. `options` are those of the app."""
    listener = socket.socket()
    listener.bind(("127.0.0.1", 0))
    model = ServedModel(
        MODEL,
        max_model_tokens=engine.scheduler.config.max_model_tokens,
        created_s=int(time.time()),
        tokenizer=engine.tokenizer,
        chat_template=chat_template,
    )
    snapshot = partial(snapshot_of, engine)
    app = create_app(EngineService(engine), model, snapshot=snapshot, **options)
    server = uvicorn.Server(uvicorn.Config(app, log_level="warning", timeout_graceful_shutdown=5))
    thread = threading.Thread(target=server.run, kwargs={"sockets": [listener]}, daemon=True)
    thread.start()
    try:
        wait_until(lambda: server.started)
        yield Client(listener.getsockname()[1])
    finally:
        server.should_exit = True
        thread.join(timeout=30)
        listener.close()
    assert not thread.is_alive()


def wait_until(condition: Callable[[], bool], limit_s: float = 30) -> None:
    deadline_s = time.monotonic() + limit_s
    while not condition():
        assert time.monotonic() < deadline_s, "it did not happen"
        time.sleep(0.005)
