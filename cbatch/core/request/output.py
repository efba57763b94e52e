"""Output of an engine for a request: new tokens step by step, and how the request ended."""

from __future__ import annotations

import msgspec

from cbatch.core.request.request import FinishReason


class OutputRow(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """New tokens of a request in one step."""

    request_id: str
    tokens: list[int]
    num_drafted: int
    num_accepted: int


class Ending(msgspec.Struct, frozen=True, array_like=True):
    """The end of a request; each accepted request has exactly one. `message` explains an error."""

    request_id: str
    reason: FinishReason
    message: str | None = None
