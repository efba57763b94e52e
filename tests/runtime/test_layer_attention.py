"""Attention computed a layer at a time, compared with an explicit softmax."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import pytest
import torch
from msgspec.structs import replace
from torch import Tensor

from cbatch.runtime.compiled.layer_attention import CompiledAttention, LayerAttention
from cbatch.runtime.model.records import Attention
from tests.runtime.marks import needs_compiler

pytestmark = needs_compiler

PLAIN = Attention(heads=4, kv_heads=2, key_dim=32, value_dim=32, scale=0.2)
SINKS = torch.tensor([-3.0, 0.5, 2.0, 4.0])
SHAPES = {
    "plain": PLAIN,
    "one head each": replace(PLAIN, kv_heads=4),
    "many to one": replace(PLAIN, heads=70, kv_heads=1, key_dim=8, value_dim=8),
    "values narrower": replace(PLAIN, key_dim=24, value_dim=16),
    "values wider": replace(PLAIN, key_dim=16, value_dim=50),
    "odd values": replace(PLAIN, key_dim=6, value_dim=7),
    "tiles": replace(PLAIN, key_dim=64, value_dim=48),
    "window": replace(PLAIN, window=3),
    "wide window": replace(PLAIN, window=70),
    "own position alone": replace(PLAIN, window=1),
    "soft cap": replace(PLAIN, soft_cap=0.7, scale=1.0),
    "sinks": replace(PLAIN, sinks=True),
    "all of it": replace(
        PLAIN, key_dim=40, value_dim=24, window=20, soft_cap=5.0, sinks=True, scale=0.5
    ),
}
# Sequences of a ragged step: (rows, context).
RAGGED = [(1, 1), (1, 130), (5, 5), (3, 70), (60, 100), (1, 65)]


class Made(NamedTuple):
    """All positions of one sequence: q [heads, context, key_dim]; k and v likewise."""

    q: Tensor
    k: Tensor
    v: Tensor


def made(shape: Attention, context: int, seed: int) -> Made:
    gen = torch.Generator().manual_seed(seed)
    widths = ((shape.heads, shape.key_dim), (shape.kv_heads, shape.key_dim))
    widths = (*widths, (shape.kv_heads, shape.value_dim))
    return Made(*(torch.randn(n, context, dim, generator=gen) for n, dim in widths))


def reference(shape: Attention, of: Made) -> Tensor:
    """Return the expected output in fp64, [context, heads, value_dim]."""
    group, context = shape.heads // shape.kv_heads, of.q.shape[1]
    k, v = (x.double().repeat_interleave(group, 0) for x in (of.k, of.v))
    scores = of.q.double() @ k.transpose(1, 2) * shape.scale
    if shape.soft_cap:
        scores = shape.soft_cap * torch.tanh(scores / shape.soft_cap)
    behind = torch.arange(context)[:, None] - torch.arange(context)
    seen = (behind >= 0) & (behind < (shape.window or context))
    scores = scores.masked_fill(~seen, float("-inf"))
    if shape.sinks:
        sinks = SINKS.double()[:, None, None].expand(-1, context, 1)
        scores = torch.cat([scores, sinks], dim=2)
    return (scores.softmax(-1)[..., :context] @ v).transpose(0, 1)


class Cache:
    """Blocks of one layer in any order, filled with values that must not be read."""

    def __init__(
        self, shape: Attention, contexts: Sequence[int], block_size: int, dtype: torch.dtype
    ) -> None:
        self.layer, self.block_size = (
            LayerAttention(shape, SINKS if shape.sinks else None),
            block_size,
        )
        width = -(-max(contexts) // block_size)
        self.num_blocks = width * len(contexts)
        order = np.random.default_rng(1).permutation(self.num_blocks)
        self.tables = order.reshape(len(contexts), width).astype(np.int32)
        numbers = block_size * (shape.key_dim + shape.value_dim)
        self.blocks = torch.full((shape.kv_heads * self.num_blocks, numbers), 1e4, dtype=dtype)
        self.attention = CompiledAttention()

    def attend(self, parts: Sequence[tuple[int, Made, int, int]]) -> Tensor:
        """Compute rows [start, end) of sequences in one step."""
        with self.attention.step(
            np.array([end - start for *_, start, end in parts]),
            np.array([end for *_, end in parts]),
            self.tables[[which for which, *_ in parts]],
            num_blocks=self.num_blocks,
            block_size=self.block_size,
        ) as step:
            q, k, v = (
                torch.cat([of[i][:, start:end] for _, of, start, end in parts], dim=1)[None]
                for i in range(3)
            )
            return step.attend(self.layer, self.blocks, q, k, v)


def ragged(cache: Cache, sequences: Sequence[Made]) -> list[Tensor]:
    """Compute the last rows of each sequence; those before are in the cache already."""
    lens = [(rows, context) for rows, context in RAGGED]
    before = [(i, of, 0, n - r) for i, (of, (r, n)) in enumerate(zip(sequences, lens, strict=True))]
    cache.attend([each for each in before if each[3]])
    out = cache.attend([(i, sequences[i], n - r, n) for i, (r, n) in enumerate(lens)])
    return list(out.split([rows for rows, _ in lens]))


def all_of(shape: Attention) -> list[Made]:
    return [made(shape, context, seed) for seed, (_, context) in enumerate(RAGGED)]


def assert_right(name: str, block_size: int, dtype: torch.dtype) -> None:
    shape = SHAPES[name]
    sequences = all_of(shape)
    cache = Cache(shape, [n for _, n in RAGGED], block_size, dtype)
    tolerance = 2e-5 if dtype == torch.float32 else 3e-2
    for output, of, (rows, _) in zip(ragged(cache, sequences), sequences, RAGGED, strict=True):
        torch.testing.assert_close(
            output.double(), reference(shape, of)[-rows:], rtol=tolerance, atol=tolerance
        )


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("name", SHAPES)
def test_it_is_the_softmax(name: str, dtype: torch.dtype) -> None:
    assert_right(name, 16, dtype)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("block_size", [1, 5, 6, 64])
def test_blocks_of_any_size(block_size: int, dtype: torch.dtype) -> None:
    assert_right("all of it", block_size, dtype)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("name", ["all of it", "tiles", "many to one", "odd values"])
def test_a_row_has_its_own_bits(name: str, dtype: torch.dtype) -> None:
    assert_batch_invariant(name, dtype)


def assert_batch_invariant(name: str, dtype: torch.dtype) -> None:
    """Check bits with other rows and alone, in one chunk and in several, by one thread and by
    several."""
    shape, threads = SHAPES[name], torch.get_num_threads()
    sequences, contexts = all_of(shape), [n for _, n in RAGGED]
    try:
        torch.set_num_threads(1)
        expected = ragged(Cache(shape, contexts, 16, dtype), sequences)
        torch.set_num_threads(3)
        computed = ragged(Cache(shape, contexts, 16, dtype), sequences)
        assert all(torch.equal(a, b) for a, b in zip(computed, expected, strict=True))
        for i, (rows, context) in enumerate(RAGGED):
            alone = Cache(shape, contexts, 16, dtype)
            at, parts = 0, []
            for end in sorted({*range(0, context, 37), context - rows, context}):
                if end > at:
                    parts.append(alone.attend([(i, sequences[i], at, end)]))
                    at = end
            assert torch.equal(torch.cat(parts)[-rows:], expected[i]), i
    finally:
        torch.set_num_threads(threads)


def test_views_and_other_types_are_taken_as_they_are() -> None:
    shape, (of, other) = PLAIN, (made(PLAIN, 40, seed) for seed in (0, 1))
    cache = Cache(shape, [40, 40], 16, torch.float32)
    expected = cache.attend([(0, of, 0, 40)])
    views = [x.transpose(0, 1).contiguous().transpose(0, 1) for x in of]
    assert not views[0].is_contiguous()
    assert torch.equal(cache.attend([(1, Made(*views), 0, 40)]), expected)
    backwards = [x.transpose(1, 2).contiguous().transpose(1, 2) for x in of]
    assert torch.equal(cache.attend([(1, Made(*backwards), 0, 40)]), expected)
    rounded = [x.bfloat16() for x in of]
    assert torch.equal(
        cache.attend([(0, Made(*rounded), 0, 40)]),
        cache.attend([(1, Made(*(x.float() for x in rounded)), 0, 40)]),
    )
    assert not torch.equal(cache.attend([(1, other, 0, 40)]), expected)


def test_a_layer_may_read_what_another_wrote() -> None:
    shape, of = PLAIN, made(PLAIN, 20, 0)
    cache = Cache(shape, [20], 16, torch.float32)
    expected = cache.attend([(0, of, 0, 20)])
    with cache.attention.step(
        np.array([2]), np.array([20]), cache.tables, num_blocks=cache.num_blocks, block_size=16
    ) as step:
        computed = step.attend(cache.layer, cache.blocks, of.q[:, 18:], None, None)
    assert torch.equal(computed, expected[18:])


def test_what_does_not_fit_is_refused() -> None:
    for change, message in (
        ({"heads": 3}, "heads"),
        ({"key_dim": 7}, "key_dim"),
        ({"window": 0}, "window"),
        ({"soft_cap": -1.0}, "soft_cap"),
    ):
        with pytest.raises(ValueError, match=message):
            LayerAttention(replace(PLAIN, **change))
    with pytest.raises(ValueError, match="sinks"):
        LayerAttention(PLAIN, SINKS[:2])
    cache, of = Cache(PLAIN, [40], 16, torch.float32), made(PLAIN, 40, 0)
    for tables in (cache.tables[:, :2], cache.tables + cache.num_blocks, cache.tables - 9):
        step = cache.attention.step(
            np.array([1]), np.array([40]), tables, num_blocks=cache.num_blocks, block_size=16
        )
        with pytest.raises(IndexError, match="block_tables"), step:
            pass
    with pytest.raises(ValueError, match="queries"):
        cache.attend([(0, of._replace(q=of.q[:2]), 0, 40)])
    cache.blocks = cache.blocks[1:]
    with pytest.raises(ValueError, match="blocks"):
        cache.attend([(0, of, 0, 40)])
