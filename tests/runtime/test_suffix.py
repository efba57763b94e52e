"""The suffix automaton's drafts against their definition by counting substrings."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from cbatch.runtime.drafting.suffix import SuffixIndex

texts = st.lists(st.integers(0, 2), max_size=40)
shapes = st.tuples(
    st.integers(1, 3), st.integers(0, 4), st.sampled_from([0.5, 1.0, 2.5]), st.floats(0, 0.6)
).map(lambda s: (s[0], s[0] + s[1], s[2], s[3]))


def built(text, *shape) -> SuffixIndex:
    index = SuffixIndex(*shape)
    for token in text:
        index.append(token)
    return index


def followers(text: list[int], context: list[int]) -> dict[int, tuple[int, int]]:
    """Of each token that followed `context` in `text`: how often, and where last."""
    found: dict[int, tuple[int, int]] = {}
    for end in range(len(context), len(text)):
        if text[end - len(context) : end] == context:
            found[text[end]] = (found.get(text[end], (0, 0))[0] + 1, end)
    return found


def likeliest(text: list[int], context: list[int]) -> tuple[int, float]:
    found = followers(text, context)
    token = max(found, key=lambda c: found[c])
    return token, found[token][0] / sum(count for count, _ in found.values())


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
    index = SuffixIndex(*shape)
    for end in range(len(text) + 1):
        assert index.propose(depth) == by_definition(text[:end], depth, *shape)
        if end < len(text):
            index.append(text[end])


@pytest.mark.parametrize("period", [1, 3])
def test_the_work_of_a_token_is_bounded_in_a_text_that_repeats_itself(monkeypatch, period):
    """Suffixes of a periodic text have as many states as it is long; few of them are visited."""

    class Counting(list):
        reads = 0

        def __getitem__(self, i):
            Counting.reads += 1
            return super().__getitem__(i)

    index = SuffixIndex(longest_tokens=8)
    index._link = Counting(index._link)
    reads = []
    for i in range(2000):
        index.append(i % period)
        reads.append(Counting.reads)
    assert len(index._next) <= 2 * 2000
    assert max(np.diff(reads[100:])) <= 2 * 8 + 4


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
        SuffixIndex(**bad)
