"""Tokenizers of Hugging Face directories."""

from __future__ import annotations

import re
from collections.abc import Sequence
from functools import cached_property
from pathlib import Path

from tokenizers import Tokenizer

from cbatch.text.control_tokens import ControlTokens, no_panics

FILE_NAME = "tokenizer.json"
_BYTE_TOKEN = re.compile("<0x[0-9A-F]{2}>")  # of sentencepiece, where no word fits
# Ids. Over one list the library keeps the interpreter from all other threads; over a batch of one
# list it does not.
_LONG = 4096


def _byte_characters() -> dict[str, int]:
    """The characters that byte-level BPE (GPT-2) writes bytes as: a printable one stands for
    itself, the others are those from U+0100 on, in order."""
    printable = [*range(33, 127), *range(161, 173), *range(174, 256)]
    others = [byte for byte in range(256) if byte not in printable]
    table = {chr(byte): byte for byte in printable}
    return table | {chr(256 + at): byte for at, byte in enumerate(others)}


_BYTES = _byte_characters()
_CONTINUATIONS = frozenset(bytes([byte]) for byte in range(0x80, 0xC0))  # of UTF-8


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

    @cached_property
    def longest_token_chars(self) -> int:
        """No token stands for more characters of a text than this."""
        return max(map(len, self.raw.get_vocab(True)), default=1)

    @cached_property
    def added(self) -> dict[int, str]:
        """Texts of the tokens that are found in a text as they are, by id."""
        return {i: token.content for i, token in self.raw.get_added_tokens_decoder().items()}

    @cached_property
    def special_ids(self) -> frozenset[int]:
        added = self.raw.get_added_tokens_decoder().items()
        return frozenset(token_id for token_id, token in added if token.special)

    @cached_property
    def has_patterns(self) -> bool:
        """Whether it brings regular expressions, which may take any time even over a short text."""
        parts = (self.raw.normalizer, self.raw.pre_tokenizer)
        return any(part is not None and b'"Regex"' in part.__getstate__() for part in parts)

    @cached_property
    def control_tokens(self) -> ControlTokens:
        """Escape and encode conversations, whose texts must not become control tokens."""
        return ControlTokens(self.raw, self.encode)

    def encode(self, text: str, *, add_special_tokens: bool = True) -> list[int]:
        """Token ids, with the special tokens that the tokenizer itself puts around a text, unless
        the text brings its own (a chat template's does). Raises `FieldError` where the tokenizer
        gives up, as on a text over which a regular expression takes too many steps."""
        with no_panics():
            return self.raw.encode_batch_fast([text], add_special_tokens=add_special_tokens)[0].ids

    def decode(self, ids: Sequence[int], *, skip_special_tokens: bool = True) -> str:
        """Text, by default without special tokens; bytes that are no UTF-8 become U+FFFD."""
        if len(ids) <= _LONG:
            return self.raw.decode(list(ids), skip_special_tokens=skip_special_tokens)
        return self.raw.decode_batch([list(ids)], skip_special_tokens=skip_special_tokens)[0]

    def token_bytes(self, token_id: int) -> bytes:
        """What a token adds to a text. Those of a text's tokens, joined, are its UTF-8; empty for
        a special token and for an id that is no token."""
        token = self.raw.id_to_token(token_id)
        if token is None or token_id in self.special_ids:
            return b""
        if _BYTE_TOKEN.fullmatch(token):
            return bytes([int(token[3:5], 16)])
        if self.byte_level and all(c in _BYTES for c in token):
            return bytes(_BYTES[c] for c in token)
        return token.replace("\u2581", " ").encode()

    def continues(self, token_id: int) -> bool:
        """Whether a token begins in the middle of a character."""
        return self.token_bytes(token_id)[:1] in _CONTINUATIONS

    @cached_property
    def byte_level(self) -> bool:
        """Whether a token's characters stand for bytes."""
        decoder = self.raw.decoder
        return decoder is not None and "ByteLevel" in repr(decoder)

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
        raw = Tokenizer.from_file(str(path))
        raw.encode("a")  # some damage shows only here
    except BaseException as error:  # bare Exception for every kind of damage
        if not isinstance(error, Exception) and type(error).__name__ != "PanicException":
            raise
        raise TokenizerError(f"tokenizer: {path} cannot be read ({error!s:.300})") from error
    return TextTokenizer(raw, str(path.parent))


def _download(name: str) -> Path:
    from huggingface_hub import hf_hub_download

    try:
        return Path(hf_hub_download(name, FILE_NAME))
    except Exception as error:  # network, missing repository, missing file, malformed name
        raise TokenizerError(
            f"tokenizer: {name!r} is no directory here, and the hub gave no {FILE_NAME} "
            f"({type(error).__name__}); give the path of a model directory"
        ) from error
