"""Collectors of traces: over HTTP and gRPC, absent, faulty, and wrongly configured."""

from __future__ import annotations

import logging
import os
import re
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from types import SimpleNamespace
from typing import Any, cast

import pytest

from cbatch.core.request.errors import FieldError
from cbatch.server.serving import tracing
from cbatch.server.serving.tracing import span_exporter
from cbatch.system.logs import JsonLines, PlainLines
from tests.server.http_client import serving, wait_until
from tests.server.test_tracing import BODY, EXTRA, PARENT_ID, TRACE_ID, parent
from tests.toy_engine import make_engine

pytest.importorskip("opentelemetry.exporter.otlp.proto.http", reason=EXTRA)
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


@pytest.mark.parametrize(
    ("collector_of", "path"),
    [(http_collector, ""), (http_collector, "/otlp"), (grpc_collector, "")],
)
def test_a_collector_gets_the_spans_before_the_server_ends(
    collector_of: Any, path: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    if collector_of is http_collector:
        monkeypatch.setenv("OTEL_EXPORTER_OTLP_PROTOCOL", "http/protobuf")
    monkeypatch.setenv("OTEL_SERVICE_NAME", "shop")
    monkeypatch.setenv("OTEL_BSP_SCHEDULE_DELAY", "600000")  # the server ends before that
    with collector_of() as (collector, url):
        exporter = span_exporter(url + path)
        with (
            serving(make_engine(), span_exporter=exporter) as client,
            client.open(BODY, headers=parent()) as response,
        ):
            assert response.status == 200
        assert list(collector.spans) == ["llm_request", "queue", "prefill", "decode"]
        request, *parts = collector.spans.values()
        assert request.trace_id.hex() == TRACE_ID and request.parent_span_id.hex() == PARENT_ID
        assert {part.parent_span_id for part in parts} == {request.span_id}
        assert collector.service_names == {"shop"}
        assert set(collector.paths) <= {path or "/v1/traces"}


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
    module = f"opentelemetry.exporter.otlp.proto.{protocol}"
    pytest.importorskip(module, reason=EXTRA)
    exporter = span_exporter(endpoint)
    assert type(exporter).__module__ == f"{module}.trace_exporter"
    exporter.shutdown()


def test_no_call_fails_for_want_of_a_collector() -> None:
    """The exporter tries to reach a port at which no program listens."""
    exporter = span_exporter("http://127.0.0.77:4318")
    with serving(make_engine(), span_exporter=exporter) as client:
        assert [client.post(BODY)[0] for _ in range(5)] == 5 * [200]


def test_the_end_of_the_server_waits_for_no_collector(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tracing, "FLUSH_S", 0.1)
    entered, released = threading.Event(), threading.Event()

    def export(spans: Any) -> None:
        entered.set()
        released.wait()

    exporter = SimpleNamespace(export=export, shutdown=lambda: None)
    with serving(make_engine(), span_exporter=cast(Any, exporter)) as client:
        assert client.post(BODY)[0] == 200
        entered.wait()
        assert client.post(BODY)[0] == 200, "calls go on meanwhile"
    assert not released.is_set(), "the server has ended"
    released.set()


# ---- variables -----------------------------------------------------------------------------------

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
    ("OTEL_EXPORTER_OTLP_HEADERS", "authorization passw0rd"),
)


@pytest.mark.parametrize(("name", "value"), BAD)
def test_a_bad_variable_is_named(name: str, value: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OTEL_SERVICE_NAME", "shop")
    monkeypatch.setenv(name, value)
    with pytest.raises(FieldError, match="is not allowed") as caught:
        span_exporter(ENDPOINT)
    assert caught.value.field == name
    assert not re.search("\n|passw0rd", str(caught.value))
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


def test_a_variable_that_is_read_once_at_an_import_is_named() -> None:
    code = f"from cbatch.server.serving.tracing import span_exporter; span_exporter({ENDPOINT!r})"
    environment = os.environ | {"OTEL_PYTHON_CONTEXT": "none"}
    done = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True)
    assert b"FieldError: OTEL_PYTHON_CONTEXT: 'none' is not allowed" in done.stderr


# ---- secrets -------------------------------------------------------------------------------------


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


# ---- long answers --------------------------------------------------------------------------------

HEAD = b"HTTP/1.1 200 OK\r\ncontent-type: application/x-protobuf\r\n"
GZIP = b"content-encoding: gzip\r\ntransfer-encoding: chunked\r\n\r\n"
# The head of an answer, a part that follows it many times, and the pause before each.
ANSWERS = {
    "compressed": (GZIP, b"10000\r\n\x1f\x8b\x08" + b"\0" * (2**16 - 3) + b"\r\n", 0.0),
    "slow": (b"content-length: 1000\r\n\r\n", b"a", 0.02),
}


@contextmanager
def answering(head: bytes, part: bytes, pause_s: float) -> Iterator[tuple[str, list[bool]]]:
    """Answer every call. Yield the URL, and whether each answer was read whole."""
    whole: list[bool] = []
    with socket.create_server(("127.0.0.1", 0)) as listener:

        def accept() -> None:
            with suppress(OSError):
                while True:
                    connection, _ = listener.accept()
                    with connection, suppress(OSError):
                        connection.recv(2**16)
                        whole.append(False)
                        connection.sendall(HEAD + head)
                        for _ in range(1000):
                            connection.sendall(part)
                            time.sleep(pause_s)
                        whole[-1] = True

        thread = threading.Thread(target=accept, daemon=True)
        thread.start()
        yield f"http://127.0.0.1:{listener.getsockname()[1]}/v1/traces", whole
        listener.shutdown(socket.SHUT_RDWR)
    thread.join(60)


@pytest.mark.parametrize("answer", ANSWERS.values(), ids=ANSWERS)
def test_no_more_than_the_start_of_an_answer_is_read(
    answer: tuple[bytes, bytes, float], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tracing, "MAX_ANSWER_S", 0.5)
    with (
        answering(*answer) as (url, whole),
        serving(make_engine(), span_exporter=span_exporter(url)) as client,
    ):
        assert client.post(BODY)[0] == 200
        wait_until(lambda: bool(whole))
    assert whole and not any(whole), "the exporter closed the connection"
