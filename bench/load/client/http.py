"""Record of a single call as its client saw it, and a minimal HTTP/1.1 client that passes on each
piece of a response with its time of arrival.

The parser is httptools' (llhttp). Connections are reused. If a reused connection ends before the
first byte of a response, the request is sent again on a new one (RFC 9112, section 9.3.1). That is
safe, since a repeated completion does no harm.
"""

from __future__ import annotations

import asyncio
import errno
import re
import ssl
import time
from array import array
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any, Literal
from urllib.parse import urlsplit

import httptools
import msgspec

from cbatch.core.request.errors import FieldError

COMPLETIONS, CHAT = "/v1/completions", "/v1/chat/completions"
# "chunks": the server sent no usage, and each chunk with output counts as a token.
TokenSource = Literal["per chunk usage", "usage", "chunks", "none"]
IDLE_S = 3.0  # idle time after which a connection is not reused; most servers allow 5 s
MAX_HEAD_BYTES = 2**16  # of an interim response
# Interim responses, such as 103 Early Hints, come before the response (RFC 9110, section 15.2).
# After 101 the connection has another protocol.
_INTERIM = re.compile(rb"HTTP/\d\.\d 1(?!01)\d\d[ \r\n]")
_STATUS_BYTES = len("HTTP/1.1 103 ")  # bytes that show if a response is interim
_HEAD_END = re.compile(rb"\r?\n\r?\n")
CLIENT_LIMITS = (errno.EMFILE, errno.ENFILE, errno.EADDRNOTAVAIL)  # limits of the client machine


class Failure(StrEnum):
    """Kinds of failure; the values name them in reports."""

    CONNECT = "not connected"  # refused, unreachable, no such host, no TLS.
    STATUS = "status"  # a status other than 200; reports count each status separately.
    REPORTED = "error in stream"  # status 200 with an error in the body.
    CUT = "cut"  # the connection ended before the response.
    MALFORMED = "malformed"  # not HTTP, not server-sent events, not JSON of the API.
    EMPTY = "empty"  # status 200 without a token.
    TRUNCATED = "truncated"  # status 200 without a finish reason and without [DONE].
    NO_USAGE = "no usage"  # not streamed and without usage, so tokens cannot be counted.
    TIMEOUT = "timeout"
    CLIENT = "client"  # the client machine is out of ports or file descriptors


class CallError(Exception):
    """A failed call. `status` is the HTTP status if `failure` is `STATUS`."""

    def __init__(self, failure: Failure, detail: str, status: int | None = None) -> None:
        super().__init__(failure, detail, status)
        self.failure, self.detail, self.status = failure, detail, status

    def __str__(self) -> str:
        return f"{self.label}: {self.detail}"

    @property
    def label(self) -> str:
        return f"status {self.status}" if self.failure is Failure.STATUS else self.failure.value


