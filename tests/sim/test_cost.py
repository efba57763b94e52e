"""Costs of steps and sizes of KV pools, compared with sums done by hand and with real runs."""

from __future__ import annotations

import json
import math
from pathlib import Path

import pytest

from bench.simulator import against_vllm
from cbatch.core.request.errors import FieldError
from sim.cost.base import constant_cost
from sim.cost.pool import (
    RULES,
    PoolRules,
    PoolSettings,
    pool_blocks,
    recorded_blocks,
    reserved_bytes,
)
from sim.cost.roofline import (
    Gpu,
    ModelShape,
    Roofline,
    RooflineConfig,
    load_gpu,
    load_shape,
)
from tests.helpers import decoding, prefilling

# A device and a model of round numbers: 1 TFLOP/s and 1 GB/s, all of it reached.
GPU = Gpu(
    bf16_flops=1e12,
    memory_bytes_per_s=1e9,
    memory_bytes=10**8,
    link_bytes_per_s=1e9,
    source="made up",
)
SHAPE = ModelShape(
    hidden_size=64,
    intermediate_size=128,
    num_hidden_layers=2,
    num_attention_heads=4,
    num_key_value_heads=2,
    vocab_size=1000,
)
LAYER_WEIGHTS = 2 * (64 * 64 * 2 + 2 * 64 * 32 + 3 * 64 * 128)  # q and o, k and v, three of the MLP
HEAD_WEIGHTS = 64 * 1000
IDEAL = {
    "compute_efficiency": 1.0,
    "memory_efficiency": 1.0,
    "layer_s": 0.0,
    "step_host_s": 0.0,
    "request_host_s": 0.0,
    "link_latency_s": 0.0,
}


def config(**more) -> RooflineConfig:
    return RooflineConfig(gpu=GPU, shape=SHAPE, **(IDEAL | more))


def test_weights_by_hand() -> None:
    assert (SHAPE.layer_weights, SHAPE.head_weights) == (LAYER_WEIGHTS, HEAD_WEIGHTS)
    assert SHAPE.kv_token_bytes == 2 * 2 * 2 * 2 * 16  # bytes, layers, k and v, heads, their size
    llama = load_shape("llama-3.1-8b")
    # Published: 8.03 billion parameters, of which norms (266 k) are not counted here.
    assert llama.weight_bytes / 2 == pytest.approx(8.03e9, rel=1e-3)
    assert llama.kv_token_bytes == 128 * 1024


def test_few_rows_are_bound_by_memory_and_many_tokens_by_arithmetic() -> None:
    """Weights are read once, KV once for each row; attention is 4 x layers x width flops a (query,
    key) pair."""
    roofline = Roofline(config())
    read_bytes = 2 * LAYER_WEIGHTS + 2 * HEAD_WEIGHTS + 3 * 50 * SHAPE.kv_token_bytes
    assert roofline.step_s(decoding(3, 150)) == (0.0, pytest.approx(read_bytes / 1e9), 0.0)
    work = prefilling(1, 4000, history=100)
    flops = 2 * LAYER_WEIGHTS * 4000 + 4 * 2 * 64 * work.prefill_pairs
    expected_s = flops / 1e12 + 2 * HEAD_WEIGHTS / 1e9
    assert roofline.step_s(work)[1] == pytest.approx(expected_s)


def test_a_price_does_not_depend_on_those_before() -> None:
    """One model prices all steps, and a new one each step. Steps have equal numbers of tokens, more
    or fewer with logits, and short and long contexts."""
    works = [
        decoding(rows, rows * context, logit_tokens=logits)
        for rows in (3, 4000)
        for context in (1, 5000)
        for logits in (rows, 1)
    ]
    shared = Roofline(config())
    assert [shared.step_s(w) for w in works] == [Roofline(config()).step_s(w) for w in works]
    *_, all_s, one_s = (shared.step_s(w)[1] for w in works)
    assert all_s > one_s, "the head is read once, unless it has so much to do"


