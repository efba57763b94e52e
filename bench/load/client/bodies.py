"""Request bodies and their prompts. Prompts of a given number of tokens are cut from a corpus of
real text: with random tokens, drafts would be accepted less often than in real use. A later turn of
a conversation contains the server's answers to earlier turns."""

from __future__ import annotations

import sysconfig
from pathlib import Path
from typing import Any, TypeVar

import msgspec

from bench.load.client.http import CHAT, COMPLETIONS, CallError, HttpClient, TimedCall
from cbatch.core.request.errors import FieldError
from sim.workload.tokens import mix
from sim.workload.traces.files import read_whole
from sim.workload.traces.request import TraceRequest

MAX_TOKENS, MAX_COMPLETION_TOKENS = "max_tokens", "max_completion_tokens"
_encode = msgspec.json.Encoder().encode
Messages = list[dict[str, Any]]
CORPUS_CHARS = 200_000  # length of the default corpus.
CHARS_PER_TOKEN, SAMPLE_CHARS = 4.0, 2000  # assumed, and length of the prompt that measures it
PIECE_CHARS = 100_000  # characters per /tokenize request

# Modules of the standard library whose source is the default corpus.
_MODULES = (
    *("argparse", "ast", "calendar", "csv", "difflib", "doctest", "enum", "fractions", "inspect"),
    *("ipaddress", "mailbox", "pdb", "pickle", "tarfile", "textwrap", "zipfile"),
)

# Errors if a server does not answer as expected.
NO_ANSWER = (CallError, ValueError, LookupError, TypeError, ZeroDivisionError)
TextOrIds = TypeVar("TextOrIds", str, tuple[int, ...])


class PromptText(msgspec.Struct, frozen=True):
    """A corpus. `ids` are the tokens of `text`, or None if the server has no /tokenize;
    `chars_per_token` is an average."""

    text: str
    chars_per_token: float
    ids: tuple[int, ...] | None = None

    def cut(self, key: int, tokens: int, *, as_ids: bool = False) -> Any:
        """Return a slice of about `tokens` tokens as text, or exactly as many ids, at a position
        that depends on `key`."""
        if as_ids and self.ids is not None:
            return list(_cut(self.ids, key, tokens))
        return _cut(self.text, key, max(1, round(tokens * self.chars_per_token)))

    def prompt(
        self, seed: int, index: int, request: TraceRequest, *, as_ids: bool = False
    ) -> str | list[int]:
        """Return the prompt of a request that has only lengths and ids of shared blocks. Blocks
        with the same hash id have the same tokens in all requests; the rest differs."""
        hash_ids, size = request.hash_ids or (), request.hash_block_tokens or 1
        shared_tokens = min(len(hash_ids) * size, request.prompt_tokens)
        pieces = [
            (mix(seed, 2 * hash_id), min(size, shared_tokens - block * size))
            for block, hash_id in enumerate(hash_ids)
            if shared_tokens > block * size
        ]
        if shared_tokens < request.prompt_tokens:
            pieces.append((mix(seed, 2 * index + 1), request.prompt_tokens - shared_tokens))
        cuts = [self.cut(*piece, as_ids=as_ids) for piece in pieces]
        return [token for ids in cuts for token in ids] if as_ids else "".join(cuts)


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


async def open_corpus(client: HttpClient, model: str, text: str, *, chat: bool) -> PromptText:
    """Tokenize `text` by the server's /tokenize, which vLLM and cbatch have. On other servers
    prompts are cut by characters, at the ratio that the usage of a short call shows."""
    ids: list[int] = []
    try:
        for start in range(0, len(text), PIECE_CHARS):
            piece = text[start : start + PIECE_CHARS]
            ids += await tokenize(client, model, piece)
        return PromptText(text, len(text) / len(ids), tuple(ids))
    except NO_ANSWER:
        pass
    sample = text[:SAMPLE_CHARS]
    prompt = {"messages": [{"role": "user", "content": sample}]} if chat else {"prompt": sample}
    try:
        body = {"model": model, "max_tokens": 1} | prompt
        answer = await _ask(client, CHAT if chat else COMPLETIONS, body)
        return PromptText(text, len(sample) / answer["usage"]["prompt_tokens"])
    except NO_ANSWER:
        return PromptText(text, CHARS_PER_TOKEN)


async def tokenize(client: HttpClient, model: str, text: str) -> list[int]:
    """Return the ids of a text by the server's /tokenize. Raises an error of `NO_ANSWER`."""
    body = {"model": model, "prompt": text, "add_special_tokens": False}
    answer = await _ask(client, "/tokenize", body)
    return msgspec.convert(answer["tokens"], list[int])