@dataclass(slots=True, eq=False)
class TimedCall:
    """Times and token counts of a call. Times are in seconds since the start of the run.

    `scheduled_s` is the send time by the source's schedule, whatever the delay of the client.
    `chunk_s` are the times of the socket reads that contained output tokens, `chunk_tokens` their
    token counts. Both are empty if the response was not streamed.
    """

    index: int
    scheduled_s: float
    prompt_tokens: int  # as planned, then as in the server's usage
    max_tokens: int
    cached_tokens: int = 0  # part of the prompt from the server's prefix cache, by its usage
    output_tokens: int = 0
    ignore_eos: bool = False  # the output should have exactly `max_tokens`
    session: str | None = None
    slo_s: tuple[float | None, float | None, float | None] = (None, None, None)
    sent_s: float = field(init=False)
    end_s: float = field(init=False)  # time of the last token, or of the failure
    chunk_s: array[float] = field(default_factory=lambda: array("d"))
    chunk_tokens: array[int] = field(default_factory=lambda: array("q"))
    chunks: int = 0  # events with output tokens
    counted_by: TokenSource = "none"
    error: CallError | None = None

    def __post_init__(self) -> None:
        self.sent_s = self.end_s = self.scheduled_s

    @property
    def first_s(self) -> float:
        """Time of the first token; without streaming, that of the last."""
        return self.chunk_s[0] if self.chunk_s else self.end_s

    @property
    def ttft_s(self) -> float:
        return self.first_s - self.scheduled_s

    @property
    def e2e_s(self) -> float:
        return self.end_s - self.scheduled_s

    @property
    def tpot_s(self) -> float | None:
        """Time from first to last token, per token after the first. None for a single token, or if
        the response was not streamed."""
        if self.output_tokens < 2 or not self.chunk_s:
            return None
        return (self.end_s - self.first_s) / (self.output_tokens - 1)

    def tokens_by_read(self) -> list[int]:
        """Return the number of tokens of each read in `chunk_s`. If only their sum is known, it is
        spread evenly over the reads."""
        if self.counted_by != "usage" or not self.chunk_s:
            return self.chunk_tokens.tolist()
        count, total = len(self.chunk_s), self.output_tokens
        return [(i + 1) * total // count - i * total // count for i in range(count)]


@dataclass(slots=True)
class LiveTally:
    """Counts for the progress display. `tokens` counts only chunks with usage."""

    sent: int = 0
    done: int = 0
    failed: int = 0
    in_flight: int = 0
    chunks: int = 0
    tokens: int = 0


class Endpoint(msgspec.Struct, frozen=True):
    """Address of a server. Paths of requests, such as /v1/models or /metrics, follow `prefix`."""

    host: str
    port: int
    tls: bool
    prefix: str  # path of the URL without /v1

    @classmethod
    def of(cls, url: str) -> Endpoint:
        """Parse a URL; `host:8000` and `http://host:8000/v1` are both `http://host:8000`. Raises
        `FieldError`."""
        parts = urlsplit(url if "//" in url else f"http://{url}")
        try:
            port = parts.port
        except ValueError as error:
            raise FieldError("URL", f"{url!r}: {error}", "write http://host:8000") from error
        if parts.scheme not in ("http", "https") or not parts.hostname or parts.query:
            raise FieldError("URL", f"{url!r} is not the URL of an API", "write http://host:8000")
        tls = parts.scheme == "https"
        prefix = parts.path.rstrip("/").removesuffix("/v1")
        return cls(parts.hostname, port or (443 if tls else 80), tls, prefix)

    @property
    def url(self) -> str:
        return f"{'https' if self.tls else 'http'}://{self.authority}{self.prefix}"

    @property
    def authority(self) -> str:
        host = f"[{self.host}]" if ":" in self.host else self.host
        return f"{host}:{self.port}"

    def message(self, method: str, path: str, body: bytes, key: str | None) -> bytes:
        head = f"{method} {self.prefix}{path} HTTP/1.1\r\nHost: {self.authority}\r\nAccept: */*\r\n"
        head += "User-Agent: cbatch-bench\r\n"
        head += "" if key is None else f"Authorization: Bearer {key}\r\n"
        if method == "POST":
            head += f"Content-Type: application/json\r\nContent-Length: {len(body)}\r\n"
        return head.encode() + b"\r\n" + body


class Connection(asyncio.Protocol):
    """A connection for one exchange at a time. The reader of a response has `begin(status)`,
    `read(piece, now_s)` and `end(now_s)`, which may raise `CallError`."""

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._transport: Any = None
        self._reader: Any = None
        self._ended: asyncio.Future[None] | None = None
        self._parser: Any = None
        self.now_s = 0.0  # time of the last data
        self.no_data_yet = True  # no byte of the current response has arrived
        self._head: bytes | None = None  # bytes before it is known if a response is interim
        self._has_length = False
        self._until_close = False  # the body ends with the connection

    @property
    def is_open(self) -> bool:
        return self._transport is not None and not self._transport.is_closing()

    async def exchange(self, message: bytes, reader: Any, unread_s: float = 0.0) -> None:
        """Send a request and pass the whole response to `reader`, which reads nothing for the first
        `unread_s`. Raises `CallError`."""
        self._reader, self._ended = reader, asyncio.get_running_loop().create_future()
        self._parser = httptools.HttpResponseParser(self)
        self.no_data_yet, self._has_length, self._until_close = True, False, False
        self._head = b""
        self._transport.write(message)
        if unread_s:
            self._transport.pause_reading()
            asyncio.get_running_loop().call_later(unread_s, self._resume)
        try:
            await self._ended
        except BaseException:
            self.close()
            raise
        finally:
            self._reader = self._ended = None

    def close(self) -> None:
        if self._transport is not None:
            self._transport.abort()

    def _resume(self) -> None:
        if self.is_open:
            self._transport.resume_reading()

    # -- called by the event loop

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = transport

    def data_received(self, data: bytes) -> None:
        self.now_s = self._clock()
        if self._ended is None or self._ended.done():
            self.close()  # data without a request
            return
        self.no_data_yet = False
        if self._head is not None:
            data = self._without_interim(self._head + data)
        try:
            self._parser.feed_data(data)
        except httptools.HttpParserCallbackError as error:  # an exception of a callback
            self._fail(error.__context__)
        except httptools.HttpParserError as error:
            self._fail(CallError(Failure.MALFORMED, f"not HTTP: {error}"))

    def connection_lost(self, exc: Exception | None) -> None:
        self._transport = None
        if self._ended is None or self._ended.done():
            return
        if self._until_close and exc is None:
            try:
                self.on_message_complete()
            except CallError as error:
                self._fail(error)
        else:
            when = "without an answer" if self.no_data_yet else "in the middle of the answer"
            self._fail(CallError(Failure.CUT, f"the connection ended {when}"))

    def _without_interim(self, data: bytes) -> bytes:
        """Drop interim responses. Return b"" until the final response begins."""
        data = data.lstrip(b"\r\n")
        while _INTERIM.match(data) and (end := _HEAD_END.search(data)):
            data = data[end.end() :].lstrip(b"\r\n")
        if len(data) < _STATUS_BYTES or (_INTERIM.match(data) and len(data) < MAX_HEAD_BYTES):
            self._head = data
            return b""
        self._head = None
        return data

    def _fail(self, error: BaseException | None) -> None:
        if self._ended is not None and not self._ended.done():
            self._ended.set_exception(error or CallError(Failure.MALFORMED, "not HTTP"))
        self.close()

    # -- called by the parser, which passes an exception on

    def on_header(self, name: bytes, value: bytes) -> None:
        if name.lower() in (b"content-length", b"transfer-encoding"):
            self._has_length = True

    def on_headers_complete(self) -> None:
        self._until_close = not self._has_length
        self._reader.begin(self._parser.get_status_code())

    def on_body(self, body: bytes) -> None:
        if self._reader is not None:
            self._reader.read(body, self.now_s)

    def on_message_complete(self) -> None:
        if self._reader is not None and self._ended is not None:
            self._reader.end(self.now_s)
            self._ended.set_result(None)
            if not self._parser.should_keep_alive():
                self.close()


class HttpClient:
    def __init__(
        self,
        endpoint: Endpoint,
        *,
        key: str | None = None,
        timeout_s: float = 600.0,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.endpoint, self._key, self._timeout_s = endpoint, key, timeout_s
        self._clock = clock
        self._idle: deque[Connection] = deque()
        self._tls = ssl.create_default_context() if endpoint.tls else None

    def message(self, method: str, path: str, body: bytes) -> bytes:
        return self.endpoint.message(method, path, body, self._key)

    async def call(
        self, method: str, path: str, body: bytes, reader: Any, *, unread_s: float = 0.0
    ) -> None:
        """Send a request and pass the response to `reader` as it arrives, after `unread_s`. Raises
        `CallError`."""
        message = self.message(method, path, body)
        try:
            async with asyncio.timeout(self._timeout_s):
                connection = self._take_idle()
                if connection is not None:
                    try:
                        await connection.exchange(message, reader, unread_s)
                    except CallError as error:
                        if error.failure is not Failure.CUT or not connection.no_data_yet:
                            raise
                        connection = None
                if connection is None:
                    connection = await self._connect()
                    await connection.exchange(message, reader, unread_s)
        except TimeoutError as error:
            raise CallError(Failure.TIMEOUT, f"{self._timeout_s:g} s passed") from error
        # Only now: during `exchange` the connection must not be given to another call.
        if connection.is_open:
            self._idle.append(connection)

    async def request(self, method: str, path: str, body: bytes = b"") -> tuple[int, bytes]:
        """Return status and body. Raises `CallError`."""
        response = _Response()
        await self.call(method, path, body, response)
        return response.status, response.body

    def close(self) -> None:
        while self._idle:
            self._idle.pop().close()

    def _take_idle(self) -> Connection | None:
        """Return the most recently used idle connection, so that surplus connections expire."""
        while self._idle:
            connection = self._idle.pop()
            if connection.is_open and self._clock() - connection.now_s < IDLE_S:
                return connection
            connection.close()
        return None

    async def _connect(self) -> Connection:
        loop, endpoint = asyncio.get_running_loop(), self.endpoint
        try:
            _, connection = await loop.create_connection(
                lambda: Connection(self._clock), endpoint.host, endpoint.port, ssl=self._tls
            )
        except TimeoutError:
            raise
        except OSError as error:
            failure = Failure.CLIENT if error.errno in CLIENT_LIMITS else Failure.CONNECT
            raise CallError(failure, str(error)) from error
        return connection


class _Response:
    status, body = 0, b""

    def begin(self, status: int) -> None:
        self.status = status

    def read(self, piece: bytes, now_s: float) -> None:
        self.body += piece

    def end(self, now_s: float) -> None: ...
