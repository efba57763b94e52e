"""A server under test: its answers as text, tokens, log probabilities and times."""

from __future__ import annotations

import asyncio
import json
import math
import random
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import msgspec

from bench.load.client.bodies import NO_ANSWER, PromptText, load_text, tokenize
from bench.load.client.http import CHAT, COMPLETIONS, CallError, HttpClient
from bench.load.run.report import scrape

Body = dict[str, Any]
BUSY = (429, 503)  # statuses of servers that are full
TOKEN_CHARS = 5.0  # characters per requested prompt token, about


class CheckedChoice(msgspec.Struct):
    """One choice of an answer. `tops` has the most likely tokens of each position."""

    text: str = ""
    reasoning: str = ""
    calls: list[dict[str, str]] = []
    finish_reason: str | None = None
    tokens: list[str] = []
    logprobs: list[float] = []
    tops: list[dict[str, float]] = []


class Answer(msgspec.Struct):
    """An answer, streamed or whole. `status` is 0 if the connection failed, and `error` then says
    why. `pieces` are the texts of the first choice's events with their times."""

    status: int = 0
    error: str = ""
    choices: list[CheckedChoice] = []
    usage: dict[str, Any] = {}
    pieces: list[tuple[float, str]] = []
    is_utf8: bool = True
    sent_s: float = 0.0
    end_s: float = 0.0

    @property
    def first(self) -> CheckedChoice:
        return self.choices[0] if self.choices else CheckedChoice()

    def gaps_s(self, from_s: float = 0.0, to_s: float = math.inf) -> list[float]:
        """Return the times between two pieces that lie within these times, in part or whole."""
        times = [at_s for at_s, _ in self.pieces]
        pairs = zip(times, times[1:], strict=False)
        return [b - a for a, b in pairs if b > from_s and a < to_s]


class NotSupportedError(Exception):
    """The server has no such feature; the message says how that was seen."""


class _Sink:
    """Collects a response. `begun` is set by the first event with text."""

    def __init__(self, streamed: bool, begun: asyncio.Event) -> None:
        self.streamed, self.answer, self.begun = streamed, Answer(sent_s=time.monotonic()), begun
        self._rest = b""

    def begin(self, status: int) -> None:
        self.answer.status = status

    def read(self, piece: bytes, now_s: float) -> None:
        self._rest += piece
        if self.streamed and self.answer.status == 200:
            *lines, self._rest = self._rest.split(b"\n")
            for line in lines:
                if line.startswith(b"data:") and line[5:].strip() not in (b"[DONE]", b"null", b""):
                    self._add(line[5:], now_s)

    def end(self, now_s: float) -> None:
        if self.answer.status != 200:
            self.answer.error = self._rest.decode("utf-8", "replace")[:2000]
        elif not self.streamed:
            self._add(self._rest, now_s)

    def _add(self, data: bytes, now_s: float) -> None:
        answer = self.answer
        try:
            event = json.loads(data.decode())
        except UnicodeDecodeError:
            answer.is_utf8 = False
            event = json.loads(data.decode("utf-8", "replace"))
        if error := event.get("error"):
            answer.error = str(error)
        answer.usage = event.get("usage") or answer.usage
        for choice in event.get("choices") or ():
            while len(answer.choices) <= choice.get("index", 0):
                answer.choices.append(CheckedChoice())
            known = answer.choices[choice.get("index", 0)]
            text = _add_choice(known, choice)
            if choice.get("index", 0) == 0 and text:
                answer.pieces.append((now_s, text))
                self.begun.set()


def _add_choice(known: CheckedChoice, choice: dict[str, Any]) -> str:
    """Add an event's choice to what is known of it. Return its text."""
    part = choice.get("delta") or choice.get("message") or {}
    text = choice.get("text") or part.get("content") or ""
    reasoning = part.get("reasoning_content") or part.get("reasoning") or ""
    known.text += text
    known.reasoning += reasoning
    known.finish_reason = choice.get("finish_reason") or known.finish_reason
    for at, call in enumerate(part.get("tool_calls") or ()):
        while len(known.calls) <= call.get("index", at):
            known.calls.append({"name": "", "arguments": ""})
        for name, value in (call.get("function") or {}).items():
            if name in ("name", "arguments"):
                known.calls[call.get("index", at)][name] += value or ""
    logprobs = choice.get("logprobs") or {}
    for entry in logprobs.get("content") or ():
        known.tokens.append(entry["token"])
        known.logprobs.append(entry["logprob"])
        known.tops.append({top["token"]: top["logprob"] for top in entry["top_logprobs"]})
    known.tokens += logprobs.get("tokens") or []
    known.logprobs += logprobs.get("token_logprobs") or []
    known.tops += [top or {} for top in logprobs.get("top_logprobs") or ()]
    return text + reasoning


