"""Changes to a trace: spread timestamps, another rate, fewer requests, other lengths."""

from __future__ import annotations

import hashlib
import math
from collections.abc import Iterable, Iterator
from itertools import chain, count, groupby, pairwise

import numpy as np
from msgspec.structs import replace

from cbatch.core.request.errors import FieldError
from sim.workload.arrivals import require_positive
from sim.workload.lengths import MAX_TOKENS
from sim.workload.traces.request import TraceRequest

MIN_GAP = 0.99  # of the bins of `spread`


def spread(requests: Iterable[TraceRequest], bin_s: float, seed: int) -> Iterator[TraceRequest]:
    """Spread timestamps that were rounded down to multiples of `bin_s` (3 s in Mooncake, whose
    timestamps are 2.999 s apart at least). Each request moves to a uniformly random time before the
    next timestamp, within `bin_s`; the order stays. Raises `FieldError` if two timestamps are less
    than `MIN_GAP` of `bin_s` apart."""
    require_positive("spread", bin_s)
    rng = np.random.default_rng(seed)
    groups = (list(group) for _, group in groupby(requests, key=lambda request: request.arrival_s))
    for group, later in pairwise(chain(groups, [None])):
        timestamp_s = group[0].arrival_s
        gap_s = math.inf if later is None else later[0].arrival_s - timestamp_s
        if gap_s < bin_s * MIN_GAP:
            raise FieldError(
                "--spread",
                f"timestamps are {gap_s:.6g} s apart, at {timestamp_s:.6g} s",
                "the trace is rounded to less than that: give fewer seconds",
            )
        offsets_s = np.sort(rng.random(len(group))) * min(bin_s, gap_s)
        for request, offset_s in zip(group, offsets_s.tolist(), strict=True):
            yield replace(request, arrival_s=timestamp_s + offset_s)


def rate_of(requests: Iterable[TraceRequest]) -> float:
    """Return the mean arrival rate, in requests per second. Raises `FieldError` if all requests
    arrive at the same time."""
    count, first_s, last_s = 0, 0.0, 0.0
    for request in requests:
        last_s = request.arrival_s
        first_s = first_s if count else last_s
        count += 1
    if last_s <= first_s:
        problem = "the trace has no rate of its own: its requests all arrive at once"
        raise FieldError("--rate", problem, "leave it out, or give a trace with arrivals")
    return (count - 1) / (last_s - first_s)


def scale(
    requests: Iterable[TraceRequest],
    *,
    rate: float = 1.0,
    prompt: float = 1.0,
    output: float = 1.0,
) -> Iterator[TraceRequest]:
    """Multiply the arrival rate and the lengths, which stay at least one token. Think times of
    sessions do not change. Raises `FieldError` for lengths beyond `MAX_TOKENS`, and for scaled
    prompts with `hash_ids`."""
    for field, value in (("--rate-scale", rate), ("--prompt", prompt), ("--output", output)):
        require_positive(field, value)
    for request in requests:
        if prompt != 1 and request.hash_ids is not None:
            raise FieldError(
                "--prompt", "prompts with hash_ids have a fixed length", "scale the rate or outputs"
            )
        yield replace(
            request,
            arrival_s=request.arrival_s / rate,
            prompt_tokens=_scaled("--prompt", request.prompt_tokens, prompt),
            output_tokens=_scaled("--output", request.output_tokens, output),
        )


def _scaled(field: str, tokens: int, factor: float) -> int:
    scaled = max(1, round(tokens * factor))
    if scaled > MAX_TOKENS:
        raise FieldError(
            field, f"scales {tokens} tokens to {scaled}", f"the maximum is {MAX_TOKENS}"
        )
    return scaled


def sample(
    requests: Iterable[TraceRequest],
    *,
    share: float = 1.0,
    max_requests: int | None = None,
    start_s: float = 0.0,
    end_s: float = math.inf,
    seed: int = 0,
) -> Iterator[TraceRequest]:
    """Yield a sample of the requests that arrive in [start_s, end_s). First a random `share` is
    kept, by whole sessions if the trace has sessions; then the first `max_requests`. Arrival
    times become relative to the first request of the sample."""
    if not 0 < share <= 1:
        raise FieldError("--share", f"{share} is not allowed", "use a number in (0, 1]")
    if max_requests is not None and max_requests < 1:
        raise FieldError("--requests", f"{max_requests} is not allowed", "ask for at least 1")
    if not 0 <= start_s < end_s:
        raise FieldError("--window", f"{start_s} to {end_s} is empty", "give START:END in seconds")
    kept, first_s = 0, 0.0
    for index, request in enumerate(requests):
        if request.arrival_s >= end_s or kept == max_requests:
            break
        if request.arrival_s < start_s:
            continue
        name = str(index) if request.session is None else f"session {request.session}"
        if share < 1 and _hash_share(name, seed) >= share:
            continue
        if not kept:
            first_s = request.arrival_s
        kept += 1
        yield replace(request, arrival_s=request.arrival_s - first_s)


def endless(requests: list[TraceRequest]) -> Iterator[TraceRequest]:
    """Repeat the requests without end. The mean gap between arrivals separates two repetitions.
    Each repetition has its own session names and `hash_ids`, so repetitions share no prefixes."""
    period_s = max(r.arrival_s for r in requests) * len(requests) / max(len(requests) - 1, 1)
    num_ids = 1 + max((max(r.hash_ids) for r in requests if r.hash_ids), default=0)
    yield from requests
    for repetition in count(1):
        for request in requests:
            hash_ids, session = request.hash_ids, request.session
            if hash_ids is not None:
                hash_ids = tuple(i + repetition * num_ids for i in hash_ids)
            if session is not None:
                session = f"{session} ({repetition})"
            arrival_s = request.arrival_s + repetition * period_s
            yield replace(request, arrival_s=arrival_s, hash_ids=hash_ids, session=session)


def _hash_share(name: str, seed: int) -> float:
    """Return a number in [0, 1) that depends on name and seed alone. All requests of a session get
    the same number, so that the session is kept or dropped as a whole."""
    digest = hashlib.blake2b(f"{seed} {name}".encode(), digest_size=8).digest()
    return int.from_bytes(digest, "big") / 2**64