def test_efficiencies_constants_and_exchanges_add_up() -> None:
    whole_s, half_s = (
        Roofline(config(memory_efficiency=share)).step_s(decoding(1, 9))[1] for share in (1, 0.5)
    )
    assert half_s == pytest.approx(2 * whole_s)
    more = Roofline(config(layer_s=1e-3, step_host_s=0.1, request_host_s=0.01))
    _, found_s, host_s = more.step_s(decoding(1, 9, admitted=3))
    assert (found_s, host_s) == (pytest.approx(whole_s + 2e-3), pytest.approx(0.1 + 0.03))
    # Two devices halve the work; of each of the ring's exchanges a device moves 2 tokens of 64
    # values of 2 bytes.
    whole_s = Roofline(config()).step_s(decoding(2, 100))[1]
    found_s = Roofline(config(tensor_parallel_size=2, link_latency_s=1e-4)).step_s(
        decoding(2, 100)
    )[1]
    exchange_s = 2 * 64 * 2 / 1e9 + 1e-4
    assert found_s == pytest.approx(whole_s / 2 + 2 * SHAPE.num_hidden_layers * exchange_s)


def test_drafts_are_charged_at_their_depth_and_at_k_plus_one() -> None:
    draft = ModelShape(
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=1,
        num_attention_heads=2,
        num_key_value_heads=2,
        vocab_size=1000,
    )
    model = Roofline(config(draft=draft))
    deep = model.step_s(decoding(2, 100, depth=3, draft_context_tokens=100))[0]
    pass_s = 2 * (draft.layer_weights + draft.head_weights) / 1e9
    assert deep == pytest.approx(3 * (pass_s + 100 * draft.kv_token_bytes / 1e9))
    assert model.step_s(decoding(2, 100))[0] == 0
    # Wide enough to be bound by arithmetic, verification costs what its tokens cost.
    verify_s, plain_s = (model.step_s(decoding(2000, drafts=n))[1] for n in (6000, 0))
    assert verify_s == pytest.approx(4 * plain_s)


def test_shapes_from_config_files(tmp_path: Path) -> None:
    fields = {
        "architectures": ["LlamaForCausalLM"],
        "hidden_size": 64,
        "intermediate_size": 128,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "vocab_size": 1000,
    }
    (tmp_path / "config.json").write_text(json.dumps(fields))
    shape = load_shape(str(tmp_path))
    assert shape.num_key_value_heads == 4 and load_shape(str(tmp_path / "config.json")) == shape
    for more, word in (
        ({"num_local_experts": 8}, "experts"),
        ({"kv_lora_rank": 512}, "latent"),
        ({"quantization_config": {"bits": 4}}, "quantised"),
        ({"hidden_size": "big"}, "hidden_size"),
    ):
        (tmp_path / "config.json").write_text(json.dumps(fields | more))
        with pytest.raises(FieldError, match=word):
            load_shape(str(tmp_path))


@pytest.mark.parametrize(
    ("make", "field"),
    [
        (lambda: config(tensor_parallel_size=3), "--tensor-parallel-size"),
        (lambda: config(tensor_parallel_size=0), "--tensor-parallel-size"),
        (lambda: config(compute_efficiency=1.5), "compute_efficiency"),
        (lambda: config(memory_efficiency=math.nan), "memory_efficiency"),
        (lambda: load_gpu("H1000"), "--gpu"),
        (lambda: load_shape("no-such-model"), "--model"),
        (lambda: constant_cost(0), "cost_profile.base_s"),
        (lambda: constant_cost(draft_pass_s=math.inf), "cost_profile.draft_pass_s"),
    ],
)
def test_bad_values_name_their_field(make, field: str) -> None:
    with pytest.raises(FieldError) as caught:
        make()
    assert caught.value.field == field


GIB = 2**30
LLAMA_8B, QWEN_32B = load_shape("llama-3.1-8b"), load_shape("qwen3-32b")
QWEN_8B = ModelShape(
    hidden_size=4096,
    intermediate_size=12288,
    num_hidden_layers=36,
    num_attention_heads=32,
    num_key_value_heads=8,
    head_dim=128,
    vocab_size=151936,
)


