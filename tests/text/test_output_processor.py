"""A running choice keeps none of its earlier outputs if they are streamed."""

from __future__ import annotations

import gc
from types import FunctionType, ModuleType
from typing import Any

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from cbatch.core.request.logprobs import TokenLogprobs
from cbatch.core.request.output import OutputRow
from cbatch.core.request.request import FinishReason, Request, SamplingParams
from cbatch.text import TextTokenizer
from cbatch.text.output_processor import LiveChoice, token_texts
from cbatch.text.outputs import Output, TokenLogprob
from tests.chained_model import byte_tokens, pieces
from tests.text.toy_tokenizers import byte_fallback, byte_level, word_ends, word_pieces
from tests.toy_engine import TOKENIZER

TEXT = "def add(a, b): return a + b"
NUM_TOP = 3


def logprobs(first: int, count: int) -> TokenLogprobs:
    columns = np.zeros((count, NUM_TOP), np.float32)
    ids = np.tile(np.arange(NUM_TOP, dtype=np.int32), (count, 1))
    return TokenLogprobs(0, first, columns[:, 0], ids, columns)


def run(*, whole: bool) -> tuple[LiveChoice, list[Output]]:
    """Return a choice after all its tokens, and its outputs. Tokens and prompt have log
    probabilities."""
    prompt = tuple(TOKENIZER.encode("x = "))
    params = SamplingParams(max_tokens=99, logprobs=NUM_TOP, prompt_logprobs=NUM_TOP)
    request = Request(request_id="r", prompt=prompt, params=params, seed=0)
    live = LiveChoice(request, "r", TOKENIZER, accumulate=whole)
    live.on_logprobs(logprobs(1, len(prompt) - 1))
    outputs = []
    for at, token in enumerate(TOKENIZER.encode(TEXT), start=len(prompt)):
        live.on_logprobs(logprobs(at, 1))
        outputs.append(live.extend(OutputRow("r", [token], 0, 0)))
    return live, outputs


def reachable(root: Any, kind: type) -> list[Any]:
    """Return the instances of `kind` that are reachable from an object, except through the
    program's code."""
    seen, instances, ahead = set(), [], [vars(root)]
    while ahead:
        value = ahead.pop()
        if id(value) in seen or isinstance(value, type | ModuleType | FunctionType):
            continue
        seen.add(id(value))
        if isinstance(value, kind):
            instances.append(value)
        ahead += gc.get_referents(value)
    return instances


def test_an_accumulated_choice_joins_its_outputs() -> None:
    live, outputs = run(whole=True)
    assert len(reachable(live, TokenLogprob)) > len(outputs)
    choice = live.extend(OutputRow("r", finish_reason=FinishReason.LENGTH)).finished
    assert choice is not None and choice.text == TEXT
    assert list(choice.token_ids) == TOKENIZER.encode(TEXT)
    assert choice.logprobs == tuple(o.logprobs[0] for o in outputs if o.logprobs)
    assert choice.prompt_logprobs is not None
    assert choice.prompt_logprobs == outputs[0].prompt_logprobs


def test_a_streamed_choice_keeps_no_earlier_outputs() -> None:
    live, outputs = run(whole=False)
    assert not reachable(live, TokenLogprob)
    text = "".join(output.text for output in outputs)
    assert all(len(output.logprobs or ()) == 1 for output in outputs)
    assert outputs[0].prompt_logprobs is not None
    last = live.extend(OutputRow("r", finish_reason=FinishReason.LENGTH))
    choice = last.finished
    assert choice is not None and text + last.text == TEXT
    assert (choice.text, choice.token_ids, choice.logprobs) == ("", (), None)
    assert choice.prompt_logprobs is None and live.num_tokens == len(outputs)


def test_the_memory_of_a_streamed_choice_does_not_grow() -> None:
    (letter,) = TOKENIZER.encode("x")

    def longest_list(num_tokens: int, *, whole: bool) -> int:
        request = Request(request_id="r", prompt=(1, 2), params=SamplingParams(), seed=0)
        live = LiveChoice(request, "r", TOKENIZER, accumulate=whole)
        for _ in range(num_tokens):
            live.extend(OutputRow("r", [letter], 0, 0))
        return max(map(len, reachable(live, list)))

    assert longest_list(300, whole=True) == 300
    assert longest_list(300, whole=False) < 10


KINDS = [byte_level(), byte_fallback(), word_pieces(), word_ends(), byte_tokens(), pieces()]
WORDS = ["hello", "true", "b", " ", "  ", "é日", "😀", "<s>", "</s>", "[SEP]", "<|im_end|>", "?"]


@given(st.sampled_from(KINDS), st.lists(st.sampled_from(WORDS), max_size=8), st.booleans())
def test_the_texts_of_a_prompts_tokens_join_to_the_prompt(
    raw: Any, words: list[str], skips: bool
) -> None:
    """This holds for unknown words too, and if the tokenizer adds tokens before and after a
    text."""
    tokenizer, text = TextTokenizer(raw, "toy"), "".join(words)
    ids = tokenizer.encode(text)
    texts = token_texts(ids, SamplingParams(skip_special_tokens=skips), tokenizer, text)
    assert len(texts) == len(ids) and (not ids or "".join(map(str, texts)) == text)
    if "hello" in words and tokenizer.encode("hello") == [tokenizer.raw.token_to_id("hello")]:
        assert any("hello" in str(each) for each in texts)


def test_the_part_of_each_token_of_a_prompt() -> None:
    def cut(raw: Any, text: str) -> list[str | None]:
        tokenizer = TextTokenizer(raw, "toy")
        return token_texts(tokenizer.encode(text), SamplingParams(), tokenizer, text)

    assert cut(byte_tokens(), "é<|im_end|>a") == ["", "é", "<|im_end|>", "a"]
    assert cut(pieces(), "true true</s>b") == ["true", " true", "</s>", "b"]
    assert cut(word_pieces(), "hello, 🦀 lo") == ["hello", ",", " 🦀", " l", "o"]
