"""Bodies that are compressed or have a byte order mark, as clients and proxies send them."""

from __future__ import annotations

import codecs
import gzip
import json
import zlib
from collections.abc import Iterator

import pytest

from cbatch.server.http.limits import ConnectionLimits
from cbatch.text import ChatTemplate
from tests.server.http_client import CHAT, COMPLETIONS, JSON, Client, call, serving
from tests.server.raw_calls import during_honest_calls, exchange, post, run, statuses
from tests.toy_engine import make_engine

LIMITS = ConnectionLimits(max_body_bytes=2**16, max_held_bytes=2**18)
BODIES = {
    COMPLETIONS: {"prompt": "def add(a, b):", "max_tokens": 4},
    CHAT: {"messages": [{"role": "user", "content": "a"}], "max_tokens": 4},
    "/tokenize": {"prompt": "a"},
    "/detokenize": {"tokens": [5]},
}


@pytest.fixture(scope="module")
def client() -> Iterator[Client]:
    template = ChatTemplate("{{ messages[0].content }}", {}, "the test")
    with serving(make_engine(), connections=LIMITS, chat_template=template) as client:
        yield client


def answer(client: Client, content: bytes, coding: str, path: str = COMPLETIONS) -> tuple[int, str]:
    """Return the status, and the field at fault or nothing."""
    headers = JSON | {"Content-Encoding": coding}
    status, body, _ = call(client, "POST", path, content, headers)
    return status, json.loads(body).get("error", {}).get("param", "")


@pytest.mark.parametrize("path", BODIES)
@pytest.mark.parametrize("coding", ["gzip", "GZip", "x-gzip", "identity"])
def test_a_body_may_be_compressed(client: Client, path: str, coding: str) -> None:
    content = json.dumps(BODIES[path]).encode()
    if coding != "identity":
        content = gzip.compress(content[:9]) + gzip.compress(content[9:])  # in two members
    assert answer(client, content, coding, path) == (200, "")


@pytest.mark.parametrize("path", BODIES)
def test_a_byte_order_mark_is_skipped(client: Client, path: str) -> None:
    content = codecs.BOM_UTF8 + json.dumps(BODIES[path]).encode()
    assert call(client, "POST", path, content, JSON)[0] == 200
    assert call(client, "POST", path, codecs.BOM_UTF8 + content, JSON)[0] == 400


@pytest.mark.parametrize("coding", ["br", "zstd", "deflate", "gzip, gzip", "compress"])
def test_other_encodings_are_rejected_by_name(client: Client, coding: str) -> None:
    assert answer(client, zlib.compress(b"{}"), coding) == (415, "content-encoding")


@pytest.mark.parametrize(
    "content",
    [b"{}", gzip.compress(b"{}" * 99)[:-9], gzip.compress(b"{}") + b"{}", b"\x1f\x8b" * 9],
    ids=["plain", "cut", "more", "noise"],
)
def test_invalid_gzip_is_rejected(client: Client, content: bytes) -> None:
    assert answer(client, content, "gzip") == (400, "body")


def test_decompression_stops_at_the_limit(client: Client) -> None:
    """A small body that expands to gigabytes is decompressed only up to the limit."""
    longest = b'{"prompt": "a", "max_tokens": 1}'.ljust(LIMITS.max_body_bytes)
    assert answer(client, gzip.compress(longest), "gzip") == (200, "")
    assert answer(client, gzip.compress(longest + b" "), "gzip") == (413, "body")
    for bomb in (
        gzip.compress(b" " * 2**25),
        gzip.compress(b"") * 999 + gzip.compress(b" " * 2**25),
    ):
        call = post(bomb, b"content-encoding: gzip", b"connection: close")
        answers = run(during_honest_calls(client.port, exchange(client.port, call)))
        assert statuses(answers) == [413], answers
