"""A language without a model: each token is a hash of the request and of everything before it.

A token thus depends on its request alone, and any error in an executor's view of the prefix changes
every later token.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from cbatch.core.request.request import FinishReason, Request
from sim.workload.tokens import mix

_MARK = 1 << 63  # set in every prefix hash, so that 0 and 1 are free for other meanings
EMPTY_PREFIX = _MARK


def extend_hash(prefix_hash: int, token: int) -> int:
    """Return the hash of a prefix and one more token. It depends on tokens alone, so equal prefixes
    share it."""
    mixed: int = mix(prefix_hash, token + 1)
    return mixed | _MARK


def prefix_hash(tokens: Iterable[int]) -> int:
    state = EMPTY_PREFIX
    for token in tokens:
        state = extend_hash(state, token)
    return state


def next_token(
    prefix: int, *, seed: int, choice: int, position: int, vocab_size: int, banned: Sequence[int]
) -> int:
    """Return the token at `position` after the prefix with that hash. `banned` must leave a
    token."""
    token: int = mix(mix(mix(prefix, seed), choice), position) % vocab_size
    for _ in range(vocab_size):
        if token not in banned:
            return token
        token = (token + 1) % vocab_size
    raise ValueError("banned: every token of the vocabulary is banned; leave at least one")


def uniform(seed: int, choice: int, position: int, purpose: int) -> float:
    """Return counter-based noise in [0, 1): the same arguments always give the same number."""
    bits: int = mix(mix(mix(mix(purpose, seed), choice), position), 0)
    return bits / 2**64


def reference_output(
    request: Request, *, vocab_size: int, eos_ids: Sequence[int], max_model_len: int
) -> tuple[list[int], FinishReason]:
    """Return the output of `request` served alone, one token at a time; an ending stop id is part
    of it."""
    params = request.params
    stop_ids = (*(() if params.ignore_eos else eos_ids), *params.stop_token_ids)
    state = prefix_hash(request.prompt)
    output: list[int] = []
    for position in range(len(request.prompt), max_model_len):
        banned = stop_ids if len(output) < params.min_tokens else ()
        token = next_token(
            state,
            seed=request.seed,
            choice=request.choice,
            position=position,
            vocab_size=vocab_size,
            banned=banned,
        )
        output.append(token)
        if token in stop_ids:
            return output, FinishReason.STOP
        if len(output) == params.max_tokens:
            break
        state = extend_hash(state, token)
    return output, FinishReason.LENGTH
