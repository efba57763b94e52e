"""Behaviour that proxies need: HEAD, content types, headers of streams, idle connections."""

from __future__ import annotations

import json
import re
import time
from contextlib import closing
from http.client import HTTPConnection, RemoteDisconnected
from pathlib import Path
from typing import Any

import pytest

from cbatch.core.request.errors import FieldError
from cbatch.server.http.keys import KeyRing
from cbatch.server.http.limits import ConnectionLimits
from cbatch.text import ChatTemplate
from tests.cli.conftest import read_serve as read
from tests.server.http_client import CHAT, COMPLETIONS, Client, call, serving
from tests.server.raw_calls import exchange, run
from tests.toy_engine import make_engine

MESSAGE = {"messages": [{"role": "user", "content": "def"}], "max_tokens": 4}
CALLS: dict[str, dict[str, Any]] = {
    COMPLETIONS: {"prompt": "def", "max_tokens": 4},
    CHAT: MESSAGE,
    "/v1/responses": {"input": "def", "max_output_tokens": 4},
    "/v1/messages": MESSAGE,
}
PAGES = ("/", "/page.css", "/page.js", "/draw.js", "/slots.js")
READ = (
    "/health",
    "/ready",
    "/version",
    "/metrics",
    "/openapi.json",
    "/v1/models",
    "/v1/models/toy",
)
TEMPLATE = ChatTemplate("{{ messages[0].content }}", {}, "the test")


@pytest.fixture
def client(toy_client: Client) -> Client:
    return toy_client


# ---- HEAD ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("path", [*PAGES, *READ, "/nowhere", "/v1/models/other", "/v1/responses/x"])
def test_head_is_answered_as_get_without_a_body(client: Client, path: str) -> None:
    got, head = (call(client, method, path) for method in ("GET", "HEAD"))
    assert got[1] and not head[1] and head[0] == got[0]
    assert head[2]["content-type"] == got[2]["content-type"]
    if path != "/metrics":
        assert head[2]["content-length"] == str(len(got[1]))


def test_head_of_a_stored_response(client: Client) -> None:
    _, stored, _ = client.post(CALLS["/v1/responses"], "/v1/responses")
    path = f"/v1/responses/{stored['id']}"
    assert call(client, "HEAD", path)[:2] == (200, b"") and client.get(path)[0] == 200


def test_head_of_the_feed_ends_and_the_connection_goes_on(client: Client) -> None:
    with closing(HTTPConnection("127.0.0.1", client.port, timeout=30)) as connection:
        for _ in range(40):  # more than may be open at the same time
            connection.request("HEAD", "/live")
            response = connection.getresponse()
            assert (response.status, response.read()) == (200, b"")
            assert response.getheader("content-type", "").startswith("text/event-stream")
        connection.request("GET", "/version")
        assert "version" in json.loads(connection.getresponse().read())


def test_head_needs_a_key_and_get(client: Client) -> None:
    status, body, headers = call(client, "HEAD", COMPLETIONS)
    assert (status, body) == (405, b"") and "POST" in headers["allow"]
    assert set(call(client, "PUT", "/v1/models")[2]["allow"].split(", ")) >= {"GET", "HEAD"}
    with serving(make_engine(), keys=KeyRing(["a"])) as guarded:
        assert call(guarded, "HEAD", "/v1/models")[:2] == (401, b"")
        assert call(guarded, "HEAD", "/health")[:2] == (200, b"")


# ---- content types and headers -------------------------------------------------------------------


@pytest.mark.parametrize("path", [*PAGES, *READ])
def test_a_content_type_has_one_charset(client: Client, path: str) -> None:
    headers = [
        line
        for line in run(exchange(client.port, b"GET %s HTTP/1.0\r\n\r\n" % path.encode())).split(
            b"\r\n"
        )
        if line.lower().startswith(b"content-type")
    ]
    assert len(headers) == 1
    assert headers[0].count(b"charset") <= 1
    assert re.fullmatch(rb"(?i)content-type: [\w/]+(; [\w-]+=[\w.-]+)*", headers[0])
    assert path not in PAGES or b"charset=utf-8" in headers[0]


@pytest.mark.parametrize("path", [*CALLS, "/tokenize"])
@pytest.mark.parametrize(
    "kind",
    [
        "application/json; charset=utf-8; charset=utf-8",
        "Application/JSON;Charset=UTF-8",
        "application/vnd.api+json",
        "APPLICATION/problem+JSON ; charset=utf-8",
        "application/json;",
    ],
)
def test_a_body_may_be_declared_as_any_json(client: Client, path: str, kind: str) -> None:
    body = CALLS.get(path, {"prompt": "def"})
    headers = {"Content-Type": kind}
    assert call(client, "POST", path, json.dumps(body).encode(), headers)[0] == 200


