"""Prompt lookup (Saxena 2023, "Prompt Lookup Decoding")."""

from __future__ import annotations

from cbatch.runtime.compiled.lookup import LookupStruct
from cbatch.runtime.drafting.lookup import Lookup, followers
from cbatch.runtime.model.arrays import I64


class NgramLookup(Lookup):
    """Drafts the tokens that followed the latest earlier occurrence of the longest known ending.

    Endings of `longest_tokens` down to `shortest_tokens` tokens are looked up. A match may be so
    near the end that its continuation runs out. The drafts then repeat from their beginning, as
    periodic text does.
    """

    def __init__(self, shortest_tokens: int = 2, longest_tokens: int = 4) -> None:
        if not 1 <= shortest_tokens <= longest_tokens:
            raise ValueError(
                f"shortest_tokens: {shortest_tokens} with longest_tokens {longest_tokens} is not "
                "allowed; use 1 <= shortest_tokens <= longest_tokens"
            )
        self._shortest, self._longest = shortest_tokens, longest_tokens
        self.struct = LookupStruct(shortest_tokens, longest_tokens, False, 0.0, 0.0)

    def guess(self, text: I64, depth: int) -> list[int]:
        positions, size = followers(text, text[-self._longest :])
        if size < self._shortest:
            return []
        start = int(positions[-1])
        drafts: list[int] = text[start : start + depth].tolist()
        period = len(text) - start
        while len(drafts) < depth:
            drafts.append(drafts[-period])
        return drafts
