"""What connections may take of a server, and how many of them the system lets it have."""

from __future__ import annotations

import contextlib
import math
from functools import partial
from typing import Annotated

import msgspec
from msgspec import Meta

from cbatch.core.request.errors import FieldError
from cbatch.core.request.typed import knob

_limits = partial(knob, "limits")
MOST_CONNECTIONS = 4096  # where open files allow it
# Of the process beside its connections: the engine's pipes, logs, models, those just refused.
OWN_FILES = 256
LEAST_READ_BYTES = 2**14  # of an answer, by its client, in the time that it has for a request


class ConnectionLimits(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Raises `FieldError`. `request_timeout_s` is for the head of a request, and again for its
    body; of an answer its client reads `LEAST_READ_BYTES` in it, or all there is. Bodies on their
    way in have `max_reading_bytes` for all of them together."""

    max_connections: Annotated[
        int | None,
        _limits(f"beyond: 503 (default: {MOST_CONNECTIONS}, or what open files allow)", "N"),
    ] = None
    request_timeout_s: Annotated[
        float,
        Meta(gt=0),
        _limits("for a call's head to come in, and for its body", "S", name="request_timeout"),
    ] = 30.0
    max_body_bytes: int = 8 * 2**20
    max_reading_bytes: int = 64 * 2**20

    def __post_init__(self) -> None:
        for field in msgspec.structs.fields(self):
            value = getattr(self, field.name)
            if value is not None and not 0 < value < math.inf:
                raise FieldError(field.name, f"{value!r} is not allowed", "give a positive number")

    @property
    def most_connections(self) -> int:
        return self.max_connections or MOST_CONNECTIONS


def connections_for(asked: int | None) -> int:
    """How many fit into the files that the process may have open; the system is asked for more of
    those where they are needed. Raises `FieldError` where what was `asked` for does not fit."""
    import resource  # Windows has none, nor `cbatch serve`

    wanted = (MOST_CONNECTIONS if asked is None else asked) + OWN_FILES
    files, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    if resource.RLIM_INFINITY != files < wanted:
        files = wanted if most == resource.RLIM_INFINITY else min(wanted, most)
        with contextlib.suppress(OSError, ValueError):
            resource.setrlimit(resource.RLIMIT_NOFILE, (files, most))
    files, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    room = (wanted if files == resource.RLIM_INFINITY else min(wanted, files)) - OWN_FILES
    if room < 1:
        problem = f"this process may have {files}, and a server needs more than {OWN_FILES}"
        raise FieldError("open files", problem, "raise the limit (ulimit -n, LimitNOFILE)")
    if asked is None:
        return room
    if asked > room:
        problem = f"{asked} need {wanted} open files, and this process may have {files}"
        remedy = f"ask for <= {room}, or raise the limit (ulimit -n, LimitNOFILE)"
        raise FieldError("max_connections", problem, remedy)
    return asked
