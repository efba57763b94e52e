"""Templates, tokenizers and texts that take unlimited time or memory: their call is rejected with
the field's name, and no other call waits."""

from __future__ import annotations

import asyncio
import json
import pickle
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import pytest
from tokenizers import Regex, Tokenizer, normalizers, pre_tokenizers

from cbatch.core.request.request import StructuredOutputs
from cbatch.grammars.validator import try_out
from cbatch.server.protocol.chats import detokenize, parse_chat, tokenize
from cbatch.server.protocol.errors import ServiceDownError
from cbatch.server.protocol.requests import text_ids
from cbatch.server.serving import prompts as prompts_module
from cbatch.server.serving import service as service_module
from cbatch.server.serving.admission_queue import Limits
from cbatch.server.serving.prompts import WorkerState, on_model
from cbatch.text import ChatTemplate, TextTokenizer
from cbatch.workers import TaskLimits, WorkerPool
from tests.server import test_service
from tests.server.http_client import CHAT, COMPLETIONS, Client, sample, serving, toy_model
from tests.server.raw_calls import during_honest_calls, exchange, post, run, statuses
from tests.toy_engine import TOKENIZER, make_engine
from tests.workers.imports import imports_of

LIMITS = Limits(prompt_timeout_s=0.5, prompt_memory_bytes=2**26)
QUICK = "{{ messages[0].content[:8] }}"
FOREVER = "{% for i in range(99999) %}{% for j in range(99999) %}{% endfor %}{% endfor %}" + QUICK
# Templates that are quick for short conversations, and need much time or memory for others.
TEMPLATES = {
    "a loop without an end": FOREVER,
    "quadratic in characters": "{% set text = messages[0].content %}"
    "{% for i in text %}{% for j in text %}{% endfor %}{% endfor %}" + QUICK,
    "by a variable": "{% for i in range(n) %}{% for j in range(n) %}{% endfor %}{% endfor %}"
    + QUICK,
    "all memory in one expression": "{{ messages[0].content * 99999999 }}",
    "all memory bit by bit": "{% for i in range(99999) %}{{ messages[0] }}{% endfor %}",
    "deep": "{% macro f(x) %}{{ f(x) }}{{ f(x) }}{% endmacro %}{{ f(1) }}",
}
MESSAGES = [{"role": "user", "content": "ab" * 6000}]
MODEL = toy_model("{{ messages[0].content }}", max_model_len=10**6)
CONVERSATION = {"messages": MESSAGES, "chat_template_kwargs": {"n": 99999}, "max_tokens": 2}


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


@pytest.mark.parametrize("name", TEMPLATES)
def test_a_template_that_exceeds_the_limits_is_rejected(name: str) -> None:
    with served(TEMPLATES[name]) as client:
        assert "template" in refused(client, CONVERSATION, CHAT, "messages")
        if name != "deep":
            tokenising = {k: v for k, v in CONVERSATION.items() if k != "max_tokens"}
            refused(client, tokenising, "/tokenize", "prompt")


@pytest.mark.parametrize(
    "task",
    [
        partial(on_model, parse_chat(json.dumps(CONVERSATION).encode(), MODEL).prompts[0].task),
        partial(on_model, partial(text_ids, "ab")),
        partial(on_model, partial(tokenize, b'{"prompt": "ab"}')),
        partial(on_model, partial(detokenize, b'{"tokens": [5]}')),
        partial(try_out, StructuredOutputs(regex="[a-z]+")),
        partial(try_out, StructuredOutputs(json={"type": "object"})),
        partial(try_out, StructuredOutputs(grammar='root ::= "a"')),
    ],
)
def test_a_worker_has_imported_all_that_it_needs(task: Any) -> None:
    """An import takes more time than the task, and is repeated in each worker."""

    async def scene() -> list[str]:
        pool = WorkerPool(partial(WorkerState, MODEL, TOKENIZER.vocab_size, (0,)))
        limits = TaskLimits(60, 2**30)
        try:
            return await pool.run(partial(imports_of, pickle.dumps(task)), limits)
        finally:
            await pool.close()

    assert not asyncio.run(asyncio.wait_for(scene(), 60))


def test_a_slow_prompt_does_not_slow_other_prompts() -> None:
    """The same template is quick for a short conversation, also after a slow one."""
    with served(TEMPLATES["quadratic in characters"]) as client:
        short = {"messages": [{"role": "user", "content": "ab"}], "max_tokens": 2}
        for _ in range(2):
            assert client.post(short, CHAT)[0] == 200
            refused(client, CONVERSATION, CHAT, "messages")


@pytest.mark.parametrize("change", [split, replace])
def test_a_regular_expression_of_the_tokenizer(change: Callable[[Tokenizer], None]) -> None:
    """It takes unlimited time for a text of a few hundred characters."""
    slow = " ".join(["x" * 21 + "c"] * 400)
    messages = [{"role": "user", "content": slow}]
    with served("{{ messages[0].content }}", tokenizer(change)) as client:
        for body, path, field in (
            ({"prompt": slow}, COMPLETIONS, "prompt"),
            ({"prompt": ["a", slow]}, COMPLETIONS, "prompt"),
            ({"prompt": slow, "truncate_prompt_tokens": 4}, COMPLETIONS, "prompt"),
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
