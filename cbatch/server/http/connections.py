"""Connections of clients, with limits on time, size of request heads, and number of connections.
`intake` limits request bodies."""

from __future__ import annotations

import asyncio
import fcntl
import sys
import termios
from typing import Any, NamedTuple

import httptools
import uvicorn
from uvicorn.protocols.http.httptools_impl import STATUS_LINE, HttpToolsProtocol
from uvicorn.server import ServerState

from cbatch.server.http.errors import error_body
from cbatch.server.http.limits import MIN_READ_BYTES, ConnectionLimits
from cbatch.server.http.middleware import RequestMiddleware
from cbatch.server.serving.replies import encode

MAX_HEAD_BYTES = 2**16  # limit of the request line and header fields
MAX_LINGERING = 128  # refused connections that stay open for `LINGER_S`; others close at once
LINGER_S = 1.0
MAX_PIPELINED = 16  # requests of a connection that wait for earlier responses

_HEAD = b"%scontent-type: application/json\r\ncontent-length: %d\r\nconnection: close\r\n%s\r\n"
_ERROR_TYPES = {408: "timeout", 503: "overloaded"}  # error types in bodies, by HTTP status


class ServerConfig(uvicorn.Config):
    """Configuration of a server with bounded connections. `options` are uvicorn's."""

    def __init__(self, app: RequestMiddleware, limits: ConnectionLimits, **options: Any) -> None:
        options |= {"http": BoundedProtocol, "ws": "none", "access_log": False}
        super().__init__(app, timeout_keep_alive=limits.keep_alive_s, **options)  # type: ignore[arg-type]
        self.limits, self.reject = limits, app.reject
        self.connection_limit = limits.connection_limit
        self.lingering: set[BoundedProtocol] = set()


class HeadError(Exception):
    """The request head exceeds a limit."""


class Unread(NamedTuple):
    """Number of response bytes that a client had not read at time `since_s` of the event loop."""

    since_s: float
    num_bytes: int


def unsent_bytes(transport: asyncio.Transport) -> int:
    """Return the number of response bytes in the kernel's send buffer, 0 if unknown. While a slow
    client reads from this buffer, asyncio's own buffer may not change for a long time."""
    try:
        size = fcntl.ioctl(transport.get_extra_info("socket").fileno(), termios.TIOCOUTQ, bytes(4))
    except (OSError, ValueError):
        return 0
    return int.from_bytes(size, sys.byteorder)


