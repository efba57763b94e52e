"""The admission queue, bounded in requests and prompt tokens, and the memory of open calls. A place
is reserved before a prompt is tokenized.

Checking first and counting later would let a burst exceed the bounds, so `reserve` does both.
"""

from __future__ import annotations

import math
import threading
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Annotated

import msgspec

from cbatch.core.request.errors import FieldError
from cbatch.engine.core import EngineMetrics
from cbatch.engine.options import knobs
from cbatch.server.protocol.errors import OverloadedError
from cbatch.system.shares import SharedLimit

_KNOB = knobs(
    "limits",
    """
max_queued_requests | N | queued requests; more get 503
max_queued_prompt_tokens | N | prompt tokens of queued requests; more get 503
queue_timeout_s name=queue_timeout | S | reject a request that waits longer for a slot (503)
timeout_s name=timeout | S | end a request that takes longer (504)
ttft_target_s name=ttft_target | S | reject a request whose first token would come later (503)
prompt_timeout_s name=prompt_timeout | S | CPU time to render and tokenize a prompt
prompt_memory_bytes | BYTES | memory to render and tokenize a prompt, as 1G
sse_heartbeat_s name=sse_heartbeat | S | begin a stream at once, and send a comment when it is \
silent for so long; 0: no comments, and begin with the first token
response_store_bytes | BYTES | memory for responses of /v1/responses, for each API key; 0: store \
none
response_store_age_s name=response_store_age | S | time to keep responses of /v1/responses
""",
)
MAX_RETRY_AFTER_S = 60
# Bytes of each call that do not count, so that long calls cannot block short calls.
FREE_BYTES = 2**14
_NUM_DEPARTURES = 64  # times of the last departures from the queue, kept to estimate Retry-After


