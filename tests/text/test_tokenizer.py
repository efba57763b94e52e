from __future__ import annotations

import json
import time
from collections.abc import Callable
from pathlib import Path
from threading import Thread
from typing import Any

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


def test_long_texts_and_lists_do_not_block_other_threads() -> None:
    """A server's streams wait for any thread that keeps the interpreter lock."""
    tokenizer = TextTokenizer(byte_level(), "the test")

    def turns_during(call: Callable[[Any], Any], source: Any, expected: Any) -> int:
        results: list[Any] = []
        thread = Thread(target=lambda: results.append(call(source)))
        turns = 0
        thread.start()  # returns once the thread runs, or releases the interpreter lock
        while not results:
            turns += 1
            time.sleep(0.001)
        thread.join()
        assert results == [expected]
        return turns

    num_lines = {"encode": 20_000, "decode": 20_000}
    while num_lines:
        for name, count in tuple(num_lines.items()):
            text = "def area(radius):\n" * count
            ids = tokenizer.raw.encode(text).ids
            given = (text, ids) if name == "encode" else (ids, text)
            if turns_during(getattr(tokenizer, name), *given) > 5:
                del num_lines[name]
            else:  # with few processors and a high load, only a longer text shows the difference
                num_lines[name] *= 4
                assert num_lines[name] < 10**6, f"{name} lets no other thread run"


def test_a_missing_tokenizer_is_named(tmp_path: Path) -> None:
    with pytest.raises(TokenizerError, match=r"tokenizer: .* has no tokenizer\.json"):
        load_tokenizer(tmp_path)


def test_a_broken_tokenizer_is_named(tmp_path: Path) -> None:
    (tmp_path / "tokenizer.json").write_text('{"model": ')
    with pytest.raises(TokenizerError, match=r"tokenizer: .*tokenizer\.json cannot be read"):
        load_tokenizer(tmp_path)


@pytest.mark.parametrize("damage", ["no such token", "no such text", "a longer prefix"])
def test_damage_that_is_detected_late_is_named(tmp_path: Path, damage: str) -> None:
    """The library panics, at the first text or while it reads the file."""
    values = json.loads(byte_level().to_str())
    piece = {"Sequence": {"id": "B" if damage == "no such text" else "A", "type_id": 0}}
    single = [{"SpecialToken": {"id": "<s>", "type_id": 0}}, piece]
    if damage == "a longer prefix":
        values["model"]["continuing_subword_prefix"] = "#" * 99
    else:
        single = single[damage == "no such text" :]
        values["post_processor"] = {"type": "TemplateProcessing", "single": single}
        values["post_processor"] |= {"pair": [], "special_tokens": {}}
    (tmp_path / "tokenizer.json").write_text(json.dumps(values))
    with pytest.raises(TokenizerError, match=r"tokenizer: .*tokenizer\.json cannot be read"):
        load_tokenizer(tmp_path)


@pytest.mark.parametrize("padding", [{"Fixed": 10**9}, {"Fixed": 10**12}, "BatchLongest"], ids=str)
@pytest.mark.parametrize("multiple", [None, 10**9])
def test_stored_padding_of_any_length_is_left_out(
    tmp_path: Path, padding: Any, multiple: int | None
) -> None:
    values = json.loads(byte_level().to_str())
    values["padding"] = {"strategy": padding, "direction": "Right", "pad_to_multiple_of": multiple}
    values["padding"] |= {"pad_id": 0, "pad_type_id": 0, "pad_token": "x"}
    stride = {"direction": "Right", "max_length": 10**9 + 1, "strategy": "LongestFirst"}
    values["truncation"] = stride | {"stride": 10**9}
    (tmp_path / "tokenizer.json").write_text(json.dumps(values))
    tokenizer = load_tokenizer(tmp_path)
    assert tokenizer.decode(tokenizer.encode("a b c")) == "a b c"


def template(pieces: list[Any], num_ids: int) -> dict[str, Any]:
    token = {"id": "x", "ids": [0] * num_ids, "tokens": ["x"] * num_ids}
    made = {"type": "TemplateProcessing", "single": pieces, "pair": []}
    return made | {"special_tokens": {"x": token}}


TEXT = {"Sequence": {"id": "A", "type_id": 0}}
ADDED = {"SpecialToken": {"id": "x", "type_id": 0}}


@pytest.mark.parametrize("depth", [0, 1, 2])
@pytest.mark.parametrize(
    ("pieces", "num_ids", "problem"),
    [
        ([TEXT] + [ADDED] * 20_000, 20_000, "adds 400000000 tokens"),
        ([ADDED, TEXT], 10_000, "adds 10000 tokens"),
        ([TEXT] * 1000, 1, "repeats every text"),
    ],
)
def test_a_post_processor_that_makes_texts_longer_is_refused(
    tmp_path: Path, pieces: list[Any], num_ids: int, problem: str, depth: int
) -> None:
    """Without the check, some of them take gigabytes at the first text."""
    values = json.loads(byte_level().to_str())
    processor = template(pieces, num_ids)
    for _ in range(depth):
        plain = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": False}
        processor = {"type": "Sequence", "processors": [plain | {"use_regex": True}, processor]}
    values["post_processor"] = processor
    (tmp_path / "tokenizer.json").write_text(json.dumps(values))
    with pytest.raises(TokenizerError, match=f"cannot be read .*{problem}"):
        load_tokenizer(tmp_path)


def test_an_unreachable_hub_name_is_named() -> None:
    with pytest.raises(TokenizerError, match="not a directory here"):
        load_tokenizer("nobody/no-such-model-of-ours")


def test_a_draft_with_other_ids_is_rejected() -> None:
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
    for special in tokenizer.special_ids:
        assert tokenizer.token_bytes(special) == b""
    assert tokenizer.special_ids and tokenizer.token_bytes(10**6) == b""
