"""The KV pool of vLLM, compared with sums done by hand and with real runs."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from bench.simulator import against_vllm
from cbatch.core.request.errors import FieldError
from sim.cost.pool import (
    FITTED,
    RULES,
    PoolRules,
    PoolSettings,
    num_graphs,
    pass_token_bytes,
    pool_blocks,
    reserved_bytes,
)
from sim.cost.recorded_pool import recorded_blocks
from sim.cost.roofline import Gpu, ModelShape, RooflineConfig, load_gpu, load_shape

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
SMALL = ModelShape(
    hidden_size=64,
    intermediate_size=128,
    num_hidden_layers=2,
    num_attention_heads=4,
    num_key_value_heads=2,
    vocab_size=1000,
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
HELD_OUT = ("RTX 4090", "RTX PRO 6000", "2 x RTX PRO 6000", "RTX 5090")


@pytest.mark.parametrize("card", RUNS)
def test_the_pools_of_runs_are_predicted_within_three_percent(card: str) -> None:
    """The runs of `HELD_OUT` were not fitted to."""
    total_bytes, shape, tp, settings, real = RUNS[card]
    assert abs(blocks(total_bytes, shape, tp, **settings) / real - 1) < 0.03


def test_most_runs_were_not_fitted_to() -> None:
    assert not set(HELD_OUT) & {card for cards in FITTED.values() for card in cards}
    assert FITTED.keys() == RULES.keys() and set(RUNS) - set(HELD_OUT) == {"L20", "A100"}


def test_parts_of_what_is_kept_as_logs_say_them() -> None:
    """Two pools of vLLM 0.6 on one card whose steps differ by 9,000 tokens have 1,952 and 1,478
    blocks (it ran no sort then). A sort's peak does not depend on the weights. The same model in
    FP8 (8.80 GiB), on a card with a limit of 18.82 GiB, left 8.60."""
    assert pass_token_bytes(LLAMA_8B) * 9_000 == pytest.approx(
        (1_952 - 1_478) * 2 * 2**20, rel=0.03
    )
    kept = reserved_bytes(QWEN_8B, PoolSettings(rules="vllm-0.19"))
    assert (18.82 - 8.80) * GIB - kept == pytest.approx(8.60 * GIB, rel=0.03)
    assert (num_graphs(256), num_graphs(128)) == (51 + 35, 35 + 19)  # as listed by two runs


def test_the_pool_by_hand(monkeypatch: pytest.MonkeyPatch) -> None:
    """The pass is the larger part with long steps, the sampler with many rows."""
    monkeypatch.setitem(RULES, "made up", PoolRules(10.0, 1e3, 5e3))
    few = PoolSettings(rules="made up", step_tokens=512, max_rows=4)
    # gate, up, their product and three of the hidden size, 2 bytes each; 4 sizes, 3 decoding
    pass_bytes = 512 * 2 * 3 * (128 + 64)
    assert reserved_bytes(SMALL, few) == pass_bytes + (4 + 3) * 1e3 + 5e3
    many = few._replace(max_rows=1_000)  # at most 512 rows have a token in a step
    sampler_bytes = 512 * 64 * 2 + 10 * 512 * 1_000
    assert reserved_bytes(SMALL, many) == sampler_bytes + (51 + 51) * 1e3 + 5e3
    left_bytes = 0.5 * 1e8 - SMALL.weight_bytes - reserved_bytes(SMALL, few)
    config = RooflineConfig(gpu=device(2e8, usable_bytes=10**8), shape=SMALL)
    num_blocks = pool_blocks(config, few._replace(gpu_memory_utilization=0.5, block_tokens=8))
    assert num_blocks == left_bytes // (8 * SMALL.kv_token_bytes)


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
        blocks(1e12, SMALL, **settings)


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
