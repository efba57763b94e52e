"""Requests of the comparisons: the demo's prompts, prompts that share prefixes, and probes."""

from __future__ import annotations

import itertools
from collections.abc import Sequence

import msgspec
import numpy as np

from sim.workload.arrivals import poisson
from sim.workload.generate import generate
from sim.workload.lengths import uniform
from sim.workload.tokens import TracePrompts
from sim.workload.traces.request import TraceRequest

BLOCK_TOKENS = 16
GROUPS, GROUP_BLOCKS = 24, 32  # shared prefixes, and the blocks of each
OWN_TOKENS, OUTPUT_TOKENS = (16, 96), (8, 64)  # ranges: prompt after the prefix, output
VOCAB_SIZE = 4096  # vocabulary of the demo pair
_PROBE_GROUP = 10**6  # a prefix that no run has
FULL_ROWS = 16  # requests of a full replica in `probe_runs`
_PROBE_TOKENS = 16  # prompt tokens of a probe after the shared prefix

# A prompt as a router sees it, int32, and as token ids of the model.
Prompt = tuple[np.ndarray, list[int]]


def from_prompts(
    texts: Sequence[Sequence[int]], rate_per_s: float, count: int, seed: int
) -> list[TraceRequest]:
    """Return a Poisson process of requests; their prompts have the lengths of `texts` in turn."""
    lengths = uniform(*OUTPUT_TOKENS)
    requests = generate(
        lambda rng: poisson(rate_per_s, rng), lengths, lengths, requests=count, seed=seed
    )
    return [
        msgspec.structs.replace(request, prompt_tokens=len(text))
        for request, text in zip(requests, itertools.cycle(texts), strict=False)
    ]


def shared_prefixes(rate_per_s: float, count: int, seed: int) -> list[TraceRequest]:
    """Return a Poisson process of requests whose prompts begin with one of `GROUPS` prefixes, drawn
    at random, and end in tokens of their own. Prefixes of different seeds differ."""
    rng = np.random.default_rng(seed)
    arrivals_s = list(itertools.islice(poisson(rate_per_s, rng), count))
    groups = (seed * GROUPS + rng.integers(0, GROUPS, count)).tolist()
    own = rng.integers(*OWN_TOKENS, count, endpoint=True).tolist()
    outputs = rng.integers(*OUTPUT_TOKENS, count, endpoint=True).tolist()
    first_s = arrivals_s[0]
    return [
        _request(arrival_s - first_s, own_tokens, output_tokens, group)
        for arrival_s, own_tokens, output_tokens, group in zip(
            arrivals_s, own, outputs, groups, strict=True
        )
    ]


def probe_runs(replicas: int, shared: bool) -> tuple[tuple[int, list[TraceRequest]], ...]:
    """Return three runs, each with its number of replicas: single short requests, `FULL_ROWS`
    requests at once to one replica, and repeatedly a request for each replica at once. If
    `shared`, all prompts share a prefix, which a replica has cached after the first."""
    group = _PROBE_GROUP if shared else None

    def probe(arrival_s: float, output_tokens: int) -> TraceRequest:
        return _request(arrival_s, _PROBE_TOKENS, output_tokens, group)

    return (
        (replicas, [probe(i / 20.0, 24) for i in range(48)]),
        (1, [probe(0.0, 96) for _ in range(FULL_ROWS)]),
        (replicas, [probe(0.3 * i, 128) for i in range(8) for _ in range(replicas)]),
    )


def _request(
    arrival_s: float, own_tokens: int, output_tokens: int, group: int | None
) -> TraceRequest:
    if group is None:
        return TraceRequest(
            arrival_s=arrival_s, prompt_tokens=own_tokens, output_tokens=output_tokens
        )
    first = group * GROUP_BLOCKS
    return TraceRequest(
        arrival_s=arrival_s,
        prompt_tokens=GROUP_BLOCKS * BLOCK_TOKENS + own_tokens,
        output_tokens=output_tokens,
        hash_ids=tuple(range(first, first + GROUP_BLOCKS)),
        hash_block_tokens=BLOCK_TOKENS,
    )


def prompts_of(requests: Sequence[TraceRequest], texts: Sequence[list[int]]) -> list[Prompt]:
    """Return the prompts of `requests`: `texts` in turn, or synthetic ones as in a replay."""
    if texts:
        turns = itertools.islice(itertools.cycle(texts), len(requests))
        return [(np.array(text, np.int32), text) for text in turns]
    synthetic = TracePrompts()
    return [(prompt, to_model_ids(prompt)) for prompt in map(synthetic.prompt, requests)]


def to_model_ids(prompt: np.ndarray) -> list[int]:
    """Map a synthetic prompt to ids of the model's vocabulary, without id 0, which ends a
    sequence."""
    return (1 + prompt.astype(np.int64) % (VOCAB_SIZE - 1)).tolist()
