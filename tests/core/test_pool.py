"""The block pool: counts, sharing, eviction order, promises, tainted blocks."""

from __future__ import annotations

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from cbatch.core.pool import ROOT_UID, BlockPool

SIZE = 4


def tokens(*blocks: int) -> np.ndarray:
    """One block of equal tokens per argument."""
    return np.repeat(np.asarray(blocks, dtype=np.int32), SIZE)


def compute(pool: BlockPool, sequence: np.ndarray) -> np.ndarray:
    """Allocate, name and complete every block of a sequence."""
    blocks = pool.allocate(len(sequence) // SIZE)
    pool.name_chain(blocks.tolist(), ROOT_UID, sequence, 0)
    pool.mark_ready(blocks.tolist())
    return blocks


def test_a_prefix_is_shared_without_copies() -> None:
    pool = BlockPool(8, SIZE)
    blocks = compute(pool, tokens(1, 2, 3))
    match = pool.match(tokens(1, 2, 9), 3)
    assert match.blocks == blocks[:2].tolist() and not match.promised
    pool.acquire(match.blocks)
    assert pool.ref_counts[blocks].tolist() == [2, 2, 1]
    pool.release(blocks)
    pool.check()
    assert pool.num_cached == 1  # only the block that nobody else holds


def test_the_same_tokens_after_another_prefix_are_another_block() -> None:
    pool = BlockPool(8, SIZE)
    compute(pool, tokens(1, 7))
    assert pool.match(tokens(2, 7), 2).blocks == []
    assert len(pool.match(tokens(1, 7), 2).blocks) == 2


def test_a_promised_block_is_waited_for_until_its_holder_leaves() -> None:
    pool = BlockPool(8, SIZE)
    sequence = tokens(1, 2)
    blocks = pool.allocate(2)
    uid = pool.name_chain(blocks[:1].tolist(), ROOT_UID, sequence, 0)
    pool.name_chain(blocks[1:].tolist(), uid, sequence, 1)
    assert pool.match(sequence, 2).promised
    pool.mark_ready(blocks[:1].tolist())
    match = pool.match(sequence, 2)
    assert match.promised and match.blocks == [blocks[0]]
    pool.release(blocks)
    match = pool.match(sequence, 2)
    assert not match.promised and match.blocks == [blocks[0]]
    pool.check()


def test_eviction_takes_the_least_recently_used_and_the_tail_of_a_chain_first() -> None:
    pool = BlockPool(4, SIZE)
    old, new = tokens(1, 2), tokens(3, 4)
    pool.release(compute(pool, old))
    pool.release(compute(pool, new))
    pool.acquire(pool.match(old, 2).blocks)  # used again: now the most recent
    pool.release(np.asarray(pool.match(old, 2).blocks, dtype=np.int32))
    pool.allocate(1)
    assert len(pool.match(old, 2).blocks) == 2
    assert len(pool.match(new, 2).blocks) == 1  # its tail went
    pool.check()


def test_a_block_computed_twice_stays_private_and_carries_the_chain_on() -> None:
    pool = BlockPool(8, SIZE)
    first = compute(pool, tokens(1))
    again = pool.allocate(2)
    pool.name_chain(again.tolist(), ROOT_UID, tokens(1, 2), 0)
    pool.mark_ready(again.tolist())
    assert pool.match(tokens(1, 2), 2).blocks == [first[0], again[1]]
    pool.release(again)
    pool.check()
    assert pool.num_cached == 1  # the private copy is free at once


def test_tainted_blocks_leave_the_cache_and_are_zeroed_when_handed_out() -> None:
    pool = BlockPool(2, SIZE)
    blocks = compute(pool, tokens(1, 2))
    pool.taint(blocks)
    assert pool.match(tokens(1, 2), 2).blocks == []
    pool.release(blocks)
    assert pool.num_free == 2
    again = pool.allocate(2)
    assert sorted(pool.take_to_zero().tolist()) == sorted(again.tolist())
    pool.release(again)
    pool.allocate(2)
    assert len(pool.take_to_zero()) == 0  # once is enough


def test_fresh_blocks_are_not_draft_valid() -> None:
    pool = BlockPool(2, SIZE)
    blocks = pool.allocate(2)
    pool.draft_valid[blocks] = True
    pool.release(blocks)
    assert not pool.draft_valid[pool.allocate(2)].any()


@settings(max_examples=60, deadline=None)
@given(st.data())
def test_counts_hold_under_any_order_of_calls(data: st.DataObject) -> None:
    pool = BlockPool(data.draw(st.integers(1, 12)), SIZE)
    held: list[np.ndarray] = []
    for _ in range(data.draw(st.integers(1, 25))):
        sequence = tokens(*data.draw(st.lists(st.integers(0, 1), min_size=1, max_size=4)))
        action = data.draw(st.sampled_from(["compute", "hit", "release", "taint", "clear"]))
        if action == "compute" and len(sequence) // SIZE <= pool.num_available:
            held.append(compute(pool, sequence))
        elif action == "hit":
            match = pool.match(sequence, len(sequence) // SIZE)
            pool.acquire(match.blocks)
            held.append(np.asarray(match.blocks, dtype=np.int32))
        elif action == "release" and held:
            pool.release(held.pop(data.draw(st.integers(0, len(held) - 1))))
        elif action == "taint" and held:
            pool.taint(held[-1])
        elif action == "clear":
            pool.clear_cache()
            assert pool.num_cached == 0
        pool.check()
    for blocks in held:
        pool.release(blocks)
    pool.check()
    assert pool.num_available == pool.num_blocks


def test_the_map_says_of_each_block_what_it_is() -> None:
    pool = BlockPool(10, SIZE)
    cached = compute(pool, tokens(1, 2, 3))
    pool.release(cached)
    pool.acquire(pool.match(tokens(1), 1).blocks)  # held again, though it is still in the cache
    private = pool.allocate(2)
    for most_cells, size in ((10, 1), (4, 3), (3, 4), (1, 10)):
        cell_blocks, used, kept = pool.occupancy(most_cells)
        assert cell_blocks == size and len(used) == len(kept) == -(-10 // size) <= most_cells
        for cell in range(len(used)):
            blocks = range(cell * size, min((cell + 1) * size, 10))
            assert used[cell] == sum(block in {cached[0], *private} for block in blocks)
            assert kept[cell] == sum(block in cached[1:] for block in blocks)
        assert kept.sum() == pool.num_cached
        assert used.sum() == 10 - pool.num_cached - pool.num_free
