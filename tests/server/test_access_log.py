"""The log has one line per finished call, without secrets or the client's text."""

from __future__ import annotations

import json
import logging
import socket
import sys
from collections.abc import Iterator
from typing import Any
from urllib.parse import quote

import pytest

from cbatch.server.http.keys import KeyRing, digest
from cbatch.server.serving.admission_queue import Limits
from cbatch.system.logs import JsonLines, PlainLines
from tests.server.engines import SlowEngine
from tests.server.http_client import CHAT, Client, serving, wait_until
from tests.server.raw_calls import post as post_bytes
from tests.toy_engine import TOKENIZER, make_engine

SECRET = "def secret(a, b):"
BODY: dict[str, Any] = {"prompt": SECRET, "max_tokens": 20, "seed": 5}
KEY = {"Authorization": "Bearer first"}


class Lines(logging.Handler):
    """A handler that collects the decoded lines."""

    def __init__(self) -> None:
        super().__init__()
        self.raw: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.raw.append(JsonLines().format(record))

    def last(self, number: int) -> dict[str, Any]:
        """Wait for the `number`-th line and return it."""
        wait_until(lambda: len(self.raw) >= number)
        assert len(self.raw) == number
        line: dict[str, Any] = json.loads(self.raw[-1])
        return line


@pytest.fixture
def lines() -> Iterator[Lines]:
    logger, handler = logging.getLogger("cbatch"), Lines()
    level = logger.level
    logger.addHandler(handler)
    logger.setLevel(logging.INFO)
    yield handler
    logger.removeHandler(handler)
    logger.setLevel(level)


def post(client: Client, body: Any, path: str = "/v1/completions", **headers: str) -> None:
    with client.open(body, path, KEY | headers) as response:
        response.read()


@pytest.fixture(scope="module")
def client() -> Iterator[Client]:
    with serving(make_engine(lookahead="fixed:3"), keys=KeyRing(["first"])) as client:
        yield client


def test_each_call_is_logged_and_probes_are_not(lines: Lines, client: Client) -> None:
    for path in ("/health", "/ready", "/metrics"):
        post(client, None, path)
    post(client, None, "/v1/models")
    post(client, BODY | {"n": 2}, **{"x-request-id": "mine-1"})
    line = lines.last(1)
    assert line["level"] == "info" and line["message"] == "request"
    assert line["request_id"] == "mine-1" and line["id"].startswith("cmpl-")
    assert (line["path"], line["status"]) == ("/v1/completions", 200)
    assert line["prompt_tokens"] == len(TOKENIZER.encode(SECRET))
    assert line["output_tokens"] == 40 and line["finish_reason"] == "length"
    assert 0 < line["ttft_s"] <= line["e2e_s"] < 60 and 0 < line["acceptance"] <= 1
    assert (
        line["stream"] is False
        and line["key"] == digest(b"first").hex()[:8]
        and "error" not in line
    )
    post(client, BODY | {"stream": True, "stop": "a"})
    assert lines.last(2)["stream"] is True and lines.last(2)["status"] == 200
    post(client, BODY | {"temperature": SECRET}, **{"x-request-id": "bad"})
    line = lines.last(3)
    assert (line["status"], line["request_id"]) == (400, "bad")
    assert line["error"] == "FieldError temperature" and "output_tokens" in line
    with client.open(BODY, headers={"Authorization": "Bearer other"}):
        pass
    line = lines.last(4)
    assert line["status"] == 401 and "key" not in line and "output_tokens" not in line
    post(client, {"messages": [{"role": "user", "content": SECRET}]}, CHAT)
    assert lines.last(5)["error"] == "FieldError messages"
    assert not any("secret" in line or "first" in line for line in lines.raw)


