"""Drafters without a model: they draft the tokens after an earlier occurrence of the last tokens.

`LookupDrafter` keeps no state. It reads the *verified* tokens of a sequence when it drafts. So a
slot that never speculates costs nothing, prompts are not indexed, and rejected drafts or
preemptions need no undo. Reading the tokens costs little compared with attention over them.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from cbatch.runtime.compiled.lookup import CompiledLookup
from cbatch.runtime.drafting.contract import Drafter, DraftRows, Proposal
from cbatch.runtime.model.arrays import I64

# The longest text that a lookup reads, in tokens before the draft. It reads at least half of this.
# The limit bounds the cost of a draft.
WINDOW_TOKENS = 16384


class Lookup:
    """Guesses the continuation of a text."""

    struct: Any = None  # the same lookup for the C kernels; None: in Python only

    def guess(self, text: I64, depth: int) -> list[int]:
        """Return at most `depth` >= 1 tokens. A smaller depth gives a prefix of the same guess."""
        raise NotImplementedError


def followers(text: I64, context: I64) -> tuple[I64, int]:
    """Find the longest suffix of `context` that occurs in `text` with a token after it.

    Return the positions of these next tokens in `text`, ascending, and the suffix's length."""
    positions, size = np.arange(len(text)), 0
    for token in context[::-1].tolist():
        candidates = positions[positions > size]
        matches = candidates[text[candidates - size - 1] == token]
        if not len(matches):
            break
        positions, size = matches, size + 1
    return positions, size


class LookupDrafter(Drafter):
    """Drafts by a lookup in a window: the last `window_tokens / 2` to `window_tokens` tokens of a
    sequence. The window's start depends on the number of tokens only."""

    def __init__(self, lookup: Lookup, window_tokens: int = WINDOW_TOKENS) -> None:
        if window_tokens < 2:
            raise ValueError(f"window_tokens: {window_tokens} is not allowed; use at least 2")
        self._lookup = lookup
        self._half = window_tokens // 2
        self.compiled = CompiledLookup.of(lookup.struct, self._half)

    def kv_lens(self, slots: NDArray[np.integer]) -> I64 | None:
        return np.zeros(len(slots), dtype=np.int64)

    def propose(self, rows: DraftRows) -> Proposal:
        if self.compiled is not None:
            tokens, num_drafted = self.compiled.look_up(self.table.tokens, *rows[:3])
        else:
            tokens, num_drafted = self._look_up(rows)
        processors = self.table.logits_processors
        if processors.num_active:
            for i, slot in enumerate(rows.slots.tolist()):
                drafts = tokens[i, : num_drafted[i]].tolist()
                num_drafted[i] = processors.num_allowed(slot, drafts)
        return Proposal(tokens, num_drafted, None, np.zeros(len(tokens), dtype=np.bool_))

    def _look_up(self, rows: DraftRows) -> tuple[I64, I64]:
        depths = rows.num_drafts.tolist()
        tokens = np.zeros((len(depths), max(depths, default=0)), dtype=np.int64)
        num_drafted = np.zeros(len(depths), dtype=np.int64)
        requests = zip(rows.slots.tolist(), rows.num_tokens.tolist(), depths, strict=True)
        for i, (slot, known, depth) in enumerate(requests):
            drafts = self._guess(slot, known, depth) if depth else []
            tokens[i, : len(drafts)] = drafts
            num_drafted[i] = len(drafts)
        return tokens, num_drafted

    def _guess(self, slot: int, known: int, depth: int) -> list[int]:
        # The window moves by half its size, so a token stays in it for at least half a window.
        start = max(-(-known // self._half) - 2, 0) * self._half
        return self._lookup.guess(self.table.tokens[slot, start:known], depth)
