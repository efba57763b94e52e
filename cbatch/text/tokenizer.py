"""Tokenizers in Hugging Face's format, and the control tokens of a rendered conversation: only the
chat template can write them, and the same text in a message is encoded as ordinary tokens."""

from __future__ import annotations

import itertools
import json
import os
import re
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import cached_property
from pathlib import Path
from typing import Any

from tokenizers import AddedToken, Tokenizer

from cbatch.core.request.errors import FieldError, InputError
from cbatch.text.chat import CallArguments

_FENCE = "\ufdd0"  # a Unicode noncharacter, around placeholders of control tokens
# First of the private-use code points that replace the first characters of control tokens.
_FIRST_STAND_IN = 0x10F000


@contextmanager
def no_panics() -> Iterator[None]:
    """Raise `FieldError` if the tokenizer panics, as it does when a regular expression takes too
    many steps. A Rust panic is not an `Exception`."""
    try:
        yield
    except BaseException as error:
        if type(error).__name__ != "PanicException":
            raise
        problem = f"the tokenizer fails on it ({error!s:.200})"
        raise FieldError("prompt", problem, "send another text") from error


class ControlTokens:
    """Encoder of conversations: `escape` the messages, render the template, `encode` the result.

    `escape` replaces the first character of a control token's text in a message. All control tokens
    in the rendered text therefore come from the template. `encode` swaps them for placeholders and
    restores the replaced characters, so messages are tokenized together with the text around them.
    The constructor's `encode` is the ordinary encoder, used if no message needed escaping.
    """

    def __init__(self, raw: Tokenizer, encode: Callable[..., list[int]]) -> None:
        self._raw, self._encode = raw, encode
        added = raw.get_added_tokens_decoder()
        self._special = {token.content: i for i, token in added.items() if token.special}
        self._pattern = re.compile(_any_of(sorted(self._special)) or "(?!)")
        firsts = sorted({content[0] for content in self._special})
        self._stand_ins = {first: chr(_FIRST_STAND_IN + i) for i, first in enumerate(firsts)}
        names = {content: f"{_FENCE}{i}{_FENCE}" for content, i in self._special.items()}
        self._placeholders = names  # by control token
        self._unknown = getattr(raw.model, "unk_token", None)
        renamed = Tokenizer(raw.model)  # shares the model's tables
        renamed.normalizer = raw.normalizer
        renamed.pre_tokenizer = raw.pre_tokenizer
        renamed.post_processor = raw.post_processor
        ids = {names.get(token.content, token.content): i for i, token in added.items()}
        tokens = []
        for name, token in zip(ids, added.values(), strict=True):
            flags = {flag: getattr(token, flag) for flag in ("single_word", "lstrip", "rstrip")}
            normalized = token.normalized and not token.special
            tokens.append(AddedToken(name, normalized=normalized, **flags))
        renamed.add_tokens(tokens)
        self._placeholder_tokenizer = renamed
        renamed_tokens = renamed.get_added_tokens_decoder().items()
        # Text and original id of each added token, by its id in the placeholder tokenizer.
        self._originals = {i: (token.content, ids[token.content]) for i, token in renamed_tokens}

    def escape(self, value: Any) -> Any:
        return _map_texts(value, self._escaped)

    def _escaped(self, text: str) -> str:
        while self._pattern.search(text):  # repeated, since matches may overlap
            text = self._pattern.sub(lambda m: self._stand_ins[m[0][0]] + m[0][1:], text)
        return text

    def encode(self, text: str, *, add_special_tokens: bool = False) -> list[int]:
        """Return the token ids of a conversation that was rendered from escaped texts. Raises
        `FieldError` for a message whose text this tokenizer can only encode as a control token."""
        for stand_in in self._stand_ins.values():
            for written in (json.dumps(stand_in), repr(stand_in)):  # as templates may print it
                text = text.replace(written[1:-1], stand_in)
        if not any(stand_in in text for stand_in in self._stand_ins.values()):
            ids = self._encode(text, add_special_tokens=add_special_tokens)
            from_template = [self._special[content] for content in self._pattern.findall(text)]
            from_tokenizer = self._encode("", add_special_tokens=add_special_tokens)
            special = filter(set(self._special.values()).__contains__, ids)
            if Counter(special) <= Counter(from_template + from_tokenizer):
                return ids  # otherwise a message became a control token after all
        text = text.replace(_FENCE, "\ufffd")
        text = self._pattern.sub(lambda m: self._placeholders[m[0]], text)
        for first, stand_in in self._stand_ins.items():
            text = text.replace(stand_in, first)
        # The library releases the interpreter lock for a batch, but not for a single text.
        with no_panics():
            encode_batch = self._placeholder_tokenizer.encode_batch
            (encoding,) = encode_batch([text], add_special_tokens=add_special_tokens)
        columns = zip(encoding.ids, encoding.tokens, encoding.special_tokens_mask, strict=True)
        ids = []
        for token_id, token, is_added in columns:
            if not is_added and token in self._special and token != self._unknown:
                ids += self._spell_out(token)
            else:  # the model may have this id, too; `token` includes blanks around `name`
                name, original_id = self._originals.get(token_id, (token, token_id))
                ids.append(token_id if is_added or name not in token else original_id)
        return ids

    def _spell_out(self, token: str) -> list[int]:
        """Return ids that encode a control token's text character by character. Some models, such
        as Unigram, would encode the whole text as the control token."""
        pieces = [piece for c in token for piece in self._raw.model.tokenize(c)]
        if any(piece.value in self._special and piece.value != self._unknown for piece in pieces):
            problem = f"holds {token!r}, which this tokenizer knows only as a control token"
            raise FieldError("messages", problem, "leave it out")
        return [piece.id for piece in pieces]


