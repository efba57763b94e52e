"""Token ids for the prompts of a trace, which says only how long they are and what they share."""

from __future__ import annotations

import numpy as np

from sim.traces.request import TraceRequest

VOCAB_SIZE = 2**31 - 1


class PromptMaker:
    """Prompts that share exactly what the trace says.

    Token j of a block named h is h * block + j. Requests without names share nothing: theirs are
    counted on from one to the next, room for the output between. Numbers start again at the end of
    the vocabulary, so far on that a whole prefix never meets itself.
    """

    def __init__(self) -> None:
        self._next_token = 0

    def prompt(self, request: TraceRequest) -> np.ndarray:
        """int32 [prompt_tokens]."""
        count = request.prompt_tokens
        if request.hash_ids is None:
            first = self._next_token
            self._next_token = (first + count + request.output_tokens) % VOCAB_SIZE
            tokens = np.arange(first, first + count, dtype=np.int64)
        else:
            size = request.hash_block_tokens or 0
            blocks = np.asarray(request.hash_ids[: -(-count // size)], dtype=np.int64)
            firsts = blocks % (VOCAB_SIZE // size) * size
            tokens = (firsts[:, None] + np.arange(size)).reshape(-1)[:count]
        wrapped: np.ndarray = tokens % VOCAB_SIZE
        return wrapped.astype(np.int32)
