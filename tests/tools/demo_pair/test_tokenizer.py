from __future__ import annotations

import pytest

from tools.demo_pair.tokenizer import load_tokenizer, save_tokenizer, train_tokenizer

SOURCE = "def area(self, width):\n        return self.width * width\n\n    def other(self):\n" * 50


@pytest.fixture(scope="module")
def tokenizer():
    return train_tokenizer([SOURCE])


@pytest.mark.parametrize(
    "text",
    [
        "",
        "def f():\n\treturn 1\r\n",
        "naïve 東京 🦀 \u200b\u0301",
        " \n \n\n  x   ",
        "\x00\x7f\ufffd",
        "a" * 300,
        "__init__  =  __a1b2__ 12345",
        "<|endoftext",
    ],
)
def test_round_trip_is_exact(tokenizer, text):
    assert tokenizer.decode(tokenizer.encode(text).ids, skip_special_tokens=False) == text


def test_a_line_break_takes_its_indentation(tokenizer):
    tokens = [tokenizer.decode([i]) for i in tokenizer.encode("x:\n        return").ids]
    assert "\n        " in tokens


def test_saved_tokenizer_loads_in_both_libraries(tokenizer, tmp_path):
    transformers = pytest.importorskip("transformers")
    save_tokenizer(tokenizer, tmp_path)
    fast_tokenizer = transformers.AutoTokenizer.from_pretrained(tmp_path)
    expected = tokenizer.encode(SOURCE).ids
    assert load_tokenizer(tmp_path).encode(SOURCE).ids == expected
    assert fast_tokenizer(SOURCE)["input_ids"] == expected
    assert fast_tokenizer.decode(expected) == SOURCE
    assert fast_tokenizer.eos_token_id == 0
