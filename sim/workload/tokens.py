"""Token ids for the prompts of a trace, and stateless noise: the draw for a token is a hash of its
request and position."""

from __future__ import annotations

from typing import Any

import numpy as np

from sim.workload.traces.request import TraceRequest

VOCAB_SIZE = 2**31 - 1
_NO_TOKENS = np.zeros(0, np.int64)
_MASK = 2**64 - 1
ACCEPT = 1  # purpose of the noise that decides on drafts


def mix(state: Any, value: Any) -> Any:
    """Return one round of splitmix64 (Steele et al. 2014), for integers or uint64 arrays."""
    z = (state ^ value) + 0x9E3779B97F4A7C15 & _MASK
    z = (z ^ (z >> 30)) * 0xBF58476D1CE4E5B9 & _MASK
    z = (z ^ (z >> 27)) * 0x94D049BB133111EB & _MASK
    return z ^ (z >> 31)


class TracePrompts:
    """Prompts that share exactly the blocks that the trace says they share.

    Token j of the block with hash id h is h * block_tokens + j. Tokens outside named blocks are
    shared with no other request: their ids continue from one request to the next, leaving room for
    the output between them. Ids wrap around at the end of the vocabulary, which is so large that
    two equal whole prefixes do not occur.
    """

    def __init__(self) -> None:
        self._next_token = 0

    def prompt(self, request: TraceRequest) -> np.ndarray:
        """Return the prompt's token ids, int32 [prompt_tokens]."""
        named = _NO_TOKENS
        if request.hash_ids is not None:
            named = self._named(request.hash_ids, request.hash_block_tokens or 1)
        num_unnamed = request.prompt_tokens - len(named)
        if num_unnamed <= 0:
            return named[: request.prompt_tokens].astype(np.int32)
        if self._next_token + num_unnamed + request.output_tokens > VOCAB_SIZE:
            self._next_token = 0
        first = self._next_token
        self._next_token += num_unnamed + request.output_tokens
        unnamed = np.arange(first, first + num_unnamed, dtype=np.int32)
        return np.concatenate([named.astype(np.int32), unnamed]) if len(named) else unnamed

    def _named(self, hash_ids: tuple[int, ...], block_tokens: int) -> np.ndarray:
        blocks = np.asarray([h % (VOCAB_SIZE // block_tokens) for h in hash_ids], dtype=np.int64)
        tokens: np.ndarray = blocks[:, None] * block_tokens + np.arange(block_tokens)
        return tokens.reshape(-1)
