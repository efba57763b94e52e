"""Spans that reach a collector, over HTTP and gRPC, and collectors that do not answer."""

from __future__ import annotations

import json
import signal
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from types import SimpleNamespace
from typing import Any

import pytest

from cbatch.server.serving import tracing
from cbatch.server.serving.tracing import span_exporter
from tests.cli.test_serve import serve
from tests.server.http_client import Client, serving
from tests.server.traced_calls import BODY, EXTRA, PARENT_ID, TRACE_ID, parent
from tests.toy_engine import make_engine

pytestmark = pytest.mark.usefixtures("otel_environment")


NAME = "service.name"


class Collector:
    """A collector that keeps what it receives: the spans by name, and the paths of calls."""

    def __init__(self) -> None:
        self.spans: dict[str, Any] = {}
        self.service_names: set[str] = set()
        self.paths: list[str] = []

    def receive(self, request: Any) -> None:
        for resource in request.resource_spans:
            names = [a.value.string_value for a in resource.resource.attributes if a.key == NAME]
            self.service_names.update(names)
            for scope in resource.scope_spans:
                self.spans |= {span.name: span for span in scope.spans}


@contextmanager
def http_collector() -> Iterator[tuple[Collector, str]]:
    pytest.importorskip("opentelemetry.exporter.otlp.proto.http", reason=EXTRA)
    from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest

    collector = Collector()

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            content = self.rfile.read(int(self.headers["content-length"]))
            collector.paths.append(self.path)
            collector.receive(ExportTraceServiceRequest.FromString(content))
            self.send_response(200)
            self.send_header("content-length", "0")
            self.end_headers()

        def log_message(self, *args: Any) -> None: ...

    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        server.daemon_threads = True
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        try:
            yield collector, f"http://localhost:{server.server_address[1]}"
        finally:
            server.shutdown()
            thread.join()


@contextmanager
def grpc_collector() -> Iterator[tuple[Collector, str]]:
    grpc = pytest.importorskip("grpc", reason=EXTRA)
    pytest.importorskip("opentelemetry.exporter.otlp.proto.grpc", reason=EXTRA)
    from opentelemetry.proto.collector.trace.v1 import trace_service_pb2 as messages
    from opentelemetry.proto.collector.trace.v1 import trace_service_pb2_grpc as services

    collector = Collector()

    class Servicer(services.TraceServiceServicer):
        def Export(self, request: Any, context: Any) -> Any:
            collector.receive(request)
            return messages.ExportTraceServiceResponse()

    server = grpc.server(ThreadPoolExecutor(2))
    services.add_TraceServiceServicer_to_server(Servicer(), server)
    port = server.add_insecure_port("127.0.0.1:0")
    server.start()
    try:
        yield collector, f"http://127.0.0.1:{port}"
    finally:
        server.stop(None).wait()


def call_traced(exporter: Any) -> None:
    """Serve one call. The server sends the spans before it ends."""
    with (
        serving(make_engine(), span_exporter=exporter) as client,
        client.open(BODY, headers=parent()) as response,
    ):
        assert response.status == 200


def require_whole(collector: Collector) -> None:
    assert list(collector.spans) == ["llm_request", "queue", "prefill", "decode"]
    request = collector.spans["llm_request"]
    assert request.trace_id.hex() == TRACE_ID and request.parent_span_id.hex() == PARENT_ID
    for name in ("queue", "prefill", "decode"):
        assert collector.spans[name].parent_span_id == request.span_id


@pytest.mark.parametrize("path", ["", "/", "/v1/traces", "/otlp"])
def test_a_collector_over_http(path: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_PROTOCOL", "http/protobuf")
    with http_collector() as (collector, url):
        call_traced(span_exporter(url + path))
        require_whole(collector)
        assert set(collector.paths) == {path.rstrip("/") or "/v1/traces"}


def test_a_collector_over_grpc() -> None:
    with grpc_collector() as (collector, url):
        call_traced(span_exporter(url))
        require_whole(collector)


@pytest.mark.parametrize(
    ("endpoint", "protocol"),
    [
        ("http://localhost:4317", "grpc"),
        ("grpc://localhost", "grpc"),
        ("http://localhost:4318", "http"),
        ("http://localhost:9/v1/traces", "http"),
        ("https://[::1]:4318/", "http"),
    ],
)
def test_the_url_chooses_a_protocol(endpoint: str, protocol: str) -> None:
    pytest.importorskip(f"opentelemetry.exporter.otlp.proto.{protocol}", reason=EXTRA)
    exporter = span_exporter(endpoint)
    assert (
        type(exporter).__module__ == f"opentelemetry.exporter.otlp.proto.{protocol}.trace_exporter"
    )
    exporter.shutdown()


@pytest.mark.parametrize("port", [4317, 4318])
def test_no_call_fails_for_want_of_a_collector(port: int) -> None:
    """The exporter tries to reach a port at which no program listens."""
    protocol = "http" if port == 4318 else "grpc"
    pytest.importorskip(f"opentelemetry.exporter.otlp.proto.{protocol}", reason=EXTRA)
    exporter = span_exporter(f"http://127.0.0.77:{port}")
    with serving(make_engine(), span_exporter=exporter) as client:
        answers = [client.post(BODY) for _ in range(5)]
    assert [status for status, _, _ in answers] == 5 * [200]
    assert len({answer["choices"][0]["text"] for _, answer, _ in answers}) == 1


def test_the_end_of_the_server_waits_for_no_collector(monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("opentelemetry.sdk", reason=EXTRA)
    monkeypatch.setattr(tracing, "FLUSH_S", 0.1)
    entered, released = threading.Event(), threading.Event()

    def export(spans: Any) -> None:
        entered.set()
        released.wait()

    exporter = SimpleNamespace(export=export, shutdown=lambda: None)
    with serving(make_engine(), span_exporter=exporter) as client:
        assert client.post(BODY)[0] == 200
        entered.wait()
        assert client.post(BODY)[0] == 200, "calls go on meanwhile"
    assert not released.is_set(), "the server has ended"
    released.set()


def test_a_server_sends_its_last_spans_before_it_ends() -> None:
    with http_collector() as (collector, url):
        options = ("--port", "0", "--lookahead", "fixed:2", "--otlp-endpoint", f"{url}/v1/traces")
        environment = {"OTEL_BSP_SCHEDULE_DELAY": "600000", "OTEL_SERVICE_NAME": "shop"}
        with serve(*options, environment=environment) as (process, where, log):
            assert f"traces: {url}/v1/traces (http/protobuf)" in log
            client = Client(int(where.rpartition(":")[2]))
            with client.open(BODY | {"max_tokens": 8}, headers=parent()) as response:
                assert len(json.loads(response.read())["choices"]) == 1
            assert not collector.spans
            process.send_signal(signal.SIGTERM)
            assert process.wait() == 0
        require_whole(collector)
        assert collector.service_names == {"shop"}
