"""Groups of ragged queries against plain attention, and layouts that are advanced, not rebuilt."""

from __future__ import annotations

from pathlib import Path

import msgspec
import numpy as np
import pytest
import torch
from torch import Tensor

from cbatch.runtime.attention import SEGMENT_TOKENS, product_rows
from cbatch.runtime.groups import StepBuffers
from cbatch.runtime.kv import KVCache
from cbatch.runtime.layout import AttentionPlanner, StepLayout
from cbatch.runtime.masks import CausalMasks, additive, seen_by_queries
from cbatch.runtime.model import Model, RunAhead, load_model
from tests.runtime.hf_models import PagedSequence, build, paged, run_all, step, tokens_of
from tests.runtime.pairs import tiny_config


def plain_attention(q: Tensor, k: Tensor, v: Tensor, position: int, window: int | None) -> Tensor:
    """q [heads, D] (scaled) at `position` over k, v [positions, kv_heads, D], in double."""
    first = 0 if window is None else max(0, position + 1 - window)
    k, v = (t[first : position + 1].double().transpose(0, 1) for t in (k, v))
    group = q.shape[0] // k.shape[0]
    scores = q.double().view(k.shape[0], group, -1) @ k.transpose(1, 2)
    return (scores.softmax(-1) @ v).flatten(0, 1)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("window", [None, 1, 100, 300])
