"""The same text streamed, in one response and from Python, also with special tokens."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from cbatch import LLM, Completion, SamplingParams
from cbatch.text import ChatTemplate, TextTokenizer
from tests.chained_model import byte_tokens, write_chained
from tests.server.http_client import CHAT, COMPLETIONS, Client, serving
from tests.test_llm import write_model
from tests.text.toy_tokenizers import byte_level

TEXT = "qhi<|im_end|>\n<|im_start|>x.y"  # the tokens after the prompt "q", each once


LENGTH = {"max_tokens": 8, "temperature": 0}


# Fields, text, finish reason, number of tokens.
CASES: list[tuple[dict[str, Any], str, str, int]] = [
    ({}, "hi\nx.y", "length", 8),
    ({"skip_special_tokens": False}, TEXT[1:], "length", 8),
    ({"stop": "<|im_end|>"}, "hi", "stop", 3),
    ({"stop": ["nothing", "i<|im_end|>\n"]}, "h", "stop", 4),
    ({"stop": ["<|im_start|>x", "."]}, "hi\n", "stop", 6),
    ({"stop": "<|im_end|>", "skip_special_tokens": False}, "hi", "stop", 3),
    ({"stop": "<|im_end|>", "include_stop_str_in_output": True}, "hi<|im_end|>", "stop", 3),
    ({"stop": "x.", "include_stop_str_in_output": True}, "hi\nx.", "stop", 7),
    ({"stop": "i\nx"}, "h", "stop", 6),  # as shown in the text
    ({"stop": "i\nx", "skip_special_tokens": False}, TEXT[1:], "length", 8),
    ({"stop_token_ids": [ord(".")]}, "hi\nx", "stop", 7),
    ({"stop_token_ids": [ord(".")], "include_stop_str_in_output": True}, "hi\nx.", "stop", 7),
    ({"stop_token_ids": [258], "skip_special_tokens": False}, "hi", "stop", 3),
    (
        {
            "stop_token_ids": [258],
            "skip_special_tokens": False,
            "include_stop_str_in_output": True,
        },
        "hi<|im_end|>",
        "stop",
        3,
    ),
    ({"skip_special_tokens": True, "spaces_between_special_tokens": False}, "hi\nx.y", "length", 8),
]


@pytest.fixture(scope="module")
def llm(tmp_path_factory: pytest.TempPathFactory) -> LLM:
    raw = byte_tokens()
    folder = tmp_path_factory.mktemp("m") / "model"
    write_chained(folder, raw, raw.encode(TEXT).ids, eos=256)
    return LLM(folder, num_blocks=64, max_num_seqs=4)


@pytest.fixture(scope="module")
def client(llm: LLM) -> Iterator[Client]:
    template = ChatTemplate("{{ messages[0].content }}", {}, "the test")
    with serving(LLM(llm.info.model, num_blocks=64).engine, chat_template=template) as client:
        yield client


def ids_of(fields: dict[str, Any], llm: LLM) -> dict[str, Any]:
    """Replace token ids: those of bytes are in the order of their names, which is not that of the
    bytes."""
    raw = llm.engine.tokenizer
    assert raw is not None
    ids = fields.get("stop_token_ids", [])
    return fields | {"stop_token_ids": [i if i > 255 else raw.encode(chr(i))[0] for i in ids]}


@pytest.mark.parametrize(("fields", "text", "reason", "count"), CASES[1:8:2])
@pytest.mark.parametrize("path", [COMPLETIONS, CHAT])
def test_served(
    client: Client, llm: LLM, path: str, fields: dict[str, Any], text: str, reason: str, count: int
) -> None:
    body = LENGTH | ids_of(fields, llm) | {"n": 2}
    given = (
        {"prompt": "q"} if path == COMPLETIONS else {"messages": [{"role": "user", "content": "q"}]}
    )
    status, answer, headers = client.post(body | given, path)
    assert status == 200 and "x-cbatch-ignored-fields" not in headers, answer
    for choice in answer["choices"]:
        shown = choice["text"] if path == COMPLETIONS else choice["message"]["content"]
        assert (shown, choice["finish_reason"]) == (text, reason)
    assert answer["usage"]["completion_tokens"] == 2 * count
    streamed, reasons = ["", ""], {}
    for event in client.stream(body | given, path):
        (part,) = event["choices"]
        shown = part["text"] if path == COMPLETIONS else part["delta"].get("content", "")
        streamed[part["index"]] += shown
        reasons[part["index"]] = part["finish_reason"]
    assert streamed == [text] * 2 and reasons == {0: reason, 1: reason}


@pytest.mark.parametrize(("fields", "text", "reason", "count"), CASES)
def test_from_python(llm: LLM, fields: dict[str, Any], text: str, reason: str, count: int) -> None:
    given = ids_of(fields, llm)
    given |= {"stop": (given["stop"],)} if isinstance(given.get("stop"), str) else {}
    done = llm.generate("q", SamplingParams(n=2, **LENGTH, **given))[0]
    for choice in done.choices:
        assert (choice.text, choice.finish_reason.value) == (text, reason)
        assert len(choice.token_ids) == count


@pytest.mark.parametrize("value", [1, "no", []])
@pytest.mark.parametrize(
    "field", ["skip_special_tokens", "include_stop_str_in_output", "spaces_between_special_tokens"]
)
def test_a_value_that_is_not_a_flag_is_rejected_by_name(
    client: Client, field: str, value: Any
) -> None:
    status, answer, _ = client.post({"prompt": "q", field: value})
    assert (status, answer["error"]["param"]) == (400, field)


SCRIPTS = [
    "def f(x):\n    return",
    "class Жук:\n    ",
    "# 日本語のコメント\n",
    "名前 = '한국어'\n",
    "print('مرحبا بالعالم')\n",
    "# नमस्ते दुनिया ",
    "😀 = '👩‍👩‍👧‍👦🏳️‍🌈'\n",
    "é\u0301\u200d\ufeff ∑∫ℝ\n",
    "x = '\u00a0\t\u2028'\n",
    "ǅ ﷽ 𝔘𝔫𝔦 𒐫\n",
]


PROMPTS = [f"{text}{i}" for i, text in itertools.product(range(20), SCRIPTS)]


OPTIONS: dict[str, Any] = {
    "numerics": "invariant",
    "lookahead": "fixed:3",
    "max_num_seqs": 32,
    "random_weights_seed": 0,
}


USAGE = {"stream_options": {"include_usage": True}}


def params_of(at: int, max_tokens: int) -> dict[str, Any]:
    """Return parameters: greedy, sampled, and with a temperature so high that characters are
    incomplete."""
    temperature = (0.0, 0.8, 2.5)[at % 3]
    return {"max_tokens": max_tokens, "temperature": temperature, "seed": at, "stop": ["\n\n\n"]}


def check_three_ways(
    client: Client,
    generate: Callable[[list[str], list[SamplingParams]], list[Completion]],
    tokenizer: TextTokenizer,
    max_tokens: int,
    prompts: list[str] = PROMPTS,
) -> list[Completion]:
    bodies = [{"prompt": p, **params_of(at, max_tokens)} for at, p in enumerate(prompts)]
    with ThreadPoolExecutor(32) as pool:
        whole = list(pool.map(lambda body: client.post(body)[1], bodies))
        streams = list(pool.map(lambda body: client.stream(body | USAGE), bodies))
    settings = [SamplingParams(**{**params_of(at, max_tokens)}) for at in range(len(prompts))]
    completions = generate(prompts, settings)
    for prompt, want, answer, events in zip(prompts, completions, whole, streams, strict=True):
        (choice,), usage = answer["choices"], events.pop()["usage"]
        parts = [event["choices"][0] for event in events]
        assert "".join(part["text"] for part in parts) == choice["text"] == want.text
        assert parts[-1]["finish_reason"] == choice["finish_reason"] == want.finish_reason.value
        prompt_tokens, tokens = len(tokenizer.encode(prompt)), len(want.token_ids)
        for counts in (usage, answer["usage"]):
            assert counts.pop("prompt_tokens_details")["cached_tokens"] < prompt_tokens
            assert counts == {
                "prompt_tokens": prompt_tokens,
                "completion_tokens": tokens,
                "total_tokens": prompt_tokens + tokens,
            }
    return completions


def test_two_hundred_prompts(tmp_path: Path) -> None:
    """Weights are random, over a byte-level vocabulary: many characters are incomplete."""
    raw = byte_level()
    model = write_model(tmp_path / "model", tokenizer=raw)
    served, reference = (LLM(model, drafter=("ngram",), **OPTIONS) for _ in range(2))
    with serving(served.engine) as client:
        completions = check_three_ways(client, reference.generate, TextTokenizer(raw, "toy"), 12)
    assert len(set(PROMPTS)) == 200
    broken = sum("\ufffd" in each.text for each in completions)
    whole = sum(any(ord(c) > 127 and c != "\ufffd" for c in each.text) for each in completions)
    assert broken > 50 and whole > 20, (broken, whole)
    assert sum(c.speculation.accepted_tokens for c in completions) > 20


@pytest.mark.statistics
def test_two_hundred_prompts_of_the_demo_pair(demo_client: Client, demo_llm: LLM) -> None:
    tokenizer = demo_llm.engine.tokenizer
    assert tokenizer is not None
    completions = check_three_ways(demo_client, demo_llm.generate, tokenizer, 32)
    assert sum(not each.text.isascii() for each in completions) >= 10, "too few beyond ASCII"
