"""Groups of ragged queries in the pass by torch, compared with plain attention."""

from __future__ import annotations

import msgspec
import numpy as np
import pytest
import torch
from torch import Tensor

from cbatch.runtime.cpu.attention.groups import StepBuffers
from cbatch.runtime.cpu.attention.layout import AttentionPlanner
from cbatch.runtime.kv_cache import KVCache
from tests.runtime.pairs import tiny_config


def plain_attention(q: Tensor, k: Tensor, v: Tensor, position: int, window: int | None) -> Tensor:
    """Attend q [heads, D] (scaled) at `position` to k, v [positions, kv_heads, D], in double."""
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
            attended = out[row].view(config.num_heads, -1).double()
            torch.testing.assert_close(attended, expected, rtol=0, atol=1e-5)


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
    stored = kv.data[0, :, :, blocks, offsets]  # [2, kv_heads, T, head_dim]
    assert torch.equal(stored[0, :, :, 0].T.flatten(), marks) and torch.equal(stored[0], stored[1])
    assert int((kv.data != 0).sum()) == 10 * 16
