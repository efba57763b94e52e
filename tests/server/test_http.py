"""Behaviour that proxies need: HEAD, content types and encodings, headers of streams, idle
connections, limits of open files, and offers of another protocol."""

from __future__ import annotations

import asyncio
import codecs
import contextlib
import gzip
import json
import re
import resource
import time
import zlib
from collections.abc import Iterator
from contextlib import closing
from http.client import HTTPConnection, RemoteDisconnected
from pathlib import Path
from typing import Any

import pytest

from cbatch.core.request.errors import FieldError
from cbatch.server.http.keys import KeyRing
from cbatch.server.http.limits import (
    MAX_CONNECTIONS,
    RESERVED_FILES,
    ConnectionLimits,
    connections_for,
)
from tests.cli.conftest import read_serve as read
from tests.server.apis import APIS, CHAT, COMPLETIONS, RESPONSES, body_of
from tests.server.engines import FIRST_CONTENT
from tests.server.http_client import JSON, Client, call, serving
from tests.server.raw_calls import (
    BODY,
    during_honest_calls,
    exchange,
    post,
    rest_of,
    run,
    statuses,
)
from tests.toy_engine import make_engine

PAGES = ("/", "/page.css", "/page.js", "/draw.js", "/slots.js")
READ = ("/health", "/ready", "/version", "/metrics", "/openapi.json", "/v1/models")
BODIES = {path: body_of(path, "def") for path in APIS}
BODIES |= {"/tokenize": {"prompt": "a"}, "/detokenize": {"tokens": [5]}}
MAX_BODY_BYTES = 2**16


@pytest.fixture
def client(toy_client: Client) -> Client:
    return toy_client


@pytest.fixture(scope="module")
def short_client() -> Iterator[Client]:
    """Serve with short limits: of bodies, and of idle connections."""
    limits = ConnectionLimits(max_body_bytes=MAX_BODY_BYTES, max_held_bytes=2**18, keep_alive_s=0.2)
    with serving(make_engine(), connections=limits, chat_template=FIRST_CONTENT) as client:
        yield client


# ---- HEAD ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("path", [*PAGES, *READ, "/nowhere", "/v1/models/other", "/v1/responses/x"])
def test_head_is_answered_as_get_without_a_body(client: Client, path: str) -> None:
    got, head = (call(client, method, path) for method in ("GET", "HEAD"))
    assert got[1] and not head[1] and head[0] == got[0]
    assert head[2]["content-type"] == got[2]["content-type"]
    if path != "/metrics":
        assert head[2]["content-length"] == str(len(got[1]))


def test_head_of_a_stored_response(client: Client) -> None:
    _, stored, _ = client.post(BODIES[RESPONSES], RESPONSES)
    path = f"{RESPONSES}/{stored['id']}"
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


# ---- content types, encodings and headers --------------------------------------------------------


@pytest.mark.parametrize("path", [*PAGES, *READ])
def test_a_content_type_has_one_charset(client: Client, path: str) -> None:
    head = run(exchange(client.port, b"GET %s HTTP/1.0\r\n\r\n" % path.encode()))
    kinds = [line for line in head.split(b"\r\n") if line.lower().startswith(b"content-type")]
    assert len(kinds) == 1 and kinds[0].count(b"charset") <= 1
    assert re.fullmatch(rb"(?i)content-type: [\w/]+(; [\w-]+=[\w.-]+)*", kinds[0])
    assert path not in PAGES or b"charset=utf-8" in kinds[0]


KINDS = {
    "application/json; charset=utf-8; charset=utf-8": True,
    "Application/JSON;Charset=UTF-8": True,
    "application/vnd.api+json": True,
    "APPLICATION/problem+JSON ; charset=utf-8": True,
    "application/json;": True,
    # Browsers send such types, and none at all, to other sites without asking these first.
    **dict.fromkeys((None, "", "text/json", "text/plain+json", "application/x", "+json"), False),
}


@pytest.mark.parametrize(("kind", "is_json"), KINDS.items())
def test_only_bodies_that_are_declared_as_json_are_read(
    client: Client, kind: str | None, is_json: bool
) -> None:
    headers = {} if kind is None else {"Content-Type": kind}
    for path, body in BODIES.items():
        status, content, _ = call(client, "POST", path, json.dumps(body).encode(), headers)
        assert status == (200 if is_json else 415), path
        if not is_json:
            message = json.loads(content)["error"]["message"]
            assert (kind or "missing") in message and "send application/json" in message


