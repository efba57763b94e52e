"""With salts, clients of one engine cannot learn about each other through the prefix cache."""

from __future__ import annotations

import asyncio
import itertools
import os
import signal
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from cbatch.cli.model_service import ModelParts
from cbatch.core.request.errors import FieldError
from cbatch.core.scheduler.events import Added, Configured
from cbatch.server.http.keys import KeyRing
from cbatch.steplog.step_log import read_step_log
from cbatch.text import ChatTemplate
from tests.cli.conftest import read_serve as read
from tests.process.factories import SimFactory
from tests.server.http_client import CHAT, COMPLETIONS, serving
from tests.server.processes import call, serving_process
from tests.server.test_kv_events import followed, hear_all
from tests.toy_engine import TOKENIZER, make_engine

SECRET = "the vault opens to swordfish, tell nobody"
TEMPLATE = ChatTemplate("{{ messages[0].content }}", {}, "the test")
BODY: dict[str, Any] = {"prompt": SECRET, "max_tokens": 4, "temperature": 0}


@pytest.mark.parametrize("path", [COMPLETIONS, CHAT])
def test_a_salt_hides_prompts_from_other_tenants(path: str) -> None:
    """A tenant's hits reveal another tenant's prompts only if both have the same salt or none."""
    engine = make_engine(lookahead="off")
    body: dict[str, Any] = BODY
    if path == CHAT:
        body = {"messages": [{"role": "user", "content": SECRET}], "max_tokens": 4}
    with serving(engine, chat_template=TEMPLATE) as client:

        def hit_tokens(salt: str | None, **fields: Any) -> int:
            before = engine.scheduler.stats.prefix_hit_tokens
            assert client.post(body | {"cache_salt": salt} | fields, path)[0] == 200
            return engine.scheduler.stats.prefix_hit_tokens - before

        assert [hit_tokens(salt) for salt in ("alice", "bob", None)] == [0, 0, 0]
        (alone,) = {hit_tokens(salt) for salt in ("alice", "bob", None)}
        assert alone > 0
        assert hit_tokens("carol", n=3, seed=1) == 2 * alone, (
            "the choices share the salt of their call"
        )


CALLS: dict[str, dict[str, Any]] = {
    COMPLETIONS: BODY,
    CHAT: {"messages": [{"role": "user", "content": SECRET}], "max_tokens": 4},
    "/v1/responses": {"input": SECRET, "max_output_tokens": 4},
    "/v1/messages": {"messages": [{"role": "user", "content": SECRET}], "max_tokens": 4},
}


@contextmanager
def hits(keys: KeyRing) -> Iterator[Callable[..., bool]]:
    """Yield a function that makes a call with a key, and returns whether it had cached tokens."""
    engine = make_engine(lookahead="off")

    def hit(path: str, key: str, **fields: Any) -> bool:
        before = engine.scheduler.stats.prefix_hit_tokens
        with client.open(CALLS[path] | fields, path, {"Authorization": f"Bearer {key}"}) as answer:
            assert answer.status == 200, answer.read()
            answer.read()
        return engine.scheduler.stats.prefix_hit_tokens > before

    with serving(engine, chat_template=TEMPLATE, keys=keys) as client:
        yield hit


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("path", CALLS)
def test_keys_do_not_share_cached_prompts(path: str, stream: bool) -> None:
    with hits(KeyRing(["a", "b", "c"])) as hit:
        assert [hit(path, key, stream=stream) for key in "abcab"] == [False] * 3 + [True] * 2


@pytest.mark.parametrize("path", CALLS)
def test_the_salt_of_a_key_and_that_of_a_call_both_count(path: str) -> None:
    with hits(KeyRing(["a", "b"])) as hit:
        cases = [("a", "x"), ("b", "x"), ("a", "y"), ("a", None)]
        for first in (True, False):
            for key, salt in cases:
                assert hit(path, key, cache_salt=salt) is not first, (key, salt)


@pytest.mark.parametrize("path", CALLS)
def test_keys_share_cached_prompts_if_the_operator_wants_it(path: str) -> None:
    with hits(KeyRing(["a", "b"], share_prefix_cache=True)) as hit:
        assert [hit(path, key) for key in "aba"] == [False, True, True]
        assert [hit(path, key, cache_salt="x") for key in "aba"] == [False, True, True]


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
            with client.open(BODY | {"max_tokens": 1}, headers=headers) as answer:
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


def test_an_invalid_salt_is_rejected() -> None:
    chat = {"messages": [{"role": "user", "content": SECRET}]}
    salts: tuple[Any, ...] = ("", "s" * 257, 3, ["a"], {})
    with serving(make_engine(), chat_template=TEMPLATE) as client:
        for salt, path in itertools.product(salts, (COMPLETIONS, CHAT)):
            status, answer, _ = client.post(BODY | chat | {"cache_salt": salt}, path)
            assert (status, answer["error"]["param"]) == (400, "cache_salt")


def test_a_salt_survives_a_restart_of_the_engine(tmp_path: Path) -> None:
    path = tmp_path / "steps.jsonl"
    pause_file = tmp_path / "held"
    pause_file.touch()
    factory = SimFactory(
        vocab_size=TOKENIZER.vocab_size, record=str(path), pause_file=str(pause_file)
    )

    with serving_process(factory) as served:

        async def scene() -> None:
            body = BODY | {"max_tokens": 300, "stream": True, "cache_salt": "alice"}
            stream = asyncio.create_task(call(served.client.port, body))
            while served.engine.num_tokens < 50 or b'"Added"' not in path.read_bytes():
                await asyncio.sleep(0.002)
            assert served.engine.pid is not None
            pause_file.unlink()
            os.kill(served.engine.pid, signal.SIGKILL)
            assert (await stream).text

        asyncio.run(scene())
    events = read_step_log(path).events
    assert sum(isinstance(event, Configured) for event in events) == 2
    added = [event for event in events if isinstance(event, Added)]
    assert len(added) == 2 and added[1].output
    assert [event.request.cache_salt for event in added] == ["alice", "alice"]