@pytest.mark.parametrize("block_size", [4, 7, 16, 48])
def test_any_mix_of_query_lengths(block_size: int, window: int | None, dtype: torch.dtype) -> None:
    plain = tiny_config(context=2000)
    config = msgspec.structs.replace(plain, sliding_window=(window,) * plain.num_layers)
    rng = np.random.default_rng(block_size)
    torch.manual_seed(block_size)
    contexts = np.array([1, 700, 33, 256, 257, 150, 90])
    query_lens = np.array([1, 1, 33, 5, 1, 150, 3])
    needed = -(-contexts // block_size)
    kv = KVCache(config, int(needed.sum()), block_size, dtype, "cpu")
    kv.data.normal_()
    ids = rng.permutation(kv.num_blocks).astype(np.int32)
    tables = np.full((len(contexts), needed.max()), 10**6, dtype=np.int32)
    for row, own in zip(tables, np.split(ids, needed.cumsum()[:-1]), strict=True):
        row[: len(own)] = own
    rows, heads = int(query_lens.sum()), config.num_kv_heads * (config.group_size + 2)
    fused = torch.randn(rows + 8, heads * config.head_dim)[:rows]
    out = torch.zeros(rows + 1, config.num_heads * config.head_dim)
    starts = query_lens.cumsum() - query_lens
    at = [np.arange(c - n, c) for c, n in zip(contexts, query_lens, strict=True)]
    planner = AttentionPlanner(config)
    buffers = StepBuffers(kv, tables, fused, out)
    layout = planner.plan(buffers, query_lens, contexts, np.concatenate(at))
    assert len(layout.groups[window]) > 2, "short and long queries, cut and whole"
    for group in layout.groups[window]:
        group.run(kv.block_rows[1])
    queries = fused.view(rows, config.num_kv_heads, -1, config.head_dim)[:, :, :-2].flatten(1, 2)
    for b in range(len(contexts)):
        own = tables[b, : needed[b]]
        k, v = kv.data[1][:, :, own].flatten(2, 3).transpose(1, 2)
        for i in range(query_lens[b]):
            row = int(starts[b]) + i
            expected = plain_attention(queries[row], k, v, int(at[b][i]), window)
            found = out[row].view(config.num_heads, -1).double()
            torch.testing.assert_close(found, expected, rtol=0, atol=1e-5)


def test_slots_are_where_the_tables_say() -> None:
    config = tiny_config()
    kv = KVCache(config, 10, 4, torch.float32, "cpu")
    fused, out = torch.zeros(5, 64), torch.zeros(6, 32)
    tables = np.array([[9, 2, 7], [3, 0, 0]], dtype=np.int32)
    planner = AttentionPlanner(config)
    query_lens, contexts = np.array([4, 1]), np.array([10, 1])
    positions = np.array([6, 7, 8, 9, 0])
    slots = planner.plan(StepBuffers(kv, tables, fused, out), query_lens, contexts, positions).slots
    marks = torch.arange(1.0, 11.0)
    kv.token_rows[0].index_copy_(0, slots, marks[:, None].expand(-1, 16))
    blocks, offsets = [2, 2, 7, 7, 3], [2, 3, 0, 1, 0]
    found = kv.data[0, :, :, blocks, offsets]  # [2, kv_heads, T, head_dim]
    assert torch.equal(found[0, :, :, 0].T.flatten(), marks) and torch.equal(found[0], found[1])
    assert int((kv.data != 0).sum()) == 10 * 16


def test_enough_rows_for_a_product_are_known() -> None:
    for head_dim in (8, 64, 128):
        for threads in (1, 2):
            torch.set_num_threads(threads)
            scores, values = product_rows(head_dim, "cpu", threads)
            assert 1 <= scores <= 16 and 1 <= values <= 16


@pytest.fixture
def advanced(monkeypatch: pytest.MonkeyPatch) -> list[bool]:
    """Whether each attempt to advance a layout succeeded."""
    found: list[bool] = []
    original = StepLayout.advance

    def recording(self: StepLayout, *args: object) -> bool:
        found.append(original(self, *args))
        return found[-1]

    monkeypatch.setattr(StepLayout, "advance", recording)
    return found


def fresh_logits(tmp_path: Path, tokens: np.ndarray) -> Tensor:
    """Logits of a sequence alone, in one chunk, by a model that never saw another step."""
    model = load_model(tmp_path, numerics="invariant")
    kv = cache(model)
    return run_all(model, kv, paged(kv, [tokens]), [len(tokens)])


def cache(model: Model, num_blocks: int = 60) -> KVCache:
    return KVCache(model.config, num_blocks, 16, model.dtype, model.device)


@pytest.mark.usefixtures("torch_pass")
def test_advanced_layouts_give_the_bits_of_rebuilt_ones(
    tmp_path: Path, advanced: list[bool]
) -> None:
    build(tmp_path, "qwen2")  # a window of 90 on two of three layers
    sequences = [tokens_of(i, n) for i, n in enumerate((120, 110))]
    expected = torch.cat([fresh_logits(tmp_path, s) for s in sequences])
    model = load_model(tmp_path, numerics="invariant")
    kv = cache(model)
    assert torch.equal(run_all(model, kv, paged(kv, sequences), [1]), expected)
    assert sum(advanced) > 60, "most steps within blocks and windows"
    assert advanced.count(False) > 5, "blocks are entered"


@pytest.mark.usefixtures("torch_pass")
def test_a_layout_is_not_advanced_for_others(tmp_path: Path, advanced: list[bool]) -> None:
    """Another sequence at the next position, other blocks, another cache, a swapped order."""
    build(tmp_path, "llama")
    model = load_model(tmp_path, numerics="invariant")
    kv, other = cache(model), cache(model)
    sequences = paged(kv, [tokens_of(i, 40) for i in range(4)])
    elsewhere = paged(other, [tokens_of(9, 40)], seed=5)[0]
    expected = [fresh_logits(tmp_path, s.tokens) for s in (*sequences, elsewhere)]

    def check(cache_: KVCache, rows: list[tuple[int, PagedSequence]]) -> bool:
        advanced.clear()
        for (i, s), logits in zip(
            rows, step(model, cache_, [(s, 1) for _, s in rows]), strict=True
        ):
            assert torch.equal(logits[0], expected[i][s.done - 1])
        return any(advanced)

    a, b, c, d = enumerate(sequences)
    e = (4, elsewhere)
    for (_, s), done in ((a, 20), (b, 21), (c, 21), (d, 20)):
        step(model, kv, [(s, done)])
    step(model, other, [(elsewhere, 20)])
    assert not check(kv, [a]) and check(kv, [a])
    assert not check(kv, [b]) and not check(kv, [a]), "the right position in other blocks"
    assert not check(other, [e]) and check(other, [e]) and not check(kv, [c])
    assert not check(kv, [b, d]) and check(kv, [b, d]) and not check(kv, [d, b])


@pytest.mark.usefixtures("decoder_pass")
def test_long_rows_are_summed_by_segments(tmp_path: Path) -> None:
    """Contexts on both sides of every segment boundary, one token at a time and in one chunk."""
    build(tmp_path, "llama", max_position_embeddings=3 * SEGMENT_TOKENS)
    model = load_model(tmp_path, numerics="invariant")
    tokens = tokens_of(0, 2 * SEGMENT_TOKENS + 3)
    kv = cache(model)
    whole = run_all(model, kv, paged(kv, [tokens]), [len(tokens)])
    for boundary in (SEGMENT_TOKENS, 2 * SEGMENT_TOKENS):
        kv = cache(model)
        sequence = paged(kv, [tokens[: boundary + 3]])[0]
        step(model, kv, [(sequence, boundary - 3)])
        single = [step(model, kv, [(sequence, 1)])[0] for _ in range(6)]
        assert torch.equal(torch.cat(single), whole[boundary - 3 : boundary + 3])


@pytest.mark.parametrize(
    "family", ["llama", "qwen2"]
)  # qwen2: a window of 90 on two of three layers
@pytest.mark.parametrize("lengths", [(120,), (110, 120), (118, 30, 97, 33, 64)])
@pytest.mark.usefixtures("decoder_pass")
@torch.inference_mode()
def test_passes_laid_out_ahead_give_the_bits_of_rebuilt_ones(
    tmp_path: Path, family: str, lengths: tuple[int, ...]
) -> None:
    """Across blocks, beyond the window, and in rows of one step and of many."""
    build(tmp_path, family)
    sequences = [tokens_of(i, n) for i, n in enumerate(lengths)]
    expected = [fresh_logits(tmp_path, s) for s in sequences]
    model = load_model(tmp_path, numerics="invariant")
    kv = cache(model)
    rows = paged(kv, sequences)
    passes = 24
    for row in rows:
        step(model, kv, [(row, len(row.tokens) - passes)])
    starts = np.array([len(s) - passes for s in sequences])
    tables = np.zeros((len(rows), 8), dtype=np.int32)
    for table, row in zip(tables, rows, strict=True):
        table[: len(row.blocks)] = row.blocks
    ahead = RunAhead(model, kv, starts, tables, passes)
    for at in range(passes):
        tokens = torch.tensor([s[n + at] for s, n in zip(sequences, starts, strict=True)])
        logits = ahead.next(tokens)
        for row, n, whole in zip(logits, starts, expected, strict=True):
            assert torch.equal(row, whole[n + at])


def test_masks_from_the_table_are_those_computed() -> None:
    group = 2
    masks = CausalMasks(8, group, torch.device("cpu"))
    for position, queries, keys in ((0, 3, 16), (5, 8, 16), (700, 2, 1024), (511, 1, 512)):
        contexts, query_lens = np.array([position + queries]), np.array([queries])
        seen = seen_by_queries(queries, query_lens, contexts, np.array([0]), keys, None)
        expected = torch.from_numpy(additive(seen[0]).repeat(group, axis=0))
        assert torch.equal(masks.of(position, queries, keys), expected)
