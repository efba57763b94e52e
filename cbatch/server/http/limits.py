"""Limits of connections, and the number of connections that the system allows."""

from __future__ import annotations

import contextlib
import math
from typing import Annotated

import msgspec
from msgspec import Meta

from cbatch.core.request.errors import FieldError
from cbatch.engine.options import knobs

MAX_CONNECTIONS = 4096  # default, if the limit on open files allows it
_KNOB = knobs(
    "limits",
    f"""
max_connections | N | open connections; more get 503 (default: {MAX_CONNECTIONS}, or as open \
files allow)
request_timeout_s name=request_timeout | S | time to receive the head of a call, and again for \
its body
keep_alive_s name=keep_alive | S | keep a connection open between calls
""",
)
Seconds = Annotated[float, Meta(gt=0)]
# Open files reserved for the engine's pipes, logs, models, and lingering refused connections.
RESERVED_FILES = 256
MIN_READ_BYTES = 2**14  # response bytes that a client must read in `request_timeout_s`


class ConnectionLimits(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Limits of connections. Raises `FieldError`. A request's head may take `request_timeout_s`,
    and its body the same time again. A client must read `MIN_READ_BYTES` of a response within
    `request_timeout_s`. Between requests a connection stays open for `keep_alive_s`, longer than
    proxies keep it. What all open calls hold is at most about `max_held_bytes`."""

    max_connections: Annotated[int | None, _KNOB["max_connections"]] = None
    request_timeout_s: Annotated[Seconds, _KNOB["request_timeout_s"]] = 30.0
    keep_alive_s: Annotated[Seconds, _KNOB["keep_alive_s"]] = 75.0
    max_body_bytes: int = 8 * 2**20
    max_held_bytes: int = 128 * 2**20

    def __post_init__(self) -> None:
        for field in msgspec.structs.fields(self):
            value = getattr(self, field.name)
            if value is not None and not 0 < value < math.inf:
                raise FieldError(field.name, f"{value!r} is not allowed", "give a positive number")

    @property
    def connection_limit(self) -> int:
        return self.max_connections or MAX_CONNECTIONS


def connections_for(max_connections: int | None) -> int:
    """Return the number of connections to allow, after raising the process's limit on open files if
    necessary. Raises `FieldError` if `max_connections` exceeds what the system allows."""
    import resource  # not on Windows, where `cbatch serve` does not run either

    needed = (MAX_CONNECTIONS if max_connections is None else max_connections) + RESERVED_FILES
    limit, hard_limit = resource.getrlimit(resource.RLIMIT_NOFILE)
    if resource.RLIM_INFINITY != limit < needed:
        limit = needed if hard_limit == resource.RLIM_INFINITY else min(needed, hard_limit)
        with contextlib.suppress(OSError, ValueError):
            resource.setrlimit(resource.RLIMIT_NOFILE, (limit, hard_limit))
    limit, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    allowed = (needed if limit == resource.RLIM_INFINITY else min(needed, limit)) - RESERVED_FILES
    if allowed < 1:
        problem = f"this process may have {limit}, and a server needs more than {RESERVED_FILES}"
        raise FieldError("open files", problem, "raise the limit (ulimit -n, LimitNOFILE)")
    if max_connections is None:
        return allowed
    if max_connections > allowed:
        problem = f"{max_connections} need {needed} open files, and this process may have {limit}"
        remedy = f"ask for <= {allowed}, or raise the limit (ulimit -n, LimitNOFILE)"
        raise FieldError("max_connections", problem, remedy)
    return max_connections
