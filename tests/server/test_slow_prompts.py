"""Templates, tokenizers and texts that take unlimited time or memory: their call is rejected with
the field's name, and no other call waits. Several keys share what is scarce."""

from __future__ import annotations

import asyncio
import json
import pickle
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from functools import partial
from typing import Any

import pytest
from tokenizers import Regex, Tokenizer, pre_tokenizers

from cbatch.core.request.request import StructuredOutputs
from cbatch.grammars.validator import try_out
from cbatch.server.http.keys import KeyRing
from cbatch.server.protocol.errors import OverloadedError, ServiceDownError
from cbatch.server.protocol.fields import text_ids
from cbatch.server.protocol.requests import detokenize, parse_chat, tokenize
from cbatch.server.serving import prompts as prompts_module
from cbatch.server.serving import service as service_module
from cbatch.server.serving.admission_queue import Limits
from cbatch.server.serving.prompts import WorkerState, on_model
from cbatch.system.shares import NoPlaceError, Places, SharedLimit
from cbatch.text import ChatTemplate, TextTokenizer
from cbatch.workers import TaskLimits, WorkerPool
from tests.server import test_service
from tests.server.apis import APIS, CHAT, COMPLETIONS, MESSAGES, RESPONSES, body_of
from tests.server.http_client import Client, sample, serving, toy_model, wait_until
from tests.server.raw_calls import during_honest_calls, exchange, post, run, statuses
from tests.server.test_admission_queue import make
from tests.toy_engine import TOKENIZER, make_engine
from tests.workers.imports import imports_of

LIMITS = Limits(prompt_timeout_s=0.5, prompt_memory_bytes=2**26)
QUICK = "{{ messages[0].content[:8] }}"
LOOPS = "{% for i in range(99999) %}{% for j in range(99999) %}{% endfor %}{% endfor %}"
# Parts of one template: quick for short conversations, and much time or memory for others.
PARTS = {
    "quadratic in characters": "{% set text = messages[0].content %}"
    "{% for i in text %}{% for j in text %}{% endfor %}{% endfor %}" + QUICK,
    "by a variable": LOOPS.replace("99999", "n") + QUICK,
    "all memory in one expression": "{{ messages[0].content * 99999999 }}",
    "all memory bit by bit": "{% for i in range(99999) %}{{ messages[0] }}{% endfor %}",
    "deep": "{% macro f(x) %}{{ f(x) }}{{ f(x) }}{% endmacro %}{{ f(1) }}",
}
TEMPLATE = "".join(
    f"{{% if part == '{name}' %}}{text}{{% endif %}}" for name, text in PARTS.items()
)
# A conversation that begins with "!" takes all of its time.
SLOW_TEMPLATE = ChatTemplate(
    f"{{% if messages[0].content[0] == '!' %}}{LOOPS}{{% endif %}}{QUICK}", {}, "the test"
)
SLOW, LONG = "!" * 12_000, "a" * 12_000
SLOW_CHAT = body_of(CHAT, SLOW, 2)


def asking(part: str, text: str = "ab" * 6000) -> dict[str, Any]:
    """Return a call that renders a part of `TEMPLATE`."""
    return body_of(CHAT, text, 2, chat_template_kwargs={"part": part, "n": 99999})


@contextmanager
def served(template: str, tokenizer: TextTokenizer = TOKENIZER) -> Iterator[Client]:
    engine = make_engine(tokenizer=tokenizer, max_model_len=4096, num_blocks=512)
    with serving(engine, LIMITS, chat_template=ChatTemplate(template, {}, "the test")) as client:
        yield client


def refused(client: Client, body: dict[str, Any], path: str, field: str) -> str:
    """Return the error message of a call. Check that other calls were served at the same time."""
    call = post(body, b"connection: close", path=path.encode())
    answers = run(during_honest_calls(client.port, exchange(client.port, call)))
    assert statuses(answers) == [400], answers
    error = json.loads(answers.partition(b"\r\n\r\n")[2])["error"]
    assert (error["type"], error["param"]) == ("invalid_request_error", field)
    return str(error["message"])


