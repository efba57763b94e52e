"""Several keys share what is scarce: a flood of one key does not keep others waiting."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import pytest

from cbatch.server.http.keys import KeyRing
from cbatch.server.protocol.errors import OverloadedError
from cbatch.server.serving.admission_queue import Limits
from cbatch.system.shares import NoPlaceError, Places, SharedLimit
from cbatch.text import ChatTemplate
from tests.server.http_client import CHAT, Client, sample, serving, wait_until
from tests.server.test_admission_queue import make
from tests.toy_engine import make_engine

# A conversation that begins with "!" takes all of its time.
TEMPLATE = ChatTemplate(
    "{% if messages[0].content[0] == '!' %}{% for i in range(99999) %}{% for j in range(99999) %}"
    "{% endfor %}{% endfor %}{% endif %}{{ messages[0].content[:8] }}",
    {},
    "the test",
)


def chat(text: str, **more: Any) -> dict[str, Any]:
    return {"messages": [{"role": "user", "content": text}], "max_tokens": 2, **more}


SLOW, HONEST = chat("!" * 12_000), chat("a" * 12_000)


@contextmanager
def flooded(limits: Limits, *, keys: tuple[str, ...] = ("a", "b")) -> Iterator[Client]:
    """Serve while key a has many slow prompts."""
    with (
        serving(make_engine(), limits, chat_template=TEMPLATE, keys=KeyRing(keys)) as client,
        ExitStack() as stack,
    ):
        assert called(client, "b", HONEST) == 200  # the workers have started
        for _ in range(8):
            stack.enter_context(client.begin(SLOW, CHAT, {"authorization": "Bearer a"}))
        wait_until(lambda: open_calls(client) == 8)
        yield client


def open_calls(client: Client) -> float:
    with client.open(None, "/metrics", {"authorization": "Bearer b"}) as response:
        lines = response.read().decode().splitlines()
    return sum(float(line.split()[-1]) for line in lines if line.startswith("cbatch:open_calls"))


def called(client: Client, key: str, body: dict[str, Any], path: str = CHAT) -> int:
    with client.open(body, path, {"authorization": f"Bearer {key}"}) as response:
        response.read()
        return response.status


@pytest.mark.parametrize(
    ("path", "body"),
    [
        (CHAT, HONEST),
        (CHAT, HONEST | {"stream": True}),
        ("/v1/messages", HONEST),
        ("/v1/responses", {"input": "a" * 12_000, "max_output_tokens": 2}),
        ("/v1/messages/count_tokens", {"messages": HONEST["messages"]}),
        ("/tokenize", {"messages": HONEST["messages"]}),
    ],
)
def test_slow_prompts_of_one_key_do_not_delay_long_prompts_of_another(
    path: str, body: dict[str, Any]
) -> None:
    """They would take forty seconds."""
    with flooded(Limits(prompt_timeout_s=10)) as client:
        for _ in range(2):
            assert called(client, "b", body, path) == 200
        assert open_calls(client) == 8, "none of them has ended"


def test_prompts_that_are_being_tokenized_do_not_count_as_prompts_to_compute() -> None:
    queue, _ = make(max_queued_requests=20, max_queued_prompt_tokens=1000)
    while True:
        try:
            queue.reserve(1, 100, "a")
        except OverloadedError as refused:
            assert "of this key" in str(refused)
            break
    for owner in ("b", "c"):
        queue.reserve(1, 100, owner)
    queue.require_room(owner="d")


def test_an_owner_leaves_a_third_of_a_limit_and_the_first_amount_has_to_fit_only() -> None:
    shared = SharedLimit(30, "things")
    for owner, expected in (("a", 20), ("b", 6), ("c", 2), ("d", 1), ("e", 1), ("f", 0)):
        taken = 0
        while shared.problem(1, owner) is None:
            shared.add(1, owner)
            taken += 1
        assert taken == expected, owner
    shared.add(-20, "a")
    assert shared.problem(20, "g") is None
    alone = SharedLimit(30, "things")
    alone.add(29, None)
    assert alone.problem(1, None) is None and alone.problem(2, None) == "29 of 30 things"


def test_owners_take_turns_for_places() -> None:
    async def scene() -> list[str]:
        places, order = Places(2), []

        async def use(owner: str) -> None:
            async with places.place(owner, 60):
                order.append(owner)
                await asyncio.sleep(0.01)

        tasks = [asyncio.create_task(use(owner)) for owner in "aaaaaabbc"]
        await asyncio.sleep(0)
        tasks[5].cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        assert all(not places.num_open(owner) for owner in "abc")
        return order

    order = asyncio.run(asyncio.wait_for(scene(), 60))
    assert sorted(order) == list("aaaaabbc")
    assert set(order[:3]) == set("abc") and order[-2:] == list("aa")


def test_a_place_is_given_back_however_its_user_ends() -> None:
    async def scene() -> None:
        places = Places(2)
        for owner in (None, "a"):
            for _ in range(5):
                with pytest.raises(KeyError):
                    async with places.place(owner, 60):
                        raise KeyError
                async with places.place(owner, 60), places.place(None, 60):
                    for waiting in (owner, "b"):
                        with pytest.raises(NoPlaceError, match="taken for 0.01 s"):
                            async with places.place(waiting, 0.01):
                                pass
                    task = asyncio.create_task(_use(places, owner))
                    await asyncio.sleep(0)
                    task.cancel()
        async with places.place("a", 1), places.place("b", 1):
            pass
        assert not places.num_open("a") and not places.num_open(None)

    asyncio.run(asyncio.wait_for(scene(), 60))


async def _use(places: Places, owner: str | None) -> None:
    async with places.place(owner, 60):
        pass


# ---- time limits ---------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("path", "body"),
    [
        (CHAT, HONEST),
        (CHAT, HONEST | {"stream": True}),
        ("/v1/messages", HONEST),
        ("/v1/responses", {"input": "a" * 12_000, "max_output_tokens": 2}),
        ("/v1/messages/count_tokens", {"messages": HONEST["messages"]}),
        ("/v1/responses/input_tokens", {"input": "a" * 12_000}),
    ],
)
@pytest.mark.parametrize("of_server", [False, True])
def test_a_time_limit_holds_while_a_prompt_waits_for_a_worker(
    path: str, body: dict[str, Any], of_server: bool
) -> None:
    limits = Limits(prompt_timeout_s=60, timeout_s=1.0 if of_server else None)
    with serving(make_engine(), limits, chat_template=TEMPLATE) as client, ExitStack() as stack:
        for _ in range(2):
            stack.enter_context(client.begin(SLOW, CHAT))
        wait_until(lambda: sample(client, "cbatch:open_calls") == 2)
        began_s = time.monotonic()
        content = json.dumps(body | ({} if of_server else {"timeout": 0.5}))
        if of_server:  # it ends the other slow prompts as well
            content = content.replace("aaaa", "!!!!")
        with client.open(content.encode(), path) as response:
            assert response.status == (504 if of_server else 408), response.read()
        assert time.monotonic() - began_s < 20, "other prompts take a minute"


@pytest.mark.parametrize("of_server", [False, True])
def test_a_time_limit_holds_while_a_body_arrives(of_server: bool) -> None:
    limits = Limits(timeout_s=0.5 if of_server else None)
    headers = {"x-envoy-expected-rq-timeout-ms": "60000" if of_server else "500"}
    with serving(make_engine(), limits) as client:
        began_s = time.monotonic()
        headers |= {"content-length": "100", "content-type": "application/json"}
        with client.begin(b'{"prompt": "a", ', headers=headers) as connection:
            assert connection.getresponse().status == (504 if of_server else 408)
        assert time.monotonic() - began_s < 20, "bodies have thirty seconds"
