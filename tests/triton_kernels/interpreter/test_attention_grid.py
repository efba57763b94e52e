"""Attention over a grid of types, pages, windows and caps; through descriptors, the same bits."""

from __future__ import annotations

import pytest
import torch
import triton
import triton.language as tl

from tests.triton_kernels.interpreter.steps import Step
from triton_kernels.attention import Heads, Tile, kernel

HEADS = Heads(kv_heads=1, group=2, head_dim=16)
# A decode over several splits, a verification that ends at one, a chunk; lengths around 64.
QUERIES = [(1, 130), (3, 64), (9, 40)]
TYPES = {
    (torch.float32, None): 2e-6,
    (torch.float16, None): 2e-3,
    (torch.bfloat16, None): 1.5e-2,
    (torch.bfloat16, torch.float8_e4m3fn): 4e-2,
    (torch.float16, torch.float8_e5m2): 4e-2,
}
pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning:triton.runtime.interpreter")

POINTERS, DESCRIPTORS = (Tile(16, 32, 4, 3, 1, descriptors) for descriptors in (False, True))


@pytest.mark.parametrize("page_tokens", [16, 32, 64, 128])
@pytest.mark.parametrize("dtype, kv_dtype", list(TYPES))
def test_window_and_cap_over_every_page(
    dtype: torch.dtype, kv_dtype: torch.dtype | None, page_tokens: int
) -> None:
    """Pages that belong to no one, tails of pages and every output hold NaN before."""
    step = Step.make(QUERIES, HEADS, page_tokens=page_tokens, dtype=dtype, kv_dtype=kv_dtype)
    expected = step.reference(window=33, soft_cap=5.0)
    work = step.work(tile=POINTERS, split_tokens=64, window=33)
    found = step.run(work, num_programs=3, soft_cap=5.0).float()
    assert (found - expected).abs().max() < TYPES[dtype, kv_dtype]
    if page_tokens % POINTERS.keys == 0:
        described = work._replace(tile=DESCRIPTORS)
        again = bounded(step).run(described, num_programs=3, soft_cap=5.0)
        assert torch.equal(again.float(), found)


def bounded(step: Step) -> Step:
    """The poison of the pool replaced by large numbers: descriptors read it, and must not care."""
    pools = (p.float().nan_to_num(nan=200.0).to(p.dtype) for p in (step.k_pages, step.v_pages))
    return step._replace(**dict(zip(("k_pages", "v_pages"), pools, strict=True)))


def test_descriptors_give_the_bits_of_pointers() -> None:
    """Where a head is no power of two, a page holds several tiles, and results are combined."""
    step = Step.make(QUERIES, Heads(2, 3, 48), page_tokens=64)
    work = step.work(tile=POINTERS, split_tokens=32)
    expected = step.run(work)
    assert torch.equal(bounded(step).run(work._replace(tile=DESCRIPTORS)), expected)
    assert int(work.items[kernel.PARTS.value, : int(work.num_items)].max()) > 2


@triton.jit
def start_of_page(pool, page, offset, KEYS: tl.constexpr, BLOCK_DIM: tl.constexpr):
    k = pool[0].load([page, pool[2], 0, 0]).reshape(KEYS, BLOCK_DIM)
    v = pool[1].load([page, pool[2], 0, 0]).reshape(KEYS, BLOCK_DIM)
    return k, v


@triton.jit
def page_of_the_next(table_ptr, tile, first_key, stop, PAGE: tl.constexpr, KEYS: tl.constexpr):
    return tl.load(table_ptr + tile // PAGE + 1)


@pytest.mark.parametrize(
    "name, broken", [("_load_whole", start_of_page), ("_page_ids", page_of_the_next)]
)
def test_a_wrong_place_is_seen(name: str, broken: object, monkeypatch: pytest.MonkeyPatch) -> None:
    step = bounded(Step.make(QUERIES, HEADS, page_tokens=64))
    work = step.work(tile=DESCRIPTORS, split_tokens=64)
    expected = step.run(work)
    monkeypatch.setattr(kernel, name, broken)
    assert not torch.equal(step.run(work), expected)


def test_descriptors_want_whole_tiles_in_a_page() -> None:
    step = Step.make(QUERIES, HEADS, page_tokens=16)
    with pytest.raises(ValueError, match=r"^k_pages: pages of 16 tokens; give multiples of 32"):
        step.run(step.work(tile=DESCRIPTORS, split_tokens=64))