@pytest.fixture(scope="module")
def client() -> Iterator[Client]:
    with served(TEMPLATE) as client:
        yield client


@pytest.mark.parametrize("part", PARTS)
def test_a_template_that_exceeds_the_limits_is_rejected(client: Client, part: str) -> None:
    body = asking(part)
    assert "template" in refused(client, body, CHAT, "messages")
    if part == "by a variable":
        del body["max_tokens"]
        refused(client, body, "/tokenize", "prompt")
    if part == "quadratic in characters":  # it is quick for a short one, also after a slow one
        assert client.post(asking(part, "ab"), CHAT)[0] == 200


def test_a_worker_has_imported_all_that_it_needs() -> None:
    """An import takes more time than the task, and is repeated in each worker."""
    model = toy_model("{{ messages[0].content }}", max_model_len=10**6)
    chat = parse_chat(json.dumps(body_of(CHAT)).encode(), model).prompts[0]
    tasks = (
        *(partial(on_model, each) for each in (chat.task, partial(text_ids, "ab"))),
        partial(on_model, partial(tokenize, b'{"prompt": "ab"}')),
        partial(on_model, partial(detokenize, b'{"tokens": [5]}')),
        partial(try_out, StructuredOutputs(regex="[a-z]+")),
        partial(try_out, StructuredOutputs(json={"type": "object"})),
        partial(try_out, StructuredOutputs(grammar='root ::= "a"')),
    )

    async def scene() -> None:
        pool = WorkerPool(partial(WorkerState, model, TOKENIZER.vocab_size, (0,)))
        try:
            for task in tasks:
                probe = partial(imports_of, pickle.dumps(task))
                assert not await pool.run(probe, TaskLimits(60, 2**30))
        finally:
            await pool.close()

    run(scene())


def test_a_regular_expression_of_the_tokenizer() -> None:
    """It takes unlimited time for a text of a few hundred characters."""
    raw = Tokenizer.from_str(TOKENIZER.raw.to_str())
    steps = [pre_tokenizers.Split(Regex("(x+x+)+y"), "isolated"), raw.pre_tokenizer]
    raw.pre_tokenizer = pre_tokenizers.Sequence(steps)
    slow = " ".join(["x" * 21 + "c"] * 400)
    with served("{{ messages[0].content }}", TextTokenizer(raw, "the test")) as client:
        for body, path, field in (
            ({"prompt": ["a", slow], "truncate_prompt_tokens": 4}, COMPLETIONS, "prompt"),
            (body_of(CHAT, slow), CHAT, "messages"),
            ({"prompt": slow}, "/tokenize", "prompt"),
        ):
            assert "0.5 s of CPU time" in refused(client, body, path, field)
        gives_up = refused(client, {"prompt": "x" * 200 + "c"}, COMPLETIONS, "prompt")
        assert "the tokenizer fails on it" in gives_up
        assert client.post({"prompt": "a x xx", "max_tokens": 2})[0] == 200


