"""The block pool: counts, sharing, eviction order, promises, tainted blocks."""

from __future__ import annotations

import itertools
import random
from collections import Counter

import numpy as np

from cbatch.core.scheduler.block_pool import ROOT, BlockPool, Match, Node, root_of
from cbatch.core.scheduler.caching_pool import EvictionQueue

SIZE = 4
ROOTS = (ROOT, root_of("a"), root_of("b"))
HAPPENED: Counter[str] = Counter()


def tokens(*blocks: int) -> np.ndarray:
    """Return one block of equal tokens per argument."""
    return np.repeat(np.asarray(blocks, dtype=np.int32), SIZE)


def compute(pool: BlockPool, sequence: np.ndarray, root: Node = ROOT) -> np.ndarray:
    """Allocate, name and complete every block of a sequence; return the blocks."""
    blocks = pool.allocate(len(sequence) // SIZE)
    pool.add_nodes(blocks, root, sequence, 0)
    pool.mark_ready(blocks)
    return blocks


def test_eviction_takes_the_least_recently_used_and_the_tail_of_a_chain_first() -> None:
    pool = BlockPool(4, SIZE)
    old, new = tokens(1, 2), tokens(3, 4)
    pool.release(compute(pool, old))
    pool.release(compute(pool, new))
    pool.acquire(pool.match(old, 2).blocks)  # used again: now the most recent
    pool.release(np.asarray(pool.match(old, 2).blocks, dtype=np.int32))
    pool.allocate(1)
    assert len(pool.match(old, 2).blocks) == 2
    assert len(pool.match(new, 2).blocks) == 1  # the chain's last block is gone
    pool.check()


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
    assert len(pool.take_to_zero()) == 0  # each block is returned once


class CheckedPool(BlockPool):
    """A pool that compares every match with the plainest trie: nodes by parent uid and tokens."""

    def __init__(self, num_blocks: int) -> None:
        super().__init__(num_blocks, SIZE)
        self.nodes: dict[tuple[int, bytes], tuple[int, int]] = {}  # uid, block

    def path(self, sequence: np.ndarray, root: Node) -> list[tuple[int, int]]:
        """Return the nodes along a sequence: uid and block of each."""
        uid, nodes = root.uid, list[tuple[int, int]]()
        for row in sequence.reshape(-1, SIZE):
            node = self.nodes.get((uid, row.tobytes()))
            if node is None:
                break
            nodes.append(node)
            uid = node[0]
        return nodes

    def add_nodes(
        self, blocks: np.ndarray, parent: Node, tokens: np.ndarray, first_index: int
    ) -> Node:
        uid, next_uid = parent.uid, self._next_uid
        rows = tokens.reshape(-1, SIZE)[first_index:]
        for block, row in zip(blocks.tolist(), rows, strict=False):
            uid, _ = self.nodes.setdefault((uid, row.tobytes()), (next_uid, block))
            next_uid += uid == next_uid
        last = super().add_nodes(blocks, parent, tokens, first_index)
        assert last.uid == uid
        return last

    def _forget(self, blocks: np.ndarray) -> None:
        freed = set(blocks.tolist())
        self.nodes = {key: node for key, node in self.nodes.items() if node[1] not in freed}
        super()._forget(blocks)

    def match(self, tokens: np.ndarray, max_blocks: int, root: Node = ROOT) -> Match:
        match = super().match(tokens, max_blocks, root)
        path = self.path(tokens[: max_blocks * SIZE], root)
        hits = list(itertools.takewhile(lambda node: self._ready[node[1]], path))
        HAPPENED["hits"] += len(hits)
        assert match.blocks == [block for _, block in hits]
        assert match.node == Node(*hits[-1]) if hits else match.node == root
        assert match.promised == (len(path) > len(hits))
        return match


def serve(rng: random.Random) -> None:
    """Run sequences through a pool as the scheduler does. Some blocks of a prompt are named at the
    start, more at the end. Other sequences share all or part of them meanwhile."""
    pool = CheckedPool(rng.randint(6, 16))
    running: list[tuple[np.ndarray, np.ndarray, Node, int]] = []
    for _ in range(60):
        sequence = tokens(*(rng.choice((0, 0, 0, 1)) for _ in range(rng.randint(2, 6))))
        count = len(sequence) // SIZE
        match = pool.match(sequence, rng.randint(1, count), rng.choice(ROOTS[:2]))
        fresh, hits = count - len(match.blocks), len(match.blocks)
        if fresh + pool.count_unreferenced(match.blocks) <= pool.num_available:
            pool.acquire(match.blocks)
            HAPPENED["evictions"] += fresh > pool.num_free
            blocks = np.append(np.array(match.blocks, dtype=np.intp), pool.allocate(fresh))
            named = rng.randint(hits, count)
            end = pool.add_nodes(blocks[hits:named], match.node, sequence, hits)
            HAPPENED["found named"] += end.uid != match.node.uid and end.block not in blocks
            running.append((sequence, blocks, end, named))
        while running and (len(running) > 2 or rng.random() < 0.4):
            sequence, blocks, end, named = running.pop(rng.randrange(len(running)))
            if rng.random() < 0.9:
                if rng.random() < 0.1:
                    pool.taint(blocks[:1])
                    HAPPENED["taints"] += 1
                elif end.block is None or pool._uids[end.block] == end.uid:
                    # Otherwise the node is no longer in the trie.
                    pool.add_nodes(blocks[named:], end, sequence, named)
                    pool.mark_ready(blocks)
            pool.release(blocks)
        pool.check()


def test_the_trie_finds_what_the_plainest_finds() -> None:
    for seed in range(40):
        serve(random.Random(seed))
    for what in ("hits", "evictions", "found named", "taints"):
        assert HAPPENED[what] > 40, what


def test_the_map_says_of_each_block_what_it_is() -> None:
    pool = BlockPool(10, SIZE)
    cached = compute(pool, tokens(1, 2, 3))
    pool.release(cached)
    pool.acquire(pool.match(tokens(1), 1).blocks)  # in use again, though it is still in the cache
    private = pool.allocate(2)
    for max_cells, size in ((10, 1), (4, 3), (3, 4), (1, 10)):
        cell_blocks, used, kept = pool.occupancy(max_cells)
        assert cell_blocks == size and len(used) == len(kept) == -(-10 // size) <= max_cells
        for cell in range(len(used)):
            blocks = range(cell * size, min((cell + 1) * size, 10))
            assert used[cell] == sum(block in {cached[0], *private} for block in blocks)
            assert kept[cell] == sum(block in cached[1:] for block in blocks)
        assert kept.sum() == pool.num_cached
        assert used.sum() == 10 - pool.num_cached - pool.num_free


# --- the queue of cached blocks -------------------------------------------------------------------

NUM_BLOCKS = 5  # few, so that the queue of twice as many entries soon wraps


def play(played: list[tuple[str, int]], seed: int) -> None:
    """Replay moves of the given sizes, each limited to the number of blocks there are."""
    rng = np.random.default_rng(seed)
    queue, expected, num_appended = EvictionQueue(NUM_BLOCKS), list[int](), 0
    order: list[int] = []  # as appended, with the removed ones until the next is taken
    for move, count in played:
        if move == "append":
            others = [block for block in range(NUM_BLOCKS) if block not in expected]
            blocks = rng.permutation(others)[:count].astype(np.intp)
            num_appended += len(blocks)
            HAPPENED["gaps closed"] += num_appended > 2 * NUM_BLOCKS
            queue.append(blocks)
            expected += blocks.tolist()
            order += blocks.tolist()
        elif move == "remove":
            blocks = rng.permutation(expected)[:count].astype(np.intp)
            queue.remove(blocks)
            expected = [block for block in expected if block not in blocks]
            HAPPENED["removed"] += len(blocks)
        else:
            count = min(count, len(expected))
            HAPPENED["taken past gaps"] += order[:count] != expected[:count]
            assert queue.take(count).tolist() == expected[:count]
            expected = expected[count:]
            order = expected.copy()
        assert queue.check().tolist() == expected and len(queue) == len(expected)


def test_the_queue_is_a_list_that_is_taken_from_in_front() -> None:
    for seed in range(60):
        rng = random.Random(seed)
        moves = [(rng.choice(["append", "remove", "take"]), rng.randint(0, 5)) for _ in range(50)]
        play(moves, seed)
    for what in ("gaps closed", "removed", "taken past gaps"):
        assert HAPPENED[what] > 20, what
