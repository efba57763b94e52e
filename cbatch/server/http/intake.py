"""Reading of request bodies, with limits on time, size, and memory of all calls together."""

from __future__ import annotations

import asyncio
import gzip
import re
import zlib
from collections.abc import Callable
from io import BytesIO
from typing import Any, cast

from litestar import Request
from litestar.types import HTTPReceiveMessage

from cbatch.core.request.errors import FieldError
from cbatch.server.http.errors import BodyTooLongError, ClientGoneError, MediaTypeError
from cbatch.server.http.limits import ConnectionLimits
from cbatch.server.http.middleware import record_of
from cbatch.server.protocol.errors import BodyTimeoutError, OverloadedError
from cbatch.server.serving.admission_queue import CallMemory, MemoryBudget

# What a body holds while it is read and parsed, as a multiple of its bytes.
PARSED = 2
_JSON_SUFFIX = re.compile(r"application/[\w.!#$&^-]+\+json")  # RFC 6839


class BodyIntake:
    """Reader of request bodies. `memory` is the budget of all calls; `overloaded` returns the error
    to raise at the limit."""

    def __init__(
        self, limits: ConnectionLimits, overloaded: Callable[[str, str], OverloadedError]
    ) -> None:
        self._limits = limits
        self.memory = MemoryBudget(limits.max_held_bytes, overloaded)

    async def body(self, request: Request[Any, Any, Any]) -> bytes:
        """Read and decompress a JSON body, and count its memory. Raises `MediaTypeError`,
        `BodyTimeoutError`, `OverloadedError`, `ClientGoneError`, `BodyTooLongError` or
        `FieldError`."""
        kind = request.headers.get("content-type", "").partition(";")[0].strip().lower()
        if kind != "application/json" and not _JSON_SUFFIX.fullmatch(kind):
            problem = f"{kind!r} is not supported" if kind else "is missing"
            raise MediaTypeError("content-type", problem, "send application/json")
        coding = request.headers.get("content-encoding", "identity").strip().lower()
        if coding not in ("identity", "gzip", "x-gzip"):
            raise MediaTypeError(
                "content-encoding", f"{coding!r} is not supported", "send gzip or none"
            )
        limit_s, memory = self._limits.request_timeout_s, record_of(request).memory
        try:
            async with asyncio.timeout(limit_s):
                content = await self._read(request, memory)
                if coding != "identity":  # in a thread, since few bytes can expand to many
                    content = await asyncio.to_thread(self._decompressed, content)
                    memory.hold(PARSED * len(content))
        except TimeoutError as error:
            raise BodyTimeoutError(f"the body took longer than {limit_s:g} s") from error
        return content

    async def _read(self, request: Request[Any, Any, Any], memory: CallMemory) -> bytes:
        announced = request.headers.get("content-length", "")
        self._require_short(int(announced) if announced.isdecimal() else 0)
        content, more = bytearray(), True
        while more:
            message = cast(HTTPReceiveMessage, await request.receive())
            if message["type"] == "http.disconnect":
                raise ClientGoneError("the client disconnected during its call")
            content += message.get("body", b"")
            self._require_short(len(content))
            memory.hold(PARSED * len(content))
            more = message.get("more_body", False)
        return bytes(content)

    def _decompressed(self, content: bytes) -> bytes:
        try:
            with gzip.GzipFile(fileobj=BytesIO(content)) as file:
                whole = file.read(self._limits.max_body_bytes + 1)
        except (OSError, EOFError, zlib.error) as error:
            raise FieldError("body", f"is not gzip ({error})", "send gzip or none") from error
        self._require_short(len(whole))
        return whole

    def _require_short(self, num_bytes: int) -> None:
        limit = self._limits.max_body_bytes
        if num_bytes > limit:
            raise BodyTooLongError("body", f"has more than {limit} bytes", "send less")