def device(total_bytes: float, usable_bytes: int | None = None) -> Gpu:
    return Gpu(
        bf16_flops=1e12,
        memory_bytes_per_s=1e9,
        memory_bytes=int(total_bytes),
        link_bytes_per_s=1e9,
        source="made up",
        usable_bytes=usable_bytes,
    )


def blocks(total_bytes: float, shape: ModelShape, tp: int = 1, **settings: object) -> int:
    config = RooflineConfig(gpu=device(total_bytes), shape=shape, tensor_parallel_size=tp)
    return pool_blocks(config, PoolSettings(**settings))  # type: ignore[arg-type]


# Real runs by card: memory as CUDA reports it, and blocks of 16 in their logs or records. Versions,
# from above: 0.19.0, 0.14 or so, 0.28.0, 0.28.0, 0.31.0 and 0.24.0.
RUNS = {
    "RTX 4090": (25_250_627_584, LLAMA_8B, 1, {"rules": "vllm-0.19"}, 2_588),
    "L20": (47.37 * GIB, QWEN_8B, 1, {"rules": "vllm-0.19"}, 11_804),
    "RTX PRO 6000": (
        101_976_440_832,
        LLAMA_8B,
        1,
        {"gpu_memory_utilization": 0.92, "max_rows": 128},
        35_913,
    ),
    "2 x RTX PRO 6000": (
        101_976_440_832,
        QWEN_32B,
        2,
        {"gpu_memory_utilization": 0.92, "max_rows": 128},
        28_884,
    ),
    "A100": (79.25 * GIB, LLAMA_8B, 1, {"gpu_memory_utilization": 0.92}, 28_781),
    "RTX 5090": (31.4 * GIB, QWEN_8B, 1, {"gpu_memory_utilization": 0.92}, 5_565),
}


@pytest.mark.parametrize("card", RUNS)
def test_the_pools_of_runs_are_predicted_within_three_percent(card: str) -> None:
    """Constants were fitted to the runs on an L20 and an A100, not to the others."""
    total_bytes, shape, tp, settings, real = RUNS[card]
    assert abs(blocks(total_bytes, shape, tp, **settings) / real - 1) < 0.03


def test_the_pool_by_hand(monkeypatch: pytest.MonkeyPatch) -> None:
    """The pass is the larger part with long steps, the sampler with many rows."""
    monkeypatch.setitem(RULES, "made up", PoolRules(10.0, 1e3, 5e3))
    few = PoolSettings(rules="made up", step_tokens=512, max_rows=4)
    # gate, up, their product and three of the hidden size, 2 bytes each; 4 sizes, 3 decoding
    pass_bytes = 512 * 2 * 3 * (128 + 64)
    assert reserved_bytes(SHAPE, few) == pass_bytes + (4 + 3) * 1e3 + 5e3
    many = few._replace(max_rows=1_000)  # at most 512 rows have a token in a step
    sampler_bytes = 512 * 64 * 2 + 10 * 512 * 1_000
    assert reserved_bytes(SHAPE, many) == sampler_bytes + (51 + 51) * 1e3 + 5e3
    left_bytes = 0.5 * 1e8 - SHAPE.weight_bytes - reserved_bytes(SHAPE, few)
    config = RooflineConfig(gpu=device(2e8, usable_bytes=10**8), shape=SHAPE)
    num_blocks = pool_blocks(config, few._replace(gpu_memory_utilization=0.5, block_tokens=8))
    assert num_blocks == left_bytes // (8 * SHAPE.kv_token_bytes)


