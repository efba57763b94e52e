"""Limits and workloads of the GPU run, against figures computed by hand."""

from __future__ import annotations

import pytest

from bench.gpu.ceilings import copy_rate, matmul_rate
from bench.gpu.engine import speculative_cost
from bench.gpu.grid import (
    ATTENTION,
    LLAMA_8B_HEADS,
    MODELS,
    RAGGED,
    UNEVEN,
    ModelShape,
    Query,
    Shape,
    workload,
)
from bench.gpu.limits import (
    Ceilings,
    Cost,
    attention_cost,
    fraction,
    kv_write_cost,
    model_weights,
    rms_norm_cost,
    sampling_cost,
    silu_mul_cost,
    step_cost,
    visible_pairs,
)

H100 = Ceilings(copy_bytes_per_s=3.0e12, matmul_flop_per_s=798e12)


def test_workloads_are_read_as_vllm_writes_them() -> None:
    assert workload("q1s1k") == [Query(1, 1024)]
    assert workload("8q1s4k") == [Query(1, 4096)] * 8
    assert workload("2q2k_32q1s4k") == [Query(2048, 2048)] * 2 + [Query(1, 4096)] * 32
    assert workload("q5_2q1s33") == [Query(5, 5), Query(1, 33), Query(1, 33)]
    assert [q.context_tokens for q in workload(UNEVEN)] == [4641, 45118, 1730, 1696]
    assert sorted({q.query_tokens for q in workload(RAGGED)}) == [1, 2, 3, 4, 5, 6, 7, 8]
    assert len(set(ATTENTION)) == len(ATTENTION) and all(workload(name) for name in ATTENTION)


@pytest.mark.parametrize("name", ["", "q", "s4k", "4x1s1k", "q1s1k_", "q8s4", "q0s4"])
def test_what_is_no_workload_is_refused(name: str) -> None:
    with pytest.raises(ValueError, match=r"^workload: "):
        workload(name)


def test_a_decode_is_bound_by_memory() -> None:
    """64 x 4096 tokens of 4096 bytes of KV, and 64 x 4096 elements of q and of the result."""
    cost = attention_cost(workload("64q1s4k"), LLAMA_8B_HEADS)
    assert cost.num_bytes == 1_073_741_824 + 2 * 524_288
    assert cost.flop == 4 * 128 * 32 * 64 * 4096
    assert cost.bound(H100) == "memory"
    assert cost.limit_s(H100) * 1e6 == pytest.approx(358.26, abs=0.01)
    assert fraction(cost, H100, 2 * cost.limit_s(H100)) == 0.5


def test_a_verification_moves_what_a_decode_does() -> None:
    decode, verify = (
        attention_cost(workload(name), LLAMA_8B_HEADS) for name in ("64q1s4k", "64q8s4k")
    )
    assert verify.num_bytes / decode.num_bytes == pytest.approx(1.0068, abs=1e-4)
    assert verify.bound(H100) == "memory"


def test_a_chunk_is_bound_by_products() -> None:
    cost = attention_cost(workload("q2k"), LLAMA_8B_HEADS)
    assert cost.flop == 4 * 128 * 32 * (2048 * 2049 // 2)
    assert cost.bound(H100) == "matmul"
    assert cost.limit_s(H100) == pytest.approx(cost.flop / 798e12)


def test_a_token_sees_itself_and_what_is_before_it() -> None:
    assert visible_pairs([Query(2, 5)]) == 4 + 5
    assert visible_pairs([Query(3, 3), Query(1, 7)]) == 1 + 2 + 3 + 7


def test_fp8_halves_the_keys() -> None:
    whole, half = (
        attention_cost([Query(1, 1000)], Shape(2, 3, 8), kv_bytes=bytes_) for bytes_ in (2, 1)
    )
    assert whole.num_bytes - half.num_bytes == 1000 * 2 * 8 * 2
    assert whole.flop == half.flop


def test_kernels_by_token() -> None:
    assert kv_write_cost(10, Shape(8, 4, 128)).num_bytes == 2 * 10 * 48 * 128 * 2
    assert rms_norm_cost(64, 4096, adds=False).num_bytes == 2 * 64 * 4096 * 2
    assert rms_norm_cost(64, 4096, adds=True).num_bytes == 4 * 64 * 4096 * 2
    assert silu_mul_cost(64, 14336).num_bytes == 3 * 64 * 14336 * 2


def test_verification_reads_logits_once() -> None:
    """97 MB in 32 us for 64 requests with 4 drafts over 152k tokens."""
    cost = sampling_cost(64 * 5, 0, 151_936)
    assert cost.num_bytes == 97_239_040
    assert cost.limit_s(H100) * 1e6 == pytest.approx(32.4, abs=0.05)
    assert sampling_cost(64 * 5, 64 * 4, 151_936).num_bytes == 97_239_040 * 9 // 5


def test_weights_of_known_models() -> None:
    """Parameters as published, less the embedding (which is looked up) and the norms."""
    assert model_weights(MODELS["llama-3.1-8b"]) == 7_504_658_432
    assert model_weights(MODELS["llama-3.2-1b"]) == 1_235_746_816
    assert model_weights(MODELS["qwen3-0.6b"]) == 595_984_384


def test_a_step_reads_weights_and_keys() -> None:
    shape = ModelShape(2, 8, 16, Shape(1, 2, 4), 100, "llama", True)
    weights = 2 * (8 * 16 + 8 * 8 + 3 * 8 * 16) + 800
    cost = step_cost([Query(3, 10)], shape, logits_rows=1)
    assert cost.num_bytes == 2 * weights + 2 * (10 * 4 * 2 * 2)
    pairs = 8 + 9 + 10
    assert cost.flop == 2 * (weights - 800) * 3 + 2 * 800 + 2 * (4 * 4 * 2 * pairs)


def test_speculation_adds_drafted_tokens_and_passes_of_the_draft() -> None:
    shape = ModelShape(2, 8, 16, Shape(1, 2, 4), 100, "llama", True)
    draft = shape._replace(layers=1)
    plain = speculative_cost(shape, draft, 4, 20, 0.0)
    assert plain == step_cost([Query(1, 20)] * 4, shape, logits_rows=4)
    some = speculative_cost(shape, draft, 4, 20, 0.5)  # two rows draft one token
    target = step_cost([Query(2, 21)] * 2 + [Query(1, 20)] * 2, shape, logits_rows=6)
    passed = step_cost([Query(1, 20)] * 4, draft, logits_rows=4)
    assert some == target.plus(passed)
    assert speculative_cost(shape, draft, 4, 20, 2.0).num_bytes > some.num_bytes


def test_ceilings_count_both_ways_and_both_operations() -> None:
    assert copy_rate(3 << 30, 2.0) == 3 << 30
    assert matmul_rate(8192, 1.0) == 2 * 8192**3
    assert Cost(6, 8).limit_s(Ceilings(3.0, 2.0)) == 4.0
