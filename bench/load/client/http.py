"""HTTP/1.1 as a load tester needs it: raw bytes out, pieces of the answer in, each with its time.

The parser is httptools' (llhttp). Connections are kept and reused; one that the server had closed
in the meantime is replaced, but only if not a byte of the answer had come (RFC 9112, section 9.3.1;
asking for a completion twice does no harm).
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

IDLE_S = 3.0  # servers close what has been idle for 5 s, as a rule
OUR_LIMITS = (errno.EMFILE, errno.ENFILE, errno.EADDRNOTAVAIL)  # nothing that a server did


class Endpoint(msgspec.Struct, frozen=True):
    """Where the API is. Paths given to `path` begin with /v1 or stand beside it (/metrics)."""

    host: str
    port: int
    tls: bool
    prefix: str  # of every path, without /v1

    @classmethod
    def of(cls, url: str) -> Endpoint:
        """Raises `FieldError`. `http://host:8000`, `host:8000` and `http://host:8000/v1` are the
        same."""
        parts = urlsplit(url if "//" in url else f"http://{url}")
        try:
            port = parts.port
        except ValueError as error:
            raise FieldError("URL", f"{url!r}: {error}", "write http://host:8000") from error
        if parts.scheme not in ("http", "https") or not parts.hostname or parts.query:
            raise FieldError("URL", f"{url!r} is none of an API", "write http://host:8000")
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
        """A whole request."""
        lines = [
            f"{method} {self.prefix}{path} HTTP/1.1",
            f"Host: {self.authority}",
            "Accept: */*",
            "User-Agent: cbatch-bench",
        ]
        if key is not None:
            lines.append(f"Authorization: Bearer {key}")
        if method == "POST":
            lines += ["Content-Type: application/json", f"Content-Length: {len(body)}"]
        return "\r\n".join([*lines, "", ""]).encode() + body


class AnswerSink(Protocol):
    """What becomes of an answer. All three may raise `CallError`."""

    def begin(self, status: int) -> None: ...

    def read(self, piece: bytes, now_s: float) -> None: ...

    def end(self, now_s: float) -> None: ...


class Connection(asyncio.Protocol):
    """One at a time: `exchange`, and again once that has returned."""

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._loop = asyncio.get_running_loop()
        self._transport: asyncio.Transport | None = None
        self._reader: AnswerSink | None = None
        self._ended: asyncio.Future[None] | None = None
        self._parser: Any = None
        self.now_s = 0.0
        self.idle_since_s = 0.0
        self.silent = True  # nothing of the present answer has come
        self._has_length = False
        self._to_the_end = False  # the answer's body ends with the connection

    @property
    def is_open(self) -> bool:
        return self._transport is not None and not self._transport.is_closing()

    async def exchange(self, message: bytes, reader: AnswerSink) -> None:
        """Raises `CallError`."""
        assert self._transport is not None
        self._reader, self._ended = reader, self._loop.create_future()
        self._parser = httptools.HttpResponseParser(self)
        self.silent, self._has_length, self._to_the_end = True, False, False
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
        self._transport = transport  # type: ignore[assignment]

    def data_received(self, data: bytes) -> None:
        self.now_s = self._clock()
        if self._ended is None or self._ended.done():
            self.close()  # nobody asked for it
            return
        self.silent = False
        try:
            self._parser.feed_data(data)
        except httptools.HttpParserError as error:
            self._fail(CallError(Failure.MALFORMED, f"not HTTP: {error}"))

    def connection_lost(self, exc: Exception | None) -> None:
        self._transport = None
        if self._ended is None or self._ended.done():
            return
        self.now_s = self._clock()
        if self._to_the_end and exc is None:
            self.on_message_complete()
        else:
            why = "without an answer" if self.silent else "in the middle of the answer"
            self._fail(CallError(Failure.CUT, f"the connection ended {why}"))

    # -- called by the parser

    def on_header(self, name: bytes, value: bytes) -> None:
        if name.lower() in (b"content-length", b"transfer-encoding"):
            self._has_length = True

    def on_headers_complete(self) -> None:
        self._to_the_end = not self._has_length
        self._tell(lambda reader: reader.begin(self._parser.get_status_code()))

    def on_body(self, body: bytes) -> None:
        if self._reader is not None:
            try:
                self._reader.read(body, self.now_s)
            except CallError as error:
                self._fail(error)

    def on_message_complete(self) -> None:
        self._tell(lambda reader: reader.end(self.now_s))
        ended = self._ended
        if ended is None or ended.done():
            return
        ended.set_result(None)
        self.idle_since_s = self.now_s
        if not self._parser.should_keep_alive():
            self.close()

    def _tell(self, what: Callable[[AnswerSink], None]) -> None:
        if self._reader is not None:
            try:
                what(self._reader)
            except CallError as error:
                self._fail(error)

    def _fail(self, error: CallError) -> None:
        self._reader = None
        if self._ended is not None and not self._ended.done():
            self._ended.set_exception(error)
        self.close()


class HttpClient:
    """As many connections as there are calls at once."""

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
        """Raises `CallError`."""
        message = self.endpoint.message(method, path, body, self._key)
        try:
            async with asyncio.timeout(self._timeout_s):
                connection = self._kept()
                if connection is not None:
                    try:
                        await connection.exchange(message, reader)
                    except CallError as error:
                        if error.failure is not Failure.CUT or not connection.silent:
                            raise
                        connection = None
                if connection is None:
                    connection = await self._connect()
                    await connection.exchange(message, reader)
        except TimeoutError as error:
            raise CallError(Failure.TIMEOUT, f"{self._timeout_s:g} s were over") from error
        # Not before `exchange` has returned: until then the connection is still in its hands.
        if connection.is_open:
            self._idle.append(connection)

    async def get(self, path: str) -> tuple[int, bytes]:
        """Status and body. Raises `CallError`."""
        return await self.whole("GET", path, b"")

    async def whole(self, method: str, path: str, body: bytes) -> tuple[int, bytes]:
        whole = _Whole()
        await self.call(method, path, body, whole)
        return whole.status, b"".join(whole.pieces)

    def close(self) -> None:
        while self._idle:
            self._idle.pop().close()

    def _kept(self) -> Connection | None:
        """The one used last, so that the others may grow old."""
        while self._idle:
            kept = self._idle.pop()
            if kept.is_open and self._clock() - kept.idle_since_s < IDLE_S:
                return kept
            kept.close()
        return None

    async def _connect(self) -> Connection:
        loop, endpoint = asyncio.get_running_loop(), self.endpoint
        try:
            _, made = await loop.create_connection(
                lambda: Connection(self._clock),
                endpoint.host,
                endpoint.port,
                ssl=self._tls,
            )
        except TimeoutError:
            raise
        except OSError as error:
            failure = Failure.CLIENT if error.errno in OUR_LIMITS else Failure.CONNECT
            raise CallError(failure, str(error)) from error
        return made


class _Whole:
    def __init__(self) -> None:
        self.status = 0
        self.pieces: list[bytes] = []

    def begin(self, status: int) -> None:
        self.status = status

    def read(self, piece: bytes, now_s: float) -> None:
        self.pieces.append(piece)

    def end(self, now_s: float) -> None: ...
