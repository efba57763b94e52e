"""Minimal HTTP/1.1 client that passes on each piece of a response with its time of arrival.

The parser is httptools' (llhttp). Connections are reused. If a reused connection ends before the
first byte of a response, the request is sent again on a new one (RFC 9112, section 9.3.1). That is
safe, since a repeated completion does no harm.
"""

from __future__ import annotations

import asyncio
import errno
import ssl
import time
from collections import deque
from collections.abc import Callable
from typing import Any, Protocol
from urllib.parse import urlsplit

import httptools
import msgspec

from bench.load.client.call import CallError, Failure
from cbatch.core.request.errors import FieldError

IDLE_S = 3.0  # idle time after which a connection is not reused; most servers allow 5 s
CLIENT_LIMITS = (errno.EMFILE, errno.ENFILE, errno.EADDRNOTAVAIL)  # limits of the client machine


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
        """Return the bytes of a request."""
        head = f"{method} {self.prefix}{path} HTTP/1.1\r\nHost: {self.authority}\r\nAccept: */*\r\n"
        head += "User-Agent: cbatch-bench\r\n"
        head += "" if key is None else f"Authorization: Bearer {key}\r\n"
        if method == "POST":
            head += f"Content-Type: application/json\r\nContent-Length: {len(body)}\r\n"
        return head.encode() + b"\r\n" + body


class AnswerSink(Protocol):
    """Receiver of a response. All three methods may raise `CallError`."""

    def begin(self, status: int) -> None: ...

    def read(self, piece: bytes, now_s: float) -> None: ...

    def end(self, now_s: float) -> None: ...


class Connection(asyncio.Protocol):
    """A connection for one exchange at a time. Interim responses, such as 103 Early Hints, are
    passed over (RFC 9110, section 15.2); after 101 the connection has another protocol."""

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._transport: Any = None
        self._reader: AnswerSink | None = None
        self._ended: asyncio.Future[None] | None = None
        self._parser: Any = None
        self.now_s = 0.0  # time of the last data
        self.no_data_yet = True  # no byte of the current response has arrived
        self._is_interim = False
        self._has_length = False
        self._until_close = False  # the body ends with the connection

    @property
    def is_open(self) -> bool:
        return self._transport is not None and not self._transport.is_closing()

    async def exchange(self, message: bytes, reader: AnswerSink) -> None:
        """Send a request and pass the whole response to `reader`. Raises `CallError`."""
        self._reader, self._ended = reader, asyncio.get_running_loop().create_future()
        self._parser = httptools.HttpResponseParser(self)
        # An interim response may say that the connection closes, and the response follows.
        self._parser.set_dangerous_leniencies(lenient_data_after_close=True)
        self.no_data_yet, self._until_close = True, False
        self._transport.write(message)
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

    # -- called by the event loop

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = transport

    def data_received(self, data: bytes) -> None:
        self.now_s = self._clock()
        if self._ended is None or self._ended.done():
            self.close()  # data without a request
            return
        self.no_data_yet = False
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

    def _fail(self, error: BaseException | None) -> None:
        if self._ended is not None and not self._ended.done():
            self._ended.set_exception(error or CallError(Failure.MALFORMED, "not HTTP"))
        self.close()

    # -- called by the parser, which passes an exception on

    def on_message_begin(self) -> None:
        self._has_length = False

    def on_header(self, name: bytes, value: bytes) -> None:
        if name.lower() in (b"content-length", b"transfer-encoding"):
            self._has_length = True

    def on_headers_complete(self) -> None:
        status = self._parser.get_status_code()
        self._is_interim = 100 <= status < 200 and status != 101
        if self._reader is not None and not self._is_interim:
            self._until_close = not self._has_length
            self._reader.begin(status)

    def on_body(self, body: bytes) -> None:
        if self._reader is not None:
            self._reader.read(body, self.now_s)

    def on_message_complete(self) -> None:
        if self._reader is not None and self._ended is not None and not self._is_interim:
            self._reader.end(self.now_s)
            self._reader = None  # of what else arrives
            self._ended.set_result(None)
            if not self._parser.should_keep_alive():
                self.close()


class HttpClient:
    """HTTP client with a connection per concurrent call."""

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

    async def call(self, method: str, path: str, body: bytes, reader: AnswerSink) -> None:
        """Send a request and pass the response to `reader` as it arrives. Raises `CallError`."""
        message = self.endpoint.message(method, path, body, self._key)
        try:
            async with asyncio.timeout(self._timeout_s):
                connection = self._take_idle()
                if connection is not None:
                    try:
                        await connection.exchange(message, reader)
                    except CallError as error:
                        if error.failure is not Failure.CUT or not connection.no_data_yet:
                            raise
                        connection = None
                if connection is None:
                    connection = await self._connect()
                    await connection.exchange(message, reader)
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
