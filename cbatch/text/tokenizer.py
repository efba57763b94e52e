"""Tokenizers of Hugging Face directories."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from tokenizers import Tokenizer

FILE_NAME = "tokenizer.json"


class TokenizerError(ValueError):
    """A tokenizer that is missing, broken, or not the one it must be; says where."""


class TextTokenizer:
    """Text to token ids and back. `source` is where it came from, for messages."""

    def __init__(self, tokenizer: Tokenizer, source: str) -> None:
        # A length limit or padding stored with the tokenizer would silently change prompts.
        tokenizer.no_truncation()
        tokenizer.no_padding()
        self.raw = tokenizer
        self.source = source

    @property
    def vocab_size(self) -> int:
        """Ids the tokenizer can produce, added tokens included."""
        return self.raw.get_vocab_size(with_added_tokens=True)

    def encode(self, text: str) -> list[int]:
        """Token ids, with the special tokens that the tokenizer itself puts around a text."""
        return self.raw.encode(text).ids

    def decode(self, ids: Sequence[int]) -> str:
        """Text without special tokens; bytes that are no UTF-8 become U+FFFD."""
        return self.raw.decode(list(ids), skip_special_tokens=True)

    def require_same_as(self, target: TextTokenizer) -> None:
        """Raises `TokenizerError` unless both give every token the same id: a draft's ids would
        mean other text to the target."""
        mine, theirs = self.raw.get_vocab(True), target.raw.get_vocab(True)
        if mine == theirs:
            return
        differing = [t for t, i in theirs.items() if mine.get(t) != i] or [
            t for t in mine if t not in theirs
        ]
        example = min(differing)
        raise TokenizerError(
            f"draft: the tokenizer of {self.source} differs from the target's in {target.source} "
            f"({len(differing)} tokens, such as {example!r}: id {mine.get(example, 'absent')} "
            f"instead of {theirs.get(example, 'absent')}); use a draft trained with the target's "
            "tokenizer"
        )


def load_tokenizer(model: str | Path) -> TextTokenizer:
    """The tokenizer beside a model: a directory with `tokenizer.json`, that file itself, or the
    name of a model on the Hugging Face hub. Raises `TokenizerError`."""
    path = Path(model)
    if path.is_dir():
        path = path / FILE_NAME
        if not path.is_file():
            raise TokenizerError(
                f"tokenizer: {path.parent} has no {FILE_NAME}; save the model's fast tokenizer "
                "there, or name another directory"
            )
    elif not path.is_file():
        path = _download(str(model))
    try:
        return TextTokenizer(Tokenizer.from_file(str(path)), str(path.parent))
    except Exception as error:  # the library raises bare Exception for every kind of damage
        raise TokenizerError(f"tokenizer: {path} cannot be read ({error})") from error


def _download(name: str) -> Path:
    from huggingface_hub import hf_hub_download

    try:
        return Path(hf_hub_download(name, FILE_NAME))
    except Exception as error:  # network, missing repository, missing file, malformed name
        raise TokenizerError(
            f"tokenizer: {name!r} is no directory here, and the hub gave no {FILE_NAME} "
            f"({type(error).__name__}); give the path of a model directory"
        ) from error
