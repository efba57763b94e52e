"""Collectors of traces: over HTTP and gRPC, absent, faulty, and wrongly configured."""

from __future__ import annotations

import json
import logging
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from cbatch.core.request.errors import FieldError
from cbatch.server.serving import tracing
from cbatch.server.serving.tracing import span_exporter
from cbatch.system.logs import JsonLines, PlainLines
from tests.cli.test_serve import serve
from tests.server.http_client import Client, serving, wait_until
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


@pytest.mark.parametrize("path", ["", "/otlp"])
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


def test_no_call_fails_for_want_of_a_collector() -> None:
    """The exporter tries to reach a port at which no program listens."""
    pytest.importorskip("opentelemetry.exporter.otlp.proto.http", reason=EXTRA)
    exporter = span_exporter("http://127.0.0.77:4318")
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


ROOT = Path(__file__).parent.parent.parent


ENDPOINT = "http://127.0.0.1:9/v1/traces"


BAD = (
    ("OTEL_BSP_MAX_QUEUE_SIZE", "-1"),
    ("OTEL_BSP_MAX_EXPORT_BATCH_SIZE", "100000"),
    ("OTEL_BSP_SCHEDULE_DELAY", "0"),
    ("OTEL_BSP_SCHEDULE_DELAY", "9" * 30),
    ("OTEL_BSP_EXPORT_TIMEOUT", "soon"),
    ("OTEL_EXPORTER_OTLP_TIMEOUT", "abc"),
    ("OTEL_EXPORTER_OTLP_TRACES_TIMEOUT", "-1"),
    ("OTEL_EXPORTER_OTLP_TIMEOUT", "nan"),
    ("OTEL_EXPORTER_OTLP_COMPRESSION", "zzz"),
    ("OTEL_EXPORTER_OTLP_CERTIFICATE", "/none/such.pem"),
    ("OTEL_RESOURCE_ATTRIBUTES", "shop"),
    ("OTEL_SPAN_ATTRIBUTE_COUNT_LIMIT", "-1"),
    ("OTEL_TRACES_SAMPLER", "some"),
)


@pytest.fixture(autouse=True)
def requires_the_exporter() -> None:
    pytest.importorskip("opentelemetry.exporter.otlp.proto.http", reason=EXTRA)


