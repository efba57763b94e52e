"""Output of an engine for a request: new tokens step by step, and how the request ended."""

from __future__ import annotations

import msgspec

from cbatch.core.request.request import FinishReason


class OutputRow(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """New tokens of a request in one step. The last row of each accepted request, and no other, has
    a `finish_reason`; it may have no tokens. `message` explains an error. `is_refused`: it is the
    request that is at fault; the message begins with the field."""

    request_id: str
    tokens: list[int] = []
    num_drafted: int = 0
    num_accepted: int = 0
    finish_reason: FinishReason | None = None
    message: str | None = None
    is_refused: bool = False