def _any_of(texts: list[str]) -> str:
    """Return a regular expression for any of the sorted texts, longest first. It is a prefix tree,
    since a tokenizer may have thousands of control tokens."""
    parts = []
    for _, group in itertools.groupby(texts, key=lambda text: text[0]):
        same_first = list(group)
        prefix = os.path.commonprefix(same_first)
        longer = [text[len(prefix) :] for text in same_first if text != prefix]
        more = f"(?:{_any_of(longer)}){'?' * (prefix in same_first)}" if longer else ""
        parts.append(re.escape(prefix) + more)
    return "|".join(parts)


def _map_texts(value: Any, change: Callable[[str], str]) -> Any:
    """Return the JSON value with `change` applied to every text in it."""
    if isinstance(value, str):
        return change(value)
    if isinstance(value, CallArguments):
        return CallArguments(_map_texts(dict(value), change), change(str(value)))
    if isinstance(value, Mapping):
        return {change(key): _map_texts(inner, change) for key, inner in value.items()}
    if isinstance(value, list):
        return [_map_texts(inner, change) for inner in value]
    return value


FILE_NAME = "tokenizer.json"
_BYTE_TOKEN = re.compile("<0x[0-9A-F]{2}>")  # SentencePiece's byte tokens
# Token ids. A longer list is decoded as a batch of one list, since the library releases the
# interpreter lock only for batches.
_MAX_SINGLE_TOKENS = 4096
_MAX_ADDED_TOKENS = 4096  # that a post-processor may put around a text


def _byte_characters() -> dict[str, int]:
    printable = [*range(33, 127), *range(161, 173), *range(174, 256)]
    others = [byte for byte in range(256) if byte not in printable]
    table = {chr(byte): byte for byte in printable}
    return table | {chr(256 + at): byte for at, byte in enumerate(others)}


_BYTES = _byte_characters()
_CONTINUATIONS = frozenset(bytes([byte]) for byte in range(0x80, 0xC0))  # UTF-8 continuation bytes


class TokenizerError(InputError):
    """A tokenizer that is missing, broken, or not the required one. The message names the file."""