class Limits(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Limits of a server. Raises `FieldError`. A choice is queued until it first has a slot.

    Requests are rejected if their prompt cannot be computed within `ttft_target_s` at the engine's
    current speed. The bounds on queued requests and tokens do not apply to an empty queue, so they
    make no request impossible. A request ends when its client has left more than
    `max_unread_tokens` tokens unread (64 for each choice, if that is more).
    """

    max_queued_requests: Annotated[int, _KNOB["max_queued_requests"]] = 256
    max_queued_prompt_tokens: Annotated[int, _KNOB["max_queued_prompt_tokens"]] = 262_144
    queue_timeout_s: Annotated[float | None, _KNOB["queue_timeout_s"]] = None
    timeout_s: Annotated[float | None, _KNOB["timeout_s"]] = None
    ttft_target_s: Annotated[float | None, _KNOB["ttft_target_s"]] = None
    max_unread_tokens: int = 2048
    prompt_timeout_s: Annotated[float, _KNOB["prompt_timeout_s"]] = 10.0
    prompt_memory_bytes: Annotated[int, _KNOB["prompt_memory_bytes"]] = 2**30
    sse_heartbeat_s: Annotated[float, _KNOB["sse_heartbeat_s"]] = 10.0
    response_store_bytes: Annotated[int, _KNOB["response_store_bytes"]] = 64 * 2**20
    response_store_age_s: Annotated[float, _KNOB["response_store_age_s"]] = 86400.0

    def __post_init__(self) -> None:
        for field in msgspec.structs.fields(self):
            value = getattr(self, field.name)
            if field.name in ("response_store_bytes", "sse_heartbeat_s") and value == 0:
                continue
            if value is not None and not 0 < value < math.inf:
                raise FieldError(field.name, f"{value!r} is not allowed", "give a positive number")


class Place:
    """The place of a prompt in the queue: its choices without a slot, and its prompt tokens, which
    are an upper bound until `set_tokens`. The context manager frees them at its end."""

    def __init__(self, queue: AdmissionQueue, owner: str | None) -> None:
        self._queue, self._owner = queue, owner
        self._held = (0, 0, 0)  # choices, tokens, and those of the tokens that are a bound

    def hold(self, num_requests: int, num_tokens: int, num_bound: int = 0) -> None:
        requests, tokens, bound = self._held
        self._held = (num_requests, num_tokens, num_bound)
        self._queue._requests.add(num_requests - requests, self._owner)
        self._queue._tokens.add(num_tokens - tokens, self._owner)
        self._queue._bound_tokens += num_bound - bound

    def set_tokens(self, num_tokens: int) -> None:
        self.hold(self._held[0], num_tokens)

    def leave(self) -> None:
        """Free the place of a choice that got its slot. The first also frees the tokens."""
        self.hold(self._held[0] - 1, 0)
        self._queue._departures_s.append(self._queue._clock())

    def __enter__(self) -> Place:
        return self

    def __exit__(self, *_: object) -> None:
        self.hold(0, 0)


class AdmissionQueue:
    """Counts of queued requests and prompt tokens, and of rejections so far by reason."""

    def __init__(
        self,
        limits: Limits,
        clock: Callable[[], float],
        stats: Callable[[], EngineMetrics | None] = lambda: None,
    ) -> None:
        self._limits, self._clock, self._stats = limits, clock, stats
        self._requests = SharedLimit(limits.max_queued_requests, "requests")
        self._tokens = SharedLimit(limits.max_queued_prompt_tokens, "prompt tokens")
        self._bound_tokens = 0  # of prompts that are being tokenized: none may reach the engine
        self.rejections: dict[str, int] = {}
        self._departures_s: deque[float] = deque(maxlen=_NUM_DEPARTURES)

    @property
    def num_requests(self) -> int:
        return self._requests.total

    @property
    def num_prompt_tokens(self) -> int:
        return self._tokens.total

    def reserve(self, num_requests: int, prompt_tokens: int, owner: str | None = None) -> Place:
        """Return a place for the choices of a prompt and for `prompt_tokens` at most. Raises
        `OverloadedError`."""
        self.require_room(num_requests, prompt_tokens, owner)
        place = Place(self, owner)
        place.hold(num_requests, prompt_tokens, prompt_tokens)
        return place

    def estimated_prefill_s(self) -> float:
        """Return the estimated seconds to compute all prompts tokenized so far, ignoring prefix
        cache hits; 0 while the time per token is unknown."""
        stats = self._stats()
        if stats is None:
            return 0.0
        queued_tokens = self.num_prompt_tokens - self._bound_tokens
        return (queued_tokens + stats.remaining_prompt_tokens) * stats.prompt_token_s

    def require_in_time(self) -> None:
        """Raise `OverloadedError` if the prompts tokenized so far, including the newest, cannot be
        computed within `ttft_target_s`."""
        target_s, needed_s = self._limits.ttft_target_s, self.estimated_prefill_s()
        if target_s is not None and needed_s > target_s:
            problem = f"the prompt would be computed in {needed_s:.2g} s, later than {target_s:g} s"
            raise self.overloaded("ttft_target", problem, math.ceil(needed_s - target_s))

    def require_room(
        self, num_requests: int = 1, prompt_tokens: int = 1, owner: str | None = None
    ) -> None:
        """Raise `OverloadedError` if this, at least the shortest request, would be rejected."""
        if self.num_requests:
            kinds = (self._requests, num_requests), (self._tokens, prompt_tokens)
            for shared, more in kinds:
                problem = shared.problem(more, owner)
                if problem is not None:
                    reason = f"queued_{shared.unit}".replace(" ", "_")
                    raise self.overloaded(reason, f"the queue is full: {problem}")

    def overloaded(
        self, reason: str, problem: str, retry_after_s: int | None = None
    ) -> OverloadedError:
        self.rejections[reason] = self.rejections.get(reason, 0) + 1
        retry_after_s = min(retry_after_s or self._retry_after_s(), MAX_RETRY_AFTER_S)
        return OverloadedError(f"{problem}; try again in {retry_after_s} s", retry_after_s)

    def _retry_after_s(self) -> int:
        """Estimate the seconds until the queue is empty, from the rate of recent departures."""
        times = self._departures_s
        if len(times) < 2:
            return 1
        interval_s = (self._clock() - times[0]) / (len(times) - 1)
        return max(1, min(MAX_RETRY_AFTER_S, math.ceil(interval_s * self.num_requests)))


class MemoryBudget:
    """The limit of the memory of all open calls. `overloaded` returns the error to raise there."""

    def __init__(self, limit: int, overloaded: Callable[[str, str], OverloadedError]) -> None:
        self.limit, self.overloaded = SharedLimit(limit, "bytes"), overloaded
        self.lock = threading.Lock()  # long bodies are parsed in threads

    @property
    def num_bytes(self) -> int:
        return self.limit.total


class CallMemory:
    """The bytes that one call holds, from the first byte of its body to the last byte of its
    response. `owner` is one of several API keys."""

    def __init__(self, budget: MemoryBudget) -> None:
        self._budget, self._num_bytes = budget, 0
        self.owner: str | None = None

    def hold(self, num_bytes: int) -> None:
        """Count `num_bytes` instead of the earlier number. Raises `OverloadedError` if they are
        more, and do not fit."""
        budget, more = self._budget, max(num_bytes - FREE_BYTES, 0) - self._num_bytes
        with budget.lock:
            problem = budget.limit.problem(more, self.owner) if more > 0 else None
            if problem is None:
                budget.limit.add(more, self.owner)
                self._num_bytes += more
        if problem is not None:
            raise budget.overloaded("call_bytes", f"open calls hold {problem}")

    @contextmanager
    def sending(self, num_bytes: int) -> Iterator[None]:
        """Count bytes that wait for a client until the block ends; they cannot be refused."""
        with self._budget.lock:
            self._budget.limit.add(num_bytes, self.owner)
        try:
            yield
        finally:
            with self._budget.lock:
                self._budget.limit.add(-num_bytes, self.owner)