class BoundedProtocol(HttpToolsProtocol):
    """A connection with timeouts. It is closed if a request takes too long to arrive while no other
    is being answered, or if the client does not read a response. uvicorn's own timeout covers only
    idle connections, and a single received byte cancels it."""

    def __init__(
        self,
        config: ServerConfig,
        server_state: ServerState,
        app_state: dict[str, Any],
        _loop: asyncio.AbstractEventLoop | None = None,
    ) -> None:
        super().__init__(config, server_state, app_state, _loop)
        self._limits, self._reject = config.limits, config.reject
        self._connection_limit = config.connection_limit
        self._lingering = config.lingering
        self._timer: asyncio.TimerHandle | None = None
        self._waiting_since_s: float | None = None  # start of the wait for a head or body
        self._in_head = False
        self._head_bytes = 0  # of the request line and header fields
        self._partial_bytes = 0  # received while the head was incomplete
        self._data = b""  # received data that the parser reads now
        self._unread: Unread | None = None

    # ---- the connection -----------------------------------------------------------------------

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        limit = self._connection_limit
        if len(self.connections) > limit and not self._close_idle():
            self._refuse(503, "connections", f"{limit} connections are open", b"retry-after: 1\r\n")
        else:
            self._waiting_since_s = self.loop.time()
            self._check_timeouts()

    def _close_idle(self) -> bool:
        idle = [
            (timer.when(), id(each), each)
            for each in self.connections
            if isinstance(each, BoundedProtocol) and (timer := each.timeout_keep_alive_task)
        ]
        if not idle:
            return False
        *_, oldest = min(idle)
        oldest.transport.close()
        self.connections.discard(oldest)
        return True

    def connection_lost(self, exc: Exception | None) -> None:
        if self._timer is not None:
            self._timer.cancel()
        self._lingering.discard(self)
        super().connection_lost(exc)

    def pause_writing(self) -> None:
        super().pause_writing()
        self._measure_unread()

    def resume_writing(self) -> None:
        super().resume_writing()
        self._unread = None

    def _measure_unread(self) -> Unread:
        num_bytes = self.transport.get_write_buffer_size() + unsent_bytes(self.transport)
        self._unread = Unread(self.loop.time(), num_bytes)
        return self._unread

    def _check_timeouts(self) -> None:
        """Timer callback: end a late request, or the connection of a client that does not read."""
        now_s, limit_s = self.loop.time(), self._limits.request_timeout_s
        cutoff_s = now_s - limit_s  # a wait that began by then has timed out
        earlier = self._unread
        if earlier is not None and earlier.since_s <= cutoff_s:
            if self._measure_unread().num_bytes > earlier.num_bytes - MIN_READ_BYTES:
                self.transport.abort()
                return
        elif earlier is None and self.transport.is_closing():  # waits for the client to read
            self._measure_unread()
        if self._waiting_since_s is not None and self._waiting_since_s <= cutoff_s:
            self._end_late_request()
        starts_s = (self._waiting_since_s, self._unread and self._unread.since_s)
        ends_s = (start + limit_s for start in starts_s if start is not None and start > cutoff_s)
        next_check_s = min(ends_s, default=now_s + limit_s)
        self._timer = self.loop.call_at(next_check_s, self._check_timeouts)

    def _end_late_request(self) -> None:
        if self._answering:
            return  # the application awaits this request's body, or answers an earlier request
        if self._in_head:
            limit_s = self._limits.request_timeout_s
            self._refuse(408, "request_timeout", f"the head took longer than {limit_s:g} s")
        else:  # no request has begun, or its response is complete before its body
            self.transport.close()

    # ---- requests -----------------------------------------------------------------------------

    def data_received(self, data: bytes) -> None:
        if self in self._lingering:
            return
        if self._waiting_since_s is None:
            self._waiting_since_s = self.loop.time()
        was_in_head, self._data = self._in_head, data
        super().data_received(data)
        refused = self in self._lingering or self.transport.is_closing()
        if was_in_head and self._in_head and not refused:
            self._partial_bytes += len(data)
            if self._partial_bytes > 2 * MAX_HEAD_BYTES:  # a header field without an end
                self._head_bytes = self._partial_bytes
                self.send_400_response("")

    def _should_upgrade(self) -> bool:
        """Return True, so that uvicorn calls `handle_websocket_upgrade` for any other protocol."""
        return bool(self.parser.get_method() != b"CONNECT")

    def handle_websocket_upgrade(self) -> None:
        """Parse the request again without its `upgrade` field, which a server may ignore (RFC 9110,
        7.8). The first parser stopped after the head."""
        upgrade = sys.exception()
        assert isinstance(upgrade, httptools.HttpParserUpgrade)
        target = b"%s %s HTTP/1.1" % (self.scope["method"].encode(), self.url)
        fields = [b"%s: %s" % field for field in self.headers if field[0] != b"upgrade"]
        # After `connection: close` the first parser would ignore the data.
        self.parser = httptools.HttpRequestParser(self)
        self.parser.set_dangerous_leniencies(lenient_data_after_close=True)  # as uvicorn does
        self.data_received(b"\r\n".join([target, *fields, b"", self._data[upgrade.args[0] :]]))

    def on_message_begin(self) -> None:
        super().on_message_begin()
        self._in_head = True
        self._head_bytes = self._partial_bytes = 0
        if self._waiting_since_s is None:
            self._waiting_since_s = self.loop.time()

    def on_url(self, url: bytes) -> None:
        self._count_head(len(url))
        super().on_url(url)

    def on_header(self, name: bytes, value: bytes) -> None:
        self._count_head(len(name) + len(value))
        super().on_header(name, value)

    def _count_head(self, num_bytes: int) -> None:
        """Add to the head's size. uvicorn answers `HeadError` by calling `send_400_response`."""
        self._head_bytes += num_bytes
        if self._head_bytes > MAX_HEAD_BYTES:
            raise HeadError

    def on_headers_complete(self) -> None:
        if len(self.pipeline) >= MAX_PIPELINED:
            raise HeadError
        self._in_head = False
        self._waiting_since_s = self.loop.time()
        super().on_headers_complete()

    def on_message_complete(self) -> None:
        self._waiting_since_s = None
        super().on_message_complete()

    def on_response_complete(self) -> None:
        if self._waiting_since_s is not None:  # the next request has its full time from now on
            self._waiting_since_s = self.loop.time()
        super().on_response_complete()

    # ---- responses of the connection itself ---------------------------------------------------

    @property
    def _answering(self) -> bool:
        return self.cycle is not None and not self.cycle.response_complete

    def send_400_response(self, msg: str) -> None:
        """Refuse an unreadable request, or only close the connection if a response has begun."""
        if self.pipeline or (self._answering and self.cycle.response_started):
            self.transport.close()
        elif self._head_bytes > MAX_HEAD_BYTES:
            self._refuse(431, "head_bytes", f"the head has more than {MAX_HEAD_BYTES} bytes")
        else:
            self._refuse(400, "malformed", msg)

    def _refuse(self, status: int, reason: str, message: str, header: bytes = b"") -> None:
        self._reject(reason)
        body = encode(error_body(message, _ERROR_TYPES.get(status, "invalid_request_error")))
        self.transport.write(_HEAD % (STATUS_LINE[status], len(body), header) + body)
        self._waiting_since_s = None
        if self._answering or len(self._lingering) >= MAX_LINGERING:
            self.transport.close()
        else:
            self._linger()

    def _linger(self) -> None:
        """Read for `LINGER_S` before closing. Data that arrives at a closed connection makes the
        client's system drop the response. The connection does not count against the limit."""
        self._lingering.add(self)
        self.connections.discard(self)
        self.transport.write_eof()
        self.loop.call_later(LINGER_S, self.transport.close)
