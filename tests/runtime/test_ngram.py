"""Prompt lookup against its definition, and what every drafter with an index per slot must do."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from cbatch.runtime.cpu.drafter import DraftRows
from cbatch.runtime.cpu.input_batch import InputBatch
from cbatch.runtime.drafting.ngram import Evidence, LookupDrafter, NgramIndex
from cbatch.runtime.drafting.suffix import SuffixIndex
from tests.runtime.engines import admission
from tests.runtime.pairs import VOCAB

INDICES = {"ngram": NgramIndex, "suffix": SuffixIndex}
every_index = pytest.mark.parametrize("make_index", INDICES.values(), ids=INDICES)
texts = st.lists(st.integers(0, 2), max_size=40)


def built(make_index, text):
    index = make_index()
    for token in text:
        index.append(token)
    return index


def by_definition(text: list[int], depth: int, shortest: int, longest: int) -> list[int]:
    """What followed the latest earlier occurrence of the longest ending, drafts included."""
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
def test_ngram_drafts_are_those_of_the_definition(text, shortest, more, depth):
    index = NgramIndex(shortest, shortest + more)
    for end in range(len(text) + 1):
        assert index.propose(depth) == by_definition(text[:end], depth, shortest, shortest + more)
        if end < len(text):
            index.append(text[end])


def test_ngrams_of_zero_are_refused_by_name():
    with pytest.raises(ValueError, match="shortest_tokens"):
        NgramIndex(0, 3)
    with pytest.raises(ValueError, match="window_tokens"):
        LookupDrafter(NgramIndex, window_tokens=1)


class World:
    """A drafter over a slot table whose tokens a test moves on by hand."""

    def __init__(self, make_index, max_slots: int = 4, **settings: Any) -> None:
        self.table = InputBatch(max_slots, 4, VOCAB)
        self.drafter = LookupDrafter(make_index, **settings)
        self.drafter.bind(self.table, 16)

    def admit(self, slot: int, tokens: list[int]) -> None:
        entered = admission(slot, tokens, max_total=400)
        self.table.admit(entered)
        self.drafter.admit(entered)

    def emit(self, slot: int, tokens: list[int]) -> None:
        known = int(self.table.num_tokens[slot])
        self.table.tokens[slot, known : known + len(tokens)] = tokens
        self.table.num_tokens[slot] += len(tokens)

    def propose(self, *slots: int, depth: int = 4) -> list[list[int]]:
        at = np.array(slots, dtype=np.int32)
        depths = np.full(len(at), depth, dtype=np.int64)
        p = self.drafter.propose(DraftRows(at, self.table.num_tokens[at], depths, at * 0))
        assert p.probs is None and not p.non_finite.any() and (p.num_drafted <= depth).all()
        return [row[:n].tolist() for row, n in zip(p.tokens, p.num_drafted, strict=True)]

    def observe(self, slot: int, since: int) -> tuple[int, int]:
        evidence: Evidence = self.drafter.observe(np.array([slot]), np.array([since]))
        return int(evidence.trials[0]), int(evidence.hits[0])


@every_index
@settings(max_examples=60, deadline=None)
@given(text=st.lists(st.integers(0, 2), min_size=1, max_size=60), data=st.data())
def test_an_index_that_grew_equals_one_built_anew(make_index, text, data):
    """Also after a window has moved, whatever was drafted and refused in between."""
    window = data.draw(st.sampled_from([6, 7, 100]))
    world = World(make_index, window_tokens=window)
    cut = data.draw(st.integers(1, len(text)))
    world.admit(0, text[:cut])
    for token in text[cut:]:
        if data.draw(st.booleans()):
            world.propose(0)
        world.table.tokens[0, world.table.num_tokens[0] + 1] = 99  # a rejected draft
        world.emit(0, [token])
    fresh = World(make_index, window_tokens=window)
    fresh.admit(0, text)
    start = max(-(-len(text) // (window // 2)) - 2, 0) * (window // 2)
    assert len(text) - start <= window and (start == 0 or len(text) - start >= window // 2)
    assert world.propose(0) == fresh.propose(0) == [built(make_index, text[start:]).propose(4)]


@every_index
def test_a_slot_forgets_its_last_sequence(make_index):
    world = World(make_index)
    copied = [1, 2, 3, 4, 5, 6, 1, 2, 3]
    world.admit(0, copied)
    world.admit(1, copied)
    assert world.propose(0, 1) == [[4, 5, 6, 1]] * 2
    world.admit(0, [7, 8, 9, 1, 2, 3])
    assert world.propose(0)[0] == [] and world.propose(1)[0]
    world.drafter.release(1)
    assert world.drafter._texts[1] is None
    world.drafter.reset()
    assert world.drafter._texts == [None] * 4


@every_index
@settings(max_examples=60, deadline=None)
@given(text=st.lists(st.integers(0, 2), min_size=2, max_size=40), data=st.data())
def test_shadow_evidence_is_what_drafting_one_token_would_have_scored(make_index, text, data):
    since = data.draw(st.integers(1, len(text)))
    guesses = [built(make_index, text[:end]).propose(1) for end in range(since, len(text))]
    trials = sum(bool(guess) for guess in guesses)
    hits = sum(guess == [text[since + i]] for i, guess in enumerate(guesses))
    world = World(make_index)
    world.admit(0, text[:since])
    world.emit(0, text[since:])
    assert world.observe(0, since) == (trials, hits)
    assert world.observe(0, since) == (0, 0)  # what has been read is not scored again
    assert world.propose(0) == [built(make_index, text).propose(4)]


@every_index
def test_tokens_that_had_drafts_are_no_shadow_evidence(make_index):
    world = World(make_index)
    world.admit(0, [1, 2, 3, 4, 1, 2])
    assert world.propose(0)[0][:2] == [3, 4]
    world.emit(0, [3, 4])  # accepted drafts: real trials
    world.emit(0, [1])  # a plain step, position 8
    assert world.observe(0, 8) == (1, 1)


def acceptance(make_index, prompt: list[int], output: list[int]) -> tuple[float, float]:
    """Accepted over observed trials, and tokens a step, where `output` is what a target says."""
    world = World(make_index)
    world.admit(0, prompt)
    done = accepted = trials = steps = 0
    while done < len(output):
        drafts = world.propose(0)[0][: len(output) - done - 1]
        agree = [d == t for d, t in zip(drafts, output[done:], strict=False)]
        hits = (agree + [False]).index(False)
        accepted += hits
        trials += min(hits + 1, len(drafts))
        world.emit(0, output[done : done + hits + 1])
        done, steps = done + hits + 1, steps + 1
    return accepted / max(trials, 1), len(output) / steps


@every_index
def test_acceptance_is_high_on_a_near_copy_and_fresh_text_is_left_alone(make_index):
    rng = np.random.default_rng(0)
    source, fresh = rng.integers(0, VOCAB, (2, 190)).tolist()
    edited = [int(rng.integers(VOCAB)) if rng.random() < 0.04 else token for token in source]
    rate, tokens_per_step = acceptance(make_index, source, edited)
    assert rate > 0.85 and tokens_per_step > 2.5
    rate, tokens_per_step = acceptance(make_index, source, fresh)
    assert rate < 0.2 and tokens_per_step < 1.1