@pytest.mark.parametrize(("name", "value"), BAD)
def test_a_bad_variable_is_named(name: str, value: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OTEL_SERVICE_NAME", "shop")
    monkeypatch.setenv(name, value)
    with pytest.raises(FieldError, match="is not allowed") as caught:
        span_exporter(ENDPOINT)
    assert caught.value.field == name and "\n" not in str(caught.value)
    assert os.environ[name] == value and os.environ["OTEL_SERVICE_NAME"] == "shop"


def test_the_argument_of_a_sampler_is_named_and_not_the_sampler(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("OTEL_TRACES_SAMPLER", "traceidratio")
    span_exporter(ENDPOINT).shutdown()
    monkeypatch.setenv("OTEL_TRACES_SAMPLER_ARG", "half")
    with pytest.raises(FieldError, match="OTEL_TRACES_SAMPLER_ARG: 'half' is not allowed"):
        span_exporter(ENDPOINT)


def test_an_empty_variable_is_unset(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, _ in BAD:
        monkeypatch.setenv(name, " ")
    span_exporter(ENDPOINT).shutdown()


def test_the_server_ends_with_one_line_before_its_engine_starts() -> None:
    command = [sys.executable, "-m", "cbatch.cli.main", "serve", "--port", "0"]
    environment = os.environ | {"OTEL_PYTHON_CONTEXT": "none"}  # read once, at an import
    done = subprocess.run(
        [*command, "--otlp-endpoint", ENDPOINT], cwd=ROOT, env=environment, capture_output=True
    )
    lines = done.stderr.decode().splitlines()
    assert done.returncode == 2 and len(lines) == 1, lines
    assert lines[0].startswith("cbatch: OTEL_PYTHON_CONTEXT: 'none' is not allowed")


@pytest.mark.parametrize(
    "endpoint",
    [
        "http://user:passw0rd@127.0.0.1:9/v1/traces",
        "http://user:at@passw0rd@127.0.0.1:9/v1/traces",
        "http://127.0.0.1:9/v1/traces?token=passw0rd",
        "ftp://user:passw0rd@127.0.0.1/",
        "user:passw0rd@127.0.0.1:9",
    ],
)
def test_no_password_is_written(endpoint: str, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    said = ""
    try:
        span_exporter(endpoint).shutdown()
    except FieldError as error:
        said = str(error)
    assert "127.0.0.1" in caplog.text + said and "passw0rd" not in caplog.text + said


def test_no_header_is_written(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_HEADERS", "authorization passw0rd")
    with pytest.raises(FieldError) as caught:
        span_exporter(ENDPOINT)
    assert caught.value.field == "OTEL_EXPORTER_OTLP_HEADERS"
    assert "passw0rd" not in str(caught.value)


@pytest.mark.parametrize("lines", [PlainLines(), JsonLines()])
@pytest.mark.parametrize(
    "text",
    [
        "Max retries exceeded with url: /v1/traces?token=passw0rd (Caused by ...)",
        "cannot connect to proxy http://user:passw0rd@proxy:3128/",
        "Failed to parse: 'https://:passw0rd@[::1'",
    ],
)
def test_errors_of_libraries_are_logged_without_secrets(
    lines: logging.Formatter, text: str
) -> None:
    try:
        raise OSError(text)
    except OSError:
        cause = sys.exc_info()
    record = logging.LogRecord("urllib3", logging.ERROR, "x.py", 1, "%s", (text,), cause)
    line = lines.format(record)
    assert "passw0rd" not in line and text[:12] in line and "OSError" in line


HEAD = b"HTTP/1.1 200 OK\r\ncontent-type: application/x-protobuf\r\n"


def endless(connection: socket.socket) -> None:
    connection.sendall(HEAD + b"transfer-encoding: chunked\r\n\r\n")
    for _ in range(2**10):
        connection.sendall(b"10000\r\n" + b"a" * 2**16 + b"\r\n")


def promised(connection: socket.socket) -> None:
    connection.sendall(HEAD + b"content-length: 1000000000\r\n\r\n")
    for _ in range(2**10):
        connection.sendall(b"a" * 2**16)


def compressed(connection: socket.socket) -> None:
    connection.sendall(HEAD + b"content-encoding: gzip\r\ntransfer-encoding: chunked\r\n\r\n")
    for _ in range(2**10):
        connection.sendall(b"10000\r\n" + b"\x1f\x8b\x08" + b"\0" * (2**16 - 3) + b"\r\n")


def slow(connection: socket.socket) -> None:
    connection.sendall(HEAD + b"content-length: 1000\r\n\r\n")
    for _ in range(1000):
        connection.sendall(b"a")
        time.sleep(0.02)


@contextmanager
def answering(answer: Callable[[socket.socket], None]) -> Iterator[tuple[str, list[bool]]]:
    """Answer every call with `answer`. Yield the URL, and whether each answer was read whole."""
    whole: list[bool] = []
    with socket.create_server(("127.0.0.1", 0)) as listener:

        def accept() -> None:
            with suppress(OSError):
                while True:
                    connection, _ = listener.accept()
                    with connection:
                        connection.recv(2**16)
                        whole.append(False)
                        with suppress(OSError):
                            answer(connection)
                            whole[-1] = True

        thread = threading.Thread(target=accept, daemon=True)
        thread.start()
        yield f"http://127.0.0.1:{listener.getsockname()[1]}/v1/traces", whole
        listener.shutdown(socket.SHUT_RDWR)
    thread.join(60)


@pytest.mark.parametrize("answer", [endless, promised, compressed, slow])
def test_no_more_than_the_start_of_an_answer_is_read(
    answer: Callable[[socket.socket], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tracing, "MAX_ANSWER_S", 0.5)
    with (
        answering(answer) as (url, whole),
        serving(make_engine(), span_exporter=span_exporter(url)) as client,
    ):
        assert client.post(BODY)[0] == 200
        wait_until(lambda: bool(whole))
    assert whole and not any(whole), "the exporter closed the connection"
