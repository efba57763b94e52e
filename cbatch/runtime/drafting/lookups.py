"""Lookup drafters by name, and the chain of an engine's drafters.

`ngram` is prompt lookup (Saxena 2023, "Prompt Lookup Decoding"), `suffix` is SuffixDecoding (Oliaro
et al. 2024, arXiv 2411.04975). The paper drafts from a suffix tree over prompt and output. It looks
up the last tokens and follows the most frequent continuation, at most `spec_factor * match length`
deep. It stops where the product of the observed frequencies gets small. This module gets the same
drafts by scanning the text.
"""

from __future__ import annotations

import numpy as np

from cbatch.core.scheduler.config import SchedulerConfig
from cbatch.runtime.compiled.lookup import LookupStruct
from cbatch.runtime.drafting.chain import ChainDrafter
from cbatch.runtime.drafting.contract import ModelDrafter
from cbatch.runtime.drafting.lookup import Lookup, LookupDrafter, followers
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


class SuffixLookup(Lookup):
    """Drafts the most frequent continuations.

    N(w, c) is the number of times that token c followed the tokens w. The context is the longest
    suffix w of the text, of `shortest_tokens` to `longest_tokens` tokens, with an earlier
    occurrence. Each draft is the c of the largest N(w, c) (the latest of equals), and extends the
    context. A context without an earlier occurrence is cut from the left until it has one. The
    number of drafts is at most `spec_factor` times the number of matched tokens, and the product of
    the drafts' frequencies N(w, c) / N(w) is at least `min_probability`.

    The default factor of 2 was measured on outputs of the demo target (T = 0 and 0.8, k = 4 and 8).
    It gave 1 to 5 % more tokens a step than the paper's factor 1, at equal acceptance (within
    0.002). Shorter contexts with a likelier c changed acceptance by at most 0.002.
    """

    def __init__(
        self,
        shortest_tokens: int = 2,
        longest_tokens: int = 24,
        spec_factor: float = 2.0,
        min_probability: float = 0.1,
    ) -> None:
        for field, ok, value in (
            ("shortest_tokens", 1 <= shortest_tokens <= longest_tokens, shortest_tokens),
            ("spec_factor", spec_factor > 0, spec_factor),
            ("min_probability", 0 <= min_probability <= 1, min_probability),
        ):
            if not ok:
                raise ValueError(
                    f"{field}: {value} is not allowed; use 1 <= shortest_tokens <= longest_tokens, "
                    "spec_factor > 0 and min_probability in [0, 1]"
                )
        self._shortest, self._longest = shortest_tokens, longest_tokens
        self._spec_factor, self._min_probability = spec_factor, min_probability
        self.struct = LookupStruct(
            shortest_tokens, longest_tokens, True, spec_factor, min_probability
        )

    def guess(self, text: I64, depth: int) -> list[int]:
        positions, matched = followers(text, text[-self._longest :])
        if matched < self._shortest:
            return []
        drafts: list[int] = []
        size, probability = matched, 1.0
        while len(drafts) < min(depth, int(self._spec_factor * matched)):
            if drafts:
                size = min(size + 1, self._longest)
                context = np.concatenate((text[-matched:], drafts))[-size:]
                positions, size = followers(text, context)
            token, count = _likeliest(text[positions])
            probability *= count / len(positions)
            if probability < self._min_probability:
                break
            drafts.append(token)
        return drafts


def _likeliest(tokens: I64) -> tuple[int, int]:
    """Return the most frequent token (the latest of equals) and its count."""
    values, at, counts = np.unique(tokens[::-1], return_index=True, return_counts=True)
    best = np.lexsort((at, -counts))[0]
    return int(values[best]), int(counts[best])


def all_lookups() -> dict[str, Lookup]:
    """Return a lookup of each name in `LOOKUPS` of `cbatch.core.request.request`."""
    return {"ngram": NgramLookup(), "suffix": SuffixLookup()}


def chain_drafter(config: SchedulerConfig, model: ModelDrafter | None) -> ChainDrafter:
    """Return the drafters of an engine on the host; `model` is its draft model or head, if any."""
    return ChainDrafter(
        model=model,
        lookups={name: LookupDrafter(lookup) for name, lookup in all_lookups().items()},
        default=config.default_chain,
    )