def encoded(client: Client, content: bytes, coding: str, path: str = COMPLETIONS) -> Any:
    """Return the status, and the field at fault or nothing."""
    status, body, _ = call(client, "POST", path, content, JSON | {"Content-Encoding": coding})
    return status, (json.loads(body).get("error") or {}).get("param", "")


@pytest.mark.parametrize("path", BODIES)
def test_a_body_may_be_compressed_or_have_a_byte_order_mark(client: Client, path: str) -> None:
    content = json.dumps(BODIES[path]).encode()
    members = gzip.compress(content[:9]) + gzip.compress(content[9:])
    for coding in ("gzip", "GZip", "x-gzip"):
        assert encoded(client, members, coding, path)[0] == 200
    assert encoded(client, content, "identity", path)[0] == 200
    assert call(client, "POST", path, codecs.BOM_UTF8 + content, JSON)[0] == 200
    assert call(client, "POST", path, codecs.BOM_UTF8 * 2 + content, JSON)[0] == 400


BAD_GZIP = [b"{}", gzip.compress(b"{}" * 99)[:-9], gzip.compress(b"{}") + b"{}", b"\x1f\x8b" * 9]


def test_other_encodings_are_rejected_by_name(client: Client) -> None:
    for coding in ("br", "zstd", "deflate", "gzip, gzip", "compress"):
        assert encoded(client, zlib.compress(b"{}"), coding) == (415, "content-encoding")
    for content in BAD_GZIP:
        assert encoded(client, content, "gzip") == (400, "body")


def test_decompression_stops_at_the_limit(short_client: Client) -> None:
    """A small body that expands to gigabytes is decompressed only up to the limit."""
    client, longest = short_client, b'{"prompt": "a", "max_tokens": 1}'.ljust(MAX_BODY_BYTES)
    assert encoded(client, gzip.compress(longest), "gzip")[0] == 200
    assert encoded(client, gzip.compress(longest + b" "), "gzip") == (413, "body")
    spaces = gzip.compress(b" " * 2**25)
    for bomb in (spaces, gzip.compress(b"") * 999 + spaces):
        sent = post(bomb, b"content-encoding: gzip", b"connection: close")
        answers = run(during_honest_calls(client.port, exchange(client.port, sent)))
        assert statuses(answers) == [413], answers


def test_no_proxy_holds_a_stream_back(client: Client) -> None:
    for path in (*APIS, "/live"):
        body = None if path == "/live" else BODIES[path] | {"stream": True, "colour": 1}
        with client.open(body, path) as response:
            assert response.status == 200
            assert response.getheader("cache-control") == "no-cache"
            assert response.getheader("x-accel-buffering") == "no"
            if path != "/live":
                assert response.read()
                assert response.getheader("x-cbatch-ignored-fields") == "colour"


def test_a_priority_without_effect_is_named_as_ignored(client: Client) -> None:
    """As other hints that have no effect: the text is the same."""
    engine = make_engine(queue_policy="priority")
    with serving(engine, chat_template=FIRST_CONTENT) as other:
        for server, policy in ((client, "fcfs"), (other, "priority")):
            for path, priority, stream in (
                *((COMPLETIONS, priority, False) for priority in (None, 0, 3, -3)),
                *((CHAT, 3, stream) for stream in (False, True)),
            ):
                body = BODIES[path] | {"priority": priority, "stream": stream}
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
                ask(connection)
            except (ConnectionError, RemoteDisconnected):
                return True
    return False


def ask(connection: HTTPConnection) -> None:
    connection.request("GET", "/version")
    response = connection.getresponse()
    assert response.status == 200 and response.read()


def test_idle_connections_outlive_those_of_proxies(client: Client, short_client: Client) -> None:
    assert ConnectionLimits().keep_alive_s == 75
    assert not closed_after_s(client.port, 6.0)
    assert closed_after_s(short_client.port, 2.0)


def test_idle_connections_give_way_to_new_ones() -> None:
    """The one that is idle for the longest is closed; connections in use are not."""

    def reused() -> HTTPConnection:
        connection = HTTPConnection("127.0.0.1", client.port, timeout=30)
        ask(connection)
        return connection

    limits = ConnectionLimits(max_connections=3)
    long = {"prompt": "def", "max_tokens": 100_000, "stream": True, "ignore_eos": True}
    engine = make_engine(max_model_len=2**18, num_blocks=2**17)
    with serving(engine, connections=limits) as client, client.running(long):
        with closing(reused()) as first, closing(reused()) as second:
            with closing(reused()), pytest.raises((ConnectionError, RemoteDisconnected)):
                ask(first)
            ask(second)
        with client.running(long), client.running(long):
            assert call(client, "GET", "/version")[0] == 503


