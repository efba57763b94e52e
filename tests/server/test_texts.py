"""The same text streamed, in one response, and from Python, with recounted tokens."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from cbatch import LLM, Completion, SamplingParams
from cbatch.text import TextTokenizer
from tests.server.http_client import Client, serving
from tests.test_llm import write_model
from tests.text.toy_tokenizers import byte_level

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
