"""Who may enter, and how often at once."""

from __future__ import annotations

import json

from tests.server.http_client import JSON, call, serving
from tests.toy_engine import make_engine

BODY = {"prompt": "def add(a, b):", "max_tokens": 20, "seed": 5}


def test_keys() -> None:
    with serving(make_engine(), api_keys=["first", "sécond"]) as client:
        raw = json.dumps(BODY).encode()
        for given, status in (
            ("Bearer first", 200),
            ("bearer first", 200),
            ("Bearer sécond", 200),
            ("Bearer third", 401),
            ("Bearer firs", 401),
            ("Bearer ", 401),
            ("Basic first", 401),
            ("first", 401),
            (None, 401),
        ):
            headers = JSON if given is None else {**JSON, "Authorization": given.encode()}
            found, body, told = call(client, "POST", "/v1/completions", raw, headers)
            assert found == status, given
            if status == 401:
                assert told["www-authenticate"] == "Bearer" and "x-request-id" in told
                assert json.loads(body)["error"]["code"] == "invalid_api_key"
        for path in ("/v1/models", "/version", "/openapi.json", "/tokenize", "/nowhere"):
            assert call(client, "GET", path)[0] == 401
        for path in ("/health", "/ready", "/metrics"):
            assert call(client, "GET", path)[0] == 200
