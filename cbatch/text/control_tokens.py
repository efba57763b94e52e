"""Control tokens of a rendered conversation. Only the chat template can write them: the same text
in a message is encoded as ordinary tokens."""

from __future__ import annotations

import itertools
import json
import os
import re
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from tokenizers import AddedToken, Tokenizer

from cbatch.core.request.errors import FieldError
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
        """Return the JSON value with every control token escaped. Raises `RecursionError`."""
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
