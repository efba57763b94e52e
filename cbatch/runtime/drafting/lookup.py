"""Drafters without a model: what followed the last tokens where they stood before.

`LookupDrafter` keeps nothing. A lookup reads the *verified* tokens of a sequence when it is asked,
so a slot that never speculates costs nothing, prompts are not indexed, and neither a rejected draft
nor a preemption has anything to undo. To read them costs little beside what attends to them.

Such a drafter chooses with certainty, so it also knows after the fact what it would have drafted:
`observe` scores it on tokens that were emitted without drafts.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from cbatch.runtime.cpu.compiled.lookup import CompiledLookup, LookupStruct
from cbatch.runtime.cpu.drafter import Drafter, DraftRows, Proposal
from cbatch.runtime.model.arrays import I64, iota

# At most so many tokens before a draft are looked at, and at least the last half of them: it bounds
# what a draft costs.
WINDOW_TOKENS = 16384


class Lookup:
    """A guess of how a text goes on."""

    struct: LookupStruct | None = None  # by which the kernels know it, too; None: they do not

    def guess(self, text: I64, depth: int) -> list[int]:
        """At most `depth` >= 1 tokens; a smaller depth gives the beginning of the same guess."""
        raise NotImplementedError


class Evidence(NamedTuple):
    """Per row, what a drafter would have scored on tokens emitted without drafts."""

    trials: I64  # [R] tokens before which it would have drafted
    hits: I64  # [R] of these, how many its first draft would have named


def followers(text: I64, context: I64) -> tuple[I64, int]:
    """Places in `text`, ascending, whose tokens follow the longest end of `context` that any token
    follows, and the length of that."""
    places, size = np.arange(len(text)), 0
    for token in context[::-1].tolist():
        before = places[places > size]
        longer = before[text[before - size - 1] == token]
        if not len(longer):
            break
        places, size = longer, size + 1
    return places, size


class LookupDrafter(Drafter):
    """Drafts what a lookup finds in the last `window_tokens / 2` to `window_tokens` tokens of a
    sequence. Where they start depends on their number alone."""

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

    def observe(self, slots: NDArray[np.integer], since: I64) -> Evidence:
        """Score the known tokens of `slots` from position `since[i]` on, each against the draft
        that its predecessors call for. Depends on emitted tokens alone, so lookahead may follow it
        without changing the law of the output.

        Call it after a step for rows that drafted nothing since then.
        """
        known = self.table.num_tokens[slots]
        if self.compiled is not None:
            return Evidence(*self.compiled.score(self.table.tokens, slots, since, known))
        evidence = Evidence(*np.zeros((2, len(slots)), dtype=np.int64))
        for i, slot in enumerate(slots.tolist()):
            for end in range(since[i], known[i]):
                guess = self._guess(slot, end, 1)
                evidence.trials[i] += bool(guess)
                evidence.hits[i] += guess == [self.table.tokens[slot, end]]
        return evidence

    def replay(
        self, slots: NDArray[np.integer], since: I64, depths: I64
    ) -> tuple[NDArray[np.bool_], I64]:
        """Whether it would have drafted after the first `since[i]` tokens of a slot, asked for
        `depths[i]` drafts, and how many would have been accepted; so many tokens are known since.
        Depends on emitted tokens alone, as `observe` does."""
        if self.compiled is not None:
            tokens, num_drafted = self.compiled.look_up(self.table.tokens, slots, since, depths)
        else:
            tokens, num_drafted = self._look_up(DraftRows(slots, since, depths, depths))
        depth = iota(tokens.shape[1])
        places = np.minimum(since[:, None] + depth, self.table.tokens.shape[1] - 1)
        emitted = self.table.tokens[slots[:, None], places]
        stands = (tokens == emitted) & (depth < num_drafted[:, None])
        hits: I64 = np.logical_and.accumulate(stands, axis=1).sum(axis=1)
        return num_drafted > 0, hits

    def _look_up(self, rows: DraftRows) -> tuple[I64, I64]:
        depths = rows.num_drafts.tolist()
        tokens = np.zeros((len(depths), max(depths, default=0)), dtype=np.int64)
        num_drafted = np.zeros(len(depths), dtype=np.int64)
        places = zip(rows.slots.tolist(), rows.num_tokens.tolist(), depths, strict=True)
        for i, (slot, known, depth) in enumerate(places):
            drafts = self._guess(slot, known, depth) if depth else []
            tokens[i, : len(drafts)] = drafts
            num_drafted[i] = len(drafts)
        return tokens, num_drafted

    def _guess(self, slot: int, known: int, depth: int) -> list[int]:
        """After the first `known` tokens of a slot."""
        # Steps of half a window: what is dropped was seen for half a window of tokens.
        start = max(-(-known // self._half) - 2, 0) * self._half
        return self._lookup.guess(self.table.tokens[slot, start:known], depth)
