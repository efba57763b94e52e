"""A server on a real socket, and a minimal client that shows what it sends."""

from __future__ import annotations

import asyncio
import http.client
import json
import socket
import threading
import time
from collections.abc import Callable, Coroutine, Iterator
from concurrent.futures import Future
from contextlib import closing, contextmanager
from functools import partial
from typing import Any

import uvicorn
import uvloop
from prometheus_client.parser import text_string_to_metric_families
from prometheus_client.samples import Sample

from cbatch.core.request.request import Request, SamplingParams
from cbatch.engine.engine import Engine
from cbatch.kv_events.publisher import KVEventPublisher
from cbatch.process.client import EngineClient
from cbatch.process.messages import Ready
from cbatch.server.http.app import create_app
from cbatch.server.http.connections import ServerConfig
from cbatch.server.http.limits import ConnectionLimits
from cbatch.server.http.run import DrainingServer
from cbatch.server.protocol.model import ServedModel
from cbatch.server.serving.admission_queue import AdmissionQueue, Limits
from cbatch.server.serving.open_request import OpenRequest
from cbatch.server.serving.service import EngineService
from cbatch.text import ChatTemplate, TextTokenizer
from cbatch.text.tool_parsers import ReasoningParser, ToolParser
from tests.process.threads import EngineThread
from tests.toy_engine import TOKENIZER

MODEL = "toy"
JSON = {"Content-Type": "application/json"}
COMPLETIONS, CHAT = "/v1/completions", "/v1/chat/completions"


def events_of(response: http.client.HTTPResponse) -> list[dict[str, Any]]:
    """Return the events of a stream; check that it ends correctly."""
    raw = response.read().decode()
    assert response.status == 200, raw
    assert response.getheader("content-type", "").startswith("text/event-stream")
    events = raw.split("\n\n")
    assert events[-2:] == ["data: [DONE]", ""]
    return [json.loads(event.removeprefix("data: ")) for event in events[:-2]]


class Client:
    """A client that opens a connection for each call, with `headers`. `server` and `loop` are set
    if the server runs in a thread."""

    def __init__(
        self,
        port: int,
        server: uvicorn.Server | None = None,
        loop: asyncio.AbstractEventLoop | None = None,
        headers: dict[str, str] | None = None,
    ) -> None:
        self.port, self.server, self._loop = port, server, loop
        self._headers = JSON | (headers or {})

    @property
    def num_connections(self) -> int:
        assert self.server is not None
        return len(self.server.server_state.connections)

    def run(self, work: Coroutine[Any, Any, None]) -> Future[None]:
        """Run a coroutine on the server's event loop."""
        assert self._loop is not None
        return asyncio.run_coroutine_threadsafe(work, self._loop)

    def post(
        self, body: dict[str, Any] | bytes, path: str = COMPLETIONS
    ) -> tuple[int, dict[str, Any], dict[str, str]]:
        """Post a call; return (status, decoded answer, headers)."""
        with self.open(body, path) as response:
            headers = {name.lower(): value for name, value in response.getheaders()}
            return response.status, json.loads(response.read()), headers

    def stream(self, body: dict[str, Any], path: str = COMPLETIONS) -> list[dict[str, Any]]:
        with self.open(body | {"stream": True}, path) as response:
            return events_of(response)

    def get(self, path: str) -> tuple[int, dict[str, Any]]:
        with self.open(None, path) as response:
            return response.status, json.loads(response.read())

    @contextmanager
    def open(
        self,
        body: dict[str, Any] | bytes | None,
        path: str = COMPLETIONS,
        headers: dict[str, Any] | None = None,
    ) -> Iterator[http.client.HTTPResponse]:
        with self.begin(body, path, headers) as connection, connection.getresponse() as response:
            yield response

    @contextmanager
    def running(
        self, body: dict[str, Any], headers: dict[str, Any] | None = None
    ) -> Iterator[http.client.HTTPResponse]:
        """Open a stream, and wait for its first token: it has a slot."""
        with self.open(body, headers=headers) as response:
            assert response.readline().startswith(b"data: ")
            yield response

    @contextmanager
    def begin(
        self,
        body: dict[str, Any] | bytes | None,
        path: str = COMPLETIONS,
        headers: dict[str, Any] | None = None,
    ) -> Iterator[http.client.HTTPConnection]:
        """Send a call without waiting for the response."""
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=60)
        raw = json.dumps(body).encode() if isinstance(body, dict) else body
        method = "GET" if raw is None else "POST"
        with closing(connection):
            connection.request(method, path, raw, self._headers | (headers or {}))
            yield connection


