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

from bench.load.client.answer import AnswerReader
from bench.load.client.bodies import PromptText, load_text
from bench.load.client.http import (
    CHAT,
    COMPLETIONS,
    CallError,
    Failure,
    HttpClient,
    LiveTally,
    TimedCall,
)
from bench.load.run.report import scrape

Body = dict[str, Any]
BUSY = (429, 503)  # statuses of servers that are full
TOKEN_CHARS = 5.0  # characters per requested prompt token, about
LONG_PROMPTS_TOKENS = (1500, 700, 300)  # the first that the server takes is a long prompt


class AnswerChoice(msgspec.Struct):
    """One choice of an answer. `tops` has the most likely tokens of each position."""

    text: str = ""
    reasoning: str = ""
    calls: list[dict[str, str]] = []
    finish_reason: str | None = None
    tokens: list[str] = []
    logprobs: list[float] = []
    tops: list[dict[str, float]] = []

    def add(self, choice: Any) -> str:
        """Add the choice of a chunk. Return its text."""
        part = choice.delta or choice.message or {}
        text = choice.text or part.get("content") or ""
        reasoning = part.get("reasoning_content") or part.get("reasoning") or ""
        self.text, self.reasoning = self.text + text, self.reasoning + reasoning
        self.finish_reason = choice.finish_reason or self.finish_reason
        for at, call in enumerate(part.get("tool_calls") or ()):
            while len(self.calls) <= call.get("index", at):
                self.calls.append({"name": "", "arguments": ""})
            for name, value in (call.get("function") or {}).items():
                if name in ("name", "arguments"):
                    self.calls[call.get("index", at)][name] += value or ""
        logprobs = choice.logprobs or {}
        self.tokens += logprobs.get("tokens") or []
        self.logprobs += logprobs.get("token_logprobs") or []
        self.tops += [top or {} for top in logprobs.get("top_logprobs") or ()]
        return text + reasoning


class Answer(msgspec.Struct):
    """An answer, streamed or whole. `status` is 0 if the connection failed, and `error` then says
    why. `pieces` are the texts of the first choice's events with their times."""

    status: int = 0
    error: str = ""
    choices: list[AnswerChoice] = []
    usage: dict[str, Any] = {}
    pieces: list[tuple[float, str]] = []
    sent_s: float = 0.0
    end_s: float = 0.0

    @property
    def first(self) -> AnswerChoice:
        return self.choices[0] if self.choices else AnswerChoice()

    def longest_gap_s(self, from_s: float = 0.0, to_s: float = math.inf) -> float:
        """Return the longest time between two pieces that lies within these times, even in part."""
        times = [at_s for at_s, _ in self.pieces]
        pairs = zip(times, times[1:], strict=False)
        return max((b - a for a, b in pairs if b > from_s and a < to_s), default=0.0)


class NotSupportedError(Exception):
    """The server has no such feature; the message says how that was seen."""


class NoAnswerError(Exception):
    """The server ended the connection, or said that it failed. The request is the second part."""


