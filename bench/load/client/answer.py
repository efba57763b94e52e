"""Parser of the OpenAI API's responses. It checks each response: status 200 alone is no success.

Every event is decoded, by a decoder that knows only the fields needed here (about a microsecond).
A chunk has tokens if it holds output (text, reasoning, a refusal, a tool call), or if its usage
counts more tokens than the chunk before. A first chunk with only a role has no token.

Servers differ in how they write a stream. The parser accepts all that the specification of
server-sent events allows, and deviations of known servers: no [DONE], no finish reason, no blank
line at the end, null or missing members, null instead of an event, usage in any chunk or none.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import msgspec

from bench.load.client.http import CallError, Failure, LiveTally, TimedCall

MAX_BYTES = 2**26  # largest event, or whole response
MAX_TOKENS = 2**31  # larger token counts are ignored as invalid
_MAX_SHOWN_BYTES = 2000  # bytes kept of an error message
_BOM = b"\xef\xbb\xbf"
_NOTHING = (b"null", b"[]", b"{}", b'""')  # data of events that some servers send as a heartbeat
_ERROR_REASONS = ("abort", "error")  # finish reasons that are errors

# JSON members of messages, parts and tool calls that hold output. Only the first member of
# `_REASONING_KEYS` counts, since servers send the same reasoning under several names.
_REASONING_KEYS = ("reasoning_content", "reasoning", "reasoning_details")
_OUTPUT_KEYS = (
    *("text", "thinking", "summary", "data", "content", "refusal", "audio", "transcript"),
    *("tool_calls", "function_call", "function", "custom", "name", "arguments", "input"),
)


class _Choice(msgspec.Struct, gc=False):
    text: Any = None
    delta: Any = None
    message: Any = None
    finish_reason: Any = None
    usage: Any = None
    error: Any = None
    index: Any = 0
    logprobs: Any = None


class _Answer(msgspec.Struct, gc=False):
    choices: list[_Choice] | None = None
    usage: Any = None
    error: Any = None
    object: Any = None
    message: Any = None
    detail: Any = None


_decode = msgspec.json.Decoder(_Answer).decode


class AnswerReader:
    """Fills `call` and `tally` from a response. With `keep_text` the output is in `text`, for the
    next turn of a conversation. `on_chunk` gets each decoded chunk and its time."""

    def __init__(
        self,
        call: TimedCall,
        tally: LiveTally,
        *,
        streamed: bool,
        keep_text: bool = False,
        on_chunk: Callable[[Any, float], None] | None = None,
    ) -> None:
        self._call, self._tally, self._streamed = call, tally, streamed
        self._on_chunk = on_chunk
        self._texts: list[str] | None = [] if keep_text else None
        self._buffer = b""  # the last, incomplete line of a stream, or the body so far
        self._unread_bytes = 0  # bytes since the last event
        self._status = 0
        self._data: list[bytes] = []  # `data` lines of the current event
        self._event_type = ""  # `event` field of the current event
        self._non_sse_line = b""  # first line that is no server-sent event
        self._ends_with_cr = False
        self._done = self._finished = self._any_output = False
        self._all_have_usage = True  # so far every chunk with output had usage
        self._usage_tokens = 0  # output tokens that usage has counted so far
        # times and tokens so far of chunks before the first output
        self._early: list[tuple[float, int]] = []

    @property
    def text(self) -> str:
        """The output so far. Halves of a character that arrived in two chunks are joined."""
        joined = "".join(self._texts or ())
        return joined.encode("utf-16", "surrogatepass").decode("utf-16", "replace")

    def begin(self, status: int) -> None:
        self._status = status

    def read(self, piece: bytes, now_s: float) -> None:
        """Parse the next bytes of the body, received at `now_s`. Raises `CallError`."""
        if self._status != 200:
            if len(self._buffer) < _MAX_SHOWN_BYTES:
                self._buffer += piece
            return
        self._unread_bytes += len(piece)
        if self._unread_bytes > MAX_BYTES:
            raise _malformed(f"{MAX_BYTES} bytes without an event", self._buffer)
        if not self._streamed:
            self._buffer += piece
            return
        if self._ends_with_cr:
            piece = piece.removeprefix(b"\n")
        self._ends_with_cr = piece[-1:] == b"\r"
        if b"\r" in piece:
            piece = piece.replace(b"\r\n", b"\n").replace(b"\r", b"\n")
        if self._buffer:
            piece = self._buffer + piece
        *lines, self._buffer = piece.split(b"\n")
        for line in lines:
            if line[:6] == b"data: " and not self._data:
                self._read_data(line[6:], now_s)
            elif line or self._data or self._event_type:
                self._read_line(line, now_s)

    def end(self, now_s: float) -> None:
        """Finish the call. Raises `CallError` if the response was an error, empty or cut off."""
        if self._status != 200:
            raise CallError(
                Failure.STATUS, _status_message(self._status, self._buffer), self._status
            )
        call = self._call
        if self._streamed:
            self._read_line(self._buffer, now_s)
        else:
            self._read_data(self._buffer, now_s)
            self._done = True
        self._read_line(b"", now_s)
        self._count_early(2)
        if not (self._any_output or call.output_tokens):
            if self._non_sse_line:
                raise _malformed("not a stream of events", self._non_sse_line)
            raise CallError(Failure.EMPTY, "a 200 without a token")
        if not (self._done or self._finished):
            problem = "the answer ended without a finish reason or [DONE]"
            raise CallError(Failure.TRUNCATED, problem)
        call.end_s = call.end_s if call.chunk_s else now_s
        if call.output_tokens:
            exact = self._all_have_usage and sum(call.chunk_tokens) == call.output_tokens
            exact = exact and all(call.chunk_tokens)
            call.counted_by = "per chunk usage" if call.chunk_s and exact else "usage"
        elif call.chunks:
            call.output_tokens, call.counted_by = call.chunks, "chunks"
        else:
            raise CallError(Failure.NO_USAGE, "the server does not count the tokens of the answer")

    # -- inside

    def _read_line(self, line: bytes, now_s: float) -> None:
        """Read a line of a stream; an empty line ends an event. Raises `CallError`."""
        if not line:
            data, self._data = b"\n".join(self._data), []
            answer = _parse(data) if data else None
            if answer is not None:
                self._read_chunk(answer, now_s)
            elif data and self._event_type in ("", "message"):
                raise _malformed("an event is not JSON of the API", data)
            elif self._event_type == "error":  # one with a message was raised at its line
                raise CallError(Failure.REPORTED, "an error without a message")
            self._event_type = ""
            return
        field, _, value = line.removeprefix(_BOM).partition(b":")
        if field == b"event":
            self._event_type = value.strip().decode("utf-8", "replace")
        elif field in (b"data", b"error"):  # `error`: llama.cpp, before 2025
            self._event_type = "error" if field == b"error" else self._event_type
            self._read_data(value, now_s)
        elif field not in (b"", b"id", b"retry"):
            self._non_sse_line = self._non_sse_line or line

    def _read_data(self, data: bytes, now_s: float) -> None:
        """Read a `data` line. Complete JSON is handled at once, since not all servers end events
        with a blank line. Raises `CallError`."""
        data = data.strip()
        if data == b"[DONE]":
            self._done = True
        elif data and (self._data or data not in _NOTHING):
            answer = None if self._data else _parse(data)
            if answer is not None:
                self._read_chunk(answer, now_s)
                return
            self._data.append(data)
            if self._event_type == "error":
                message = data.decode("utf-8", "replace")[:_MAX_SHOWN_BYTES]
                raise CallError(Failure.REPORTED, message)

    def _read_chunk(self, answer: _Answer, now_s: float) -> None:
        """Count the tokens of a chunk. Raises `CallError` if the chunk is an error."""
        self._unread_bytes = 0
        self._raise_error(answer)
        if self._on_chunk is not None:
            self._on_chunk(answer, now_s)
        expects_more = self._all_have_usage and not self._finished
        choices, usage, call = answer.choices or (), answer.usage, self._call
        outputs = []
        for choice in choices:
            part = choice.message if choice.delta is None else choice.delta
            if output := _output_text(choice.text or part):
                outputs.append(output)
            usage = usage or choice.usage
            self._finished = self._finished or bool(choice.finish_reason)
        tokens = None
        if isinstance(usage, dict):
            tokens = _count(usage.get("completion_tokens"))
            call.prompt_tokens = _count(usage.get("prompt_tokens")) or call.prompt_tokens
            call.cached_tokens = max(call.cached_tokens, _cached_tokens(usage))
            call.output_tokens = max(call.output_tokens, tokens or 0)
        # A chunk without output has tokens only if usage grows from chunk to chunk: some servers
        # send the usage of the whole answer in a chunk with an empty choice, the first or the last.
        if not outputs:
            if self._streamed and choices and tokens and expects_more:
                if self._any_output and tokens > self._usage_tokens:
                    self._count_chunk(tokens, now_s)
                elif not self._early or tokens > self._early[-1][1]:
                    self._early.append((now_s, tokens))
            return
        self._any_output = True
        if self._texts is not None:
            self._texts += outputs
        if self._streamed:
            self._count_early(tokens or 0)
            self._count_chunk(tokens, now_s)

    def _count_early(self, tokens: int) -> None:
        """Count the chunks before the first output, whose usage is now `tokens`, if usage grows."""
        if self._early and (len(self._early) > 1 or tokens > self._early[0][1]):
            for at_s, total in self._early:
                self._count_chunk(total, at_s)
        self._early.clear()

    def _count_chunk(self, tokens: int | None, now_s: float) -> None:
        call, new = self._call, 1
        if tokens is None:
            self._all_have_usage = False
        else:
            new = max(tokens - self._usage_tokens, 0)
            self._usage_tokens += new
            self._tally.tokens += new
        call.chunks += 1
        call.end_s = now_s
        if call.chunk_s and call.chunk_s[-1] == now_s:
            call.chunk_tokens[-1] += new
        else:
            call.chunk_s.append(now_s)
            call.chunk_tokens.append(new)
        self._tally.chunks += 1

    def _raise_error(self, answer: _Answer) -> None:
        """Raise `CallError` if a chunk is an error, in any of the forms that servers use."""
        error = answer.error
        for choice in answer.choices or ():
            error = error or choice.error
            if choice.finish_reason in _ERROR_REASONS:
                error = error or f"the finish reason is {choice.finish_reason!r}"
        if not error and (self._event_type == "error" or answer.object == "error"):
            error = answer.message or answer.detail or "an error without a message"
        if not error and answer.choices is None and not self._event_type:
            error = answer.detail or answer.message
        if error:
            raise CallError(Failure.REPORTED, _error_text(error))


def _parse(data: bytes) -> _Answer | None:
    """Decode JSON of the API, or return None. Python's parser is the second try: it is slower, but
    accepts NaN, halves of surrogate pairs, and text that is not UTF-8."""
    try:
        return _decode(data)
    except (msgspec.MsgspecError, ValueError, RecursionError):
        pass
    try:
        return msgspec.convert(json.loads(data.decode("utf-8", "replace")), _Answer)
    except (msgspec.MsgspecError, ValueError, RecursionError):
        return None


def _output_text(value: Any) -> str:
    """Join all output within a member: a string, a message, a list of parts or calls."""
    if isinstance(value, dict):
        reasoning = next((v for name in _REASONING_KEYS if (v := value.get(name))), None)
        return _output_text(reasoning) + "".join(
            [_output_text(v) for n in _OUTPUT_KEYS if (v := value.get(n))]
        )
    if isinstance(value, list):
        return "".join(map(_output_text, value))
    return value if isinstance(value, str) else ""


def _count(value: Any) -> int | None:
    is_number = isinstance(value, int | float) and not isinstance(value, bool)
    return int(value) if is_number and 0 <= value < MAX_TOKENS else None


def _cached_tokens(usage: dict[str, Any]) -> int:
    """Return the prompt tokens that came from the server's prefix cache: the field of OpenAI, or of
    DeepSeek."""
    details = usage.get("prompt_tokens_details")
    cached = details.get("cached_tokens") if isinstance(details, dict) else None
    return _count(usage.get("prompt_cache_hit_tokens") if cached is None else cached) or 0


def _malformed(problem: str, data: bytes) -> CallError:
    shown = data[:80].decode("utf-8", "replace")
    return CallError(Failure.MALFORMED, f"{problem} ({shown!r})")


def _status_message(status: int, body: bytes) -> str:
    try:
        return f"{status}: {_error_text(msgspec.json.decode(body))}"
    except (msgspec.MsgspecError, ValueError, RecursionError):
        return f"{status}: {body[:200].decode('utf-8', 'replace')!r}"


def _error_text(value: Any) -> str:
    """Return the message of an error, in the shapes of OpenAI, FastAPI, TGI and others."""
    if isinstance(value, list):
        return "; ".join(map(_error_text, value))[:_MAX_SHOWN_BYTES]
    names = ("error", "message", "detail", "msg")
    if isinstance(value, dict) and (name := next((n for n in names if value.get(n)), None)):
        place = ".".join(map(str, value.get("loc") or ()))
        return f"{place}: " * bool(place) + _error_text(value[name])
    return str(value)[:_MAX_SHOWN_BYTES]
