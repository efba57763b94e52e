"""A server under test: its answers, and other requests that keep it busy."""

from __future__ import annotations

import asyncio
import json
import random
import time
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from typing import Any

import msgspec

from bench.load.client import http
from bench.load.client.answer import AnswerReader
from bench.load.client.bodies import PromptText, load_text
from bench.load.run.report import scrape

Body = dict[str, Any]
BUSY = (429, 503)  # statuses of servers that are full
TOKEN_CHARS = 5.0  # characters per requested prompt token, about
LONG_PROMPTS_TOKENS = (1500, 700, 300)  # the first that the server takes is a long prompt


class FindingError(Exception):
    """A deviation. `seed` makes its trial the first when the check is run alone with it."""

    def __init__(self, problem: str, request: Body | None = None, near_tie: bool = False) -> None:
        super().__init__(problem)
        self.problem, self.request, self.near_tie = problem, request, near_tie
        self.seed: int | None = None


class NotSupportedError(Exception):
    """The server has no such feature; the message says how that was seen."""


class AnswerChoice(msgspec.Struct):
    """One choice of an answer. `tops` has the most likely tokens of each position."""

    text: str = ""
    reasoning: str = ""
    calls: dict[int, dict[str, str]] = {}
    finish_reason: str | None = None
    tokens: list[str] = []
    logprobs: list[float] = []
    tops: list[dict[str, float]] = []

    def add(self, choice: Any) -> str:
        """Add the choice of a chunk. Return its text."""
        part, logprobs = choice.delta or choice.message or {}, choice.logprobs or {}
        text = choice.text or part.get("content") or ""
        reasoning = part.get("reasoning_content") or part.get("reasoning") or ""
        self.text, self.reasoning = self.text + text, self.reasoning + reasoning
        self.finish_reason = choice.finish_reason or self.finish_reason
        for at, call in enumerate(part.get("tool_calls") or ()):
            known = self.calls.setdefault(call.get("index", at), {"name": "", "arguments": ""})
            for name in known:
                known[name] += (call.get("function") or {}).get(name) or ""
        self.tokens += logprobs.get("tokens") or []
        self.logprobs += logprobs.get("token_logprobs") or []
        self.tops += [top or {} for top in logprobs.get("top_logprobs") or ()]
        return text + reasoning


class Answer(AnswerChoice):
    """An answer, streamed or whole, with the fields of its first choice. `error` says why there is
    none; `status` is 0 if that was no answer of HTTP. `pieces` are the texts of events."""

    status: int = 200
    error: str = ""
    others: list[AnswerChoice] = []
    usage: dict[str, Any] = {}
    pieces: list[str] = []
    read_s: Sequence[float] = ()  # times of tokens
    sent_s: float = 0.0
    end_s: float = 0.0


class TestedServer:
    """Asks a server, and keeps it busy. Prompts are cut from the source of Python's library."""

    def __init__(self, client: http.HttpClient, model: str) -> None:
        self.client, self.model = client, model
        self._corpus = PromptText(load_text(None), TOKEN_CHARS)
        self._alone: dict[str, Answer] = {}

    def prompt(self, rng: random.Random, tokens: int = 24) -> str:
        """Return a piece of the corpus of about `tokens` tokens."""
        text: str = self._corpus.cut(rng.getrandbits(64), tokens)
        return text

    async def rest(self, wait_s: float = 2.0) -> float:
        """Wait until no request runs, for a limited time. Return the number of those that do by
        /metrics, 0 if it does not say."""
        deadline_s = time.monotonic() + wait_s
        while True:
            metrics = await scrape(self.client)
            running = metrics.values.get("running", 0.0) if metrics else 0.0
            if not running or time.monotonic() > deadline_s:
                return running
            await asyncio.sleep(0.1)

    async def ask(
        self,
        body: Body,
        *,
        streamed: bool = True,
        needed: bool = True,
        begun: asyncio.Event | None = None,
        unread_s: float = 0.0,
    ) -> Answer:
        """Ask for a completion, or for a chat if `body` has messages. `begun` is set at the first
        text, or at the end. Without an answer that is `needed`, a refusal raises
        `NotSupportedError`, and any other error is a finding."""
        begun, call = begun or asyncio.Event(), http.TimedCall(0, 0.0, 0, 0)
        answer = Answer(read_s=call.chunk_s, sent_s=time.monotonic())

        def add(chunk: Any, now_s: float) -> None:
            answer.usage = chunk.usage or answer.usage
            for choice in chunk.choices or ():
                while len(answer.others) < choice.index:
                    answer.others.append(AnswerChoice())
                if choice.index:
                    answer.others[choice.index - 1].add(choice)
                elif text := answer.add(choice):
                    answer.pieces.append(text)
                    begun.set()

        usage = {"stream_options": {"include_usage": True}} if streamed else {}
        fields = {"model": self.model, "stream": streamed} | usage | body
        reader = AnswerReader(call, http.LiveTally(), streamed=streamed, on_chunk=add)
        path, data = http.CHAT if "messages" in body else http.COMPLETIONS, json.dumps(fields)
        try:
            await self.client.call("POST", path, data.encode(), reader, unread_s=unread_s)
        except http.CallError as error:
            if error.failure not in (http.Failure.EMPTY, http.Failure.NO_USAGE):
                answer.status = error.status or 0
                answer.error = (error.detail if error.status else str(error))[:200]
        except (LookupError, TypeError, AttributeError) as error:
            answer.status, answer.error = 0, f"not an answer of the API: {error!r}"
        finally:
            begun.set()
        answer.end_s = time.monotonic()
        if needed and answer.error:
            is_refusal = 400 <= answer.status < 500 or answer.status in BUSY
            raise (
                NotSupportedError(answer.error) if is_refusal else FindingError(answer.error, body)
            )
        return answer

    async def alone(self, body: Body) -> Answer:
        """Return the answer that the server gave when it had no other request."""
        key = json.dumps(body, sort_keys=True)
        if key not in self._alone:
            self._alone[key] = await self.ask(body)
        return self._alone[key]

    async def takes(self, **fields: Any) -> bool:
        """Say if the server accepts a request with these fields."""
        try:
            await self.alone({"prompt": "a", "max_tokens": 1} | fields)
        except NotSupportedError:
            return False
        return True

    async def long_tokens(self) -> int:
        """Return the length of prompts that are long for this server, but not too long."""
        for tokens in LONG_PROMPTS_TOKENS[:-1]:
            if await self.takes(prompt=self.prompt(random.Random(0), tokens), max_tokens=64):
                return tokens
        return LONG_PROMPTS_TOKENS[-1]

    @asynccontextmanager
    async def load(
        self, count: int, rng: random.Random, prompt_tokens: int = 24, max_tokens: int = 64
    ) -> AsyncIterator[None]:
        """Keep `count` other requests running, and leave them at the end."""
        begun = asyncio.Event()

        async def one() -> None:
            body: Body = {"temperature": 1.0, "max_tokens": max_tokens}
            while True:
                body["prompt"] = self.prompt(rng, prompt_tokens)
                answer = await self.ask(body, needed=False, begun=begun)
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