class TestedServer:
    """Asks a server, and keeps it busy. Prompts are cut from the source of Python's library."""

    def __init__(self, client: HttpClient, model: str) -> None:
        self.client, self.model = client, model
        self._corpus = PromptText(load_text(None), TOKEN_CHARS)
        self._alone: dict[str, Answer] = {}
        self._long_tokens: int | None = None
        self._logprobs: Body | None = None

    def prompt(self, rng: random.Random, tokens: int = 24) -> str:
        """Return a piece of the corpus of about `tokens` tokens."""
        text: str = self._corpus.cut(rng.getrandbits(64), tokens)
        return text

    def message(self, body: Body) -> bytes:
        """Return the bytes of a request for a completion."""
        fields = json.dumps({"model": self.model} | body).encode()
        return self.client.message("POST", COMPLETIONS, fields)

    async def running(self) -> float:
        """Return the number of running requests by /metrics, 0 if it does not say."""
        metrics = await scrape(self.client)
        return 0.0 if metrics is None else metrics.values.get("running", 0.0)

    async def rest(self, wait_s: float = 2.0) -> float:
        """Wait until no request runs, for a limited time. Return the number of those that do."""
        deadline_s = time.monotonic() + wait_s
        while (running := await self.running()) and time.monotonic() < deadline_s:
            await asyncio.sleep(0.1)
        return running

    async def ask(
        self, body: Body, *, streamed: bool = True, begun: asyncio.Event | None = None
    ) -> Answer:
        """Ask for a completion, or for a chat if `body` has messages. `begun` is set at the first
        text, or at the end."""
        answer, begun = Answer(sent_s=time.monotonic()), begun or asyncio.Event()

        def add(chunk: Any, now_s: float) -> None:
            answer.usage = chunk.usage or answer.usage
            for choice in chunk.choices or ():
                while len(answer.choices) <= choice.index:
                    answer.choices.append(AnswerChoice())
                text = answer.choices[choice.index].add(choice)
                if choice.index == 0 and text:
                    answer.pieces.append((now_s, text))
                    begun.set()

        fields = {"model": self.model, "stream": streamed} | body
        if streamed:
            fields["stream_options"] = {"include_usage": True}
        call = TimedCall(0, answer.sent_s, 0, 0)
        reader = AnswerReader(call, LiveTally(), streamed=streamed, on_chunk=add)
        path = CHAT if "messages" in body else COMPLETIONS
        answer.status = 200
        try:
            await self.client.call("POST", path, json.dumps(fields).encode(), reader)
        except CallError as error:
            if error.failure not in (Failure.EMPTY, Failure.NO_USAGE):
                is_answer = error.failure in (Failure.STATUS, Failure.REPORTED)
                answer.error = error.detail if is_answer else str(error)
                answer.status = error.status or 200 * (error.failure is Failure.REPORTED)
        except (LookupError, TypeError, AttributeError) as error:
            answer.error = f"not an answer of the API: {error!r}"
        answer.end_s = time.monotonic()
        begun.set()
        return answer

    async def require(self, body: Body, what: str, *, streamed: bool = True) -> Answer:
        """Ask, and take a refusal as a missing feature. Raises `NotSupportedError`, or
        `NoAnswerError` if there is neither an answer nor a refusal."""
        answer = await self.ask(body, streamed=streamed)
        if 400 <= answer.status < 500 or answer.status in BUSY:
            raise NotSupportedError(f"{what}: {answer.error[:160]}")
        if answer.error and answer.status != 200:
            raise NoAnswerError(f"no answer: {answer.error[:200]}", body)
        return answer

    async def alone(self, body: Body) -> Answer:
        """Return the answer that the server gave when it had no other request."""
        key = json.dumps(body, sort_keys=True)
        if key not in self._alone:
            self._alone[key] = await self.require(body, "the request")
        return self._alone[key]

    async def logprobs(self) -> Body:
        """Return the field that asks for log probabilities, or nothing if it is refused."""
        if self._logprobs is None:
            five: Body = {"logprobs": 5}
            refused = (await self.ask({"prompt": "a", "max_tokens": 1} | five)).error
            self._logprobs = {} if refused else five
        return self._logprobs

    async def long_tokens(self) -> int:
        """Return the length of prompts that are long for this server, but not too long."""
        for tokens in () if self._long_tokens else LONG_PROMPTS_TOKENS:
            body: Body = {"prompt": self.prompt(random.Random(0), tokens), "max_tokens": 64}
            if not (await self.ask(body)).error:
                self._long_tokens = tokens
                break
        return self._long_tokens or LONG_PROMPTS_TOKENS[-1]

    @asynccontextmanager
    async def load(
        self, count: int, rng: random.Random, prompt_tokens: int = 24
    ) -> AsyncIterator[None]:
        """Keep `count` other requests running, and cancel them at the end."""
        begun = asyncio.Event()

        async def one() -> None:
            while True:
                body: Body = {"prompt": self.prompt(rng, prompt_tokens), "temperature": 1.0}
                answer = await self.ask(body | {"max_tokens": 64}, begun=begun)
                await asyncio.sleep(0.05 if answer.error else 0)

        tasks = [asyncio.create_task(one()) for _ in range(count)]
        try:
            if tasks:
                await begun.wait()
            yield
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)

    async def cancel_storm(self, count: int, rng: random.Random) -> None:
        """Begin `count` long answers, and leave each after its first text."""

        async def one() -> None:
            begun = asyncio.Event()
            body = {"prompt": self.prompt(rng), "max_tokens": 600, "ignore_eos": True}
            task = asyncio.create_task(self.ask(body, begun=begun))
            await begun.wait()
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)

        await asyncio.gather(*(one() for _ in range(count)))
