from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from cbatch.core.request.errors import FieldError
from cbatch.server.protocol.errors import OverloadedError
from cbatch.server.serving.admission_queue import AdmissionQueue, Limits
from tests.checking.clock import VirtualClock


def make(stats: Any = None, **limits: float) -> tuple[AdmissionQueue, VirtualClock]:
    clock = VirtualClock()
    return AdmissionQueue(Limits(**limits), clock, lambda: stats), clock


def test_both_bounds_hold_and_places_are_freed() -> None:
    queue, _ = make(max_queued_requests=3, max_queued_prompt_tokens=100)
    first = queue.reserve(2, 60)
    with pytest.raises(OverloadedError, match="2 of 3 requests"):
        queue.reserve(2, 10)
    with pytest.raises(OverloadedError, match="60 of 100 prompt tokens"):
        queue.reserve(1, 50)
    assert queue.rejections == {"queued_requests": 1, "queued_prompt_tokens": 1}
    second = queue.reserve(1, 40)
    assert (queue.num_requests, queue.num_prompt_tokens) == (3, 100)
    first.leave()
    assert (queue.num_requests, queue.num_prompt_tokens) == (2, 40), "the choices share one prompt"
    first.leave()
    first.__exit__()
    second.__exit__()
    second.__exit__()
    assert (queue.num_requests, queue.num_prompt_tokens) == (0, 0)


def test_a_place_is_reserved_before_the_prompt_is_tokenized() -> None:
    """A burst does not exceed the bounds, although the true lengths are known later."""
    queue, _ = make(max_queued_prompt_tokens=100)
    places = []
    with pytest.raises(OverloadedError):
        for _ in range(10):
            places.append(queue.reserve(1, 40))
    assert len(places) == 2
    for place in places:
        place.set_tokens(10)
    assert queue.num_prompt_tokens == 20
    queue.reserve(1, 40)


def test_an_empty_queue_accepts_a_call_of_any_size() -> None:
    queue, _ = make(max_queued_requests=2, max_queued_prompt_tokens=10)
    queue.require_room()
    queue.reserve(5, 1000)
    with pytest.raises(OverloadedError):
        queue.reserve(1, 1)
    with pytest.raises(OverloadedError):
        queue.require_room()


def test_retry_after_follows_the_rate_of_departures() -> None:
    queue, clock = make(max_queued_requests=20)
    assert queue.overloaded("full", "no room").retry_after_s == 1, "no departures yet"
    place = queue.reserve(20, 1)
    for _ in range(5):
        clock.advance(2.0)
        place.leave()
    assert queue.overloaded("full", "no room").retry_after_s == 30
    clock.advance(10_000)
    assert queue.overloaded("full", "no room").retry_after_s == 60


@pytest.mark.parametrize("field", ["max_queued_requests", "timeout_s", "max_unread_tokens"])
@pytest.mark.parametrize("value", [0, -1, float("nan"), float("inf")])
def test_bad_limits_are_named(field: str, value: float) -> None:
    with pytest.raises(FieldError, match=field):
        Limits(**{field: value})


def test_a_prompt_that_cannot_be_computed_in_time_is_rejected() -> None:
    """At 10 ms per token, prompts of 40 tokens are in slots and 30 are queued when the call
    comes."""
    stats = SimpleNamespace(remaining_prompt_tokens=40, prompt_token_s=0.01)
    queue, _ = make(stats, ttft_target_s=1.0)
    queue.reserve(1, 30).set_tokens(30)
    with queue.reserve(1, 30):
        pass
    queue.require_in_time()
    last = queue.reserve(1, 2000)
    queue.require_in_time()  # the prompt is being tokenized, and may never reach the engine
    last.set_tokens(250)
    assert queue.estimated_prefill_s() == pytest.approx(3.2)
    with pytest.raises(OverloadedError, match="3.2 s, later than 1 s") as refused:
        queue.require_in_time()
    assert refused.value.retry_after_s == 3
    assert queue.rejections == {"ttft_target": 1}
    last.__exit__()
    queue.require_in_time()


@pytest.mark.parametrize(
    "stats", [None, SimpleNamespace(remaining_prompt_tokens=9**9, prompt_token_s=0.0)]
)
def test_without_a_known_prompt_speed_no_prompt_is_rejected(stats: Any) -> None:
    queue, _ = make(stats, ttft_target_s=1e-3)
    queue.reserve(1, 10**6).set_tokens(10**6)
    queue.require_in_time()


def test_without_a_target_no_prompt_is_rejected() -> None:
    queue, _ = make(SimpleNamespace(remaining_prompt_tokens=10**6, prompt_token_s=1.0))
    queue.reserve(1, 10**6).set_tokens(10**6)
    queue.require_in_time()
