"""The `openai` package as a client of the demo pair."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from typing import Any

import openai
import pytest

from cbatch import LLM, Completion, SamplingParams
from tests.server.http_client import MODEL, Client

PROMPT = "def area(width, height):\n    return "
MESSAGES: Any = [{"role": "user", "content": PROMPT}]
OPTIONS: Any = {"model": MODEL, "max_tokens": 24, "temperature": 0.8, "seed": 7}


@pytest.fixture(scope="module")
def sdk(demo_client: Client) -> Iterator[openai.OpenAI]:
    url = f"http://127.0.0.1:{demo_client.port}/v1"
    with openai.OpenAI(base_url=url, api_key="unused", max_retries=0) as client:
        yield client


@pytest.fixture(scope="module")
def expected(demo_llm: LLM) -> Completion:
    options = {"max_tokens": 24, "temperature": 0.8, "seed": 7, "n": 2, "logprobs": 2}
    return demo_llm.generate(PROMPT, SamplingParams(**options))[0]


def test_models(sdk: openai.OpenAI) -> None:
    assert [model.id for model in sdk.models.list()] == [MODEL]
    assert sdk.models.retrieve(MODEL).owned_by == "cbatch"
    with pytest.raises(openai.NotFoundError):
        sdk.models.retrieve("other")


def test_completions(sdk: openai.OpenAI, expected: Completion) -> None:
    whole = sdk.completions.create(prompt=PROMPT, n=2, logprobs=2, **OPTIONS)
    assert [choice.text for choice in whole.choices] == [c.text for c in expected.choices]
    assert [choice.index for choice in whole.choices] == [0, 1]
    usage = whole.usage
    assert usage is not None and usage.prompt_tokens == len(expected.prompt_token_ids)
    assert usage.completion_tokens == sum(len(c.token_ids) for c in expected.choices)
    for choice, want in zip(whole.choices, expected.choices, strict=True):
        assert choice.logprobs is not None and want.logprobs is not None
        assert choice.logprobs.token_logprobs == [each.logprob for each in want.logprobs]
    listed = sdk.completions.create(prompt=[PROMPT, list(expected.prompt_token_ids)], **OPTIONS)
    assert [choice.text for choice in listed.choices] == [expected.text] * 2


def test_completions_stream(sdk: openai.OpenAI, expected: Completion) -> None:
    options: Any = {"stream_options": {"include_usage": True}, "n": 2}
    chunks = list(sdk.completions.create(prompt=PROMPT, stream=True, **options, **OPTIONS))
    texts = ["", ""]
    for chunk in chunks[:-1]:
        for choice in chunk.choices:
            texts[choice.index] += choice.text
    assert texts == [choice.text for choice in expected.choices]
    assert chunks[-1].choices == [] and chunks[-1].usage is not None
    assert chunks[-1].usage.completion_tokens == sum(len(c.token_ids) for c in expected.choices)
    assert len(chunks) > 6, "it did not stream"


def test_chat(sdk: openai.OpenAI, expected: Completion) -> None:
    whole = sdk.chat.completions.create(
        messages=MESSAGES, n=2, logprobs=True, top_logprobs=2, **OPTIONS
    )
    assert [c.message.content for c in whole.choices] == [c.text for c in expected.choices]
    assert whole.choices[0].message.role == "assistant"
    logprobs, want = whole.choices[0].logprobs, expected.logprobs
    assert logprobs is not None and logprobs.content is not None and want is not None
    assert [each.logprob for each in logprobs.content] == [each.logprob for each in want]
    raw = b"".join(bytes(each.bytes or []) for each in logprobs.content)
    assert raw.decode() == expected.text
    new: Any = {**OPTIONS, "max_completion_tokens": 5, "max_tokens": openai.omit}
    short = sdk.chat.completions.create(messages=MESSAGES, **new)
    assert short.usage is not None and short.usage.completion_tokens == 5
    assert expected.text.startswith(short.choices[0].message.content or "?")


def test_chat_stream(sdk: openai.OpenAI, expected: Completion) -> None:
    stop = expected.text[9:12]
    with sdk.chat.completions.stream(messages=MESSAGES, stop=stop, **OPTIONS) as stream:
        final = stream.get_final_completion()
    assert final.choices[0].message.content == expected.text[: expected.text.index(stop)]
    assert final.choices[0].message.role == "assistant"
    parts = sdk.chat.completions.create(messages=MESSAGES, stream=True, **OPTIONS)
    assert "".join(part.choices[0].delta.content or "" for part in parts) == expected.text


def test_extensions_through_extra_body(sdk: openai.OpenAI) -> None:
    extra = {"top_k": 1, "min_tokens": 4, "ignore_eos": True, "max_lookahead": 0, "colour": 1}
    options = {**OPTIONS, "seed": 1}
    raw = sdk.completions.with_raw_response.create(prompt=PROMPT, extra_body=extra, **options)
    assert raw.headers["x-cbatch-ignored-fields"] == "colour"
    greedy = sdk.completions.create(prompt=PROMPT, **{**OPTIONS, "temperature": 0})
    assert raw.parse().choices[0].text == greedy.choices[0].text


def test_errors_are_the_packages_own(sdk: openai.OpenAI) -> None:
    with pytest.raises(openai.BadRequestError, match="temperature"):
        sdk.completions.create(prompt=PROMPT, **{**OPTIONS, "temperature": -1})
    with pytest.raises(openai.BadRequestError, match="tools"):
        tool: Any = {"type": "function", "function": {"name": "f", "parameters": {}}}
        sdk.chat.completions.create(messages=MESSAGES, tools=[tool], **OPTIONS)
    with pytest.raises(openai.NotFoundError):
        sdk.completions.create(prompt=PROMPT, model="other")


def test_many_at_once_from_asyncio(demo_client: Client, demo_llm: LLM) -> None:
    prompts = [f"def function_{i}(x):\n" for i in range(16)]
    params = SamplingParams(max_tokens=16, temperature=0.8, seed=3)
    want = [completion.text for completion in demo_llm.generate(prompts, params)]
    options = {**OPTIONS, "max_tokens": 16, "seed": 3}

    async def streamed(client: openai.AsyncOpenAI, prompt: str) -> str:
        messages: Any = [{"role": "user", "content": prompt}]
        parts = await client.chat.completions.create(messages=messages, stream=True, **options)
        return "".join([part.choices[0].delta.content or "" async for part in parts])

    async def run() -> tuple[list[str], list[str]]:
        url = f"http://127.0.0.1:{demo_client.port}/v1"
        async with openai.AsyncOpenAI(base_url=url, api_key="-", max_retries=0) as client:
            chats = await asyncio.gather(*(streamed(client, p) for p in prompts))
            plain = (client.completions.create(prompt=p, **options) for p in prompts)
            return chats, [(each.choices[0].text) for each in await asyncio.gather(*plain)]

    assert asyncio.run(run()) == (want, want)