class TestedServer:
    """Asks a server, and keeps it busy. Prompts are cut from the source of Python's library."""

    def __init__(self, client: HttpClient, key: str | None, model: str) -> None:
        self.client, self._key, self.model = client, key, model
        self._corpus = PromptText(load_text(None), TOKEN_CHARS)
        self._alone: dict[str, Answer] = {}

    def prompt(self, rng: random.Random, tokens: int = 24) -> str:
        """Return a piece of the corpus of about `tokens` tokens."""
        text: str = self._corpus.cut(rng.getrandbits(64), tokens)
        return text

    def message(self, body: Body) -> bytes:
        """Return the bytes of a request for a completion."""
        fields = json.dumps({"model": self.model} | body).encode()
        return self.client.endpoint.message("POST", COMPLETIONS, fields, self._key)

    async def rest(self) -> None:
        """Wait until the server has ended what a check left."""
        for _ in range(20):
            if not await self.running():
                return
            await asyncio.sleep(0.1)

    async def running(self) -> float:
        """Return the number of running requests by /metrics, 0 if it does not say."""
        metrics = await scrape(self.client)
        return 0.0 if metrics is None else metrics.values.get("running", 0.0)

    async def ask(
        self, body: Body, *, streamed: bool = True, begun: asyncio.Event | None = None
    ) -> Answer:
        """Ask for a completion, or for a chat if `body` has messages. `begun` is set at the first
        text, or at the end."""
        fields = {"model": self.model, "stream": streamed} | body
        if streamed:
            fields["stream_options"] = {"include_usage": True}
        sink = _Sink(streamed, begun or asyncio.Event())
        path = CHAT if "messages" in body else COMPLETIONS
        try:
            await self.client.call("POST", path, json.dumps(fields).encode(), sink)
        except CallError as error:
            sink.answer.error = str(error)
        except (ValueError, LookupError, TypeError, AttributeError) as error:
            sink.answer.error = f"not an answer of the API: {error!r}"
        sink.answer.end_s = time.monotonic()
        sink.begun.set()
        return sink.answer

    async def require(self, body: Body, what: str, *, streamed: bool = True) -> Answer:
        """Ask, and take a refusal as a missing feature. Raises `NotSupportedError`."""
        answer = await self.ask(body, streamed=streamed)
        if 400 <= answer.status < 500 or answer.status in BUSY:
            raise NotSupportedError(f"{what}: {answer.status} {answer.error[:160]}")
        return answer

    async def tokenize(self, text: str) -> list[int]:
        """Return the ids of a text by /tokenize, or an empty list if the server has none."""
        try:
            return await tokenize(self.client, self.model, text)
        except NO_ANSWER:
            return []

    async def alone(self, body: Body) -> Answer:
        """Return the answer that the server gave when it had no other request."""
        key = json.dumps(body, sort_keys=True)
        if key not in self._alone:
            self._alone[key] = await self.require(body, "the request")
        return self._alone[key]

    @asynccontextmanager
    async def load(
        self, count: int, rng: random.Random, *, prompt_tokens: int = 24, max_tokens: int = 64
    ) -> AsyncIterator[None]:
        """Keep `count` other requests running, and cancel them at the end."""
        begun = [asyncio.Event() for _ in range(count)]

        async def one(event: asyncio.Event) -> None:
            while True:
                body: Body = {"prompt": self.prompt(rng, prompt_tokens), "temperature": 1.0}
                answer = await self.ask(body | {"max_tokens": max_tokens}, begun=event)
                await asyncio.sleep(0.05 if answer.error else 0)

        tasks = [asyncio.create_task(one(event)) for event in begun]
        try:
            for event in begun[:1]:
                await event.wait()
            yield
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)

    async def cancel_storm(self, count: int, rng: random.Random) -> None:
        """Begin `count` long answers, and leave each after its first text."""

        async def one() -> None:
            begun = asyncio.Event()
            body = {"prompt": self.prompt(rng), "max_tokens": 1000, "ignore_eos": True}
            task = asyncio.create_task(self.ask(body, begun=begun))
            await begun.wait()
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)

        await asyncio.gather(*(one() for _ in range(count)))