def test_the_cause_of_an_aborted_call_is_logged(
    lines: Lines, monkeypatch: pytest.MonkeyPatch
) -> None:
    long = BODY | {"max_tokens": 8000, "stream": True}
    with serving(SlowEngine(monkeypatch).engine, Limits(timeout_s=1.2)) as client:
        with client.open(long) as response:
            response.read(10)
        line = lines.last(1)
        assert (line["status"], line["finish_reason"]) == (200, "abort") and "error" not in line
        post(client, long | {"timeout": 0.8})
        line = lines.last(2)
        assert line["status"] == 200 and line["error"] == "ClientDeadlineError"
        post(client, long | {"stream": False})
        line = lines.last(3)
        assert (line["status"], line["error"]) == (504, "DeadlineError")
        assert line["output_tokens"] > 0


def test_a_client_that_disconnects_is_not_logged_as_a_failure(lines: Lines, client: Client) -> None:
    with socket.create_connection(("127.0.0.1", client.port)) as left:
        left.sendall(post_bytes(b'{"prompt": "', b"authorization: Bearer first", num_bytes=999))
    line = lines.last(1)
    assert (line["status"], line["error"]) == (499, "ClientGoneError")


HOSTILE = {
    "csi": "\x9b31m",
    "delete": "\x7f",
    "escape": "\x1b[2J",
    "forged line": "\n2026-11-28T00:00:00Z info: request",
    "return": "\r",
    "next line": "\x85x",
    "line separator": "\u2028x",
    "direction": "\u202etxt.exe",
    "isolate": "\u2066a",
    "tag": "\U000e0041",
    "mark": "\ufeff",
}
AT_EVERY_PLACE = pytest.mark.parametrize("text", [*HOSTILE.values(), "\ud800"], ids=ascii)


def is_safe(log: str) -> bool:
    """Return whether the log has no control or invisible character but line ends."""
    return log.replace("\n", "").isprintable()


@AT_EVERY_PLACE
def test_no_value_breaks_a_log_line(text: str) -> None:
    try:
        raise ValueError(f"near {text}")
    except ValueError:
        cause = sys.exc_info()
    values = {"name": "cbatch", "levelname": "INFO", "msg": "%s\nfailed", "args": (text,)}
    record = logging.makeLogRecord(
        values | {"exc_info": cause} | {"fields": {"path": text, "names": [text], "tokens": 3}}
    )
    line = JsonLines().format(record)
    assert line.isprintable(), "one line"
    entry = json.loads(line)
    assert entry["message"] == f"{text}\nfailed" and entry["path"] == text
    assert entry["names"] == [text] and entry["tokens"] == 3 and text in entry["exception"]
    assert "none" not in entry and entry["time"].endswith("Z")
    plain = PlainLines().format(record)
    first, *trace = plain.split("\n")
    assert is_safe(plain) and "failed path=" in first.replace("\\n", "")
    assert trace and all(each.startswith("  ") for each in trace), "no line begins as a record"


def test_a_client_cannot_write_controls_into_the_log(
    lines: Lines, client: Client, monkeypatch: pytest.MonkeyPatch
) -> None:
    plain = PlainLines()
    monkeypatch.setattr(lines, "emit", lambda record: lines.raw.append(plain.format(record)))
    for text in HOSTILE.values():
        path, own_id = f"/v1/{quote(text)}", text.encode().strip(b"\r\n")
        post(client, None, path)
        post(client, BODY, path)
        post(client, {text: "\ud800"})
        post(client, BODY | {"model": text, text: 1})
        with client.open(BODY, headers={"x-request-id": own_id}):
            pass
    wait_until(lambda: len(lines.raw) >= 4 * len(HOSTILE))
    monkeypatch.setattr(KeyRing, "find", lambda *_: 1 / 0)
    for text in HOSTILE.values():  # an internal error is logged with the path
        post(client, None, f"/v1/{quote(text)}")
    assert sum("division by zero" in line for line in lines.raw) == len(HOSTILE)
    assert all(map(is_safe, lines.raw)), lines.raw
    starts = [line for record in lines.raw for line in record.split("\n") if line[:1] != " "]
    assert len(starts) == len(lines.raw), "no line but the first of a record begins as one"


def test_a_long_name_of_a_field_is_cut_in_the_log(lines: Lines, client: Client) -> None:
    post(client, {"x" * 10_000: "\ud800"})
    assert lines.last(1)["error"].startswith("FieldError xxx") and len(lines.raw[0]) < 1000
