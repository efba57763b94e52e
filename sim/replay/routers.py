"""Routers of a fleet: they choose the replica for a request.

A router knows what a gateway knows: which requests it sent where, which of them have ended, and
their prompts. It knows neither the state inside a replica nor the length of an output. Ties go to
the next replica in turn.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Iterator
from hashlib import blake2b
from itertools import pairwise
from typing import Protocol

import numpy as np

from cbatch.core.request.errors import FieldError

BLOCK_TOKENS = 64  # tokens per block of remembered prefixes
MAX_PREFIXES = 2**18  # limit of remembered prefixes; the least recently used are dropped first
# A prefix does not count on a replica whose open requests exceed the fewest by more than both
# limits: a number, and a share of the fewest.
MAX_EXCESS_REQUESTS = 8
MAX_EXCESS_SHARE = 0.5
MIN_SHARE = 0.25  # share of the prompt, above which a prefix alone decides


class ReplicaLoad:
    """Requests and prompt tokens that each replica was sent and has not answered."""

    def __init__(self, num_replicas: int) -> None:
        self.requests = [0] * num_replicas
        self.prompt_tokens = [0] * num_replicas

    def add(self, replica: int, prompt_tokens: int) -> None:
        self.requests[replica] += 1
        self.prompt_tokens[replica] += prompt_tokens

    def remove(self, replica: int, prompt_tokens: int) -> None:
        self.requests[replica] -= 1
        self.prompt_tokens[replica] -= prompt_tokens


class Router(Protocol):
    def route(self, prompt: np.ndarray, load: ReplicaLoad) -> int:
        """Return the replica for the request with this prompt (int32), which is not yet in
        `load`."""


class RoundRobin:
    """Choose each replica in turn, regardless of load."""

    def __init__(self) -> None:
        self._next = 0

    def route(self, prompt: np.ndarray, load: ReplicaLoad) -> int:
        chosen = self._next
        self._next = (chosen + 1) % len(load.requests)
        return chosen


class LeastLoaded:
    """Choose the replica with the fewest open requests, then the fewest prompt tokens."""

    def __init__(self) -> None:
        self._next = 0

    def route(self, prompt: np.ndarray, load: ReplicaLoad) -> int:
        chosen = _least_loaded(load, self._next)
        self._next = chosen + 1
        return chosen


class PrefixAffine:
    """Choose the replica that was sent the longest prefix of the prompt, in whole blocks. If it is
    only a small part of the prompt, such as a system prompt of all requests, it is weighed against
    the load: the replica with the fewest prompt tokens, without those of the prefix, is chosen."""

    def __init__(self) -> None:
        self._next = 0
        self._sent: OrderedDict[bytes, int] = OrderedDict()  # by prefix: a bit mask of replicas

    def route(self, prompt: np.ndarray, load: ReplicaLoad) -> int:
        prefixes, least = _prefixes(prompt), min(load.requests)
        limit = least + max(MAX_EXCESS_REQUESTS, MAX_EXCESS_SHARE * least)
        known = [
            length if load.requests[replica] <= limit else 0
            for replica, length in enumerate(self._known(prefixes, len(load.requests)))
        ]
        chosen = known.index(max(known))
        if known[chosen] <= MIN_SHARE * len(prefixes):
            in_turn = _in_turn(len(known), self._next)
            saved = [BLOCK_TOKENS * length for length in known]
            work = [each - less for each, less in zip(load.prompt_tokens, saved, strict=True)]
            chosen = min(in_turn, key=lambda i: (work[i], load.requests[i]))
        self._next = chosen + 1
        self._remember(prefixes, chosen)
        return chosen

    def _known(self, prefixes: list[bytes], num_replicas: int) -> list[int]:
        """Return for each replica how many leading blocks of the prompt it was sent."""
        lengths, knowing = [0] * num_replicas, (1 << num_replicas) - 1
        for length, prefix in enumerate(prefixes, 1):
            knowing &= self._sent.get(prefix, 0)
            if not knowing:
                break
            for replica in range(num_replicas):
                if knowing >> replica & 1:
                    lengths[replica] = length
        return lengths

    def _remember(self, prefixes: list[bytes], replica: int) -> None:
        for prefix in prefixes:
            self._sent[prefix] = self._sent.pop(prefix, 0) | 1 << replica
        while len(self._sent) > MAX_PREFIXES:
            self._sent.popitem(last=False)


ROUTERS: dict[str, Callable[[], Router]] = {
    "round-robin": RoundRobin,
    "least-loaded": LeastLoaded,
    "prefix-affine": PrefixAffine,
}


def make_router(name: str, replicas: int) -> Router | None:
    """Return the router for `replicas`, None for a single one. Raises `FieldError`."""
    if replicas < 1:
        raise FieldError("--replicas", f"{replicas} is not allowed", "use at least 1")
    if name not in ROUTERS:
        raise FieldError("--router", f"{name!r} is unknown", f"use one of {', '.join(ROUTERS)}")
    return ROUTERS[name]() if replicas > 1 else None


def _least_loaded(load: ReplicaLoad, first: int) -> int:
    """Return the least loaded replica; ties go to the first in turn, counted from `first`."""
    in_turn = _in_turn(len(load.requests), first)
    return min(in_turn, key=lambda i: (load.requests[i], load.prompt_tokens[i]))


def _in_turn(count: int, first: int) -> Iterator[int]:
    return ((first + i) % count for i in range(count))


def _prefixes(prompt: np.ndarray) -> list[bytes]:
    """Return a digest for every prefix of whole blocks."""
    names = [b""]
    for start, end in pairwise(range(0, len(prompt) + 1, BLOCK_TOKENS)):
        names.append(blake2b(names[-1] + prompt[start:end].tobytes(), digest_size=16).digest())
    return names[1:]
