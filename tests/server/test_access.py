"""Access: keys and their limits, and pages of other origins."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from cbatch.cli.model_service import ModelParts
from cbatch.cli.serve_settings import ServeSettings
from cbatch.cli.settings import settings_of
from cbatch.core.request.errors import FieldError
from cbatch.server.http.keys import ApiKey, KeyBusyError, KeyRing, digest, read_keys
from tests.checking.clock import VirtualClock
from tests.cli.conftest import read_serve as read
from tests.server.apis import COMPLETIONS, RESPONSES, body_of
from tests.server.engines import FIRST_CONTENT, SlowEngine
from tests.server.http_client import JSON, Client, call, sample, serving, wait_until
from tests.toy_engine import make_engine

# Two keys whose digests begin with the same 32 bits.
MINE, OTHER = "sk-key-31691", "sk-key-35805"
BODY = body_of(COMPLETIONS)
RAW = json.dumps(BODY).encode()
GUARDED = ("/v1/models", "/version", "/openapi.json", "/tokenize", "/live", "/nowhere", "/metrics")
PAGE = "https://app.example:8443"
KEY = {"Authorization": f"Bearer {MINE}"}
ALLOWED, EXPOSED = "access-control-allow-origin", "access-control-expose-headers"
PREFLIGHT = {
    "Origin": PAGE,
    "Access-Control-Request-Method": "POST",
    "Access-Control-Request-Headers": "authorization,content-type,x-stainless-os",
}


@pytest.fixture(scope="module")
def client() -> Iterator[Client]:
    """Return a client of a server with three keys and two origins."""
    options: Any = {"chat_template": FIRST_CONTENT, "cors_origins": [PAGE.upper() + "/", "null"]}
    keys = KeyRing([MINE, OTHER, "sécond"], max_requests_per_key=1)
    with serving(make_engine(), keys=keys, **options) as client:
        yield client


# ---- keys ----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("given", "status"),
    [
        (f"Bearer {MINE}", 200),
        (f"bearer {MINE}", 200),
        ("Bearer sécond", 200),
        ("Bearer third", 401),
        (f"Bearer {MINE[:-1]}", 401),
        ("Bearer ", 401),
        (f"Basic {MINE}", 401),
        (MINE, 401),
        (None, 401),
    ],
)
def test_a_call_needs_a_key(client: Client, given: str | None, status: int) -> None:
    headers: Any = JSON if given is None else JSON | {"Authorization": given.encode()}
    code, body, answer_headers = call(client, "POST", COMPLETIONS, RAW, headers)
    assert code == status
    if status == 401:
        assert answer_headers["www-authenticate"] == "Bearer" and "x-request-id" in answer_headers
        assert json.loads(body)["error"]["code"] == "invalid_api_key"


def test_all_but_probes_need_a_key(client: Client) -> None:
    assert {call(client, "GET", path)[0] for path in GUARDED} == {401}
    assert {call(client, "GET", path)[0] for path in ("/health", "/ready")} == {200}
    assert client.get("/health")[1] == {"status": "ok"}, "the load tells of other clients"
    assert call(client, "GET", "/metrics", headers=KEY)[0] == 200


def test_a_key_has_a_limit_of_open_calls(monkeypatch: pytest.MonkeyPatch) -> None:
    """Streams count until they end, for any reason; other keys and other methods do not count."""
    engine = SlowEngine(monkeypatch).engine
    keys = KeyRing(["first", "second"], max_requests_per_key=2)
    first, second = ({"Authorization": f"Bearer {name}"} for name in ("first", "second"))
    long = BODY | {"max_tokens": 8000, "stream": True}
    with serving(engine, keys=keys, open_metrics=True) as client:
        assert client.get("/health")[1] == {"status": "ok", "requests": 0}

        def status(body: dict[str, Any] | None, path: str, headers: dict[str, str]) -> int:
            with client.open(body, path, headers) as response:
                response.read()
                return response.status

        with client.open(long, headers=first) as one, client.open(long, headers=first) as two:
            for body in (BODY, long):
                with client.open(body, headers=first) as refused:
                    answer = json.loads(refused.read())
                    assert refused.status == 429, answer
                    assert int(refused.getheader("retry-after", "0")) >= 1
                assert answer["error"]["code"] == "rate_limit_exceeded"
            assert status(None, "/v1/models", first) == status(BODY, COMPLETIONS, second) == 200
            assert one.status == two.status == 200
        assert sample(client, "vllm:admission_rejections_total", reason="key_limit") == 2
        wait_until(lambda: status(BODY, COMPLETIONS, first) == 200)


def test_retry_after_follows_the_durations_of_the_keys_calls() -> None:
    clock = VirtualClock()
    key = ApiKey(b"secret", 2, clock)

    def refused_until_s() -> int:
        with (
            key.count_request(),
            key.count_request(),
            pytest.raises(KeyBusyError) as caught,
            key.count_request(),
        ):
            pass
        return caught.value.retry_after_s

    assert refused_until_s() == 1, "no durations yet"
    for _ in range(16):
        with key.count_request():
            clock.advance(12.0)
    assert refused_until_s() == 6
    assert "secret" not in key.id


def as_key(
    client: Client, key: str, method: str, path: str, body: dict[str, Any] | None = None
) -> tuple[int, Any]:
    content = None if body is None else json.dumps(body).encode()
    headers = JSON | {"Authorization": f"Bearer {key}"}
    status, answer, _ = call(client, method, path, content, headers)
    return status, json.loads(answer)


@pytest.mark.parametrize(
    ("method", "path", "body"),
    [
        ("GET", "/{id}", None),
        ("POST", "", body_of(RESPONSES)),
        ("POST", "/input_tokens", {"input": "a"}),
        ("DELETE", "/{id}", None),
    ],
    ids=["read", "continue", "count", "delete"],
)
def test_keys_with_equal_beginnings_of_their_digests_share_no_stored_responses(
    client: Client, method: str, path: str, body: dict[str, Any] | None
) -> None:
    assert digest(MINE.encode())[:4] == digest(OTHER.encode())[:4]
    stored = as_key(client, MINE, "POST", RESPONSES, body_of(RESPONSES))[1]["id"]
    path = RESPONSES + path.format(id=stored)
    body = None if body is None else body | {"previous_response_id": stored}
    assert as_key(client, OTHER, method, path, body)[0] == 404
    assert as_key(client, MINE, method, path, body)[0] == 200


# ---- settings ------------------------------------------------------------------------------------


@pytest.mark.parametrize(("keys", "limit"), [(["a"], 0), ([], 3)])
def test_a_limit_per_key_without_keys_is_rejected(keys: list[str], limit: int) -> None:
    with pytest.raises(FieldError, match="max_requests_per_key"):
        KeyRing(keys, max_requests_per_key=limit)


@pytest.mark.parametrize("secret", ["", " ", "\t\r\n", "a\x00b", "a\x1bb", "a\x9bb"])
def test_a_key_that_no_header_can_hold_is_refused(secret: str) -> None:
    with pytest.raises(FieldError, match="^api_key: ") as caught:
        KeyRing(["real", secret])
    assert repr(secret) not in str(caught.value)


@pytest.mark.parametrize(
    ("text", "variables", "flags", "origin"),
    [
        ("", {}, ("--api-key", ""), "--api-key"),
        ("", {}, ("--api-key", "a", "--api-key", " "), "--api-key"),
        ("", {"CBATCH_API_KEY": " , "}, (), "CBATCH_API_KEY"),
        ("api_key = []", {}, (), "serve.toml: api_key"),
        ('api_key = ["a", ""]', {}, (), "serve.toml: api_key"),
        ("", {}, ("--api-key-file", ""), "--api-key-file"),
        ("", {"CBATCH_API_KEY_FILE": ""}, (), "CBATCH_API_KEY_FILE"),
    ],
)
def test_a_setting_without_a_key_does_not_open_the_server(
    tmp_path: Path, text: str, variables: dict[str, str], flags: tuple[str, ...], origin: str
) -> None:
    settings = read(tmp_path, text, variables, *flags)
    with pytest.raises(FieldError) as caught, settings.naming():
        ModelParts(settings.values)
    assert caught.value.field.endswith(origin)
    replica = settings_of(ServeSettings, {"api_key": []}, "args")
    with pytest.raises(FieldError, match="args: api_key"), replica.naming():
        ModelParts(replica.values)


def test_keys_from_a_file(tmp_path: Path) -> None:
    """Blanks, comments and repeats are no keys."""
    path = tmp_path / "keys"
    path.write_bytes("\ufefffirst \r\n\t\n  # staging keys\n\t#none\nfirst\n sécond\n".encode())
    assert read_keys(path) == ["first", "first", "sécond"]
    keys = KeyRing([*read_keys(path), " third\n", "third"])
    assert len(keys.accepted) == 3
    for secret in ("first", "sécond", "third", "third ", "\tthird"):
        assert keys.find(b"Bearer " + secret.encode()) is not None, secret
    for secret in ("", " ", "# staging keys", "#none", "\ufefffirst"):
        assert keys.find(b"Bearer " + secret.encode()) is None, secret
    assert len(KeyRing(["f\udce9"]).accepted) == 1, "an argument that is not UTF-8"
    path.write_text("# none\n")
    for wrong in (path, tmp_path / "nothing", tmp_path):
        with pytest.raises(FieldError, match="api_key_file"):
            read_keys(wrong)


# ---- other origins -------------------------------------------------------------------------------


def test_a_preflight_needs_no_key(client: Client) -> None:
    status, body, headers = call(client, "OPTIONS", COMPLETIONS, headers=PREFLIGHT)
    assert (status, body, headers[ALLOWED]) == (204, b"", PAGE)
    assert headers["access-control-allow-headers"] == PREFLIGHT["Access-Control-Request-Headers"]
    assert "POST" in headers["access-control-allow-methods"] and headers["vary"] == "origin"
    other = PREFLIGHT | {"Origin": "https://evil.example"}
    status, _, headers = call(client, "OPTIONS", COMPLETIONS, headers=other)
    assert status == 401 and ALLOWED not in headers


@pytest.mark.parametrize(
    ("method", "path", "body", "headers", "status"),
    [
        ("POST", COMPLETIONS, RAW, JSON | KEY, 200),
        ("POST", COMPLETIONS, RAW[:-1] + b', "stream": true}', JSON | KEY, 200),
        ("POST", COMPLETIONS, b"{", JSON | KEY, 400),
        ("POST", COMPLETIONS, RAW, KEY, 415),
        ("POST", COMPLETIONS, RAW, JSON, 401),
        ("GET", COMPLETIONS, None, KEY, 405),
        ("GET", "/nowhere", None, KEY, 404),
        ("GET", "/health", None, {}, 200),
    ],
)
def test_pages_of_named_origins_may_read_answers(
    client: Client, method: str, path: str, body: bytes, headers: dict[str, str], status: int
) -> None:
    for origin in (PAGE, "null"):
        code, _, answer_headers = call(client, method, path, body, headers | {"Origin": origin})
        assert (code, answer_headers[ALLOWED]) == (status, origin)
        assert "x-request-id" in answer_headers[EXPOSED]
    for other in ("https://app.example", "https://evil.example", PAGE + ".evil", "*", ""):
        code, _, answer_headers = call(client, method, path, body, headers | {"Origin": other})
        assert code == status and ALLOWED not in answer_headers


@pytest.mark.parametrize("origins", [(), ("*",)])
def test_no_origin_or_every_origin(origins: tuple[str, ...]) -> None:
    with serving(make_engine(), cors_origins=origins) as client:
        assert client.get("/health")[1] == {"status": "ok", "requests": 0}, "without keys"
        _, _, answer_headers = call(client, "POST", COMPLETIONS, RAW, JSON | {"Origin": PAGE})
        _, _, preflight = call(client, "OPTIONS", COMPLETIONS, headers=PREFLIGHT)
    expected = origins[0] if origins else None
    assert answer_headers.get(ALLOWED) == preflight.get(ALLOWED) == expected
