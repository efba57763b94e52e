from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
from tokenizers import Tokenizer

from cbatch.text import TextTokenizer, TokenizerError, load_tokenizer
from tests.text.toy_tokenizers import byte_fallback, byte_level, printable


def test_round_trip_from_a_directory_or_the_file(tmp_path: Path) -> None:
    byte_level().save(str(tmp_path / "tokenizer.json"))
    for source in (tmp_path, tmp_path / "tokenizer.json", str(tmp_path)):
        tokenizer = load_tokenizer(source)
        assert tokenizer.decode(tokenizer.encode("naïve 日本 😀\n\t")) == "naïve 日本 😀\n\t"
        assert tokenizer.vocab_size == byte_level().get_vocab_size()


def test_stored_truncation_does_not_cut_prompts(tmp_path: Path) -> None:
    raw = byte_level(380)
    raw.enable_truncation(4)
    raw.enable_padding(length=64)
    raw.save(str(tmp_path / "tokenizer.json"))
    tokenizer = load_tokenizer(tmp_path)
    assert tokenizer.decode(tokenizer.encode("a b c d e f g h")) == "a b c d e f g h"


def test_a_missing_tokenizer_is_named(tmp_path: Path) -> None:
    with pytest.raises(TokenizerError, match=r"tokenizer: .* has no tokenizer\.json"):
        load_tokenizer(tmp_path)


def test_a_broken_tokenizer_is_named(tmp_path: Path) -> None:
    (tmp_path / "tokenizer.json").write_text('{"model": ')
    with pytest.raises(TokenizerError, match=r"tokenizer: .*tokenizer\.json cannot be read"):
        load_tokenizer(tmp_path)


def test_an_unreachable_hub_name_is_named() -> None:
    with pytest.raises(TokenizerError, match="no directory here"):
        load_tokenizer("nobody/no-such-model-of-ours")


def test_a_draft_with_other_ids_is_refused() -> None:
    target = TextTokenizer(byte_level(400), "target-dir")
    TextTokenizer(byte_level(400), "draft-dir").require_same_as(target)
    with pytest.raises(TokenizerError, match="draft: the tokenizer of draft-dir differs"):
        TextTokenizer(byte_level(300), "draft-dir").require_same_as(target)


@pytest.mark.parametrize("make", [byte_level, byte_fallback, printable])
def test_the_bytes_of_tokens_are_those_of_the_text(make: Callable[[], Tokenizer]) -> None:
    tokenizer = TextTokenizer(make(), "toy")
    texts = ["def add(a, b):\n", "hello world a"]
    texts += [] if make is printable else ["héllo 日本語 😀\x00\x7f"]
    for text in texts:
        ids = tokenizer.encode(text)
        pieces = b"".join(map(tokenizer.token_bytes, ids))
        assert pieces.decode().removeprefix(" ") == tokenizer.decode(ids)
        assert max(len(tokenizer.decode([i])) for i in ids) <= tokenizer.longest_token_chars
    for special in tokenizer.special_tokens:
        assert tokenizer.token_bytes(tokenizer.raw.token_to_id(special)) == b""
    assert tokenizer.special_tokens and tokenizer.token_bytes(10**6) == b""
