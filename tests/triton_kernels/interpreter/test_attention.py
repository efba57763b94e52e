"""Attention in the interpreter against the reference, and bit for bit against itself."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from tests.triton_kernels.interpreter.steps import Step
from triton_kernels.attention import Heads, Partials, Tile, WorkList, kernel, plan

SMALL = Heads(kv_heads=1, group=2, head_dim=16)
# Decodes, verifications of different k, a chunk, one that ends at a split, a row without tokens.
MIXED = [(1, 70), (3, 40), (2, 32), (0, 7), (12, 45), (1, 1), (5, 5), (1, 64)]
TOLERANCE = {torch.float32: 2e-6, torch.float16: 2e-3, torch.bfloat16: 1.5e-2}


def error(found: torch.Tensor, expected: torch.Tensor) -> float:
    """NaN where anything is."""
    return float((found.float() - expected).abs().max())


@pytest.mark.parametrize("page_tokens", [16, 128])
@pytest.mark.parametrize("dtype", list(TOLERANCE))
def test_a_mixed_step(dtype: torch.dtype, page_tokens: int) -> None:
    heads = SMALL._replace(kv_heads=2)
    step = Step.make(MIXED, heads, dtype=dtype, page_tokens=page_tokens, seed=page_tokens)
    assert error(step.run(step.work()), step.reference()) < TOLERANCE[dtype]


@pytest.mark.parametrize("group, head_dim", [(1, 64), (3, 48), (16, 32)])
def test_shapes_of_heads(group: int, head_dim: int) -> None:
    step = Step.make(MIXED[:3], Heads(2, group, head_dim), seed=group)
    assert error(step.run(step.work()), step.reference()) < TOLERANCE[torch.float32]


@pytest.mark.parametrize("window", [1, 20])
def test_window(window: int) -> None:
    """Pages before the window belong to no one and are not read."""
    step = Step.make(MIXED[:5], SMALL, seed=window)
    freed = int(step.tables[0, -1])
    expected = step.reference(window=window)
    for table, starts, context in zip(
        step.tables, step.starts.diff().tolist(), step.contexts.tolist(), strict=True
    ):
        table[: max(context - starts - window + 1, 0) // 16] = freed
    assert error(step.run(step.work(window=window)), expected) < TOLERANCE[torch.float32]
    assert error(expected, step.reference(window=window + 1)) != 0


@pytest.mark.parametrize("soft_cap", [0.5, 30.0])
def test_soft_cap(soft_cap: float) -> None:
    step = Step.make(MIXED[:3], SMALL)
    found = step.run(step.work(), soft_cap=soft_cap)
    assert error(found, step.reference(soft_cap=soft_cap)) < TOLERANCE[torch.float32]
    assert error(found, step.reference()) > 1e-3


@pytest.mark.parametrize("kv_dtype", [torch.float8_e4m3fn, torch.float8_e5m2])
def test_fp8(kv_dtype: torch.dtype) -> None:
    step = Step.make(MIXED[:3], SMALL, dtype=torch.bfloat16, kv_dtype=kv_dtype)
    scales = {"k_scale": 0.7, "v_scale": 1.9}
    assert error(step.run(step.work(), **scales), step.reference(**scales)) < 4e-2


@pytest.mark.parametrize("dtype", list(TOLERANCE))
@pytest.mark.parametrize("window", [None, 40])
def test_bits_of_a_token_are_its_own(dtype: torch.dtype, window: int | None) -> None:
    """Verified among drafts, in a chunk, or decoded alone: the same bits."""
    step = Step.make([(9, 100), (20, 60), (1, 45)], SMALL, dtype=dtype)
    together = step.run(step.work(window=window))
    items = []
    for b, position in ((0, 95), (0, 91), (1, 45), (1, 59), (2, 44)):
        row = int(step.starts[b + 1]) - (int(step.contexts[b]) - position)
        alone = step._replace(
            q=step.q[row : row + 1],
            tables=step.tables[b : b + 1],
            starts=torch.tensor([0, 1], dtype=torch.int32),
            contexts=torch.tensor([position + 1], dtype=torch.int32),
        )
        work = alone.work(window=window)
        assert torch.equal(alone.run(work)[0], together[row])
        items.append(int(work.num_items))
    assert items == ([3, 3, 2, 2, 2] if window is None else [2, 2, 2, 2, 2])


@pytest.mark.parametrize("most_partials, num_programs", [(1, 11), (7, 1)])
def test_bits_do_not_depend_on_who_computes_what(most_partials: int, num_programs: int) -> None:
    """Nor on memory for partial results: what does not fit is folded by one program."""
    step = Step.make(MIXED, SMALL)
    expected = step.run(step.work())
    work = step.work(most_partials=most_partials)
    assert torch.equal(step.run(work, num_programs=num_programs), expected)
    parts = work.items[kernel.PARTS.value, : int(work.num_items)]
    assert bool((parts > 1).any()) == (most_partials > 1)


def test_a_work_list_serves_every_layer() -> None:
    step = Step.make(MIXED[:2], SMALL)
    work = step.work()
    first = step.run(work)
    assert torch.equal(step.run(work), first)


def test_split_points_that_move_change_bits() -> None:
    """So the equalities above are no accident of the numbers."""
    step = Step.make([(1, 100)], SMALL)
    apart, together = (step.run(step.work(split_tokens=tokens)) for tokens in (32, 128))
    assert not torch.equal(apart, together)


def test_folding_in_another_order_changes_bits(monkeypatch: pytest.MonkeyPatch) -> None:
    step = Step.make([(1, 100)], SMALL)
    expected = step.run(step.work())
    work = step.work()
    at = int(work.num_items)
    work.items[kernel.FIRST_SPLIT.value, :at] = work.items[kernel.FIRST_SPLIT.value, :at].flip(0)
    work.items[kernel.STOP_SPLIT.value, :at] = work.items[kernel.STOP_SPLIT.value, :at].flip(0)
    found = step.run(work)
    assert not torch.equal(found, expected)
    assert error(found, step.reference()) < TOLERANCE[torch.float32]


@pytest.mark.parametrize(
    "field, change",
    [
        (kernel.POSITION, 1),  # a token sees its successor
        (kernel.FIRST_SPLIT, 1),  # keys are lost
        (kernel.STOP_SPLIT, -1),
        (kernel.PART, 1),  # counted with another block
        (kernel.TOKENS, -1),
        (kernel.SEQUENCE, -1),  # keys of another
    ],
)
def test_every_field_of_an_item_counts(field: Any, change: int) -> None:
    step = Step.make([(1, 20), (2, 60), (3, 40)], SMALL)
    work = step.work()
    last = int(work.num_items) - 1
    work.items[field.value, last] += change
    expected = step.reference()
    assert not error(step.run(work, check=False), expected) < 1e-3


def test_an_item_left_out_leaves_poison() -> None:
    step = Step.make([(12, 40)], SMALL)
    work = step.work()
    work.num_items.sub_(1)
    assert step.run(work, check=False).isnan().any()


def test_arguments_that_do_not_fit_are_named() -> None:
    step = Step.make([(1, 20)], SMALL)
    work = step.work()
    more = Step.make([(1, 20), (8, 8)], SMALL)
    with pytest.raises(ValueError, match=r"^q: 9 tokens"):
        more.run(work)
    with pytest.raises(ValueError, match=r"^context_lens: 2 sequences"):
        plan(more.starts, more.contexts, work)
    other = Partials.allocate(1, SMALL, Tile(64, 16, 4, 1), "cpu")
    with pytest.raises(ValueError, match=r"^partials: "):
        WorkList.allocate(other, SMALL, work.tile, most_tokens=1, most_sequences=1, split_tokens=32)
    bad = {
        "q": step._replace(q=step.q[..., :8]),
        "k_pages": step._replace(k_pages=step.k_pages[:, :8], v_pages=step.v_pages[:, :8]),
        "v_pages": step._replace(v_pages=step.v_pages[:-1]),
        "block_tables": step._replace(tables=step.tables.long()),
    }
    for name, wrong in bad.items():
        with pytest.raises(ValueError, match=f"^{name}: "):
            wrong.run(work)
    with pytest.raises(ValueError, match=r"^context_lens: "):
        step._replace(contexts=step.contexts.long()).work()
    with pytest.raises(ValueError, match=r"^split_tokens: "):
        step.work(split_tokens=24)
    with pytest.raises(ValueError, match=r"^tile\.rows: "):
        Step.make([(1, 20)], Heads(1, 17, 16)).work(tile=Tile(16, 16, 4, 1))
