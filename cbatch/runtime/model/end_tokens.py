"""Tokens that end a text, from the files of a tokenizer."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import msgspec

# Texts of the tokens that llama.cpp recognises as ends of a text.
END_TOKENS = frozenset(
    ["<|eot_id|>", "<|im_end|>", "<|end|>", "<|endoftext|>", "<|eom_id|>", "<|end_of_text|>"]
    + ["</s>", "<EOT>", "_<EOT>", "<end_of_turn>", "<｜end▁of▁sentence｜>"]
)
# In gpt-oss's format these end a text, and <|end|> ends a message, after which a text may go on.
HARMONY_END_TOKENS = frozenset(["<|return|>", "<|call|>"])


class _Added(msgspec.Struct):
    id: int
    content: str
    special: bool = False


class _Model(msgspec.Struct):
    vocab: dict[str, int] | list[tuple[str, float]] = {}


class _Tokenizer(msgspec.Struct):
    added_tokens: list[_Added] = []
    model: msgspec.Raw = msgspec.Raw(b"{}")  # large: decoded only if necessary


def tokenizer_end_ids(
    configs: Iterable[Mapping[str, Any]], tokenizer: Path, *, guess: bool
) -> list[int]:
    """Return the ids of the `eos_token`s in `configs`, looked up in a `tokenizer.json`. If there
    are none and `guess` is set, return its special tokens with a text in `END_TOKENS`."""
    tokens = [config.get("eos_token") for config in configs]
    texts = [each.get("content") if isinstance(each, dict) else each for each in tokens]
    names = [text for text in texts if isinstance(text, str)]
    if not (names or guess) or not tokenizer.is_file():
        return []
    try:
        file = msgspec.json.decode(tokenizer.read_bytes(), type=_Tokenizer)
        ids = {each.content: each.id for each in file.added_tokens}
        if not names:
            return [t.id for t in file.added_tokens if t.special and t.content in END_TOKENS]
        if not ids.keys() >= set(names):
            vocab = msgspec.json.decode(file.model, type=_Model).vocab
            if isinstance(vocab, list):
                vocab = {text: at for at, (text, _) in enumerate(vocab)}
            ids = vocab | ids
    except (OSError, msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        return []  # `load_tokenizer` reports what is wrong
    return [ids[name] for name in names if name in ids]