def call(
    client: Client,
    method: str,
    path: str,
    body: bytes | None = None,
    headers: dict[str, str] | None = None,
) -> tuple[int, bytes, dict[str, str]]:
    connection = http.client.HTTPConnection("127.0.0.1", client.port, timeout=30)
    try:
        connection.request(method, path, body, headers or {})
        response = connection.getresponse()
        answer_headers = {name.lower(): value for name, value in response.getheaders()}
        return response.status, response.read(), answer_headers
    finally:
        connection.close()


@contextmanager
def serving(
    engine: Engine,
    limits: Limits | None = None,
    kv_events: KVEventPublisher | None = None,
    **options: Any,
) -> Iterator[Client]:
    """Serve an engine in a thread until the block ends. `options` are those of
    `serving_service`."""
    client = EngineClient(partial(EngineThread, engine.core))
    service = EngineService(client, engine.tokenizer, limits=limits, kv_events=kv_events)
    with serving_service(service, engine.tokenizer, **options) as served:
        yield served


@contextmanager
def serving_service(
    service: EngineService,
    tokenizer: TextTokenizer | None,
    *,
    chat_template: ChatTemplate | None = None,
    tool_parser: ToolParser | None = None,
    reasoning_parser: ReasoningParser = "none",
    connections: ConnectionLimits | None = None,
    grace_s: float | None = None,
    **options: Any,
) -> Iterator[Client]:
    """Serve HTTP on a free port, in a thread. With `grace_s` it drains at a signal. `options` are
    those of the app."""
    limits = connections or ConnectionLimits()
    listener = socket.socket()
    listener.bind(("127.0.0.1", 0))
    servers: list[uvicorn.Server] = []
    loops: list[asyncio.AbstractEventLoop] = []

    async def serve() -> None:
        engine = await service.start()
        model = served_model(engine, tokenizer, chat_template, tool_parser, reasoning_parser)
        app = create_app(service, model, limits=limits, **options)
        config = ServerConfig(app, limits, log_level="warning", timeout_graceful_shutdown=5)
        loops.append(asyncio.get_running_loop())
        if grace_s is None:
            servers.append(uvicorn.Server(config))
        else:
            draining: Any = {"grace_s": grace_s, "on_listening": lambda _: None}
            servers.append(DrainingServer(config, service, **draining))
        await servers[0].serve(sockets=[listener])

    thread = threading.Thread(target=uvloop.run, args=(serve(),), daemon=True)
    thread.start()
    try:
        wait_until(lambda: bool(servers) and servers[0].started, limit_s=60)
        yield Client(listener.getsockname()[1], servers[0], loops[0])
    finally:
        for server in servers:
            server.should_exit = True
        thread.join(timeout=120)
        listener.close()
    assert not thread.is_alive()


def served_model(
    engine: Ready,
    tokenizer: TextTokenizer | None,
    chat_template: ChatTemplate | None = None,
    tool_parser: ToolParser | None = None,
    reasoning_parser: ReasoningParser = "none",
) -> ServedModel:
    return ServedModel(
        MODEL,
        max_model_len=engine.config.max_model_len,
        vocab_size=engine.config.vocab_size,
        created_s=int(time.time()),
        tokenizer=tokenizer,
        chat_template=chat_template,
        tool_parser=tool_parser,
        reasoning_parser=reasoning_parser,
    )


def toy_model(template: str = "{{ messages[0].content }}", **options: Any) -> ServedModel:
    """Return a model without an engine, with the toy tokenizer unless another is given."""
    given = {"max_model_len": 256, "vocab_size": TOKENIZER.vocab_size, "created_s": 0}
    given |= {"name": MODEL, "tokenizer": TOKENIZER}
    return ServedModel(chat_template=ChatTemplate(template, {}, "the test"), **(given | options))


def open_request(prompt: tuple[int, ...] = (1,), *, n: int = 1, seed: int = 1) -> OpenRequest:
    """Return a request without an engine. It yields the outputs that a test puts in."""
    opened = OpenRequest(AdmissionQueue(Limits(), time.monotonic), n)
    opened.request = Request(
        request_id="r", prompt=prompt, params=SamplingParams(n=n, max_tokens=9), seed=seed
    )
    return opened


def samples(client: Client) -> list[Sample]:
    """Return all samples of `/metrics`."""
    with client.open(None, "/metrics") as response:
        assert response.getheader("content-type", "").startswith("text/plain")
        families = text_string_to_metric_families(response.read().decode())
    return [entry for family in families for entry in family.samples]


def sample(client: Client, name: str, **labels: str) -> float:
    """Return a sample of `/metrics`."""
    for entry in samples(client):
        if entry.name == name and labels.items() <= entry.labels.items():
            return entry.value
    raise AssertionError(f"{name} {labels} is not there")


def wait_until(condition: Callable[[], bool], limit_s: float = 30) -> None:
    deadline_s = time.monotonic() + limit_s
    while not condition():
        assert time.monotonic() < deadline_s, "it did not happen"
        time.sleep(0.005)