def test_keep_alive_is_a_setting(tmp_path: Path) -> None:
    assert read(tmp_path, "", {}, "--keep-alive", "5").values.connections.keep_alive_s == 5
    for wrong in ("0", "-1", "inf"):
        with pytest.raises(FieldError, match="^--keep-alive: "):
            read(tmp_path, "", {}, "--keep-alive", wrong)


# ---- open files ----------------------------------------------------------------------------------

NO_LIMIT = resource.RLIM_INFINITY
MAX_FILES = MAX_CONNECTIONS + RESERVED_FILES


@pytest.mark.parametrize(
    ("soft", "hard", "limit", "room", "files"),
    [
        (20_000, 20_000, None, MAX_CONNECTIONS, 20_000),
        (1024, 20_000, None, MAX_CONNECTIONS, MAX_FILES),
        (1024, 20_000, 10_000, 10_000, 10_000 + RESERVED_FILES),
        (1024, 2048, None, 2048 - RESERVED_FILES, 2048),
        (NO_LIMIT, NO_LIMIT, None, MAX_CONNECTIONS, NO_LIMIT),
        (1024, 1024, MAX_CONNECTIONS, r"max_connections: 4096 need \d+ open files.*<= 768", 1024),
        (8, 8, None, r"open files: .* 8, .*ulimit -n", 8),
        (RESERVED_FILES, RESERVED_FILES, None, "open files: .*ulimit -n", RESERVED_FILES),
    ],
)
def test_open_files_are_reserved_for_the_engine(
    monkeypatch: pytest.MonkeyPatch, soft: int, hard: int, limit: Any, room: Any, files: int
) -> None:
    """`room` is the number of allowed connections, or the error."""
    limits = [(soft, hard)]
    monkeypatch.setattr(resource, "getrlimit", lambda _: limits[-1])
    monkeypatch.setattr(resource, "setrlimit", lambda _, changed: limits.append(changed))
    if isinstance(room, str):
        with pytest.raises(FieldError, match=room):
            connections_for(limit)
    else:
        assert connections_for(limit) == room
    assert limits[-1] == (files, hard)


@pytest.mark.parametrize("field", ConnectionLimits.__struct_fields__)
def test_an_invalid_limit_is_rejected(field: str) -> None:
    for value in (0, -1, float("nan"), float("inf")):
        with pytest.raises(FieldError, match=field):
            ConnectionLimits(**{field: value})


# ---- offers --------------------------------------------------------------------------------------

CONTENT = json.dumps(BODY).encode()
FRAMES = [
    b"content-length: %d\r\n\r\n%s" % (len(CONTENT), CONTENT),
    b"transfer-encoding: chunked\r\n\r\n5\r\n%s\r\n%x\r\n%s\r\n0\r\n\r\n"
    % (CONTENT[:5], len(CONTENT) - 5, CONTENT[5:]),
]
OFFERS = {
    "h2c": b"Connection: Upgrade, HTTP2-Settings\r\nUpgrade: h2c\r\nHTTP2-Settings: AAEA\r\n",
    "no connection field": b"Upgrade: h2c\r\n",
    "websocket": b"Connection: keep-alive, Upgrade\r\nUpgrade: websocket\r\n",
    "two fields": b"Connection: keep-alive\r\nConnection: Upgrade\r\nUpgrade: h2c, TLS/1.0\r\n",
}
HEAD = b"POST /v1/completions HTTP/1.1\r\nhost: x\r\ncontent-type: application/json\r\n"
LAST = b"GET /version HTTP/1.1\r\nhost: x\r\nconnection: close, upgrade\r\nupgrade: TLS/1.0\r\n\r\n"


async def sent_in_parts(port: int, content: bytes, num_bytes: int) -> bytes:
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    for at in range(0, len(content), num_bytes):
        writer.write(content[at : at + num_bytes])
        await asyncio.sleep(0)
    with contextlib.closing(writer):
        return await rest_of(reader)


@pytest.mark.parametrize("offer", OFFERS.values(), ids=OFFERS)
def test_an_offer_is_ignored(client: Client, offer: bytes) -> None:
    """The request arrives in parts, with other requests after it on the same connection."""
    calls = b"".join(HEAD + offer + frame for frame in FRAMES) + LAST
    answers = run(sent_in_parts(client.port, calls, 7))
    assert statuses(answers) == [200, 200, 200], answers
    assert answers.count(b'"text"') == 2


def test_connect_and_http_2_are_rejected(client: Client) -> None:
    for sent in (b"CONNECT a:80 HTTP/1.1\r\nhost: x\r\n\r\n", b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"):
        assert statuses(run(sent_in_parts(client.port, sent, 2**16))) == [400]
