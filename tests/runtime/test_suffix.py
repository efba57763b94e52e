"""The suffix automaton's drafts against their definition by counting substrings."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from cbatch.runtime.suffix import SuffixIndex

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


def forgets_at_a_split(self, state, token, target):
    short = split(self, state, token, target)
    self._count[short] = 0
    return short


def counts_once_per_state(self, state, token):
    """Several states may lead to one: each would count the occurrence again."""
    count_occurrence(self, state, token)
    while state:
        self._count[self._next[state][token]] += 1
        state = self._link[state]


def does_not_notice_a_split(self, state):
    return state


split, count_occurrence = SuffixIndex._split, SuffixIndex._count_occurrence


@pytest.mark.parametrize(
    ("name", "broken"),
    [
        ("_split", forgets_at_a_split),
        ("_count_occurrence", counts_once_per_state),
        ("_cut", does_not_notice_a_split),
    ],
)
def test_the_definition_notices_wrong_counts_and_contexts(monkeypatch, name, broken):
    rng = np.random.default_rng(0)
    samples = [rng.integers(0, 3, 40).tolist() for _ in range(20)]
    shape = (1, 4, 2.5, 0.2)

    def agree() -> bool:
        return all(built(t, *shape).propose(4) == by_definition(t, 4, *shape) for t in samples)

    assert agree()
    monkeypatch.setattr(SuffixIndex, name, broken)
    assert not agree()


def test_frequency_decides_and_the_latest_breaks_a_tie():
    assert built([1, 2, 7, 1, 2, 8, 1, 2, 8, 1, 2, 7, 1, 2, 7, 1, 2]).propose(1) == [7]
    assert built([1, 2, 7, 1, 2, 8, 1, 2]).propose(1) == [8]


def test_no_more_drafts_than_the_factor_allows_for_the_match():
    text = [1, 2, 3, 4, 5, 6, 7, 8, 9, 0, 1, 2, 3]
    assert built(text).propose(8) == [4, 5, 6, 7, 8, 9]
    assert built(text, 2, 24, 1.0).propose(8) == [4, 5, 6]
    assert built(text, 4).propose(8) == []


def test_drafts_stop_where_the_text_went_on_in_many_ways():
    text = [t for end in range(3, 10) for t in (1, 2, end)] + [1, 2]
    assert built(text, 2, 24, 1.0, 0.1).propose(1) == [9]
    assert built(text, 2, 24, 1.0, 0.2).propose(1) == []


@settings(max_examples=50, deadline=None)
@given(text=texts, shape=shapes)
def test_a_smaller_depth_is_the_beginning_of_a_larger_one(text, shape):
    index = built(text, *shape)
    deep = index.propose(8)
    assert all(index.propose(k) == deep[:k] for k in range(1, 8))


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
