"""Access by keys, and limits on concurrent calls."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from cbatch.core.request.errors import FieldError
from cbatch.server.http.keys import ApiKey, KeyBusyError, KeyRing, read_keys
from tests.checking.clock import VirtualClock
from tests.server.http_client import JSON, call, sample, serving, wait_until
from tests.server.test_app import SlowEngine
from tests.toy_engine import make_engine

BODY = {"prompt": "def add(a, b):", "max_tokens": 20, "seed": 5}
GUARDED = ("/v1/models", "/version", "/openapi.json", "/tokenize", "/live", "/nowhere")


def test_keys() -> None:
    with serving(make_engine(), keys=KeyRing(["first", "sécond"])) as client:
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
            code, body, answer_headers = call(client, "POST", "/v1/completions", raw, headers)
            assert code == status, given
            if status == 401:
                assert (
                    answer_headers["www-authenticate"] == "Bearer"
                    and "x-request-id" in answer_headers
                )
                assert json.loads(body)["error"]["code"] == "invalid_api_key"
        for path in (*GUARDED, "/metrics"):
            assert call(client, "GET", path)[0] == 401
        for path in ("/health", "/ready"):
            assert call(client, "GET", path)[0] == 200
        assert call(client, "GET", "/metrics", headers={"Authorization": "Bearer first"})[0] == 200


@pytest.mark.parametrize(
    ("keys", "open_metrics", "is_open"),
    [((), False, True), (("a",), True, True), (("a",), False, False)],
)
def test_health_shows_the_load_only_if_metrics_are_open(
    keys: tuple[str, ...], open_metrics: bool, is_open: bool
) -> None:
    """Metrics would tell one client about the others."""
    with serving(make_engine(), keys=KeyRing(keys), open_metrics=open_metrics) as client:
        for method in ("GET", "HEAD"):
            assert call(client, method, "/metrics")[0] == (200 if is_open else 401)
        status, health = client.get("/health")
        assert status == 200 and health == {"status": "ok"} | ({"requests": 0} if is_open else {})


def test_a_key_has_a_limit_of_open_calls(monkeypatch: pytest.MonkeyPatch) -> None:
    """Streams count until they end, for any reason; other keys and other methods do not count."""
    engine = SlowEngine(monkeypatch).engine
    keys = KeyRing(["first", "second"], max_requests_per_key=2)
    first, second = ({"Authorization": f"Bearer {name}"} for name in ("first", "second"))
    long = BODY | {"max_tokens": 8000, "stream": True}
    with serving(engine, keys=keys, open_metrics=True) as client:
        with client.open(long, headers=first) as one, client.open(long, headers=first) as two:
            for body in (BODY, long):
                with client.open(body, headers=first) as refused:
                    answer = json.loads(refused.read())
                    assert refused.status == 429, answer
                    assert int(refused.getheader("retry-after", "0")) >= 1
                assert answer["error"]["code"] == "rate_limit_exceeded"
            with client.open(None, "/v1/models", headers=first) as looked:
                assert looked.status == 200
            with client.open(BODY, headers=second) as other:
                assert other.status == 200
            assert one.status == two.status == 200
        assert sample(client, "vllm:admission_rejections_total", reason="key_limit") == 2

        def admitted() -> bool:
            with client.open(BODY, headers=first) as again:
                return again.status == 200

        wait_until(admitted)


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


@pytest.mark.parametrize(("keys", "limit"), [(["a"], 0), ([], 3)])
def test_a_limit_per_key_without_keys_is_rejected(keys: list[str], limit: int) -> None:
    with pytest.raises(FieldError, match="max_requests_per_key"):
        KeyRing(keys, max_requests_per_key=limit)


def test_keys_from_a_file(tmp_path: Path) -> None:
    path = tmp_path / "keys"
    path.write_text("# of the web shop\nfirst\n\n  second \n")
    assert read_keys(path) == ["first", "second"]
    path.write_text("# none\n")
    for wrong in (path, tmp_path / "nothing", tmp_path):
        with pytest.raises(FieldError, match="api_key_file"):
            read_keys(wrong)
