"""Prompts of a given number of tokens, cut from a corpus of real text.

Random tokens are unlike real text: with them, drafts would be accepted less often than in real
use.
"""

from __future__ import annotations

import sysconfig
from pathlib import Path
from typing import TypeVar

import msgspec

from bench.load.client.call import CallError
from bench.load.client.http import HttpClient
from cbatch.core.request.errors import FieldError
from sim.workload.tokens import mix
from sim.workload.traces.files import read_whole
from sim.workload.traces.request import TraceRequest

CORPUS_CHARS = 200_000  # length of the default corpus.
CHARS_PER_TOKEN = 4.0  # assumed until the server has counted a prompt.
PIECE_CHARS = 100_000  # characters per /tokenize request

# Modules of the standard library whose source is the default corpus.
_MODULES = (
    *("argparse", "ast", "calendar", "csv", "difflib", "doctest", "enum", "fractions", "inspect"),
    *("ipaddress", "mailbox", "pdb", "pickle", "tarfile", "textwrap", "zipfile"),
)

TextOrIds = TypeVar("TextOrIds", str, tuple[int, ...])


class PromptText(msgspec.Struct, frozen=True):
    """A corpus. `ids` are the tokens of `text`, or None if the server has no /tokenize;
    `chars_per_token` is an average."""

    text: str
    chars_per_token: float
    ids: tuple[int, ...] | None = None

    def text_of(self, key: int, tokens: int) -> str:
        """Return a slice of about `tokens` tokens, at a position that depends on `key`."""
        return _cut(self.text, key, max(1, round(tokens * self.chars_per_token)))

    def ids_of(self, key: int, tokens: int) -> list[int]:
        """Return exactly `tokens` token ids, at a position that depends on `key`; needs `ids`."""
        assert self.ids is not None
        return list(_cut(self.ids, key, tokens))


class PromptCutter:
    """Makes prompts for requests that only have lengths and ids of shared blocks (`hash_ids`)."""

    def __init__(self, corpus: PromptText, seed: int, *, as_ids: bool) -> None:
        self._corpus, self._seed, self._as_ids = corpus, seed, as_ids

    def prompt(self, index: int, request: TraceRequest) -> str | list[int]:
        """Return the prompt, as text or token ids. Blocks with the same hash id have the same
        tokens in all requests; the rest differs from request to request."""
        hash_ids = request.hash_ids or ()
        size = request.hash_block_tokens or 1
        shared_tokens = min(len(hash_ids) * size, request.prompt_tokens)
        pieces = [
            (mix(self._seed, 2 * hash_id), min(size, shared_tokens - block * size))
            for block, hash_id in enumerate(hash_ids)
            if shared_tokens > block * size
        ]
        if shared_tokens < request.prompt_tokens:
            pieces.append((mix(self._seed, 2 * index + 1), request.prompt_tokens - shared_tokens))
        if self._as_ids:
            return [token for piece in pieces for token in self._corpus.ids_of(*piece)]
        return "".join(self._corpus.text_of(*piece) for piece in pieces)

    def message(self, index: int, tokens: int) -> str:
        return self._corpus.text_of(mix(self._seed, 2 * index + 1), tokens)


def load_text(path: Path | None) -> str:
    """Return the text of a file, or by default source code of Python's standard library. Raises
    `FieldError`."""
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
    """Tokenize `text` by the server's /tokenize, which vLLM and cbatch have. On other servers
    prompts are cut by characters, with `CHARS_PER_TOKEN` until a trial call has measured it."""
    ids: list[int] = []
    try:
        for start in range(0, len(text), PIECE_CHARS):
            piece = text[start : start + PIECE_CHARS]
            body = {"model": model, "prompt": piece, "add_special_tokens": False}
            status, raw = await client.request("POST", "/tokenize", msgspec.json.encode(body))
            if status != 200:
                raise ValueError(f"/tokenize returned {status}")
            ids += msgspec.json.decode(raw, type=_Tokenized).tokens
        return PromptText(text, len(text) / len(ids), tuple(ids))
    except (CallError, ValueError, ZeroDivisionError):
        return PromptText(text, CHARS_PER_TOKEN)


class _Tokenized(msgspec.Struct):
    tokens: list[int]


def _cut(whole: TextOrIds, key: int, length: int) -> TextOrIds:
    """Return a slice that starts at `key` modulo the length of `whole`, and wraps around."""
    start = key % len(whole)
    piece = whole[start : start + length]
    while len(piece) < length:
        piece += whole[: length - len(piece)]
    return piece
