"""State pages of recurrent layers: what a prefix hit needs, which pages are kept, faults."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import numpy as np
import pytest

from cbatch.core.request.errors import FieldError
from cbatch.core.request.request import Request
from cbatch.core.scheduler.page_pool import NO_PAGE, PagePool
from cbatch.core.scheduler.scheduler import Scheduler
from cbatch.core.scheduler.slot_pages import SlotPages, pages_per_slot
from cbatch.steplog.step_log import replay
from tests.checking.executor import Faults
from tests.checking.kv import ContractBreachError
from tests.helpers import VOCAB_SIZE, World, make_config, make_request

SIZE = 4  # tokens per block
INTERVAL = 5  # blocks


def world(**options: Any) -> World:
    more = {name: options.pop(name) for name in ("depth", "faults") if name in options}
    sizes = {"num_blocks": 400, "max_model_len": 400, "max_num_batched_tokens": 64}
    settings = sizes | {"num_state_pages": 60, "state_interval": INTERVAL} | options
    return World(make_config(**settings), **more)


def ids(seed: int, count: int) -> tuple[int, ...]:
    return tuple(np.random.default_rng(seed).integers(0, VOCAB_SIZE, count).tolist())


def serve(served: World, name: str, prompt: Iterable[int], **params: Any) -> int:
    """Serve a request to its end, and return how many tokens of its prompt were in the cache."""
    params = {"max_tokens": 11, "ignore_eos": True} | params
    before = served.scheduler.stats.prefix_hit_tokens
    served.add(make_request(name, prompt, **params))
    served.run()
    return served.scheduler.stats.prefix_hit_tokens - before


@pytest.mark.parametrize("lookahead", ["off", "fixed:3", "fixed:7"])
@pytest.mark.parametrize("depth", [0, 1])
def test_a_next_turn_computes_its_new_tokens_and_no_whole_interval(
    depth: int, lookahead: str
) -> None:
    served = world(depth=depth, lookahead=lookahead, state_interval=1000)
    prompt, computed = ids(0, 50), 0  # tokens in KV
    for turn in range(4):
        hits = serve(served, f"t{turn}", prompt)
        assert hits == computed // SIZE * SIZE
        whole = (*prompt, *served.output(f"t{turn}"))
        computed = len(whole) - 1
        prompt = (*whole, *ids(1 + turn, 7))
    served.assert_reference()


def test_which_boundaries_a_prompt_leaves_in_the_cache() -> None:
    served = world(max_num_batched_tokens=200)
    shared = ids(0, 47)
    assert serve(served, "first", (*shared, *ids(1, 70))) == 0
    # The first page that two prompts share is the last whole interval before they differ. The
    # second prompt leaves its own where it differs, so that the third hits all that is shared.
    assert serve(served, "second", (*shared, *ids(2, 60))) == 2 * INTERVAL * SIZE
    assert serve(served, "third", (*shared, *ids(3, 60))) == 47 // SIZE * SIZE
    assert serve(served, "again", (*shared, *ids(3, 60))) == (47 + 60 - 1) // SIZE * SIZE


def test_equal_prompts_wait_for_the_page_of_the_first() -> None:
    served = world()
    for choice in range(3):
        served.add(make_request(f"c{choice}", ids(0, 40), seed=1, choice=choice, max_tokens=3))
    served.run()
    assert served.scheduler.stats.prefix_hit_tokens == 2 * 36
    served.assert_reference()


def test_without_the_prefix_cache_no_page_is_kept() -> None:
    served = world(enable_prefix_caching=False)
    assert serve(served, "a", ids(0, 50)) == serve(served, "b", ids(0, 50)) == 0
    pages = served.scheduler.state.pages
    assert pages is not None and pages.pool.num_free == pages.pool.size


@pytest.mark.parametrize("depth", [0, 1])
@pytest.mark.parametrize("num_pages", [3, 4, 7])
def test_few_pages_serve_fewer_sequences_at_once(depth: int, num_pages: int) -> None:
    served = world(depth=depth, num_state_pages=num_pages, lookahead="fixed:5")
    assert pages_per_slot(5, SIZE) == 3
    for i in range(5):
        served.add(make_request(f"r{i}", 30 + i, max_tokens=20, ignore_eos=True))
    peak = 0
    while served.scheduler.has_work:
        served.step()
        peak = max(peak, served.scheduler.num_running)
    assert peak == num_pages // 3
    served.run()
    served.assert_reference()


def test_too_few_pages_for_one_sequence_are_refused() -> None:
    with pytest.raises(FieldError, match="num_state_pages: 2 cannot hold .* give 3 or more"):
        Scheduler(make_config(num_state_pages=2, lookahead="fixed:5"))


def test_a_replay_of_the_log_gives_the_same_pages() -> None:
    served = world(lookahead="fixed:3")
    for name, seed in (("a", 0), ("b", 0), ("c", 1)):
        serve(served, name, ids(seed, 60))
    plans: list[Any] = []
    replay(served.events, on_plan=plans.append)
    expected = [plan.deltas.state_pages.tolist() for plan in served.plans]
    assert [plan.deltas.state_pages.tolist() for plan in plans if plan] == expected
    assert any(pages[0] for pages in expected)


# ---- planted faults ------------------------------------------------------------------------------

give, take_in = PagePool.give, SlotPages.reserve


def one_boundary_early(patch: pytest.MonkeyPatch) -> None:
    """A page is given to the node of the next block."""
    path = SlotPages._path
    patch.setattr(SlotPages, "_path", lambda *a: path(*a)[1:])


def drafts_reach_no_page(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(SlotPages, "reserve", lambda self, rows, ends: take_in(self, rows, ends - 3))


def rejected_drafts_count(patch: pytest.MonkeyPatch) -> None:
    """The page after the current boundary is given, which drafts may have written."""

    def advance(self: SlotPages, slot: int, *args: Any, **more: Any) -> None:
        page = self.tables.item(slot, self.last.item(slot))
        path = self._path(slot, args[0].root)
        if page != NO_PAGE and path:
            give(self.pool, page, path[-1])
        real(self, slot, *args, **more)

    real = SlotPages.advance
    patch.setattr(SlotPages, "advance", advance)


def an_evicted_page_has_its_owner(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(PagePool, "_forget", lambda *_: None)


def a_failed_sequence_leaves_its_pages(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(SlotPages, "taint", lambda *_: None)
    patch.setattr(PagePool, "forget_blocks", lambda *_: None)


def requests() -> list[Request]:
    rng = np.random.default_rng(3)
    return [
        make_request(
            f"r{i}",
            (*ids(i % 3, 30), *ids(i, int(rng.integers(1, 20)))),
            max_tokens=int(rng.integers(5, 30)),
            ignore_eos=True,
        )
        for i in range(30)
    ]


def crowded(depth: int = 0, **more: Any) -> World:
    """Return a world with too few blocks and pages for its requests, two of which fail."""
    sizes = {"num_state_pages": 24, "state_interval": 2, "num_blocks": 60, "lookahead": "fixed:5"}
    faults = Faults(non_finite_at={"r4": 2, "r7": 0})
    served = world(depth=depth, faults=faults, **sizes | more)
    served.add(*requests())
    return served


@pytest.mark.parametrize("interval", [2, 7])
@pytest.mark.parametrize("depth", [0, 1])
def test_a_crowd_is_served_as_if_alone(depth: int, interval: int) -> None:
    served = crowded(depth, state_interval=interval, num_state_pages=48)
    pages = served.scheduler.state.pages
    assert pages is not None
    served.run()
    served.assert_reference(*(f"r{i}" for i in range(30) if i not in (4, 7)))
    stats = served.scheduler.stats
    assert stats.prefix_hit_tokens > 100 and stats.preemptions > 0
    given = [plan.deltas.state_pages for plan in served.plans]  # slots, boundaries, pages
    skips = [(np.diff(each[1]) > 1) & (np.diff(each[0]) == 0) for each in given]
    assert any(each.any() for each in skips), "no chunk left a page before its last boundary"
    # A step is in flight, whose request has ended: it may have a slot with one page.
    num_slots = len(pages.tables) - served.scheduler.state.table.num_free
    num_pages = np.count_nonzero(pages.tables != NO_PAGE)
    assert num_pages <= num_slots <= depth, "a page without a slot"
    assert pages.pool.num_free + pages.pool.num_cached + num_pages == pages.pool.size
    per_slot = pages_per_slot(5, served.config.block_size)
    assert pages.room(overlaps=False) == pages.pool.size - num_slots * per_slot, "extra pages"


@pytest.mark.parametrize(
    "plant",
    [
        one_boundary_early,
        drafts_reach_no_page,
        rejected_drafts_count,
        an_evicted_page_has_its_owner,
        a_failed_sequence_leaves_its_pages,
    ],
    ids=lambda plant: plant.__name__,
)
def test_a_planted_fault_is_found(
    plant: Callable[[pytest.MonkeyPatch], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    plant(monkeypatch)
    served = crowded()
    with pytest.raises((ContractBreachError, AssertionError)):
        served.run()
