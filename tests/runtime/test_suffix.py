"""SuffixDecoding's drafts compared with their definition by counting substrings."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from cbatch.runtime.drafting.suffix import SuffixLookup

texts = st.lists(st.integers(0, 2), max_size=40)
shapes = st.tuples(
    st.integers(1, 3), st.integers(0, 4), st.sampled_from([0.5, 1.0, 2.5]), st.floats(0, 0.6)
).map(lambda s: (s[0], s[0] + s[1], s[2], s[3]))


def followers(text: list[int], context: list[int]) -> dict[int, tuple[int, int]]:
    """Return, for each token that followed `context` in `text`, its count and last place."""
    counts: dict[int, tuple[int, int]] = {}
    for end in range(len(context), len(text)):
        if text[end - len(context) : end] == context:
            counts[text[end]] = (counts.get(text[end], (0, 0))[0] + 1, end)
    return counts


def likeliest(text: list[int], context: list[int]) -> tuple[int, float]:
    counts = followers(text, context)
    token = max(counts, key=lambda c: counts[c])
    return token, counts[token][0] / sum(count for count, _ in counts.values())


def by_definition(text, depth, shortest, longest, spec_factor, least_probability) -> list[int]:
    known = [n for n in range(shortest, min(longest, len(text)) + 1) if followers(text, text[-n:])]
    if not known:
        return []
    matched = max(known)
    context, drafts, probability = text[-matched:], [], 1.0
    while len(drafts) < min(depth, int(spec_factor * matched)):
        while not followers(text, context):
            context = context[1:]
        token, frequency = likeliest(text, context)
        probability *= frequency
        if probability < least_probability:
            break
        drafts.append(token)
        context = (context + [token])[-longest:]
    return drafts


@settings(max_examples=150, deadline=None)
@given(text=texts, shape=shapes, depth=st.integers(1, 8))
def test_drafts_are_those_of_the_definition(text, shape, depth):
    lookup, tokens = SuffixLookup(*shape), np.array(text, dtype=np.int64)
    for end in range(len(text) + 1):
        assert lookup.guess(tokens[:end], depth) == by_definition(text[:end], depth, *shape)


@pytest.mark.parametrize(
    "bad",
    [
        {"shortest_tokens": 0},
        {"shortest_tokens": 30},
        {"spec_factor": 0.0},
        {"least_probability": 1.1},
    ],
)
def test_what_makes_no_sense_is_refused_by_name(bad):
    with pytest.raises(ValueError, match=next(iter(bad))):
        SuffixLookup(**bad)