@pytest.mark.parametrize("path", [*CALLS, "/tokenize"])
@pytest.mark.parametrize(
    "kind", [None, "", "text/json", "text/plain+json", "application/x", "+json"]
)
def test_a_body_that_a_page_could_send_is_refused(
    client: Client, path: str, kind: str | None
) -> None:
    """Browsers send such types, and none at all, to other sites without asking these first."""
    headers = {} if kind is None else {"Content-Type": kind}
    status, body, _ = call(client, "POST", path, json.dumps(MESSAGE).encode(), headers)
    assert status == 415
    message = json.loads(body)["error"]["message"]
    assert (kind or "missing") in message and "send application/json" in message


@pytest.mark.parametrize("path", CALLS)
def test_no_proxy_holds_a_stream_back(client: Client, path: str) -> None:
    body = CALLS[path] | {"stream": True, "colour": 1}
    with client.open(body, path) as response:
        assert response.read() and response.status == 200
        assert response.getheader("cache-control") == "no-cache"
        assert response.getheader("x-accel-buffering") == "no"
        assert response.getheader("x-cbatch-ignored-fields") == "colour"


def test_no_proxy_holds_the_feed_back(client: Client) -> None:
    with client.open(None, "/live") as response:
        assert response.getheader("cache-control") == "no-cache"
        assert response.getheader("x-accel-buffering") == "no"


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("path", [COMPLETIONS, CHAT])
def test_a_priority_without_effect_is_named_as_ignored(
    client: Client, path: str, stream: bool
) -> None:
    """As other hints that have no effect: the text is the same."""
    with serving(make_engine(queue_policy="priority"), chat_template=TEMPLATE) as other:
        for server, policy in ((client, "fcfs"), (other, "priority")):
            for priority in (None, 0, 3, -3):
                body = CALLS[path] | {"priority": priority, "stream": stream}
                with server.open(body, path) as response:
                    assert response.status == 200 and response.read()
                named = response.getheader("x-cbatch-ignored-fields")
                assert named == ("priority" if priority and policy == "fcfs" else None)


# ---- idle connections ----------------------------------------------------------------------------


def closed_after_s(port: int, idle_s: float) -> bool:
    """Return whether a connection was closed before its second request, after `idle_s`."""
    with closing(HTTPConnection("127.0.0.1", port, timeout=30)) as connection:
        for pause_s in (0.0, idle_s):
            time.sleep(pause_s)
            try:
                connection.request("GET", "/version")
                connection.getresponse().read()
            except (ConnectionError, RemoteDisconnected):
                return True
            assert connection.sock is not None
    return False


def test_idle_connections_outlive_those_of_proxies(client: Client) -> None:
    assert ConnectionLimits().keep_alive_s == 75
    assert not closed_after_s(client.port, 6.0)
    with serving(make_engine(), connections=ConnectionLimits(keep_alive_s=0.2)) as short:
        assert closed_after_s(short.port, 2.0)


def test_idle_connections_give_way_to_new_ones() -> None:
    """The one that is idle for the longest is closed; connections in use are not."""
    limits = ConnectionLimits(max_connections=3)
    long = {"prompt": "def", "max_tokens": 100_000, "stream": True, "ignore_eos": True}
    engine = make_engine(max_model_len=2**18, num_blocks=2**17)
    with serving(engine, connections=limits) as client, client.running(long):
        with closing(reused(client)) as first, closing(reused(client)) as second:
            with closing(reused(client)), pytest.raises((ConnectionError, RemoteDisconnected)):
                ask(first)
            ask(second)
        with client.running(long), client.running(long):
            assert call(client, "GET", "/version")[0] == 503


def reused(client: Client) -> HTTPConnection:
    """Return a connection that has had a response."""
    connection = HTTPConnection("127.0.0.1", client.port, timeout=30)
    ask(connection)
    return connection


def ask(connection: HTTPConnection) -> None:
    connection.request("GET", "/version")
    response = connection.getresponse()
    assert response.status == 200 and response.read()


def test_keep_alive_is_a_setting(tmp_path: Path) -> None:
    assert read(tmp_path, "", {}, "--keep-alive", "5").values.connections.keep_alive_s == 5
    for wrong in ("0", "-1", "inf"):
        with pytest.raises(FieldError, match="^--keep-alive: "):
            read(tmp_path, "", {}, "--keep-alive", wrong)
