"""Keys that a server takes, and that are distinguished by more than the beginnings of digests."""

from __future__ import annotations

import json
import logging
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from cbatch.cli.model_service import ModelParts
from cbatch.cli.serve_settings import ServeSettings
from cbatch.cli.settings import settings_of
from cbatch.core.request.errors import FieldError
from cbatch.server.http.keys import KeyRing, digest, read_keys
from cbatch.text import ChatTemplate
from tests.cli.test_settings import read
from tests.server.http_client import JSON, Client, call, serving
from tests.server.test_access_log import Lines
from tests.toy_engine import make_engine

# Two keys whose digests begin with the same 32 bits.
MINE, OTHER = "sk-key-31691", "sk-key-35805"
RESPONSES = "/v1/responses"
BODY: dict[str, Any] = {"input": "def add(a, b):", "max_output_tokens": 4}
TEMPLATE = ChatTemplate("{{ messages[0].content }}", {}, "the test")


@pytest.fixture(scope="module")
def client() -> Iterator[Client]:
    keys = KeyRing([MINE, OTHER], max_requests_per_key=1)
    with serving(make_engine(), keys=keys, chat_template=TEMPLATE) as client:
        yield client


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
        ("GET", RESPONSES + "/{id}", None),
        ("POST", RESPONSES, BODY | {"previous_response_id": "{id}"}),
        ("POST", RESPONSES + "/input_tokens", {"input": "a", "previous_response_id": "{id}"}),
        ("DELETE", RESPONSES + "/{id}", None),
    ],
    ids=["read", "continue", "count", "delete"],
)
def test_keys_with_equal_beginnings_of_their_digests_share_no_stored_responses(
    client: Client, method: str, path: str, body: dict[str, Any] | None
) -> None:
    assert digest(MINE.encode())[:4] == digest(OTHER.encode())[:4]
    stored = as_key(client, MINE, "POST", RESPONSES, BODY)[1]["id"]
    path, body = path.format(id=stored), body and dict(body)
    if body:
        body["previous_response_id"] = stored
    assert as_key(client, OTHER, method, path, body)[0] == 404
    assert as_key(client, MINE, method, path, body)[0] == 200


def test_a_log_line_shows_the_beginning_of_the_key_s_digest(client: Client) -> None:
    lines, logger = Lines(), logging.getLogger("cbatch")
    level = logger.level
    logger.addHandler(lines)
    logger.setLevel(logging.INFO)
    try:
        as_key(client, MINE, "POST", RESPONSES, BODY)
        assert lines.last(1)["key"] == digest(MINE.encode()).hex()[:8]
    finally:
        logger.removeHandler(lines)
        logger.setLevel(level)


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
        ("", {"CBATCH_API_KEY": ""}, (), "CBATCH_API_KEY"),
        ("", {"CBATCH_API_KEY": " , "}, (), "CBATCH_API_KEY"),
        ("api_key = []", {}, (), "serve.toml: api_key"),
        ('api_key = ""', {}, (), "serve.toml: api_key"),
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


def test_a_replica_without_a_key_does_not_start() -> None:
    settings = settings_of(ServeSettings, {"api_key": []}, "args")
    with pytest.raises(FieldError, match="args: api_key"), settings.naming():
        ModelParts(settings.values)


def test_blanks_comments_and_repeats_are_no_keys(tmp_path: Path) -> None:
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
