"""Compare the queue of cached blocks with the simplest ordered structure: a list."""

from __future__ import annotations

from collections import Counter

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from cbatch.core.scheduler.block_pool import EvictionQueue

NUM_BLOCKS = 5  # few, so that the queue of twice as many entries soon wraps
HAPPENED: Counter[str] = Counter()
moves = st.tuples(st.sampled_from(["append", "remove", "take"]), st.integers(0, NUM_BLOCKS))


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


@settings(max_examples=100, deadline=None, derandomize=True)
@given(st.lists(moves, min_size=20, max_size=60), st.integers(0, 9))
def test_it_is_a_list_that_is_taken_from_in_front(played: list[tuple[str, int]], seed: int) -> None:
    play(played, seed)


def test_everything_happened() -> None:
    if not HAPPENED:
        pytest.skip("nothing was played")
    for what in ("gaps closed", "removed", "taken past gaps"):
        assert HAPPENED[what] > 20, what
