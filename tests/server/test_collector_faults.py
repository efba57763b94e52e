"""Bad variables of OpenTelemetry, secrets of a collector, and collectors whose answers are bad."""

from __future__ import annotations

import logging
import os
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import pytest

from cbatch.core.request.errors import FieldError
from cbatch.server.serving import collector
from cbatch.server.serving.tracing import span_exporter
from cbatch.system.logs import JsonLines, PlainLines
from tests.server.http_client import serving, wait_until
from tests.server.traced_calls import BODY, EXTRA
from tests.toy_engine import make_engine

pytestmark = pytest.mark.usefixtures("otel_environment")
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


@pytest.mark.parametrize("name", sorted({name for name, _ in BAD}))
def test_an_empty_variable_is_unset(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
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


# ---- answers -------------------------------------------------------------------------------------

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
    monkeypatch.setattr(collector, "MAX_ANSWER_S", 0.5)
    with (
        answering(answer) as (url, whole),
        serving(make_engine(), span_exporter=span_exporter(url)) as client,
    ):
        assert client.post(BODY)[0] == 200
        wait_until(lambda: bool(whole))
    assert whole and not any(whole), "the exporter closed the connection"
