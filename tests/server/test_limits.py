"""The limit of connections, and limits that can never apply."""

from __future__ import annotations

import resource

import pytest

from cbatch.core.request.errors import FieldError
from cbatch.server.http.limits import (
    MAX_CONNECTIONS,
    RESERVED_FILES,
    ConnectionLimits,
    connections_for,
)

NO_LIMIT = resource.RLIM_INFINITY
MAX_FILES = MAX_CONNECTIONS + RESERVED_FILES


@pytest.mark.parametrize(
    ("soft", "hard", "limit", "room", "files"),
    [
        (20_000, 20_000, None, MAX_CONNECTIONS, 20_000),
        (1024, 20_000, None, MAX_CONNECTIONS, MAX_FILES),
        (1024, 20_000, 10_000, 10_000, 10_000 + RESERVED_FILES),
        (1024, 2048, None, 2048 - RESERVED_FILES, 2048),
        (1024, NO_LIMIT, 50_000, 50_000, 50_000 + RESERVED_FILES),
        (NO_LIMIT, NO_LIMIT, None, MAX_CONNECTIONS, NO_LIMIT),
        (1024, 1024, 1024 - RESERVED_FILES, 1024 - RESERVED_FILES, 1024),
        (1024, 1024, MAX_CONNECTIONS, None, 1024),
    ],
)
def test_open_files_are_reserved_for_the_engine(
    monkeypatch: pytest.MonkeyPatch,
    soft: int,
    hard: int,
    limit: int | None,
    room: int | None,
    files: int,
) -> None:
    """`room` is the number of allowed connections; None: the limit is rejected."""
    limits = [(soft, hard)]
    monkeypatch.setattr(resource, "getrlimit", lambda _: limits[-1])
    monkeypatch.setattr(resource, "setrlimit", lambda _, changed: limits.append(changed))
    if room is None:
        with pytest.raises(FieldError, match=r"max_connections: 4096 need \d+ open files.*<= 768"):
            connections_for(limit)
    else:
        assert connections_for(limit) == room
    assert limits[-1] == (files, hard)


@pytest.mark.parametrize(("files", "limit"), [(8, None), (RESERVED_FILES, None), (64, 1)])
def test_too_few_open_files_for_any_connection(
    monkeypatch: pytest.MonkeyPatch, files: int, limit: int | None
) -> None:
    monkeypatch.setattr(resource, "getrlimit", lambda _: (files, files))
    monkeypatch.setattr(resource, "setrlimit", lambda *_: None)
    with pytest.raises(FieldError, match=rf"open files: .* {files}, .*ulimit -n"):
        connections_for(limit)


@pytest.mark.parametrize("field", ConnectionLimits.__struct_fields__)
def test_an_invalid_limit_is_rejected(field: str) -> None:
    for value in (0, -1, float("nan"), float("inf")):
        with pytest.raises(FieldError, match=field):
            ConnectionLimits(**{field: value})
