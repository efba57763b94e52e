"""Pages of other origins: named origins may call and read all responses, errors included."""

from __future__ import annotations

import json
from collections.abc import Iterator

import pytest

from cbatch.server.http.keys import KeyRing
from tests.server.http_client import JSON, Client, call, serving
from tests.toy_engine import make_engine

PAGE = "https://app.example:8443"
BODY = json.dumps({"prompt": "def add(a, b):", "max_tokens": 4}).encode()
KEY = {"Authorization": "Bearer a"}
ALLOWED, EXPOSED = "access-control-allow-origin", "access-control-expose-headers"
PREFLIGHT = {
    "Origin": PAGE,
    "Access-Control-Request-Method": "POST",
    "Access-Control-Request-Headers": "authorization,content-type,x-stainless-os",
}


@pytest.fixture(scope="module")
def client() -> Iterator[Client]:
    keys = KeyRing(["a"], max_requests_per_key=1)
    with serving(make_engine(), keys=keys, cors_origins=[PAGE.upper() + "/", "null"]) as client:
        yield client


def test_a_preflight_needs_no_key(client: Client) -> None:
    status, body, headers = call(client, "OPTIONS", "/v1/completions", headers=PREFLIGHT)
    assert (status, body, headers[ALLOWED]) == (204, b"", PAGE)
    assert headers["access-control-allow-headers"] == PREFLIGHT["Access-Control-Request-Headers"]
    assert "POST" in headers["access-control-allow-methods"] and headers["vary"] == "origin"


@pytest.mark.parametrize(
    ("method", "path", "body", "headers", "status"),
    [
        ("POST", "/v1/completions", BODY, JSON | KEY, 200),
        ("POST", "/v1/completions", BODY[:-1] + b', "stream": true}', JSON | KEY, 200),
        ("POST", "/v1/completions", b"{", JSON | KEY, 400),
        ("POST", "/v1/completions", BODY, KEY, 415),
        ("POST", "/v1/completions", BODY, JSON, 401),
        ("GET", "/v1/completions", None, KEY, 405),
        ("GET", "/nowhere", None, KEY, 404),
        ("GET", "/health", None, {}, 200),
    ],
)
def test_pages_of_named_origins_may_read_answers(
    client: Client,
    method: str,
    path: str,
    body: bytes | None,
    headers: dict[str, str],
    status: int,
) -> None:
    for origin in (PAGE, "null"):
        code, _, answer_headers = call(client, method, path, body, headers | {"Origin": origin})
        assert (code, answer_headers[ALLOWED]) == (status, origin)
        assert "x-request-id" in answer_headers[EXPOSED]
    for other in ("https://app.example", "https://evil.example", PAGE + ".evil", "*", ""):
        code, _, answer_headers = call(client, method, path, body, headers | {"Origin": other})
        assert code == status and ALLOWED not in answer_headers


def test_a_preflight_of_another_origin_is_rejected(client: Client) -> None:
    status, _, headers = call(
        client, "OPTIONS", "/v1/completions", headers=PREFLIGHT | {"Origin": "https://evil.example"}
    )
    assert status == 401 and ALLOWED not in headers


@pytest.mark.parametrize("origins", [(), ("*",)])
def test_no_origin_or_every_origin(origins: tuple[str, ...]) -> None:
    with serving(make_engine(), cors_origins=origins) as client:
        _, _, answer_headers = call(
            client, "POST", "/v1/completions", BODY, JSON | {"Origin": PAGE}
        )
        _, _, preflight = call(client, "OPTIONS", "/v1/completions", headers=PREFLIGHT)
    assert (
        answer_headers.get(ALLOWED) == preflight.get(ALLOWED) == (origins[0] if origins else None)
    )
