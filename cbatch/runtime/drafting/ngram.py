"""Drafters without a model: what followed the last tokens where they stood before.

`LookupDrafter` keeps one index per slot over prompt and output. An index follows the *verified*
tokens only and is brought up to date when it is asked, so a slot that never speculates costs
nothing and a rejected draft has nothing to undo. `NgramIndex` is prompt lookup (Saxena 2023,
"Prompt Lookup Decoding"); `cbatch/runtime/drafting/suffix.py` has the index of SuffixDecoding.

Such a drafter chooses with certainty, so it also knows after the fact what it would have drafted:
`observe` scores it on tokens that were emitted without drafts.
"""

from __future__ import annotations

from array import array
from collections.abc import Callable
from typing import NamedTuple, Protocol

import numpy as np
from numpy.typing import NDArray

from cbatch.core.scheduler.plan import NewSequence
from cbatch.runtime.cpu.drafter import Drafter, DraftRows, Proposal
from cbatch.runtime.cpu.input_batch import InputBatch
from cbatch.runtime.model.arrays import I64

# At most so many tokens of a sequence are indexed, and at least the last half of them. An index was
# measured to take 0.2 to 0.5 kB a token, hence at most 8 MB a slot.
WINDOW_TOKENS = 16384


class Index(Protocol):
    """A sequence of tokens that grows at its end, and a guess of how it goes on."""

    def append(self, token: int) -> None:
        """Amortised constant time."""

    def propose(self, depth: int) -> list[int]:
        """At most `depth` >= 1 tokens; a smaller depth gives the beginning of the same guess."""


class Evidence(NamedTuple):
    """Per row, what a drafter would have scored on tokens emitted without drafts."""

    trials: I64  # [R] tokens before which it would have drafted
    hits: I64  # [R] of these, how many its first draft would have named


class NgramIndex:
    """The tokens that followed the latest earlier occurrence of the longest known ending.

    Endings of `longest_tokens` down to `shortest_tokens` tokens are looked up. A match so near the
    end that its continuation runs out goes on with its own drafts, which repeats a period.
    """

    def __init__(self, shortest_tokens: int = 2, longest_tokens: int = 4) -> None:
        if not 1 <= shortest_tokens <= longest_tokens:
            raise ValueError(
                f"shortest_tokens: {shortest_tokens} with longest_tokens {longest_tokens} is not "
                "allowed; use 1 <= shortest_tokens <= longest_tokens"
            )
        self._tokens = array("i")
        # For each length: n-gram, as bytes -> where its latest occurrence ended.
        self._ends: list[tuple[int, dict[bytes, int]]] = [
            (size, {}) for size in range(shortest_tokens, longest_tokens + 1)
        ]
        self._match: int | None = None  # where the latest earlier occurrence of the ending ended

    def append(self, token: int) -> None:
        tokens = self._tokens
        tokens.append(token)
        end = len(tokens)
        self._match = None
        for size, ends in self._ends:
            if size > end:
                return
            ngram = tokens[end - size :].tobytes()
            earlier = ends.get(ngram)
            if earlier is not None:  # a longer one overrides
                self._match = earlier
            ends[ngram] = end

    def propose(self, depth: int) -> list[int]:
        start = self._match
        if start is None:
            return []
        drafts = self._tokens[start : start + depth].tolist()
        period = len(self._tokens) - start
        while len(drafts) < depth:
            drafts.append(drafts[-period])
        return drafts


class _Text:
    """An index over positions `start` to `end` of a slot's tokens."""

    __slots__ = ("end", "index", "start")

    def __init__(self, index: Index, start: int) -> None:
        self.index = index
        self.start = self.end = start


class LookupDrafter(Drafter):
    """Drafts from an index per slot. Keeps nothing in KV, so it is never behind.

    `window_tokens` bounds the memory of a slot: the index holds the last `window_tokens / 2` to
    `window_tokens` tokens of its sequence. Where it starts depends on their number alone, so that
    an index built anew, as after a preemption, equals one that grew.
    """

    def __init__(self, make_index: Callable[[], Index], window_tokens: int = WINDOW_TOKENS) -> None:
        if window_tokens < 2:
            raise ValueError(f"window_tokens: {window_tokens} is not allowed; use at least 2")
        self._make_index = make_index
        self._half = window_tokens // 2

    def bind(self, table: InputBatch, num_blocks: int) -> None:
        super().bind(table, num_blocks)
        self.reset()

    def reset(self) -> None:
        self._texts: list[_Text | None] = [None] * self.table.max_slots

    def admit(self, admission: NewSequence) -> None:
        self._texts[admission.slot] = None

    def release(self, slot: int) -> None:
        self._texts[slot] = None

    def kv_lens(self, slots: NDArray[np.integer]) -> I64 | None:
        return np.zeros(len(slots), dtype=np.int64)

    def propose(self, rows: DraftRows) -> Proposal:
        depths = rows.num_drafts.tolist()
        tokens = np.zeros((len(depths), max(depths, default=0)), dtype=np.int64)
        num_drafted = np.zeros(len(depths), dtype=np.int64)
        places = zip(rows.slots.tolist(), rows.num_tokens.tolist(), depths, strict=True)
        for i, (slot, known, depth) in enumerate(places):
            if depth:
                drafts = self._read(slot, known).index.propose(depth)
                del drafts[self.table.logits_processors.num_allowed(slot, drafts) :]
                tokens[i, : len(drafts)] = drafts
                num_drafted[i] = len(drafts)
        return Proposal(tokens, num_drafted, None, np.zeros(len(depths), dtype=np.bool_))

    def observe(self, slots: NDArray[np.integer], since: I64) -> Evidence:
        """Score the known tokens of `slots` from position `since[i]` on, each against the draft
        that its predecessors call for. Depends on emitted tokens alone, so lookahead may follow it
        without changing the law of the output.

        Call it after a step for rows that drafted nothing; `since` is their `num_tokens` before the
        step. Tokens that the drafter has read already are not scored again.
        """
        trials, hits = np.zeros((2, len(slots)), dtype=np.int64)
        places = zip(slots.tolist(), since.tolist(), strict=True)
        for i, (slot, first) in enumerate(places):
            text, known = self._read(slot, first), int(self.table.num_tokens[slot])
            index = text.index
            for token in self.table.tokens[slot, text.end : known].tolist():
                guess = index.propose(1)
                if guess:
                    trials[i] += 1
                    hits[i] += guess[0] == token
                index.append(token)
            text.end = max(known, text.end)
        return Evidence(trials, hits)

    def _read(self, slot: int, known: int) -> _Text:
        """The slot's index, after at least its first `known` tokens."""
        # Steps of half a window: what is dropped was indexed half a window of tokens ago.
        start = max(-(-known // self._half) - 2, 0) * self._half
        text = self._texts[slot]
        if text is None or text.start < start:
            text = self._texts[slot] = _Text(self._make_index(), start)
        if text.end < known:
            append = text.index.append
            for token in self.table.tokens[slot, text.end : known].tolist():
                append(token)
            text.end = known
        return text
