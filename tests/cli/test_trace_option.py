"""The option `--otlp-endpoint` where it is refused. No test needs OpenTelemetry."""

from __future__ import annotations

import sys
from collections.abc import Callable

import pytest

from cbatch.core.request.errors import FieldError
from cbatch.server.serving.tracing import span_exporter
from tests.cli.conftest import Run

PROTOCOLS = ("OTEL_EXPORTER_OTLP_TRACES_PROTOCOL", "OTEL_EXPORTER_OTLP_PROTOCOL")


@pytest.fixture(autouse=True)
def no_protocol(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in PROTOCOLS:
        monkeypatch.delenv(name, raising=False)


@pytest.mark.parametrize(
    ("endpoint", "protocol"),
    [
        ("localhost:4317", None),
        ("http://", None),
        ("ftp://collector:4317", None),
        ("grpc://collector:4318", "http/protobuf"),
        ("http://collector:4318", "http/json"),
        ("", "grpc"),
    ],
)
@pytest.mark.parametrize("name", PROTOCOLS)
def test_an_endpoint_that_cannot_be_used_is_refused(
    monkeypatch: pytest.MonkeyPatch, endpoint: str, protocol: str | None, name: str
) -> None:
    if protocol is not None:
        monkeypatch.setenv(name, protocol)
    with pytest.raises(FieldError, match=r"otlp_endpoint: cannot export .*http://localhost:4317"):
        span_exporter(endpoint)


@pytest.mark.parametrize("flag", ["--otlp-endpoint", "--otlp-traces-endpoint"])
def test_without_the_packages_the_extra_is_named(
    monkeypatch: pytest.MonkeyPatch, cbatch: Callable[..., Run], flag: str
) -> None:
    for module in list(sys.modules):
        if module.partition(".")[0] == "opentelemetry":
            monkeypatch.delitem(sys.modules, module)
    monkeypatch.setitem(sys.modules, "opentelemetry", None)
    run = cbatch("serve", flag, "http://localhost:4317")
    assert run.status == 2 and run.err.count("\n") == 1
    assert (
        "--otlp-endpoint: needs OpenTelemetry" in run.err
        and "pip install 'cbatch[otel]'" in run.err
    )