def test_a_draft_takes_its_weights_and_its_kv() -> None:
    gpu, draft = load_gpu("H100"), load_shape("llama-3.2-1b")
    alone = pool_blocks(RooflineConfig(gpu=gpu, shape=LLAMA_8B))
    both = pool_blocks(RooflineConfig(gpu=gpu, shape=LLAMA_8B, draft=draft))
    share = LLAMA_8B.kv_token_bytes / (LLAMA_8B.kv_token_bytes + draft.kv_token_bytes)
    assert 0.93 * share < both / alone < share
    with pytest.raises(FieldError, match="leave no room"):
        pool_blocks(RooflineConfig(gpu=load_gpu("L4"), shape=load_shape("llama-3.1-70b")))


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"rules": "vllm-9"}, "--pool: 'vllm-9' is unknown; use one of vllm-0.19"),
        ({"gpu_memory_utilization": 1.5}, "--gpu-memory-utilization: 1.5 is not allowed"),
    ],
)
def test_bad_settings_name_their_option(settings: dict[str, object], words: str) -> None:
    with pytest.raises(FieldError, match=words):
        blocks(1e12, SHAPE, **settings)


# -- of a recorded run


@pytest.mark.parametrize(
    ("text", "num_and_size"),
    [
        (json.dumps({"kv_cache": {"num_gpu_blocks": 2588, "block_size": 16}}), (2588, 16)),
        (json.dumps([{"a": {"num_gpu_blocks": None}}, {"b": {"num_gpu_blocks": 7}}]), (7, 16)),
        ('x_info{block_size="32",num_gpu_blocks="900"} 1.0\n', (900, 32)),
        ("cache_config_info with initialization after num_gpu_blocks is: 11804\n", (11804, 16)),
        ("GPU KV cache size: 41,408 tokens\n", (2588, 16)),
        ("# GPU blocks: 99, # CPU blocks: 5\n... # GPU blocks: 1,952, # CPU\n", (1952, 16)),
        ("GPU KV cache size: 6,400 tokens\nnum_gpu_blocks is: 200\n", (200, 32)),
    ],
)
def test_a_record_says_its_pool(tmp_path: Path, text: str, num_and_size: tuple[int, int]) -> None:
    path = tmp_path / "run"
    path.write_text(text, encoding="utf-8")
    assert recorded_blocks(path, None) == num_and_size
    assert recorded_blocks(path, num_and_size[1]) == num_and_size


def test_a_block_size_is_the_callers_where_no_record_says_it(tmp_path: Path) -> None:
    path = tmp_path / "log"
    path.write_text("GPU KV cache size: 41,408 tokens", encoding="utf-8")
    assert recorded_blocks(path, 32) == (1294, 32)
    path.write_text(json.dumps({"num_gpu_blocks": 9, "block_size": 16}), encoding="utf-8")
    with pytest.raises(FieldError, match="--block-size: 32 differs from that of"):
        recorded_blocks(path, 32)
    path.write_text("GPU KV cache size: 3 tokens", encoding="utf-8")
    with pytest.raises(FieldError, match="has no blocks"):
        recorded_blocks(path, 16)
    path.write_text("nothing", encoding="utf-8")
    with pytest.raises(FieldError, match="does not say the number of KV blocks"):
        recorded_blocks(path, None)
    with pytest.raises(FieldError, match=r"cannot be read .*vllm-0\.19"):
        recorded_blocks(tmp_path / "absent", None)


def test_the_bench_reads_the_recorded_pool(tmp_path: Path) -> None:
    """Otherwise it is predicted, from the recorded memory."""
    engine = {"max_num_seqs": 256, "max_num_batched_tokens": 2048}
    meta = {"vllm_version": "0.19.0", "engine_kwargs": engine}

    def found(more: dict[str, object]) -> int:
        (tmp_path / "meta.json").write_text(json.dumps(meta | more), encoding="utf-8")
        return against_vllm.run_blocks(tmp_path, "llama-3.1-8b")

    assert found({"kv_cache": {"num_gpu_blocks": 2588, "block_size": 16}}) == 2588
    hardware = {"hardware": {"device_total_memory_bytes": 25_250_627_584}}
    assert found(hardware) == pytest.approx(2588, rel=0.03)
    more = found(hardware | {"kv_cache": {"gpu_memory_utilization": 0.95}})
    assert more - found(hardware) == pytest.approx(0.05 * 25_250_627_584 / 2**21, abs=1)
    assert found(hardware | {"vllm_version": "0.28.0"}) != found(hardware)
    with pytest.raises(FieldError, match="--num-blocks: .* has neither blocks nor"):
        found({})