async def _ask(client: HttpClient, path: str, body: dict[str, Any]) -> dict[str, Any]:
    status, raw = await client.request("POST", path, msgspec.json.encode(body))
    if status != 200:
        raise ValueError(f"{path} returned {status}")
    return msgspec.json.decode(raw, type=dict[str, Any])


def _cut(whole: TextOrIds, key: int, length: int) -> TextOrIds:
    """Return a slice that starts at `key` modulo the length of `whole`, and wraps around."""
    start = key % len(whole)
    piece = whole[start : start + length]
    while len(piece) < length:
        piece += whole[: length - len(piece)]
    return piece


class Item(msgspec.Struct, frozen=True):
    """A prompt that the user gave, with further `fields` for its call."""

    prompt: str | list[int] | None = None
    messages: Messages | None = None
    fields: dict[str, Any] = {}


class BodySettings(msgspec.Struct, frozen=True, kw_only=True):
    """Settings for all bodies of a run. `items` are used in rotation; without items, prompts are
    cut from `corpus`. With `conversations`, later turns of a session include its answers."""

    model: str
    chat: bool
    streamed: bool
    fields: dict[str, Any]  # fields of every call
    chunk_usage: bool = True  # ask for usage in every chunk, not only in the last
    ignore_eos: bool = False
    items: tuple[Item, ...] = ()
    corpus: PromptText | None = None
    conversations: bool = False
    seed: int = 0


class Prepared(msgspec.Struct, frozen=True):
    body: bytes
    call: TimedCall
    keep_text: bool


class Bodies:
    """Builds the bodies of a run's calls, and keeps the transcripts of its conversations."""

    def __init__(self, settings: BodySettings) -> None:
        self._settings = settings
        self.path = CHAT if settings.chat else COMPLETIONS
        self._common: dict[str, Any] = {"model": settings.model}
        if settings.streamed:
            usage = {"include_usage": True}
            usage |= {"continuous_usage_stats": True} if settings.chunk_usage else {}
            self._common |= {"stream": True, "stream_options": usage}
        if settings.ignore_eos:
            self._common["ignore_eos"] = True
        self._common |= settings.fields
        # By session: messages so far, and their planned number of tokens.
        self._transcripts: dict[str, tuple[Messages, int]] = {}

    def prepare(self, index: int, request: TraceRequest) -> Prepared:
        fields = self._common | {MAX_TOKENS: request.output_tokens}
        session = request.session if self._settings.conversations else None
        if self._settings.items:
            item = self._settings.items[index % len(self._settings.items)]
            fields |= item.fields
            fields |= self._prompt_fields(item.prompt, item.messages)
        elif session is None:
            corpus = self._settings.corpus
            assert corpus is not None
            as_ids = corpus.ids is not None and not self._settings.chat
            prompt = corpus.prompt(self._settings.seed, index, request, as_ids=as_ids)
            fields |= self._prompt_fields(prompt)
        else:
            fields |= self._turn(index, request, session)
        max_tokens = fields.get(MAX_COMPLETION_TOKENS, fields[MAX_TOKENS])
        if MAX_COMPLETION_TOKENS in fields:
            del fields[MAX_TOKENS]
        call = TimedCall(index, request.arrival_s, request.prompt_tokens, max_tokens)
        call.ignore_eos = bool(fields.get("ignore_eos"))
        call.session = request.session
        call.slo_s = (request.ttft_slo_s, request.tpot_slo_s, request.e2e_slo_s)
        return Prepared(_encode(fields), call, session is not None)

    def add_answer(self, request: TraceRequest, text: str) -> None:
        if self._settings.conversations and request.session is not None:
            self._transcripts[request.session][0].append({"role": "assistant", "content": text})

    # -- inside

    def _prompt_fields(
        self, prompt: str | list[int] | None, messages: Messages | None = None
    ) -> dict[str, Any]:
        if self._settings.chat:
            return {"messages": messages or [{"role": "user", "content": prompt}]}
        return {"prompt": prompt}

    def _turn(self, index: int, request: TraceRequest, session: str) -> dict[str, Any]:
        """Return the prompt of a turn. A later turn, which has a `think_s`, continues its session's
        transcript, always as text: answers come as text."""
        corpus, seed = self._settings.corpus, self._settings.seed
        assert corpus is not None
        messages, planned_tokens = self._transcripts.get(session, ([], 0))
        if request.think_s is None or not messages:
            messages, message = [], corpus.prompt(seed, index, request)
        else:
            tokens = max(1, request.prompt_tokens - planned_tokens)
            message = corpus.cut(mix(seed, 2 * index + 1), tokens)
        messages.append({"role": "user", "content": message})
        self._transcripts[session] = messages, request.prompt_tokens + request.output_tokens
        if self._settings.chat:
            return {"messages": list(messages)}
        return {"prompt": "".join(each["content"] for each in messages)}
