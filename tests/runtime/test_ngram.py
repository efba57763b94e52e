"""Prompt lookup compared with its definition."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from cbatch.runtime.drafting.lookup import LookupDrafter
from cbatch.runtime.drafting.ngram import NgramLookup

texts = st.lists(st.integers(0, 2), max_size=40)


def by_definition(text: list[int], depth: int, shortest: int, longest: int) -> list[int]:
    """Return the tokens after the latest earlier occurrence of the longest ending, drafts
    included."""
    for n in range(min(longest, len(text)), shortest - 1, -1):
        for end in range(len(text) - 1, n - 1, -1):
            if text[end - n : end] == text[-n:]:
                extended = list(text)
                for i in range(depth):
                    extended.append(extended[end + i])
                return extended[len(text) :]
    return []


@settings(max_examples=150, deadline=None)
@given(text=texts, shortest=st.integers(1, 3), more=st.integers(0, 3), depth=st.integers(1, 8))
def test_drafts_are_those_of_the_definition(text, shortest, more, depth):
    lookup, tokens = NgramLookup(shortest, shortest + more), np.array(text, dtype=np.int64)
    for end in range(len(text) + 1):
        expected = by_definition(text[:end], depth, shortest, shortest + more)
        assert lookup.guess(tokens[:end], depth) == expected


def test_ngrams_of_zero_are_refused_by_name():
    with pytest.raises(ValueError, match="shortest_tokens"):
        NgramLookup(0, 3)
    with pytest.raises(ValueError, match="window_tokens"):
        LookupDrafter(NgramLookup(), window_tokens=1)
