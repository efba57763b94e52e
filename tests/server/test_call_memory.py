"""Memory of open calls: it counts against one budget, until it is released or the call ends."""

from __future__ import annotations

import json
import tracemalloc
from collections.abc import Iterator
from contextlib import ExitStack, closing, contextmanager
from typing import Any

import pytest

from cbatch.server.http.keys import KeyRing
from cbatch.server.http.limits import ConnectionLimits
from cbatch.server.serving.admission_queue import FREE_BYTES, MemoryBudget
from cbatch.text import ChatTemplate
from tests.server.apis import CHAT, MESSAGES, RESPONSES, USER, body_of
from tests.server.http_client import Client, sample, serving, wait_until
from tests.server.raw_calls import deaf, post
from tests.server.test_connections import REFUSALS, watched
from tests.toy_engine import make_engine

BIG = 2**20
LONG = "u" * BIG
SAID = {"role": "assistant", "content": LONG}
HOG: dict[str, Any] = {"prompt": "a", "max_tokens": 30_000, "ignore_eos": True}
SHORT = {"prompt": "a", "max_tokens": 2}
JUNK = body_of(CHAT, max_tokens=1, junk=LONG)
LIMIT_BYTES = 16 * BIG
TEMPLATE = ChatTemplate("{{ messages[-1].content }}", {}, "the test")


@contextmanager
def served(limit_bytes: int = LIMIT_BYTES, **options: Any) -> Iterator[tuple[Client, MemoryBudget]]:
    engine = make_engine(max_num_seqs=1, max_model_len=2**15, num_blocks=2**12)
    options |= {"connections": ConnectionLimits(max_held_bytes=limit_bytes)}
    with watched() as budgets, serving(engine, chat_template=TEMPLATE, **options) as client:
        yield client, budgets[0]


@pytest.mark.parametrize(
    ("path", "change"),
    [
        (CHAT, {"junk": LONG, "stream": True}),
        (RESPONSES, {"store": False, "junk": LONG}),
        (MESSAGES, {"messages": [USER, SAID, USER]}),
    ],
)
def test_a_body_is_released_when_its_prompt_is_tokenized(path: str, change: Any) -> None:
    """Calls that wait for a slot hold none of it."""

    def counts() -> tuple[float, float]:
        return sample(client, "cbatch:open_calls"), sample(client, "cbatch:queued_requests")

    content = json.dumps(body_of(path) | change).encode()
    with served() as (client, memory), client.begin(HOG), ExitStack() as stack:
        wait_until(lambda: counts() == (1, 0))
        tracemalloc.start()
        stack.callback(tracemalloc.stop)
        before, _ = tracemalloc.get_traced_memory()
        for _ in range(4):
            stack.enter_context(client.begin(content, path))
        wait_until(lambda: counts() == (5, 4))
        wait_until(lambda: tracemalloc.get_traced_memory()[0] - before < BIG)
        wait_until(lambda: memory.num_bytes < BIG)


def fill(client: Client, memory: MemoryBudget, num_bytes: int) -> Any:
    """Send a body in part, so that it holds these bytes."""
    mute = deaf(client.port, post(b" " * ((num_bytes + FREE_BYTES) // 2), num_bytes=8 * BIG - 1))
    wait_until(lambda: memory.num_bytes >= num_bytes - 1)
    return closing(mute)


def test_a_short_call_counts_the_conversation_that_it_continues() -> None:
    call = {"type": "function_call", "call_id": LONG, "name": "f", "arguments": "{}"}
    with served() as (client, memory):
        status, answer, _ = client.post(
            body_of(RESPONSES) | {"input": [USER, call, USER]}, RESPONSES
        )
        assert status == 200, answer
        more = {"input": "b", "previous_response_id": answer["id"]}
        for path, body in (
            (RESPONSES, body_of(RESPONSES, stream=True) | more),
            (f"{RESPONSES}/input_tokens", more),
        ):
            with fill(client, memory, LIMIT_BYTES - 2 * BIG):
                status, answer, headers = client.post(body, path)
                assert status == 503 and int(headers["retry-after"]) >= 1, answer
                assert client.post(SHORT)[0] == 200
            wait_until(lambda: memory.num_bytes == 0)
            with client.open(body, path) as response:
                assert response.status == 200 and response.read()
            wait_until(lambda: memory.num_bytes == 0)
        assert sample(client, REFUSALS, reason="call_bytes") == 2


@pytest.mark.parametrize(("stream", "held_bytes"), [(False, 22 * BIG), (True, 28 * BIG)])
def test_what_a_client_does_not_read_counts_until_it_leaves(stream: bool, held_bytes: int) -> None:
    """The buffers of the system hold less than the response."""
    echo, limit_bytes = body_of(RESPONSES, user=LONG * 6, stream=stream), 40 * BIG
    with served(limit_bytes) as (client, memory):
        with closing(deaf(client.port, post(echo, path=RESPONSES.encode()))):
            wait_until(lambda: memory.num_bytes > held_bytes)
            assert client.post(JUNK, CHAT)[0] == 200
            with fill(client, memory, limit_bytes - memory.num_bytes - BIG // 2):
                wait_until(lambda: memory.num_bytes > limit_bytes - BIG)
                assert client.post(JUNK, CHAT)[0] == 503
                assert client.post(SHORT)[0] == 200
        wait_until(lambda: memory.num_bytes == 0)


def test_one_key_leaves_memory_for_others() -> None:
    def status(key: str) -> int:
        with client.open(JUNK, CHAT, {"authorization": f"Bearer {key}"}) as response:
            return response.status

    with served(keys=KeyRing(["a", "b"])) as (client, memory), ExitStack() as stack:
        part = post(b" " * BIG, b"authorization: Bearer a", num_bytes=2 * BIG)
        for _ in range(12):
            stack.callback(deaf(client.port, part).close)
        wait_until(lambda: status("a") == 503)
        assert [status("b") for _ in range(3)] == [200] * 3
        assert memory.num_bytes < LIMIT_BYTES
