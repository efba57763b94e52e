"""Tokens that end a text, by what a tokenizer's files say of them."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec

from cbatch.runtime.model.json_files import read_json_object

# Texts by which llama.cpp knows such a token.
END_TOKENS = frozenset(
    ["<|eot_id|>", "<|im_end|>", "<|end|>", "<|endoftext|>", "<|eom_id|>", "<|end_of_text|>"]
    + ["</s>", "<EOT>", "_<EOT>", "<end_of_turn>", "<｜end▁of▁sentence｜>"]
)
_FILES = ("tokenizer_config.json", "special_tokens_map.json")


class _Added(msgspec.Struct):
    id: int
    content: str
    special: bool = False


class _Model(msgspec.Struct, frozen=True):
    vocab: dict[str, int] | list[tuple[str, float]] = {}


class _Tokenizer(msgspec.Struct):
    """The part of a `tokenizer.json` that is needed."""

    added_tokens: list[_Added] = []
    model: _Model = _Model()


def tokenizer_end_ids(directory: Path, *, guess: bool) -> list[int]:
    """Return the ids of each `eos_token` that the tokenizer's files name. Where they name none, and
    with `guess`, those of its special tokens with a text of `END_TOKENS`. Raise ModelError for a
    file that cannot be read."""
    configs = [read_json_object(file) for name in _FILES if (file := directory / name).exists()]
    names = {text for config in configs if (text := _text_of(config.get("eos_token")))}
    known = {text: token_id for config in configs for text, token_id in _added_by(config)}
    if names <= known.keys() and not (guess and not names):
        return [known[text] for text in sorted(names)]
    file = directory / "tokenizer.json"
    try:
        tokenizer = msgspec.json.decode(
            file.read_bytes() if file.is_file() else b"", type=_Tokenizer
        )
    except (OSError, msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        return []  # `load_tokenizer` says what is wrong
    if not names:
        specials = (each for each in tokenizer.added_tokens if each.special)
        return [each.id for each in specials if each.content in END_TOKENS]
    vocab = tokenizer.model.vocab
    if isinstance(vocab, list):
        vocab = {text: at for at, (text, _) in enumerate(vocab)}
    known = vocab | {each.content: each.id for each in tokenizer.added_tokens} | known
    return [known[text] for text in sorted(names) if text in known]


def _text_of(token: Any) -> str | None:
    text = token.get("content") if isinstance(token, dict) else token
    return text if isinstance(text, str) else None


def _added_by(config: dict[str, Any]) -> Iterator[tuple[str, int]]:
    """Texts and ids of the tokens that a configuration adds to its tokenizer."""
    added = config.get("added_tokens_decoder")
    for token_id, token in added.items() if isinstance(added, dict) else ():
        text = _text_of(token)
        if text is not None and token_id.isdecimal() and len(token_id) < 10:
            yield text, int(token_id)
