"""With salts, clients of one engine cannot learn about each other through the prefix cache."""

from __future__ import annotations

import asyncio
import itertools
import os
import signal
from pathlib import Path
from typing import Any

import pytest

from cbatch.core.scheduler.events import Added, Configured
from cbatch.steplog.step_log import read_step_log
from cbatch.text import ChatTemplate
from tests.process.factories import SimFactory
from tests.server.http_client import CHAT, COMPLETIONS, serving
from tests.server.processes import call, serving_process
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
