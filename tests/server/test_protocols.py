"""Limits of connections and open files, and requests that offer another protocol: the offer is
ignored, and the request is answered."""

from __future__ import annotations

import asyncio
import contextlib
import json
import resource
from collections.abc import Iterator

import pytest

from cbatch.core.request.errors import FieldError
from cbatch.server.http.limits import (
    MAX_CONNECTIONS,
    RESERVED_FILES,
    ConnectionLimits,
    connections_for,
)
from tests.server.http_client import Client, serving
from tests.server.raw_calls import BODY, rest_of, run, statuses
from tests.toy_engine import make_engine

NO_LIMIT = resource.RLIM_INFINITY
MAX_FILES = MAX_CONNECTIONS + RESERVED_FILES


@pytest.mark.parametrize(
    ("soft", "hard", "limit", "room", "files"),
    [
        (20_000, 20_000, None, MAX_CONNECTIONS, 20_000),
        (1024, 20_000, None, MAX_CONNECTIONS, MAX_FILES),
        (1024, 20_000, 10_000, 10_000, 10_000 + RESERVED_FILES),
        (1024, 2048, None, 2048 - RESERVED_FILES, 2048),
        (1024, NO_LIMIT, 50_000, 50_000, 50_000 + RESERVED_FILES),
        (NO_LIMIT, NO_LIMIT, None, MAX_CONNECTIONS, NO_LIMIT),
        (1024, 1024, 1024 - RESERVED_FILES, 1024 - RESERVED_FILES, 1024),
        (1024, 1024, MAX_CONNECTIONS, None, 1024),
    ],
)
def test_open_files_are_reserved_for_the_engine(
    monkeypatch: pytest.MonkeyPatch,
    soft: int,
    hard: int,
    limit: int | None,
    room: int | None,
    files: int,
) -> None:
    """`room` is the number of allowed connections; None: the limit is rejected."""
    limits = [(soft, hard)]
    monkeypatch.setattr(resource, "getrlimit", lambda _: limits[-1])
    monkeypatch.setattr(resource, "setrlimit", lambda _, changed: limits.append(changed))
    if room is None:
        with pytest.raises(FieldError, match=r"max_connections: 4096 need \d+ open files.*<= 768"):
            connections_for(limit)
    else:
        assert connections_for(limit) == room
    assert limits[-1] == (files, hard)


@pytest.mark.parametrize(("files", "limit"), [(8, None), (RESERVED_FILES, None), (64, 1)])
def test_too_few_open_files_for_any_connection(
    monkeypatch: pytest.MonkeyPatch, files: int, limit: int | None
) -> None:
    monkeypatch.setattr(resource, "getrlimit", lambda _: (files, files))
    monkeypatch.setattr(resource, "setrlimit", lambda *_: None)
    with pytest.raises(FieldError, match=rf"open files: .* {files}, .*ulimit -n"):
        connections_for(limit)


@pytest.mark.parametrize("field", ConnectionLimits.__struct_fields__)
def test_an_invalid_limit_is_rejected(field: str) -> None:
    for value in (0, -1, float("nan"), float("inf")):
        with pytest.raises(FieldError, match=field):
            ConnectionLimits(**{field: value})


# ---- offers ----


CONTENT = json.dumps(BODY).encode()
FRAMES = {
    "length": b"content-length: %d\r\n\r\n%s" % (len(CONTENT), CONTENT),
    "chunked": b"transfer-encoding: chunked\r\n\r\n5\r\n%s\r\n%x\r\n%s\r\n0\r\n\r\n"
    % (CONTENT[:5], len(CONTENT) - 5, CONTENT[5:]),
}
OFFERS = {
    "h2c": b"Connection: Upgrade, HTTP2-Settings\r\nUpgrade: h2c\r\nHTTP2-Settings: AAEA\r\n",
    "h2c without settings": b"connection: upgrade\r\nupgrade: h2c\r\n",
    "no connection field": b"Upgrade: h2c\r\n",
    "websocket": b"Connection: keep-alive, Upgrade\r\nUpgrade: websocket\r\n",
    "two fields": b"Connection: keep-alive\r\nConnection: Upgrade\r\nUpgrade: h2c, TLS/1.0\r\n",
}
LAST = b"GET /version HTTP/1.1\r\nhost: x\r\nconnection: close, upgrade\r\nupgrade: TLS/1.0\r\n\r\n"


def offering(offer: str, frame: str) -> bytes:
    head = b"POST /v1/completions HTTP/1.1\r\nhost: x\r\ncontent-type: application/json\r\n"
    return head + OFFERS[offer] + FRAMES[frame]


async def sent_in_parts(port: int, content: bytes, num_bytes: int) -> bytes:
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    for at in range(0, len(content), num_bytes):
        writer.write(content[at : at + num_bytes])
        await asyncio.sleep(0)
    with contextlib.closing(writer):
        return await rest_of(reader)


@pytest.fixture(scope="module")
def client() -> Iterator[Client]:
    with serving(make_engine()) as client:
        yield client


@pytest.mark.parametrize("offer", OFFERS)
@pytest.mark.parametrize("frame", FRAMES)
@pytest.mark.parametrize("num_bytes", [7])
def test_an_offer_is_ignored(client: Client, offer: str, frame: str, num_bytes: int) -> None:
    """The request arrives at once or in parts, with other requests after it on the same
    connection."""
    calls = offering(offer, frame) * 2 + LAST
    answers = run(sent_in_parts(client.port, calls, num_bytes))
    assert statuses(answers) == [200, 200, 200], answers
    assert answers.count(b'"text"') == 2


def test_connect_and_http_2_are_rejected(client: Client) -> None:
    for call in (b"CONNECT a:80 HTTP/1.1\r\nhost: x\r\n\r\n", b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"):
        assert statuses(run(sent_in_parts(client.port, call, 2**16))) == [400]
