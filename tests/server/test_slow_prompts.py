"""Templates, tokenizers and texts that take unlimited time or memory: their call is rejected with
the field's name, and no other call waits. Several keys share what is scarce."""

from __future__ import annotations

import asyncio
import json
import pickle
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from functools import partial
from typing import Any

import pytest
from tokenizers import Regex, Tokenizer, normalizers, pre_tokenizers

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
from tests.server.http_client import (
    CHAT,
    COMPLETIONS,
    Client,
    sample,
    serving,
    toy_model,
    wait_until,
)
from tests.server.raw_calls import during_honest_calls, exchange, post, run, statuses
from tests.server.test_admission_queue import make
from tests.toy_engine import TOKENIZER, make_engine
from tests.workers.imports import imports_of

LIMITS = Limits(prompt_timeout_s=0.5, prompt_memory_bytes=2**26)
QUICK = "{{ messages[0].content[:8] }}"
FOREVER = "{% for i in range(99999) %}{% for j in range(99999) %}{% endfor %}{% endfor %}" + QUICK
# Parts of one template: quick for short conversations, and much time or memory for others.
PARTS = {
    "a loop without an end": FOREVER,
    "quadratic in characters": "{% set text = messages[0].content %}"
    "{% for i in text %}{% for j in text %}{% endfor %}{% endfor %}" + QUICK,
    "by a variable": "{% for i in range(n) %}{% for j in range(n) %}{% endfor %}{% endfor %}"
    + QUICK,
    "all memory in one expression": "{{ messages[0].content * 99999999 }}",
    "all memory bit by bit": "{% for i in range(99999) %}{{ messages[0] }}{% endfor %}",
    "deep": "{% macro f(x) %}{{ f(x) }}{{ f(x) }}{% endmacro %}{{ f(1) }}",
}
TEMPLATE = "".join(
    f"{{% if part == '{name}' %}}{text}{{% endif %}}" for name, text in PARTS.items()
)
MESSAGES = [{"role": "user", "content": "ab" * 6000}]
MODEL = toy_model("{{ messages[0].content }}", max_model_len=10**6)
CONVERSATION = {"messages": MESSAGES, "chat_template_kwargs": {"n": 99999}, "max_tokens": 2}


def asking(part: str, messages: Any = MESSAGES) -> dict[str, Any]:
    """Return a call that renders a part of `TEMPLATE`."""
    return {"messages": messages, "chat_template_kwargs": {"part": part, "n": 99999}}


def tokenizer(change: Callable[[Tokenizer], None]) -> TextTokenizer:
    raw = Tokenizer.from_str(TOKENIZER.raw.to_str())
    change(raw)
    return TextTokenizer(raw, "the test")


def split(raw: Tokenizer) -> None:
    steps = [pre_tokenizers.Split(Regex("(x+x+)+y"), "isolated"), raw.pre_tokenizer]
    raw.pre_tokenizer = pre_tokenizers.Sequence(steps)


def replace(raw: Tokenizer) -> None:
    raw.normalizer = normalizers.Replace(Regex("(x+x+)+y"), "z")


@contextmanager
def served(
    template: str = QUICK, used_tokenizer: TextTokenizer = TOKENIZER, **options: Any
) -> Iterator[Client]:
    chat_template = ChatTemplate(template, {}, "the test's template")
    engine = make_engine(tokenizer=used_tokenizer, max_model_len=4096, num_blocks=512)
    with serving(engine, LIMITS, chat_template=chat_template, **options) as client:
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
    assert "template" in refused(client, body | {"max_tokens": 2}, CHAT, "messages")
    if part == "by a variable":
        refused(client, body, "/tokenize", "prompt")


def test_a_slow_prompt_does_not_slow_other_prompts(client: Client) -> None:
    """The same template is quick for a short conversation, also after a slow one."""
    part, short = "quadratic in characters", [{"role": "user", "content": "ab"}]
    refused(client, asking(part) | {"max_tokens": 2}, CHAT, "messages")
    assert client.post(asking(part, short) | {"max_tokens": 2}, CHAT)[0] == 200


def test_a_worker_has_imported_all_that_it_needs() -> None:
    """An import takes more time than the task, and is repeated in each worker."""
    body = json.dumps(CONVERSATION).encode()
    tasks = (
        partial(on_model, parse_chat(body, MODEL).prompts[0].task),
        partial(on_model, partial(text_ids, "ab")),
        partial(on_model, partial(tokenize, b'{"prompt": "ab"}')),
        partial(on_model, partial(detokenize, b'{"tokens": [5]}')),
        partial(try_out, StructuredOutputs(regex="[a-z]+")),
        partial(try_out, StructuredOutputs(json={"type": "object"})),
        partial(try_out, StructuredOutputs(grammar='root ::= "a"')),
    )

    async def scene() -> None:
        pool = WorkerPool(partial(WorkerState, MODEL, TOKENIZER.vocab_size, (0,)))
        try:
            for task in tasks:
                probe = partial(imports_of, pickle.dumps(task))
                assert not await pool.run(probe, TaskLimits(60, 2**30))
        finally:
            await pool.close()

    asyncio.run(asyncio.wait_for(scene(), 60))


