"""The order of a slot's drafters, from their observed acceptance."""

from __future__ import annotations

import numpy as np
import pytest

from cbatch.runtime.drafting.drafter_choice import DrafterChoice

NGRAM, SUFFIX, MODEL = range(3)
CHAIN = (NGRAM, SUFFIX, MODEL)


def make(model_price: float = 0.0, slots: int = 4, chain: tuple[int, ...] = CHAIN) -> DrafterChoice:
    choice = DrafterChoice((0.0, 0.0, model_price), slots)
    for slot in range(slots):
        choice.enter(slot, chain)
    return choice


def order(choice: DrafterChoice, slot: int) -> list[int]:
    ranks = choice.ranks[:, slot]
    return [int(d) for d in ranks.argsort() if choice.in_chain[d, slot]]


def tell(choice: DrafterChoice, drafter: int, slot: int, accepted: int, times: int = 1) -> None:
    """Observe drafts of 4 tokens of which `accepted` are accepted; decide after each."""
    for _ in range(times):
        choice.observe(drafter, np.array([slot]), np.array([accepted]), np.array([accepted < 4]))
        choice.decide()


@pytest.mark.parametrize("chain", [CHAIN, (MODEL, SUFFIX), (SUFFIX, MODEL, NGRAM)])
def test_equal_drafters_are_ordered_by_the_chain_and_cheaper_ones_come_first(chain):
    assert order(make(chain=chain), 2) == list(chain)
    lookups = [drafter for drafter in chain if drafter != MODEL]
    assert order(make(0.1, chain=chain), 2) == [*lookups, MODEL]


def test_a_slot_learns_for_itself_and_the_fleet_for_newcomers():
    choice = make()
    for _ in range(10):
        tell(choice, NGRAM, 0, 0)
        tell(choice, MODEL, 0, 4)
        tell(choice, NGRAM, 1, 4)
        tell(choice, MODEL, 1, 0)
    assert order(choice, 0)[0] == MODEL and order(choice, 1)[0] == NGRAM
    tell(choice, SUFFIX, 1, 4, times=60)
    choice.leave(3)
    choice.enter(3, CHAIN)
    assert order(choice, 3)[0] == SUFFIX


def test_a_price_weighs_what_a_deeper_draft_may_bring():
    """At 0.2 of a step a pass, an always right model beats a lookup that is half right. It does not
    at 0.5, nor if only one of four drafts comes."""
    for price, accepted, first in ((0.2, 4, MODEL), (0.5, 4, NGRAM), (0.2, 1, NGRAM)):
        choice = make(price, chain=(NGRAM, MODEL))
        for _ in range(20):
            tell(choice, MODEL, 0, accepted)
            tell(choice, NGRAM, 0, 1)
        assert order(choice, 0)[0] == first, (price, accepted)


def test_a_drafter_without_news_is_tried_again():
    choice = make(chain=(NGRAM, MODEL))
    tell(choice, MODEL, 0, 0, times=8)
    assert order(choice, 0)[0] == NGRAM
    for _ in range(400):
        tell(choice, NGRAM, 0, 1)
        if order(choice, 0)[0] == MODEL:
            return
    raise AssertionError("a model that failed once is never asked again")


def test_what_was_learnt_leaves_and_comes_back():
    choice = make()
    tell(choice, MODEL, 0, 4, times=8)
    learnt = order(choice, 0)
    assert learnt[0] == MODEL
    sums = choice.leave(0)
    assert not choice.in_chain[:, 0].any() and not choice.has_several[0]
    choice.enter(0, (NGRAM, SUFFIX))
    assert order(choice, 0) == [NGRAM, SUFFIX]
    choice.enter(2, CHAIN, sums)
    assert order(choice, 2) == learnt


@pytest.mark.filterwarnings("error")
@pytest.mark.parametrize("accepted", [0, 4])
def test_sums_stay_sound_when_nothing_or_everything_is_accepted(accepted):
    choice = make(0.1)
    slots = np.arange(4)
    for _ in range(20_000):
        for drafter in CHAIN:
            choice.observe(drafter, slots, np.full(4, accepted), np.full(4, accepted < 4))
        choice.decide()
    assert order(choice, 0) == [NGRAM, SUFFIX, MODEL]
