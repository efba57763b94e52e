"""Real text of a given length: slices of a corpus, in tokens where the server can tell them.

Random tokens would flatter or hurt speculation: nobody can guess them, and no text is like them.
"""

from __future__ import annotations

import sysconfig
from pathlib import Path
from typing import TypeVar

import msgspec

from bench.load.client.call import CallError
from bench.load.client.http import HttpClient
from cbatch.core.request.errors import FieldError
from sim.traces.files import read_whole
from sim.traces.request import TraceRequest
from sim.workload.tokens import mix

CORPUS_CHARS = 200_000
CHARS_PER_TOKEN = 4.0
PIECE_CHARS = 100_000  # tokenised at once
_MODULES = (
    *("argparse", "ast", "calendar", "csv", "difflib", "doctest", "enum", "fractions", "inspect"),
    *("ipaddress", "mailbox", "pdb", "pickle", "tarfile", "textwrap", "zipfile"),
)

Whole = TypeVar("Whole", str, tuple[int, ...])


class PromptText(msgspec.Struct, frozen=True):
    """`ids` are the tokens of `text`, where the server has a tokenizer to ask; `chars_per_token`
    holds on average."""

    text: str
    chars_per_token: float
    ids: tuple[int, ...] | None = None

    def text_of(self, name: int, tokens: int) -> str:
        """About so many tokens. The same name begins at the same place."""
        return _cut(self.text, name, max(1, round(tokens * self.chars_per_token)))

    def ids_of(self, name: int, tokens: int) -> list[int]:
        """Exactly so many. The server must have told the tokens."""
        assert self.ids is not None
        return list(_cut(self.ids, name, tokens))


class PromptCutter:
    """Prompts for requests that say only how long they are and what they share."""

    def __init__(self, corpus: PromptText, seed: int, *, as_ids: bool) -> None:
        self._corpus, self._seed, self._as_ids = corpus, seed, as_ids

    def prompt(self, index: int, request: TraceRequest) -> str | list[int]:
        """Tokens of a named block are those of every block of that name; the rest belongs to the
        request alone."""
        names = request.hash_ids or ()
        size = request.hash_block_tokens or 1
        named = min(len(names) * size, request.prompt_tokens)
        pieces = [
            (mix(self._seed, 2 * name), min(size, named - start * size))
            for start, name in enumerate(names)
            if named > start * size
        ]
        if named < request.prompt_tokens:
            pieces.append((mix(self._seed, 2 * index + 1), request.prompt_tokens - named))
        if self._as_ids:
            return [token for piece in pieces for token in self._corpus.ids_of(*piece)]
        return "".join(self._corpus.text_of(*piece) for piece in pieces)

    def message(self, index: int, tokens: int) -> str:
        return self._corpus.text_of(mix(self._seed, 2 * index + 1), tokens)


def load_text(path: Path | None) -> str:
    """A file's, or else source code of the standard library: real, long and always there."""
    if path is not None:
        try:
            text = read_whole(path).decode()
        except (OSError, UnicodeDecodeError) as error:
            raise FieldError("--text", f"{path}: {error}", "name a UTF-8 file") from error
        if len(text) < 1000:
            raise FieldError("--text", f"{path} has {len(text)} characters", "give a longer text")
        return text
    folder = Path(sysconfig.get_paths()["stdlib"])
    sources = [folder / f"{name}.py" for name in _MODULES]
    text = "".join(each.read_text(encoding="utf-8") for each in sources if each.is_file())
    if not text:
        raise FieldError("--text", "this Python has no source files", "name a text file")
    return text[:CORPUS_CHARS]


async def open_corpus(client: HttpClient, model: str, text: str) -> PromptText:
    """Ask the server for the tokens of `text` (/tokenize, as vLLM and cbatch have it). If it does
    not tell them, only characters are known, and `CHARS_PER_TOKEN` until a prompt is counted."""
    ids: list[int] = []
    try:
        for start in range(0, len(text), PIECE_CHARS):
            piece = text[start : start + PIECE_CHARS]
            body = {"model": model, "prompt": piece, "add_special_tokens": False}
            status, raw = await client.whole("POST", "/tokenize", msgspec.json.encode(body))
            if status != 200:
                raise ValueError(f"/tokenize is answered with {status}")
            ids += msgspec.json.decode(raw, type=_Tokenized).tokens
        return PromptText(text, len(text) / len(ids), tuple(ids))
    except (CallError, ValueError, ZeroDivisionError):
        return PromptText(text, CHARS_PER_TOKEN)


class _Tokenized(msgspec.Struct):
    tokens: list[int]


def _cut(whole: Whole, name: int, length: int) -> Whole:
    """From a place that the name alone decides; goes round at the end."""
    start = name % len(whole)
    piece = whole[start : start + length]
    while len(piece) < length:
        piece += whole[: length - len(piece)]
    return piece
