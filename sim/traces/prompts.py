"""Token ids for the prompts of a trace, which says only how long they are and what they share."""

from __future__ import annotations

import numpy as np

from sim.traces.request import TraceRequest

VOCAB_SIZE = 2**31 - 1
_NOTHING = np.zeros(0, np.int64)


class TracePrompts:
    """Prompts that share exactly what the trace says.

    Token j of a block named h is h * block + j. Tokens without a name are shared with nobody: they
    are counted on from one request to the next, with room for the output between. Numbers start
    again at the end of the vocabulary, so far on that no whole prefix meets itself.
    """

    def __init__(self) -> None:
        self._next_token = 0

    def prompt(self, request: TraceRequest) -> np.ndarray:
        """int32 [prompt_tokens]."""
        named = _NOTHING
        if request.hash_ids is not None:
            named = self._named(request.hash_ids, request.hash_block_tokens or 1)
        missing = request.prompt_tokens - len(named)
        if missing <= 0:
            return named[: request.prompt_tokens].astype(np.int32)
        if self._next_token + missing + request.output_tokens > VOCAB_SIZE:
            self._next_token = 0
        first = self._next_token
        self._next_token += missing + request.output_tokens
        unnamed = np.arange(first, first + missing, dtype=np.int32)
        return np.concatenate([named.astype(np.int32), unnamed]) if len(named) else unnamed

    def _named(self, hash_ids: tuple[int, ...], block_tokens: int) -> np.ndarray:
        blocks = np.asarray([h % (VOCAB_SIZE // block_tokens) for h in hash_ids], dtype=np.int64)
        tokens: np.ndarray = blocks[:, None] * block_tokens + np.arange(block_tokens)
        return tokens.reshape(-1)
