"""Micro-benchmark (`pytest bench --benchmark-enable`) of the block pool. Each round restores it."""

from __future__ import annotations

import numpy as np
import pytest

from cbatch.core.scheduler.block_pool import ROOT, BlockPool

BLOCK_TOKENS, NUM_BLOCKS = 16, 65_536


@pytest.mark.parametrize("count", [1, 256])
def test_allocate_and_release(benchmark, count):
    """Allocate and release private blocks: a step reserves them, a finished request frees them."""
    pool = BlockPool(NUM_BLOCKS, BLOCK_TOKENS)
    benchmark(lambda: pool.release(pool.allocate(count)))
    assert pool.num_free == NUM_BLOCKS


@pytest.mark.parametrize("prompt_tokens", [512, 8192])
def test_prefix_hit(benchmark, prompt_tokens):
    """Match, acquire and release a prompt that is cached whole."""
    pool = BlockPool(NUM_BLOCKS, BLOCK_TOKENS)
    tokens = np.random.default_rng(0).integers(0, 32_000, prompt_tokens).astype(np.int32)
    blocks = _cache(pool, tokens)

    def hit():
        match = pool.match(tokens, len(blocks))
        pool.acquire(match.blocks)
        pool.release(np.asarray(match.blocks))
        return match

    assert len(benchmark(hit).blocks) == prompt_tokens // BLOCK_TOKENS
    assert pool.num_cached == len(blocks)


def test_a_full_cache_gives_way(benchmark):
    """Take every block of a prompt of 512 tokens from another prompt, least recently used first."""
    pool = BlockPool(1024, BLOCK_TOKENS)
    rng = np.random.default_rng(0)
    prompts = [rng.integers(0, 32_000, 512).astype(np.int32) for _ in range(64)]
    at = 0

    def next_prompt():
        nonlocal at
        at += 1
        _cache(pool, prompts[at % len(prompts)])

    for _ in prompts:
        next_prompt()
    assert not pool.num_free
    benchmark(next_prompt)
    assert not pool.num_free and pool.num_cached == 1024
    pool.check()


def _cache(pool: BlockPool, tokens: np.ndarray) -> np.ndarray:
    """Allocate, name, mark ready and release the blocks of a sequence. Return them."""
    blocks = pool.allocate(len(tokens) // BLOCK_TOKENS)
    pool.add_nodes(blocks, ROOT, tokens, 0)
    pool.mark_ready(blocks)
    pool.release(blocks)
    return blocks
