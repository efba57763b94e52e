"""What an engine tells of a request: its new tokens step by step, and its one end."""

from __future__ import annotations

import msgspec

from cbatch.core.request.request import FinishReason


class OutputRow(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """A request's new tokens of one step."""

    request_id: str
    tokens: list[int]
    num_drafted: int
    num_accepted: int


class Ending(msgspec.Struct, frozen=True, array_like=True):
    """The one end of an accepted request. `message` says what is wrong, where something is."""

    request_id: str
    reason: FinishReason
    message: str | None = None
