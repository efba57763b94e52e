"""Attention in the interpreter compared with the reference, over types, pages, windows and caps;
and bit for bit with itself."""

from __future__ import annotations

import pytest
import torch

from tests.triton_kernels.interpreter.steps import Step
from triton_kernels.attention import (
    Heads,
    Partials,
    Tile,
    WorkList,
    attention,
    balanced_partials,
    kernel,
    plan,
)

pytestmark = [
    pytest.mark.usefixtures("device"),
    pytest.mark.filterwarnings("ignore::RuntimeWarning:triton.runtime.interpreter"),
]

SMALL = Heads(kv_heads=1, group=2, head_dim=16)
# Decodes, verifications of different k, a chunk, one that ends at a split, a row without tokens.
MIXED = [(1, 70), (3, 40), (2, 32), (0, 7), (12, 45), (1, 1), (5, 5), (1, 64)]
TOLERANCE = {torch.float32: 2e-6, torch.float16: 2e-3, torch.bfloat16: 1.5e-2}


def error(actual: torch.Tensor, expected: torch.Tensor) -> float:
    """Return the largest difference; NaN if there is any NaN."""
    return float((actual.float() - expected).abs().max())


@pytest.mark.parametrize("dtype, page_tokens", [*zip(TOLERANCE, (16, 32, 128), strict=True)])
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
    """Pages before the window are unused and are not read."""
    step = Step.make(MIXED[:5], SMALL, seed=window)
    freed = int(step.tables[0, -1])
    expected = step.reference(window=window)
    for table, starts, context in zip(
        step.tables, step.starts.diff().tolist(), step.contexts.tolist(), strict=True
    ):
        table[: max(context - starts - window + 1, 0) // 16] = freed
    assert error(step.run(step.work(window=window)), expected) < TOLERANCE[torch.float32]
    assert error(expected, step.reference(window=window + 1)) != 0


@pytest.mark.parametrize("balanced", [None, 12])
def test_sinks(balanced: int | None) -> None:
    """Each head's sink is counted once, however many parts a result has."""
    step, room = Step.make(MIXED, SMALL, seed=3), balanced_partials(12, SMALL)
    work = step.work(split_tokens=16, max_partials=room, balanced=balanced)
    sinks = torch.tensor([1.5, -2.0])
    expected = step.reference(sinks=sinks)
    assert error(step.run(work, sinks=sinks), expected) < TOLERANCE[torch.float32]
    assert (work.items[: int(work.num_items), kernel.PARTS.value] > 1).any()
    assert error(step.reference(), expected) > 0.1


@pytest.mark.parametrize("first_key, rows", [(1, 128), (17, 16)])
def test_keys_before_the_first(first_key: int, rows: int) -> None:
    """Keys before the first are not seen by any query; a query that sees no other key attends to
    nothing."""
    step = Step.make(MIXED, SMALL, seed=first_key)
    actual = step.run(step.work(tile=Tile(rows, 16, 4, 2)), first_key=first_key)
    assert error(actual, step.reference(first_key=first_key)) < TOLERANCE[torch.float32]
    assert not actual[int(step.starts[5])].any()
    assert error(actual, step.reference()) > 1e-2


@pytest.mark.parametrize("dtype, window", [*zip(TOLERANCE, (None, 40, None), strict=True)])
def test_bits_of_a_token_are_its_own(dtype: torch.dtype, window: int | None) -> None:
    """Verified among drafts, in a chunk, or decoded alone, it has the same bits."""
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


@pytest.mark.parametrize("max_partials, num_programs", [(1, 11), (7, 1)])
def test_bits_do_not_depend_on_who_computes_what(max_partials: int, num_programs: int) -> None:
    """Bits do not depend on memory for partial results either: one program folds what does not
    fit."""
    step = Step.make(MIXED, SMALL)
    expected = step.run(step.work())
    work = step.work(max_partials=max_partials)
    assert torch.equal(step.run(work, num_programs=num_programs), expected)
    parts = work.items[: int(work.num_items), kernel.PARTS.value]
    assert bool((parts > 1).any()) == (max_partials > 1)


@pytest.mark.parametrize("programs, window", [(1, None), (12, 20), (40, None)])
def test_balanced_parts(programs: int, window: int | None) -> None:
    """A step is split into about as many parts as there are programs, and no more than fit."""
    tile = Tile(32, 16, 4, 2)
    step = Step.make(MIXED, SMALL)
    room = balanced_partials(programs, SMALL)
    work = step.work(
        tile=tile, split_tokens=16, max_partials=room, balanced=programs, window=window
    )
    assert error(step.run(work), step.reference(window=window)) < TOLERANCE[torch.float32]
    parts = work.items[: int(work.num_items), kernel.PARTS.value]
    assert bool((parts > 1).any()) == (programs > 1)
    assert len(parts) <= max(len(MIXED), 4 * programs // 3 + len(MIXED))


def test_balanced_parts_always_have_memory() -> None:
    """For any lengths, all parts have a place for their partial results."""
    generator = torch.Generator().manual_seed(4)
    for _ in range(12):
        count = int(torch.randint(1, 9, (), generator=generator))
        contexts = torch.randint(1, 4000, (count,), generator=generator).int()
        programs = int(torch.randint(1, 60, (), generator=generator))
        tile, room = Tile(16, 16, 4, 2), balanced_partials(programs, SMALL)
        roomy, exact = (
            WorkList.allocate(
                Partials.allocate(places, SMALL, tile, "cpu"),
                SMALL,
                tile,
                max_tokens=count,
                max_sequences=count,
                split_tokens=64,
                balanced=programs,
            )
            for places in (4000, room)
        )
        for work in (roomy, exact):
            plan(torch.arange(count + 1).int(), contexts, work)
        items = [w.items[: int(w.num_items), kernel.PARTS.value].tolist() for w in (roomy, exact)]
        assert items[0] == items[1]


def test_queries_of_other_lengths_are_left_to_another_list() -> None:
    """Each work list takes its own lengths; together they cover the step."""
    step = Step.make(MIXED, SMALL)
    out = torch.full((len(step.q), step.q[0].numel()), float("nan"))
    for queries in ((1, 3), (4, 50)):
        work = step.work(queries=queries)
        attention(
            step.q, step.k_pages, step.v_pages, step.tables, out, work, scale=step.scale,
            num_programs=3,
        )  # fmt: skip
        taken = [n for n in step.starts.diff().tolist() if queries[0] <= n <= queries[1]]
        assert int(work.items[: int(work.num_items), kernel.TOKENS.value].sum()) >= sum(taken)
    assert torch.equal(out.view(step.q.shape), step.run(step.work()))


@pytest.mark.parametrize("query", [(64, 64), (33, 47)])
def test_tiles_of_prompts_look_at_no_mask_where_every_key_is_seen(query: tuple[int, int]) -> None:
    step = Step.make([query, (2, 5)], SMALL, page_tokens=64)
    work = step.work(tile=Tile(128, 16, 8, 3), split_tokens=64, balanced=4)
    assert error(step.run(work), step.reference()) < TOLERANCE[torch.float32]


def test_a_work_list_serves_every_layer() -> None:
    step = Step.make(MIXED[:2], SMALL)
    work = step.work()
    first = step.run(work)
    assert torch.equal(step.run(work), first)


def test_split_points_that_move_change_bits() -> None:
    """This shows that the equalities above are no accident of the numbers."""
    step = Step.make([(1, 100)], SMALL)
    apart, together = (step.run(step.work(split_tokens=tokens)) for tokens in (32, 128))
    assert not torch.equal(apart, together)


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
POINTERS, DESCRIPTORS = (Tile(16, 32, 4, 3, 1, descriptors) for descriptors in (False, True))


@pytest.mark.parametrize(
    "dtype, kv_dtype, page_tokens", [(*of, (16, 128)[i % 2]) for i, of in enumerate(TYPES)]
)
def test_window_and_cap_over_every_page(
    dtype: torch.dtype, kv_dtype: torch.dtype | None, page_tokens: int
) -> None:
    """Unused pages, tails of pages and every output are NaN before."""
    step = Step.make(QUERIES, HEADS, page_tokens=page_tokens, dtype=dtype, kv_dtype=kv_dtype)
    expected = step.reference(window=33, soft_cap=5.0)
    work = step.work(tile=POINTERS, split_tokens=64, window=33)
    actual = step.run(work, num_programs=3, soft_cap=5.0).float()
    assert (actual - expected).abs().max() < TYPES[dtype, kv_dtype]
    if page_tokens % POINTERS.keys == 0:
        described = work._replace(tile=DESCRIPTORS)
        again = bounded(step).run(described, num_programs=3, soft_cap=5.0)
        assert torch.equal(again.float(), actual)


def bounded(step: Step) -> Step:
    """Replace the poison of the pool by large numbers: descriptors read it, and must ignore it."""
    pools = (p.float().nan_to_num(nan=200.0).to(p.dtype) for p in (step.k_pages, step.v_pages))
    return step._replace(**dict(zip(("k_pages", "v_pages"), pools, strict=True)))


def test_descriptors_give_the_bits_of_pointers() -> None:
    """The cases are heads that are no power of two, pages with several tiles, and combined
    results."""
    step = Step.make(QUERIES, Heads(2, 3, 48), page_tokens=64)
    work = step.work(tile=POINTERS, split_tokens=32)
    expected = step.run(work)
    assert torch.equal(bounded(step).run(work._replace(tile=DESCRIPTORS)), expected)
    assert int(work.items[: int(work.num_items), kernel.PARTS.value].max()) > 2


def test_descriptors_want_whole_tiles_in_a_page() -> None:
    step = Step.make(QUERIES, HEADS, page_tokens=16)
    with pytest.raises(ValueError, match=r"^k_pages: pages of 16 tokens; give multiples of 32"):
        step.run(step.work(tile=DESCRIPTORS, split_tokens=64))


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
        WorkList.allocate(other, SMALL, work.tile, max_tokens=1, max_sequences=1, split_tokens=32)
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