class TextTokenizer:
    """Encode text to token ids, and decode ids. `source` names the tokenizer in messages."""

    def __init__(self, tokenizer: Tokenizer, source: str) -> None:
        # A truncation length or padding in the file would silently change prompts.
        tokenizer.no_truncation()
        tokenizer.no_padding()
        self.raw = tokenizer
        self.source = source

    @property
    def vocab_size(self) -> int:
        return self.raw.get_vocab_size(with_added_tokens=True)

    @cached_property
    def longest_token_chars(self) -> int:
        return max(map(len, self.raw.get_vocab(True)), default=1)

    @cached_property
    def added(self) -> dict[int, str]:
        """Texts of the added tokens, by id."""
        return {i: token.content for i, token in self.raw.get_added_tokens_decoder().items()}

    @cached_property
    def special_ids(self) -> frozenset[int]:
        added = self.raw.get_added_tokens_decoder().items()
        return frozenset(token_id for token_id, token in added if token.special)

    @cached_property
    def has_patterns(self) -> bool:
        """True if the tokenizer uses regular expressions, which may be slow on any text."""
        parts = (self.raw.normalizer, self.raw.pre_tokenizer)
        return any(part is not None and b'"Regex"' in part.__getstate__() for part in parts)

    @cached_property
    def control_tokens(self) -> ControlTokens:
        """Encoder of conversations, which never encodes text of a message as a control token."""
        return ControlTokens(self.raw, self.encode)

    def encode(self, text: str, *, add_special_tokens: bool = True) -> list[int]:
        """Return token ids, with the special tokens that the tokenizer puts around a text. Pass
        `add_special_tokens=False` for a text that has its own, such as a rendered chat template.
        Raises `FieldError` if the tokenizer fails, as when a regular expression takes too many
        steps."""
        with no_panics():
            return self.raw.encode_batch_fast([text], add_special_tokens=add_special_tokens)[0].ids

    def decode(self, ids: Sequence[int], *, skip_special_tokens: bool = True) -> str:
        """Return the text, by default without special tokens. Invalid UTF-8 becomes U+FFFD."""
        if len(ids) <= _MAX_SINGLE_TOKENS:
            return self.raw.decode(list(ids), skip_special_tokens=skip_special_tokens)
        return self.raw.decode_batch([list(ids)], skip_special_tokens=skip_special_tokens)[0]

    def token_bytes(self, token_id: int) -> bytes:
        """Return the UTF-8 bytes that a token adds to a text; empty for a special token."""
        token = self.raw.id_to_token(token_id)
        if token is None or token_id in self.special_ids:
            return b""
        if _BYTE_TOKEN.fullmatch(token):
            return bytes([int(token[3:5], 16)])
        if self.byte_level and all(c in _BYTES for c in token):
            return bytes(_BYTES[c] for c in token)
        return token.replace("\u2581", " ").encode()

    def continues(self, token_id: int) -> bool:
        """Return whether a token begins in the middle of a UTF-8 character."""
        return self.token_bytes(token_id)[:1] in _CONTINUATIONS

    @cached_property
    def byte_level(self) -> bool:
        """True if the characters of tokens represent bytes, as in GPT-2."""
        decoder = self.raw.decoder
        return decoder is not None and "ByteLevel" in repr(decoder)

    def require_same_as(self, target: TextTokenizer) -> None:
        """Raise `TokenizerError` unless both tokenizers give every token the same id. The target
        model verifies the draft model's token ids, so an id must mean the same text to both."""
        own_vocab, target_vocab = self.raw.get_vocab(True), target.raw.get_vocab(True)
        if own_vocab == target_vocab:
            return
        differing = [t for t, i in target_vocab.items() if own_vocab.get(t) != i] or [
            t for t in own_vocab if t not in target_vocab
        ]
        example = min(differing)
        raise TokenizerError(
            f"draft: the tokenizer of {self.source} differs from the target's in {target.source} "
            f"({len(differing)} tokens, such as {example!r}: id {own_vocab.get(example, 'absent')} "
            f"instead of {target_vocab.get(example, 'absent')}); "
            "use a draft trained with the target's tokenizer"
        )


def load_tokenizer(model: str | Path) -> TextTokenizer:
    """Load the tokenizer of a model: a directory with `tokenizer.json`, that file, or a model's
    name on the Hugging Face hub. Raises `TokenizerError`."""
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
        raw.no_truncation()
        raw.no_padding()  # which may be of any length
        _require_small_additions(raw)
        raw.encode("a")  # detects damage that loading does not
    except BaseException as error:  # the library raises bare Exception, or panics
        if not isinstance(error, Exception) and type(error).__name__ != "PanicException":
            raise
        raise TokenizerError(f"tokenizer: {path} cannot be read ({error!s:.300})") from error
    return TextTokenizer(raw, str(path.parent))


def _require_small_additions(raw: Tokenizer) -> None:
    """Raise ValueError if the post-processor adds very many tokens to a text, or repeats it."""
    num_added = raw.num_special_tokens_to_add(False)
    if num_added > _MAX_ADDED_TOKENS:
        raise ValueError(f"its post_processor adds {num_added} tokens to every text")
    state = None if raw.post_processor is None else json.loads(raw.post_processor.__getstate__())
    pending = [state or {}]
    while pending:
        processor = pending.pop()
        pending += processor.get("processors", ())
        if sum("Sequence" in piece for piece in processor.get("single", ())) > 1:
            raise ValueError("its post_processor repeats every text")


def _download(name: str) -> Path:
    from huggingface_hub import hf_hub_download

    try:
        return Path(hf_hub_download(name, FILE_NAME))
    except Exception as error:  # network, missing repository, missing file, malformed name
        raise TokenizerError(
            f"tokenizer: {name!r} is not a directory here, and the hub gave no {FILE_NAME} "
            f"({type(error).__name__}); give the path of a model directory"
        ) from error
