"""Limits and workloads of the GPU run, compared with figures computed by hand."""

from __future__ import annotations

import pytest

from bench.gpu import limits
from bench.gpu.limits import (
    ATTENTION,
    LLAMA_8B_HEADS,
    MODELS,
    RAGGED,
    UNEVEN,
    Ceilings,
    Cost,
    Query,
    attention_cost,
    step_cost,
    visible_pairs,
    workload,
)
from sim.cost.shapes import ModelShape

H100 = Ceilings(read_bytes_per_s=3.0e12, matmul_flop_per_s=798e12)
SHAPE = ModelShape(
    hidden_size=8,
    intermediate_size=16,
    num_hidden_layers=2,
    num_attention_heads=2,
    num_key_value_heads=1,
    head_dim=4,
    vocab_size=100,
)


def test_workloads_are_read_as_vllm_writes_them() -> None:
    assert workload("q1s1k") == [Query(1, 1024)]
    assert workload("2q2k_32q1s4k") == [Query(2048, 2048)] * 2 + [Query(1, 4096)] * 32
    assert workload("q5_2q1s33") == [Query(5, 5), Query(1, 33), Query(1, 33)]
    assert [q.context_tokens for q in workload(UNEVEN)] == [4641, 45118, 1730, 1696]
    assert sorted({q.query_tokens for q in workload(RAGGED)}) == [1, 2, 3, 4, 5, 6, 7, 8]
    assert len(set(ATTENTION)) == len(ATTENTION) and all(workload(name) for name in ATTENTION)
    for name in ("", "q", "s4k", "4x1s1k", "q1s1k_", "q8s4", "q0s4"):
        with pytest.raises(ValueError, match=r"^workload: "):
            workload(name)


def test_attention_is_bound_by_memory_or_by_products() -> None:
    """64 x 4096 tokens of 4096 bytes of KV, and 64 x 4096 elements of q and of the result."""
    decode, verify, chunk = (
        attention_cost(workload(name), LLAMA_8B_HEADS) for name in ("64q1s4k", "64q8s4k", "q2k")
    )
    assert decode == Cost(1_073_741_824 + 2 * 524_288, 4 * 128 * 32 * 64 * 4096)
    assert decode.limit_s(H100) * 1e6 == pytest.approx(358.26, abs=0.01)
    assert verify.num_bytes / decode.num_bytes == pytest.approx(1.0068, abs=1e-4)
    assert chunk.flop == 4 * 128 * 32 * (2048 * 2049 // 2)
    assert [cost.bound(H100) for cost in (decode, verify, chunk)] == ["memory", "memory", "matmul"]
    assert chunk.limit_s(H100) == pytest.approx(chunk.flop / 798e12)
    # A token sees itself and the tokens before it.
    assert visible_pairs([Query(2, 5)]) == 4 + 5
    assert visible_pairs([Query(3, 3), Query(1, 7)]) == 1 + 2 + 3 + 7


def test_verification_reads_logits_once() -> None:
    # 97 MB in 32 us for 64 requests with 4 drafts over 152k tokens.
    cost = limits.sampling_cost(64 * 5, 151_936)
    assert cost.num_bytes == 97_239_040
    assert cost.limit_s(H100) * 1e6 == pytest.approx(32.4, abs=0.05)


def test_a_step_reads_weights_and_keys() -> None:
    """Parameters as published, less the embedding (which is looked up) and the norms."""
    weights = [shape.layer_weights + shape.head_weights for shape in MODELS.values()]
    assert weights == [7_504_658_432, 1_235_746_816]
    counted = 2 * (8 * 16 + 8 * 8 + 3 * 8 * 16) + 800
    cost = step_cost([Query(3, 10)], SHAPE, logits_rows=1)
    assert cost.num_bytes == 2 * counted + 2 * (10 * 4 * 2 * 2)
    pairs = 8 + 9 + 10
    assert cost.flop == 2 * (counted - 800) * 3 + 2 * 800 + 2 * (4 * 4 * 2 * pairs)
