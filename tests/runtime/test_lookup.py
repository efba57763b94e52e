"""Lookup drafters, with compiled kernels and without, compared with their definitions."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from cbatch.runtime.drafting.contract import DraftRows
from cbatch.runtime.drafting.lookup import Lookup, LookupDrafter
from cbatch.runtime.drafting.lookups import NgramLookup, SuffixLookup
from cbatch.runtime.input_batch import InputBatch
from tests.runtime.engines import VOCAB, admission
from tests.runtime.marks import has_compiler

Maker = Callable[..., Lookup]


def interpreted(kind: type[Lookup]) -> Maker:
    def make(*shape: Any) -> Lookup:
        lookup = kind(*shape)
        lookup.struct = None
        return lookup

    return make


KINDS: tuple[type[Lookup], ...] = (NgramLookup, SuffixLookup)
MADE = {kind: (interpreted(kind), kind) for kind in KINDS}  # without kernels, and with them
MAKERS: dict[str, Maker] = {f"{kind.__name__} in Python": interpreted(kind) for kind in KINDS}
if has_compiler():
    MAKERS |= {kind.__name__: kind for kind in KINDS}
every_lookup = pytest.mark.parametrize("make", MAKERS.values(), ids=MAKERS)


def guessed(make: Maker, text: list[int], depth: int = 4) -> list[int]:
    return make().guess(np.array(text, dtype=np.int64), depth)


class World:
    """A drafter over a slot table whose tokens a test appends."""

    def __init__(self, make: Maker, max_num_seqs: int = 4, **settings: Any) -> None:
        self.table = InputBatch(max_num_seqs, 4, VOCAB)
        self.drafter = LookupDrafter(make(), **settings)
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

    def propose_at(self, ends: range, depth: int) -> list[list[int]]:
        """Return the proposals at each of these lengths of slot 0."""
        at = np.array(ends, dtype=np.int64)
        p = self.drafter.propose(DraftRows(at * 0, at, np.full(len(at), depth), at * 0))
        return [row[:n].tolist() for row, n in zip(p.tokens, p.num_drafted, strict=True)]


shapes = {
    NgramLookup: st.tuples(st.integers(1, 3), st.integers(0, 4)).map(lambda s: (s[0], sum(s))),
    SuffixLookup: st.tuples(
        st.integers(1, 3), st.integers(0, 4), st.sampled_from([0.5, 1.0, 2.5]), st.floats(0, 0.6)
    ).map(lambda s: (s[0], s[0] + s[1], s[2], s[3])),
}


def by_ngram_definition(text: list[int], depth: int, shortest: int, longest: int) -> list[int]:
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


def by_suffix_definition(text, depth, shortest, longest, spec_factor, min_probability) -> list[int]:
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
        if probability < min_probability:
            break
        drafts.append(token)
        context = (context + [token])[-longest:]
    return drafts


DEFINITIONS = {NgramLookup: by_ngram_definition, SuffixLookup: by_suffix_definition}


@pytest.mark.parametrize("kind", KINDS)
@settings(max_examples=150, deadline=None)
@given(text=st.lists(st.integers(0, 2), max_size=40), data=st.data(), depth=st.integers(1, 8))
def test_drafts_are_those_of_the_definition(kind, text, data, depth):
    shape, tokens = data.draw(shapes[kind]), np.array(text, dtype=np.int64)
    lookup = kind(*shape)
    for end in range(len(text) + 1):
        expected = DEFINITIONS[kind](text[:end], depth, *shape)
        assert lookup.guess(tokens[:end], depth) == expected


def test_bad_settings_are_refused_by_name():
    for kind, bad in (
        (NgramLookup, {"shortest_tokens": 0}),
        (SuffixLookup, {"shortest_tokens": 30}),
        (SuffixLookup, {"spec_factor": 0.0}),
        (SuffixLookup, {"min_probability": 1.1}),
        (partial(LookupDrafter, NgramLookup()), {"window_tokens": 1}),
    ):
        with pytest.raises(ValueError, match=next(iter(bad))):
            kind(**bad)


@pytest.mark.skipif(not has_compiler(), reason="no C compiler, or not Linux")
@pytest.mark.parametrize("kind", KINDS)
@settings(max_examples=150, deadline=None)
@given(data=st.data())
def test_kernels_find_what_python_does(kind, data):
    """Texts are long and repeat themselves with periods and with errors."""
    shape = data.draw(shapes[kind] | st.just(()))
    letters = st.integers(0, data.draw(st.sampled_from([0, 1, 2, 9])))
    part = data.draw(st.lists(letters, min_size=1, max_size=40))
    text = part * data.draw(st.integers(1, 8)) + data.draw(st.lists(letters, max_size=20)) + part
    for at in data.draw(st.lists(st.integers(0, len(text) - 1), max_size=4)):
        text[at] = 10
    window = data.draw(st.sampled_from([7, 50, 10_000]))
    ends = range(1, len(text) + 1, data.draw(st.integers(1, 9)))
    worlds = [World(partial(make, *shape), window_tokens=window) for make in MADE[kind]]
    for world in worlds:
        world.admit(0, text)
        assert (world.drafter.compiled is None) == (world is worlds[0])
    for depth in (1, data.draw(st.integers(2, 60))):
        assert worlds[0].propose_at(ends, depth) == worlds[1].propose_at(ends, depth)


@every_lookup
def test_drafts_stay_when_the_drafter_drafts_again(make):
    world = World(make)
    for slot, text in enumerate(([1, 2, 3, 4] * 3, [5, 6, 7, 8] * 3, [9])):
        world.admit(slot, text)
    (slots, known), lag = np.array([[0], [12]], dtype=np.int64), np.zeros(1, dtype=np.int64)
    deep = world.drafter.propose(DraftRows(slots, known, lag + 6, lag))
    assert world.propose(1, 2, depth=2) == [[5, 6], []]
    assert deep.num_drafted.tolist() == [6] and deep.tokens.tolist() == [[1, 2, 3, 4, 1, 2]]


@every_lookup
@settings(max_examples=60, deadline=None)
@given(text=st.lists(st.integers(0, 2), min_size=1, max_size=60), data=st.data())
def test_a_sequence_that_grew_is_read_as_one_that_is_admitted(make, text, data):
    """This holds after a window has moved, whatever was drafted and rejected in between."""
    window = data.draw(st.sampled_from([6, 7, 100]))
    world = World(make, window_tokens=window)
    cut = data.draw(st.integers(1, len(text)))
    world.admit(0, text[:cut])
    for token in text[cut:]:
        if data.draw(st.booleans()):
            world.propose(0)
        world.table.tokens[0, world.table.num_tokens[0] + 1] = 99  # a rejected draft
        world.emit(0, [token])
    fresh = World(make, window_tokens=window)
    fresh.admit(0, text)
    start = max(-(-len(text) // (window // 2)) - 2, 0) * (window // 2)
    assert len(text) - start <= window and (start == 0 or len(text) - start >= window // 2)
    assert world.propose(0) == fresh.propose(0) == [guessed(make, text[start:])]


def acceptance(make, prompt: list[int], output: list[int]) -> tuple[float, float]:
    """Return accepted over observed trials, and tokens a step, for a target that writes
    `output`."""
    world = World(make)
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


@every_lookup
def test_acceptance_is_high_on_a_near_copy_and_fresh_text_is_left_alone(make):
    rng = np.random.default_rng(0)
    source, fresh = rng.integers(0, VOCAB, (2, 190)).tolist()
    edited = [int(rng.integers(VOCAB)) if rng.random() < 0.04 else token for token in source]
    rate, tokens_per_step = acceptance(make, source, edited)
    assert rate > 0.85 and tokens_per_step > 2.5
    rate, tokens_per_step = acceptance(make, source, fresh)
    assert rate < 0.2 and tokens_per_step < 1.1
