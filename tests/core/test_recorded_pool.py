"""The pool's record tells which blocks a lookup would hit, after any sequence of calls."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Callable

import numpy as np
import pytest

from cbatch.core.request.errors import FieldError
from cbatch.core.scheduler.block_pool import BlockPool, Node, root_of
from cbatch.core.scheduler.recorded_pool import (
    BlocksStored,
    CacheCleared,
    RecordedBlockPool,
)
from cbatch.kv_events.wire import encode_changes
from tests.checking.follower import Follower, cached_prefixes, hits
from tests.helpers import World, make_config, make_request

SIZE = 4
SALTS = (None, "a", "b")
ALPHABET = (0, 1)
HAPPENED: Counter[str] = Counter()


def tokens(*blocks: int) -> np.ndarray:
    return np.repeat(np.asarray(blocks, dtype=np.int32), SIZE)


class Running:
    """A sequence as the scheduler has it: some of its blocks are named as it enters."""

    def __init__(self, pool: BlockPool, sequence: np.ndarray, blocks: np.ndarray) -> None:
        self.pool, self.sequence, self.blocks = pool, sequence, blocks
        self.end: Node
        self.named = 0

    def name(self, end: Node, first: int, last: int) -> None:
        self.end = self.pool.add_nodes(self.blocks[first:last], end, self.sequence, first)
        self.named = last

    def complete(self) -> None:
        self.name(self.end, self.named, len(self.blocks))
        self.pool.mark_ready(self.blocks)


def drive(pool: BlockPool, choose: Callable[[int], int], num_actions: int) -> None:
    """Do anything that a pool allows, and check its follower after each call. `choose(n)` returns a
    number below n."""
    assert isinstance(pool, RecordedBlockPool)
    follower, running = Follower(), list[Running]()
    for _ in range(num_actions):
        action = choose(16)
        if action < 6:
            sequence = tokens(*(choose(2) for _ in range(1 + choose(5))))
            enter(pool, running, sequence, root_of(SALTS[choose(4) % 3]), choose)
        elif action < 10 and running:
            running[choose(len(running))].complete()
        elif action < 14 and running:
            pool.release(running.pop(choose(len(running))).blocks)
        elif action == 14 and running:
            failed = running.pop(choose(len(running)))
            pool.taint(failed.blocks)
            pool.release(failed.blocks)
            HAPPENED["taints"] += 1
        elif action == 15 and choose(4) == 0:
            pool.clear_cache()
            HAPPENED["clears"] += 1
        changes = pool.take_changes()
        follower.take(encode_changes(changes, 0.0, SIZE))
        known = follower.prefixes
        assert known == cached_prefixes(pool, SALTS) == hits(pool, SALTS, ALPHABET)
        pool.check()
        HAPPENED["cached"] += len(known)
    HAPPENED.update(follower.num_events)


def enter(
    pool: BlockPool,
    running: list[Running],
    sequence: np.ndarray,
    root: Node,
    choose: Callable[[int], int],
) -> None:
    count = len(sequence) // SIZE
    match = pool.match(sequence, choose(count + 1), root)
    fresh = count - len(match.blocks)
    if fresh + pool.count_unreferenced(match.blocks) > pool.num_available:
        return
    pool.acquire(match.blocks)
    blocks = np.append(np.array(match.blocks, dtype=np.intp), pool.allocate(fresh))
    running.append(Running(pool, sequence, blocks))
    running[-1].name(match.node, len(match.blocks), len(match.blocks) + choose(fresh + 1))


def test_the_record_is_the_cache_after_long_runs() -> None:
    for seed in range(12):
        drive(RecordedBlockPool(6 + seed % 9, SIZE), random.Random(seed).randrange, 100)
    for what in ("taints", "clears", "BlockStored", "BlockRemoved", "AllBlocksCleared"):
        assert HAPPENED[what] > 10, what


def test_a_hash_is_of_the_prefix_alone() -> None:
    """Another pool, other blocks and an eviction leave the hash unchanged; another salt changes
    it."""

    def stored(pool: RecordedBlockPool, salt: str | None) -> list[BlocksStored]:
        blocks = pool.allocate(3)
        pool.add_nodes(blocks, root_of(salt), tokens(7, 8, 7), 0)
        pool.mark_ready(blocks)
        pool.release(blocks)
        return [each for each in pool.take_changes() if isinstance(each, BlocksStored)]

    pool, other = RecordedBlockPool(4, SIZE), RecordedBlockPool(9, SIZE)
    other.release(other.allocate(5))
    (first,) = stored(pool, None)
    assert stored(other, None) == [first]
    assert len({*first.hashes}) == 3 and all(0 <= each < 2**64 for each in first.hashes)
    (salted,) = stored(pool, "a")
    assert not {*salted.hashes} & {*first.hashes}
    assert (salted.salt, salted.parent_hash) == ("a", None)
    assert stored(pool, None) == [first]


def test_there_is_nothing_to_record_without_a_prefix_cache() -> None:
    with pytest.raises(FieldError, match="kv_events"):
        make_config(kv_events=True, enable_prefix_caching=False)


def test_a_block_is_recorded_in_the_step_that_completes_it() -> None:
    """No lookup of the prefix is needed first."""
    world = World(make_config(kv_events=True))
    world.add(make_request("r", range(9), max_tokens=8, ignore_eos=True))
    known = []
    while world.scheduler.has_work:
        world.step()
        known.append((world.scheduler.stats.emitted_tokens, len(world.follower.blocks)))
    assert known == [(1, 2), (2, 2), (3, 2), (4, 3), (5, 3), (6, 3), (7, 3), (8, 4)]


def test_a_reset_executor_has_nothing_cached() -> None:
    world = World(make_config(kv_events=True))
    world.add(make_request("r", range(9), max_tokens=4, cache_salt="tenant"))
    world.step()
    assert len(world.follower.blocks) == 2
    world.scheduler.executor_reset(world.clock())
    assert world.scheduler.state.pool.take_changes() == [CacheCleared()]
    world.follower.blocks.clear()
    world.executor.reset()
    world.run()
    assert world.follower.num_events == {"BlockStored": 3}
