"""The responses of the Responses API that clients may continue or read again."""

from __future__ import annotations

import time
from collections import OrderedDict
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

from cbatch.core.request.errors import short
from cbatch.server.protocol.errors import UnknownItemError, UnknownResponseError

_ENTRY_BYTES = 512  # of Python's objects for a stored response
_ITEM_BYTES = 64  # and for each item of its conversation
_NAMED_BYTES = 256  # and for each of its own that has an id
# A longer conversation fits no context, and translating it would take long.
MAX_CONVERSATION_BYTES = 16 * 2**20


class StoredResponse(NamedTuple):
    body: bytes
    items: Sequence[bytes]  # of the conversation up to the end of the response, in JSON
    named: Mapping[str, bytes]  # of the request and the response, by id
    num_bytes: int
    expires_s: float


class ResponseStore:
    """The stored responses of all API keys. Responses of one key are unknown to others. `args` are
    those of `KeyResponses`."""

    def __init__(self, *args: Any) -> None:
        self._args = args
        self._by_key: dict[str | None, KeyResponses] = {}

    def of(self, key: str | None) -> KeyResponses:
        return self._by_key.setdefault(key, KeyResponses(*self._args))


class KeyResponses:
    """The stored responses of one API key: at most `max_bytes`, kept for `max_age_s`. `num_bytes`
    counts shared items in every conversation, so the memory is at most that. Lookups change
    nothing, so a thread may make them."""

    def __init__(
        self, max_bytes: int, max_age_s: float, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._max_bytes, self._max_age_s, self._clock = max_bytes, max_age_s, clock
        self._responses: OrderedDict[str, StoredResponse] = OrderedDict()
        self._holders: dict[str, str] = {}  # ids of responses, by those of their items
        self.num_bytes = 0

    def __len__(self) -> int:
        return len(self._responses)

    def items(self, response_id: str) -> Sequence[bytes]:
        return self._find(response_id, "previous_response_id").items

    def item(self, item_id: str, field: str) -> bytes:
        response = self._responses.get(self._holders.get(item_id, ""))
        if response is None or response.expires_s <= self._clock():
            problem = f"{short(item_id)} is not an item of a stored response"
            raise UnknownItemError(field, problem, "send the item itself")
        return response.named[item_id]

    def body(self, response_id: str) -> bytes:
        return self._find(response_id, "response_id").body

    def delete(self, response_id: str) -> None:
        self._find(response_id, "response_id")
        self._drop(response_id)

    def keep(
        self, response_id: str, body: bytes, items: Sequence[bytes], named: Mapping[str, bytes]
    ) -> None:
        """Store a response, if it fits, and drop others that are expired or have no room."""
        now_s = self._clock()
        conversation_bytes = sum(map(len, items))
        num_bytes = conversation_bytes + len(body) + _ENTRY_BYTES + _ITEM_BYTES * len(items)
        num_bytes += sum(map(len, named)) + _NAMED_BYTES * len(named)
        if conversation_bytes > MAX_CONVERSATION_BYTES or num_bytes > self._max_bytes:
            return
        while self._responses:
            oldest = next(iter(self._responses))
            fits = self.num_bytes + num_bytes <= self._max_bytes
            if fits and self._responses[oldest].expires_s > now_s:
                break
            self._drop(oldest)
        expires_s = now_s + self._max_age_s
        stored = StoredResponse(body, items, named, num_bytes, expires_s)
        self._responses[response_id] = stored
        self._holders |= dict.fromkeys(named, response_id)
        self.num_bytes += num_bytes

    def _find(self, response_id: str, field: str) -> StoredResponse:
        response = self._responses.get(response_id)
        if response is not None and response.expires_s > self._clock():
            return response
        kept = f"{self._max_bytes} bytes per key are kept, for {self._max_age_s:g} s"
        problem = f"{response_id!r} is unknown or has expired ({kept} at most)"
        raise UnknownResponseError(field, problem, "send the whole conversation as `input`")

    def _drop(self, response_id: str) -> None:
        response = self._responses.pop(response_id)
        self.num_bytes -= response.num_bytes
        for item_id in response.named:
            if self._holders.get(item_id) == response_id:
                del self._holders[item_id]