@pytest.mark.parametrize("change", [split, replace])
def test_a_regular_expression_of_the_tokenizer(change: Callable[[Tokenizer], None]) -> None:
    """It takes unlimited time for a text of a few hundred characters."""
    slow = " ".join(["x" * 21 + "c"] * 400)
    messages = [{"role": "user", "content": slow}]
    with served("{{ messages[0].content }}", tokenizer(change)) as client:
        for body, path, field in (
            ({"prompt": ["a", slow], "truncate_prompt_tokens": 4}, COMPLETIONS, "prompt"),
            ({"messages": messages}, CHAT, "messages"),
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
    limits = Limits(prompt_timeout_s=2)
    template = ChatTemplate(FOREVER, {}, "the test")
    with serving(make_engine(), limits, chat_template=template) as client:
        calls = [post(CONVERSATION, b"connection: close", path=CHAT.encode())] * 6

        async def scene() -> list[int]:
            answers = await asyncio.gather(*(exchange(client.port, each) for each in calls))
            return sorted(status for each in answers for status in statuses(each))

        assert run(scene()) == [400] * 2 + [503] * 4
        assert sample(client, "vllm:admission_rejections_total", reason="prompts") == 4


def test_a_stop_signal_does_not_wait_for_a_slow_prompt(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(service_module, "TOKENIZING_GRACE_S", 0.1)

    async def scene() -> None:
        async with test_service.service(Limits(prompt_timeout_s=600)) as made:
            model = toy_model(FOREVER, max_model_len=10**6)
            made.open(model)
            (prompt,) = parse_chat(json.dumps(CONVERSATION).encode(), model).prompts
            slow = test_service.submit(made, prompt, test_service.LONG)
            task = asyncio.create_task(slow)
            await asyncio.sleep(0.5)
            await made.drain(600)
            with pytest.raises(ServiceDownError, match="stopping"):
                await task

    asyncio.run(asyncio.wait_for(scene(), 60))


def test_a_client_that_leaves_ends_its_slow_prompt() -> None:
    limits = Limits(prompt_timeout_s=600)
    with serving(
        make_engine(), limits, chat_template=ChatTemplate(FOREVER, {}, "the test")
    ) as client:
        for _ in range(6):
            with client.begin(CONVERSATION, CHAT):
                time.sleep(0.05)
        while sample(client, "cbatch:open_calls"):
            time.sleep(0.01)


# ---- keys share what is scarce ----

# A conversation that begins with "!" takes all of its time.
SLOW_TEMPLATE = ChatTemplate(
    "{% if messages[0].content[0] == '!' %}{% for i in range(99999) %}{% for j in range(99999) %}"
    "{% endfor %}{% endfor %}{% endif %}{{ messages[0].content[:8] }}",
    {},
    "the test",
)


def chat(text: str, **more: Any) -> dict[str, Any]:
    return {"messages": [{"role": "user", "content": text}], "max_tokens": 2, **more}


SLOW, HONEST = chat("!" * 12_000), chat("a" * 12_000)


PATHS: list[tuple[str, dict[str, Any]]] = [
    (CHAT, HONEST),
    (CHAT, HONEST | {"stream": True}),
    ("/v1/messages", HONEST),
    ("/v1/responses", {"input": "a" * 12_000, "max_output_tokens": 2}),
    ("/v1/messages/count_tokens", {"messages": HONEST["messages"]}),
]


def open_calls(client: Client) -> float:
    with client.open(None, "/metrics", {"authorization": "Bearer b"}) as response:
        lines = response.read().decode().splitlines()
    return sum(float(line.split()[-1]) for line in lines if line.startswith("cbatch:open_calls"))


def called(client: Client, key: str, body: dict[str, Any], path: str = CHAT) -> int:
    with client.open(body, path, {"authorization": f"Bearer {key}"}) as response:
        response.read()
        return response.status


def test_slow_prompts_of_one_key_do_not_delay_long_prompts_of_another() -> None:
    """They would take forty seconds."""
    limits, keys = Limits(prompt_timeout_s=10), KeyRing(["a", "b"])
    with (
        serving(make_engine(), limits, chat_template=SLOW_TEMPLATE, keys=keys) as client,
        ExitStack() as stack,
    ):
        assert called(client, "b", HONEST) == 200  # the workers have started
        for _ in range(8):
            stack.enter_context(client.begin(SLOW, CHAT, {"authorization": "Bearer a"}))
        wait_until(lambda: open_calls(client) == 8)
        for path, body in (*PATHS, ("/tokenize", {"messages": HONEST["messages"]})):
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


@pytest.mark.parametrize("of_server", [False, True])
def test_a_time_limit_holds_while_a_prompt_waits_for_a_worker(of_server: bool) -> None:
    limits = Limits(prompt_timeout_s=60, timeout_s=1.0 if of_server else None)
    with serving(make_engine(), limits, chat_template=SLOW_TEMPLATE) as client:
        for path, body in (*PATHS, ("/v1/responses/input_tokens", {"input": "a" * 12_000})):
            with client.begin(SLOW, CHAT), client.begin(SLOW, CHAT):
                wait_until(lambda: sample(client, "cbatch:open_calls") == 2)
                began_s = time.monotonic()
                content = json.dumps(body | ({} if of_server else {"timeout": 0.5}))
                if of_server:  # it ends the other slow prompts as well
                    content = content.replace("aaaa", "!!!!")
                with client.open(content.encode(), path) as response:
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
