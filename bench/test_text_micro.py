"""Micro-benchmark (`pytest bench --benchmark-enable`) of detokenising one sequence of 256
tokens."""

from __future__ import annotations

import pytest

from cbatch import SamplingParams
from cbatch.demo import demo_paths, demo_prompts
from cbatch.text import TextStream, load_tokenizer

NUM_TOKENS = 256


@pytest.fixture(scope="module")
def tokenizer():
    return load_tokenizer(demo_paths()[0])


@pytest.mark.parametrize("stop", [(), ("</end>", "\n\n\n\n")], ids=["plain", "stop"])
@pytest.mark.parametrize("tokens_per_push", [1, 4])
def test_detokenise(benchmark, tokenizer, tokens_per_push, stop):
    ids = list(tokenizer.encode("\n".join(demo_prompts())))[:NUM_TOKENS]
    pushes = [ids[at : at + tokens_per_push] for at in range(0, len(ids), tokens_per_push)]

    def decode():
        stream = TextStream(tokenizer, SamplingParams(stop=stop))
        return "".join(stream.push(ids_pushed).text for ids_pushed in pushes) + stream.finish()

    assert len(ids) == NUM_TOKENS and benchmark(decode) == tokenizer.decode(ids)
