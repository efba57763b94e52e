"""With salts, clients of one engine cannot learn about each other through the prefix cache."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from cbatch.cli.model_service import ModelParts
from cbatch.core.request.errors import FieldError
from cbatch.server.http.keys import KeyRing
from tests.cli.conftest import read_serve as read
from tests.server.apis import APIS, CHAT, COMPLETIONS, body_of
from tests.server.engines import FIRST_CONTENT
from tests.server.http_client import serving
from tests.server.test_kv_events import followed, hear_all
from tests.toy_engine import make_engine

SECRET = "the vault opens to swordfish, keep it to yourself"
Hits = Callable[..., int]  # path, key, and fields of a call: its cached tokens
EACH_API = pytest.mark.parametrize("path", APIS)


@contextmanager
def counted(keys: KeyRing) -> Iterator[Hits]:
    """Yield a function that makes a call, and returns how many of its tokens were cached."""
    engine = make_engine(lookahead="off", num_blocks=4096)

    def hits(path: str, key: str = "a", text: str = SECRET, **fields: object) -> int:
        before = engine.scheduler.stats.prefix_hit_tokens
        body, headers = body_of(path, text) | fields, {"Authorization": f"Bearer {key}"}
        with client.open(body, path, headers) as answer:
            assert answer.status == 200 and answer.read()
        return engine.scheduler.stats.prefix_hit_tokens - before

    with serving(engine, chat_template=FIRST_CONTENT, keys=keys) as client:
        yield hits


@pytest.fixture(scope="module")
def hits() -> Iterator[Hits]:
    with counted(KeyRing(["a", "b", "c"])) as hits:
        yield hits


@pytest.mark.parametrize("path", [COMPLETIONS, CHAT])
def test_a_salt_hides_prompts_from_other_tenants(path: str) -> None:
    """A tenant's hits reveal another tenant's prompts only if both have the same salt or none."""
    with counted(KeyRing([])) as hits:
        first, again = ([hits(path, cache_salt=salt) for salt in ("x", "y", None)] for _ in "12")
        assert first == [0, 0, 0] and len(set(again)) == 1 and again[0] > 0
        # The choices share the salt of their call.
        assert hits(path, cache_salt="z", n=3, seed=1) == 2 * again[0]


@EACH_API
def test_keys_do_not_share_cached_prompts(hits: Hits, path: str) -> None:
    for stream in (False, True):
        text = f"{APIS.index(path)}{stream:d} {SECRET}"
        got = [bool(hits(path, key, text, stream=stream)) for key in "abcab"]
        assert got == [False] * 3 + [True] * 2


@EACH_API
def test_the_salt_of_a_key_and_that_of_a_call_both_count(hits: Hits, path: str) -> None:
    cases = [("a", "x"), ("b", "x"), ("a", "y"), ("a", None)]
    for first in (True, False):
        for key, salt in cases:
            text = f"{APIS.index(path)}+ {SECRET}"
            assert bool(hits(path, key, text, cache_salt=salt)) is not first


def test_keys_share_cached_prompts_if_the_operator_wants_it() -> None:
    with counted(KeyRing(["a", "b"], share_prefix_cache=True)) as hits:
        for path in APIS:
            for salt in (None, "x"):
                text = f"{APIS.index(path)} {SECRET}"
                got = [bool(hits(path, key, text, cache_salt=salt)) for key in "aba"]
                assert got == [False, True, True]


def test_one_key_has_no_salt_so_events_are_those_of_an_open_server(tmp_path: Path) -> None:
    hashes = []
    for number, keys in enumerate(([], ["a"], ["a", "b"], ["b", "a"])):
        folder = tmp_path / str(number)
        folder.mkdir()
        engine = make_engine(kv_events=True, lookahead="off")
        with (
            followed(folder) as (publisher, gateway),
            serving(engine, kv_events=publisher, keys=KeyRing(keys)) as client,
        ):
            headers = {"Authorization": "Bearer a"}
            body = body_of(COMPLETIONS, SECRET, 1, temperature=0)
            with client.open(body, headers=headers) as answer:
                assert answer.status == 200 and answer.read()
            hashes.append(frozenset(hear_all(publisher, gateway).blocks))
    assert hashes[0] == hashes[1] and hashes[2] == hashes[3], "equal in all replicas"
    assert hashes[0] and hashes[2] and not hashes[0] & hashes[2]


def test_sharing_needs_a_prefix_cache(tmp_path: Path) -> None:
    flags = ("--share-prefix-cache", "--no-enable-prefix-caching")
    settings = read(tmp_path, "", {}, *flags)
    with pytest.raises(FieldError, match="^--share-prefix-cache: "), settings.naming():
        ModelParts(settings.values)
    settings = read(tmp_path, "share_prefix_cache = true", {}, "--api-key", "a", "--api-key", "b")
    keys = ModelParts(settings.values).keys
    assert len(keys.accepted) == 2
    for key in (keys.find(b"Bearer a"), keys.find(b"Bearer b")):
        assert key is not None and key.salt is None