def test_a_slow_prompt_waits_for_a_worker_only_for_a_limited_time(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(prompts_module, "WAIT_S", 0.2)
    limits = Limits(prompt_timeout_s=1)
    with serving(make_engine(), limits, chat_template=SLOW_TEMPLATE) as client:
        calls = [post(SLOW_CHAT, b"connection: close", path=CHAT.encode())] * 6

        async def scene() -> list[int]:
            answers = await asyncio.gather(*(exchange(client.port, each) for each in calls))
            return sorted(status for each in answers for status in statuses(each))

        assert run(scene()) == [400] * 2 + [503] * 4
        assert sample(client, "vllm:admission_rejections_total", reason="prompts") == 4


def test_a_stop_signal_does_not_wait_for_a_slow_prompt(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(service_module, "TOKENIZING_GRACE_S", 0.1)

    async def scene() -> None:
        async with test_service.service(Limits(prompt_timeout_s=600)) as made:
            model = toy_model(LOOPS, max_model_len=10**6)
            made.open(model)
            (prompt,) = parse_chat(json.dumps(SLOW_CHAT).encode(), model).prompts
            task = asyncio.create_task(test_service.submit(made, prompt, test_service.LONG))
            await asyncio.sleep(0.5)
            await made.drain(600)
            with pytest.raises(ServiceDownError, match="stopping"):
                await task

    run(scene())


# ---- keys share what is scarce -------------------------------------------------------------------


def open_calls(client: Client) -> float:
    with client.open(None, "/metrics", {"authorization": "Bearer b"}) as response:
        lines = response.read().decode().splitlines()
    return sum(float(line.split()[-1]) for line in lines if line.startswith("cbatch:open_calls"))


def test_slow_prompts_of_one_key_do_not_delay_long_prompts_of_another() -> None:
    """They would take forty seconds. They end when their clients leave."""
    limits, keys = Limits(prompt_timeout_s=600), KeyRing(["a", "b"])
    calls = [(path, body_of(path, LONG, 2)) for path in APIS[1:]]
    messages = {"messages": calls[0][1]["messages"]}
    calls += [(CHAT, calls[0][1] | {"stream": True})]
    calls += [(path, messages) for path in (f"{MESSAGES}/count_tokens", "/tokenize")]
    with serving(make_engine(), limits, chat_template=SLOW_TEMPLATE, keys=keys) as client:
        with ExitStack() as stack:
            for number in range(9):
                if number == 1:
                    for _ in range(7):
                        key = {"authorization": "Bearer a"}
                        stack.enter_context(client.begin(SLOW_CHAT, CHAT, key))
                    wait_until(lambda: open_calls(client) == 7)
                path, body = calls[number % len(calls)]
                with client.open(body, path, {"authorization": "Bearer b"}) as response:
                    assert response.read() and response.status == 200, path
            assert open_calls(client) == 7, "none of them has ended"
        wait_until(lambda: not open_calls(client))


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

    order = run(scene())
    assert sorted(order) == list("aaaaabbc")
    assert set(order[:3]) == set("abc") and order[-2:] == list("aa")


def test_a_place_is_given_back_however_its_user_ends() -> None:
    async def scene() -> None:
        places = Places(2)

        async def use(owner: str | None) -> None:
            async with places.place(owner, 60):
                pass

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
                    task = asyncio.create_task(use(owner))
                    await asyncio.sleep(0)
                    task.cancel()
        async with places.place("a", 1), places.place("b", 1):
            pass
        assert not places.num_open("a") and not places.num_open(None)

    run(scene())


# ---- time limits ---------------------------------------------------------------------------------


@pytest.mark.parametrize("of_server", [False, True])
def test_a_time_limit_holds_while_a_prompt_waits_for_a_worker(of_server: bool) -> None:
    limits = Limits(prompt_timeout_s=60, timeout_s=1.0 if of_server else None)
    # The server's limit ends the other slow prompts as well.
    own = {} if of_server else {"timeout": 0.5}
    with serving(make_engine(), limits, chat_template=SLOW_TEMPLATE) as client:
        for path in (CHAT, f"{RESPONSES}/input_tokens"):
            body = body_of(path.removesuffix("/input_tokens"), SLOW if of_server else LONG) | own
            with client.begin(SLOW_CHAT, CHAT), client.begin(SLOW_CHAT, CHAT):
                wait_until(lambda: sample(client, "cbatch:open_calls") == 2)
                began_s = time.monotonic()
                with client.open(body, path) as response:
                    assert response.status == (504 if of_server else 408), response.read()
                assert time.monotonic() - began_s < 20, "other prompts take a minute"
            wait_until(lambda: not sample(client, "cbatch:open_calls"))


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
