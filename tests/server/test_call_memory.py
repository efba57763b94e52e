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
from tests.server.http_client import CHAT, Client, sample, serving, wait_until
from tests.server.raw_calls import deaf, post
from tests.server.test_connections import REFUSALS, watched
from tests.toy_engine import make_engine

RESPONSES, MESSAGES = "/v1/responses", "/v1/messages"
TEMPLATE = ChatTemplate("{{ messages[-1].content }}", {}, "the test")
BIG = 2**20
LONG = "u" * BIG
USER = [{"role": "user", "content": "ab"}]
HOG: dict[str, Any] = {"prompt": "a", "max_tokens": 30_000, "ignore_eos": True}
LIMIT_BYTES = 16 * BIG


@contextmanager
def served(limit_bytes: int = LIMIT_BYTES, **options: Any) -> Iterator[tuple[Client, MemoryBudget]]:
    engine = make_engine(max_num_seqs=1, max_model_len=2**15, num_blocks=2**12)
    limits = ConnectionLimits(max_held_bytes=limit_bytes)
    with (
        watched() as budgets,
        serving(engine, chat_template=TEMPLATE, connections=limits, **options) as client,
    ):
        yield client, budgets[0]


@pytest.mark.parametrize(
    ("path", "body"),
    [
        (CHAT, {"messages": USER, "max_tokens": 2, "junk": LONG, "stream": True}),
        (CHAT, {"messages": [{"role": "system", "content": LONG}, *USER], "max_tokens": 2}),
        (RESPONSES, {"input": "ab", "max_output_tokens": 2, "store": False, "junk": LONG}),
        (MESSAGES, {"messages": USER, "max_tokens": 2, "system": LONG}),
        (MESSAGES, {"messages": USER, "max_tokens": 2, "junk": [LONG], "stream": True}),
    ],
)
def test_a_body_is_released_when_its_prompt_is_tokenized(path: str, body: dict[str, Any]) -> None:
    """Calls that wait for a slot hold none of it."""
    content = json.dumps(body).encode()
    with served() as (client, memory), client.begin(HOG), ExitStack() as stack:
        wait_until(lambda: counts(client) == (1, 0))
        tracemalloc.start()
        stack.callback(tracemalloc.stop)
        before, _ = tracemalloc.get_traced_memory()
        for _ in range(4):
            stack.enter_context(client.begin(content, path))
        wait_until(lambda: counts(client) == (5, 4))
        wait_until(lambda: tracemalloc.get_traced_memory()[0] - before < BIG)
        wait_until(lambda: memory.num_bytes < BIG)


def counts(client: Client) -> tuple[float, float]:
    return sample(client, "cbatch:open_calls"), sample(client, "cbatch:queued_requests")


def fill(client: Client, memory: MemoryBudget, num_bytes: int) -> Any:
    """Send a body in part, so that it holds these bytes."""
    mute = deaf(client.port, post(b" " * ((num_bytes + FREE_BYTES) // 2), num_bytes=8 * BIG - 1))
    wait_until(lambda: memory.num_bytes >= num_bytes - 1)
    return closing(mute)


def test_a_short_call_counts_the_conversation_that_it_continues() -> None:
    with served() as (client, memory):
        call = {"type": "function_call", "call_id": LONG, "name": "f", "arguments": "{}"}
        body = {"input": [call, *USER], "max_output_tokens": 2}
        status, answer, _ = client.post(body, RESPONSES)
        assert status == 200, answer
        short: dict[str, Any] = {"input": "b", "previous_response_id": answer["id"]}
        calls = (
            (RESPONSES, short | {"stream": True, "max_output_tokens": 2}),
            (f"{RESPONSES}/input_tokens", short),
        )
        for path, body in calls:
            with fill(client, memory, LIMIT_BYTES - 2 * BIG):
                status, answer, headers = client.post(body, path)
                assert status == 503 and int(headers["retry-after"]) >= 1, answer
                assert client.post({"prompt": "a", "max_tokens": 2})[0] == 200
            wait_until(lambda: memory.num_bytes == 0)
            with client.open(body, path) as response:
                assert response.status == 200
                response.read()
            wait_until(lambda: memory.num_bytes == 0)
        assert sample(client, REFUSALS, reason="call_bytes") == 2


ECHO = {"input": "ab", "max_output_tokens": 2, "user": LONG * 6}


@pytest.mark.parametrize(
    ("body", "held_bytes"),
    [
        (ECHO, 22 * BIG),
        (ECHO | {"stream": True}, 28 * BIG),
    ],
)
def test_what_a_client_does_not_read_counts_until_it_leaves(
    body: dict[str, Any], held_bytes: int
) -> None:
    """The system's own buffers hold less than the response."""
    chat, limit_bytes = {"messages": USER, "max_tokens": 1, "junk": LONG}, 40 * BIG
    with served(limit_bytes) as (client, memory):
        with closing(deaf(client.port, post(body, path=RESPONSES.encode()))):
            wait_until(lambda: memory.num_bytes > held_bytes)
            assert client.post(chat, CHAT)[0] == 200
            with fill(client, memory, limit_bytes - memory.num_bytes - BIG // 2):
                wait_until(lambda: memory.num_bytes > limit_bytes - BIG)
                assert client.post(chat, CHAT)[0] == 503
                assert client.post({"prompt": "a", "max_tokens": 2})[0] == 200
        wait_until(lambda: memory.num_bytes == 0)


def test_a_slow_reader_gets_all_bytes_of_a_long_response() -> None:
    with served(40 * BIG) as (client, _):
        _, answer, _ = client.post(ECHO, RESPONSES)
        for _ in range(2):
            status, again = client.get(f"{RESPONSES}/{answer['id']}")
            assert status == 200 and again == answer and again["user"] == ECHO["user"]


def test_one_key_leaves_memory_for_others() -> None:
    with served(keys=KeyRing(["a", "b"])) as (client, memory), ExitStack() as stack:
        body = json.dumps({"messages": USER, "max_tokens": 1, "junk": LONG}).encode()
        part = post(b" " * BIG, b"authorization: Bearer a", num_bytes=2 * BIG)
        for _ in range(12):
            stack.callback(deaf(client.port, part).close)
        key_a = {"authorization": "Bearer a"}

        def refused() -> bool:
            with client.open(body, CHAT, key_a) as response:
                return response.status == 503

        wait_until(refused)
        for _ in range(3):
            with client.open(body, CHAT, {"authorization": "Bearer b"}) as response:
                assert response.status == 200
        assert memory.num_bytes < LIMIT_BYTES
