"""Answers of the OpenAI API, read as they come and checked: a 200 alone is no success.

Every event is decoded, by a decoder that knows only the fields needed here (about a microsecond).
A chunk brings tokens if it has text, or if its usage counts more tokens than the chunk before: so
no first chunk with a role and nothing else passes for a first token.
"""

from __future__ import annotations

from typing import Any

import msgspec

from bench.load.client.call import CallError, Failure, LiveTally, TimedCall

_MOST_TOLD = 2000  # bytes kept of an answer that is an error


class _Usage(msgspec.Struct, gc=False):
    prompt_tokens: int
    completion_tokens: int


class _Part(msgspec.Struct, gc=False):
    """Of a chat: a delta, or the message."""

    content: str | None = None
    reasoning_content: str | None = None


class _Choice(msgspec.Struct, gc=False):
    text: str | None = None
    delta: _Part | None = None
    message: _Part | None = None
    finish_reason: str | None = None

    def said(self) -> str:
        if self.text:
            return self.text
        part = self.delta or self.message
        return "" if part is None else part.content or part.reasoning_content or ""


class _Told(msgspec.Struct, gc=False):
    """An event, or a whole answer."""

    choices: list[_Choice] = []
    usage: _Usage | None = None
    error: Any = None


_decode = msgspec.json.Decoder(_Told).decode


class AnswerReader:
    """Fills a `TimedCall` in. `keep_text` keeps what was said, for the turn after."""

    def __init__(
        self, call: TimedCall, tally: LiveTally, *, streamed: bool, keep_text: bool = False
    ) -> None:
        self._call, self._tally, self._streamed = call, tally, streamed
        self._said: list[str] | None = [] if keep_text else None
        self._rest = b""
        self._status = 0
        self._done = self._finished = self._has_usage = self._any = False
        self._counted = True  # every chunk with text told its tokens
        self._tokens = 0  # as of the latest chunk with tokens

    @property
    def text(self) -> str:
        return "".join(self._said or ())

    def begin(self, status: int) -> None:
        self._status = status

    def read(self, piece: bytes, now_s: float) -> None:
        if self._status != 200:
            if len(self._rest) < _MOST_TOLD:
                self._rest += piece
            return
        if not self._streamed:
            self._rest += piece
            return
        if self._rest:
            piece = self._rest + piece
        if b"\r" in piece:
            piece = piece.replace(b"\r\n", b"\n")
        *events, self._rest = piece.split(b"\n\n")
        for event in events:
            if event[:6] == b"data: " and b"\n" not in event:
                self._event(event[6:], now_s)
            else:
                self._lines(event, now_s)

    def end(self, now_s: float) -> None:
        """Raises `CallError` if this was no answer."""
        if self._status != 200:
            raise CallError(Failure.STATUS, _message(self._status, self._rest), self._status)
        call = self._call
        if self._streamed:
            if self._rest.strip():
                raise _malformed("the stream ends within an event", self._rest)
        elif self._rest:
            told = self._decoded(self._rest)
            self._take_choices(told, now_s)
            self._done = True
            call.end_s = now_s
        if not (self._any and call.output_tokens) and (self._has_usage or not self._any):
            raise CallError(Failure.EMPTY, "a 200 without a token")
        if not (self._done and self._finished):
            what = "[DONE]" if self._finished else "finish reason"
            raise CallError(Failure.TRUNCATED, f"the answer ended without its {what}")
        if not self._has_usage:
            raise CallError(
                Failure.NO_USAGE, "tokens cannot be counted: the server does not tell usage"
            )
        call.per_chunk_usage = self._streamed and self._counted

    # -- inside

    def _lines(self, event: bytes, now_s: float) -> None:
        """An event of any form that the specification of server-sent events allows."""
        data: list[bytes] = []
        for line in event.split(b"\n"):
            name, _, value = line.partition(b":")
            if name == b"data":
                data.append(value.removeprefix(b" "))
            elif name not in (b"", b"event", b"id", b"retry"):
                raise _malformed("not a stream of events", event)
        if data:
            self._event(b"\n".join(data), now_s)

    def _event(self, data: bytes, now_s: float) -> None:
        if data == b"[DONE]":
            self._done = True
            return
        told = self._decoded(data)
        usage = told.usage
        if told.choices and self._take_choices(told, now_s):
            call, new = self._call, 0
            if usage is None:
                self._counted = False
            else:
                new = usage.completion_tokens - self._tokens
                self._tokens = usage.completion_tokens
            call.chunks += 1
            call.end_s = now_s
            if call.chunk_s and call.chunk_s[-1] == now_s:
                call.chunk_tokens[-1] += new
            else:
                call.chunk_s.append(now_s)
                call.chunk_tokens.append(new)
            self._tally.chunks += 1
            self._tally.tokens += new
        elif usage is not None:
            self._count(usage)

    def _take_choices(self, told: _Told, now_s: float) -> bool:
        """Whether they brought tokens."""
        any_text = False
        for choice in told.choices:
            said = choice.said()
            if said:
                any_text = True
                if self._said is not None:
                    self._said.append(said)
            if choice.finish_reason is not None:
                self._finished = True
        if told.usage is not None:
            self._count(told.usage)
            any_text = any_text or told.usage.completion_tokens > self._tokens
        self._any = self._any or any_text
        return any_text

    def _count(self, usage: _Usage) -> None:
        self._has_usage = True
        self._call.prompt_tokens = usage.prompt_tokens
        self._call.output_tokens = usage.completion_tokens

    def _decoded(self, data: bytes) -> _Told:
        try:
            told = _decode(data)
        except (msgspec.DecodeError, UnicodeDecodeError) as error:
            raise _malformed(str(error), data) from error
        if told.error is not None:
            raise CallError(Failure.REPORTED, _told_error(told.error))
        return told


def _malformed(why: str, data: bytes) -> CallError:
    shown = data[:80].decode("utf-8", "replace")
    return CallError(Failure.MALFORMED, f"{why} ({shown!r})")


def _message(status: int, body: bytes) -> str:
    """What an error's body says."""
    try:
        told = msgspec.json.decode(body)
        return f"{status}: {_told_error(told['error'])}"
    except (ValueError, TypeError, KeyError, UnicodeDecodeError):
        return f"{status}: {body[:200].decode('utf-8', 'replace')!r}"


def _told_error(error: Any) -> str:
    return str(error.get("message", error)) if isinstance(error, dict) else str(error)
