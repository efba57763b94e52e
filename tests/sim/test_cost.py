"""Costs of steps and sizes of KV pools, compared with sums done by hand and with real runs."""

from __future__ import annotations

import csv
import json
import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from msgspec import structs

from bench.simulator import against_vllm
from cbatch.core.request.errors import FieldError
from cbatch.core.scheduler.config import SchedulerConfig
from sim.cli.scenario import Scenario
from sim.cli.scheduler_config import as_recorded
from sim.cost.base import constant_cost
from sim.cost.pool import (
    RULES,
    PoolRules,
    PoolSettings,
    pool_blocks,
    recorded_blocks,
    reserved_bytes,
)
from sim.cost.roofline import Gpu, ModelRates, Roofline, RooflineConfig, load_gpu
from sim.cost.shapes import ModelShape, load_shape
from sim.executor.fake import FakeExecutor
from sim.replay.replay import replay
from sim.workload.sources import ClosedLoop
from sim.workload.traces.request import TraceRequest
from tests.helpers import decoding, make_config, prefilling

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
SMALL_BYTES = 2 * 2 * (8 * 64 + 2 * (4 + 2 * 2) * 16 + 3 * 128)  # of both layers, for a token
# No time but that of the data sheet, and a sharp corner.
IDEAL = {
    **dict.fromkeys(("compute_efficiency", "memory_efficiency", "attention_efficiency"), 1.0),
    **dict.fromkeys(("product_s", "kernel_s", "attention_s", "step_s", "link_latency_s"), 0.0),
    **dict.fromkeys(("step_host_s", "row_host_s", "request_host_s"), 0.0),
    **dict.fromkeys(("query_keys", "sampling_passes"), 0.0),
    "corner": 60.0,
}


def config(**more) -> RooflineConfig:
    return RooflineConfig(**({"gpu": GPU, "shape": SHAPE} | IDEAL | more))


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
    read_s = (read_bytes + 3 * SMALL_BYTES) / 1e9
    assert roofline.step_s(decoding(3, 150)) == (0.0, pytest.approx(read_s), 0.0)
    work = prefilling(1, 4000, history=100)
    flops = 2 * LAYER_WEIGHTS * 4000 + 4 * 2 * 64 * work.prefill_pairs
    expected_s = flops / 1e12 + (2 * HEAD_WEIGHTS + 4000 * SMALL_BYTES) / 1e9
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


def test_constants_add_up_and_the_host_counts_if_it_is_slower() -> None:
    work = decoding(1, 9, admitted=3)
    whole_s, half_s = (
        Roofline(config(memory_efficiency=share)).step_s(work)[1] for share in (1, 0.5)
    )
    assert half_s == pytest.approx(2 * whole_s)
    kernels = {"product_s": 1e-3, "kernel_s": 1e-4, "attention_s": 1e-2, "step_s": 0.1}
    expected_s = whole_s + 9e-3 + 8e-4 + 2e-2 + 0.1  # four products a layer, and the head
    assert Roofline(config(**kernels)).step_s(work)[1] == pytest.approx(expected_s)
    host = {"step_host_s": 0.1, "row_host_s": 0.02, "request_host_s": 0.01}
    assert Roofline(config(**host)).step_s(work)[2] == pytest.approx(0.15 - whole_s)
    assert Roofline(config(**host, step_s=0.2)).step_s(work)[2] == 0
    filters_s = Roofline(config(has_filters=True, filter_passes=3.0)).step_s(work)[1] - whole_s
    assert filters_s == pytest.approx(3 * 2 * SHAPE.vocab_size / 1e9)
    # Where arithmetic takes as long as memory, a mean of exponent 2 takes the root of 2 as long.
    even = ModelRates(config(gpu=device(10**8, bf16_flops=1e9), corner=2.0), SHAPE)
    even_s = even.roof(even.token_s, even.weights_s)
    assert even_s == pytest.approx(2**0.5 * 2 * LAYER_WEIGHTS / 1e9)
    # Two devices halve the work; of each of the ring's exchanges a device moves 2 tokens of 64
    # values of 2 bytes.
    whole_s = Roofline(config()).step_s(decoding(2, 100))[1]
    two = config(tensor_parallel_size=2, link_latency_s=1e-4)
    shared_s = Roofline(two).step_s(decoding(2, 100))[1]
    exchange_s = 2 * 64 * 2 / 1e9 + 1e-4
    assert shared_s == pytest.approx(whole_s / 2 + 2 * SHAPE.num_hidden_layers * exchange_s)


def test_drafts_are_charged_at_their_depth_and_at_k_plus_one() -> None:
    halves = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 1}
    draft = structs.replace(SHAPE, **halves, num_attention_heads=2)
    model = Roofline(config(draft=draft))
    deep = model.step_s(decoding(2, 100, depth=3, draft_context_tokens=100))[0]
    pass_bytes = 2 * (draft.layer_weights + draft.head_weights) + 2 * draft.small_token_bytes
    pass_s = pass_bytes / 1e9
    assert deep == pytest.approx(3 * (pass_s + 100 * draft.kv_token_bytes / 1e9))
    assert model.step_s(decoding(2, 100))[0] == 0
    # Wide enough to be bound by arithmetic, verification costs what its tokens cost.
    verify_s, plain_s = (model.step_s(decoding(2000, drafts=n))[1] for n in (6000, 0))
    assert verify_s == pytest.approx(4 * plain_s, rel=1e-3)


def test_shapes_from_config_files(tmp_path: Path) -> None:
    fields = {
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
        ({"kv_lora_rank": 512}, "latent"),
        ({"quantization_config": {"quant_method": "aqlm"}}, "'aqlm' is unknown"),
        ({"quantization_config": {"quant_method": "compressed-tensors"}}, "config_groups"),
        ({"hidden_size": "big"}, "hidden_size"),
    ):
        (tmp_path / "config.json").write_text(json.dumps(fields | more))
        with pytest.raises(FieldError, match=word):
            load_shape(str(tmp_path))

    def shape_of(**more: object) -> ModelShape:
        (tmp_path / "config.json").write_text(json.dumps(fields | more))
        return load_shape(str(tmp_path))

    pack = {"weights": {"num_bits": 4, "group_size": 32}}
    eight = {"weights": {"num_bits": 8}, "input_activations": {"num_bits": 8}}
    for given, bits, has_8bit_products in (
        ({"quant_method": "fp8"}, 8, True),
        ({"quant_method": "awq", "bits": 4, "group_size": 128}, 4 + 20 / 128, False),
        ({"quant_method": "compressed-tensors", "config_groups": {"a": pack}}, 4.625, False),
        ({"quant_method": "compressed-tensors", "config_groups": {"a": eight}}, 8, True),
    ):
        shape = shape_of(quantization_config=given)
        assert (shape.weight_bits, shape.has_8bit_products) == (bits, has_8bit_products)
        assert shape.weight_bytes == bits / 8 * shape.layer_weights + 4 * shape.head_weights
    # Qwen1.5-MoE-A2.7B and Qwen3-30B-A3B: 14.3 and 30.5 billion weights, 2.7 and 3.3 active.
    moe = {"hidden_size": 2048, "num_hidden_layers": 24, "num_attention_heads": 16}
    moe |= {"num_experts": 60, "num_experts_per_tok": 4, "moe_intermediate_size": 1408}
    shape = shape_of(**moe, shared_expert_intermediate_size=5632, vocab_size=151936)
    assert shape.layer_weights + 2 * shape.head_weights == pytest.approx(14.3e9, rel=0.01)
    assert shape.token_weights + 2 * shape.head_weights == pytest.approx(2.7e9, rel=0.01)
    moe |= {"num_hidden_layers": 48, "num_attention_heads": 32, "num_key_value_heads": 4}
    moe |= {"num_experts": 128, "num_experts_per_tok": 8, "moe_intermediate_size": 768}
    shape = shape_of(**moe, head_dim=128, vocab_size=151936)
    assert shape.layer_weights + 2 * shape.head_weights == pytest.approx(30.5e9, rel=0.01)
    assert shape.token_weights + 2 * shape.head_weights == pytest.approx(3.3e9, rel=0.03)


def test_few_tokens_read_few_experts_and_narrow_weights_and_keys_take_less() -> None:
    experts = {"num_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 64}
    shape = structs.replace(SHAPE, **experts)
    expert_bytes = 2 * 2 * 3 * 64 * 64  # of both layers
    rates = ModelRates(config(corner=1.0, gpu=device(1e8, bf16_flops=1e30)), shape)
    one_s, two_s = (rates.matrices_s(tokens, 0) for tokens in (1, 2))
    more_s = expert_bytes * (8 * (1 - 0.75**2) - 2) / 1e9 + 2 * shape.small_token_bytes / 1e9
    assert two_s - one_s == pytest.approx(more_s)
    narrow = structs.replace(SHAPE, weight_bits=8.0, has_8bit_products=True, kv_bytes=1)
    (_, wide_s, _), (_, narrow_s, _) = (
        Roofline(config(shape=each)).step_s(decoding(1, 1000)) for each in (SHAPE, narrow)
    )
    saved_bytes = LAYER_WEIGHTS + 500 * SHAPE.kv_token_bytes
    assert wide_s - narrow_s == pytest.approx(saved_bytes / 1e9)
    assert ModelRates(config(), narrow).token_s == LAYER_WEIGHTS / 1e12


# -- real runs

RESULTS = Path(__file__).parents[2] / "bench" / "results" / "h200-2026-11-27.json"
H100_CELLS = Path(__file__).parents[3] / "shared" / "data" / "measured" / "h100_vllm" / "cells.csv"


def test_the_steps_of_an_8b_on_an_h200_are_predicted_within_eight_percent() -> None:
    """Constants are shared by all rows, and by the H100 of vLLM below."""
    draft, errors = structs.replace(LLAMA_8B, num_hidden_layers=2), {}
    for row in json.loads(RESULTS.read_bytes())["rows"]:
        is_step = row.get("what") == "steps" and row["implementation"] == "cbatch"
        if not is_step or row["lookahead"] == "adaptive":
            continue
        rows, drafts = row["batch"], round(row["batch"] * row["drafts_a_row"])
        context = round(rows * row["context_tokens"])
        work = decoding(rows, context + drafts, depth=round(row["drafts_a_row"]))
        work.draft_context_tokens, work.ingested_tokens = context, round(0.24 * drafts / 4)
        h200 = RooflineConfig(gpu=load_gpu("H200"), shape=LLAMA_8B, draft=draft)
        h200 = structs.replace(h200, has_filters=row["sampling"] == "top_p")
        ratio = sum(Roofline(h200).step_s(work)) / (row["step_ms"] / 1e3)
        errors[row["lookahead"], row["sampling"], rows] = ratio - 1
    assert len(errors) == 16 and max(map(abs, errors.values())) < 0.08, errors


@pytest.mark.shared_data
def test_a_public_run_of_vllm_on_an_h100_is_predicted() -> None:
    """One or two requests of each client give the errors of the run's own number. The worst cell,
    16 clients with prompts of 1,024, probably found those of the cell before it in the cache."""
    if not H100_CELLS.is_file():
        pytest.skip(f"{H100_CELLS} is absent")
    sizes = {"num_blocks": 23_564, "max_num_seqs": 1024, "max_num_batched_tokens": 8192}
    config = SchedulerConfig(**sizes, max_model_len=40_960, prompt_share=1.0)
    errors = []
    for cell in csv.DictReader(H100_CELLS.read_text(encoding="utf-8").splitlines()):
        prompt, output, clients, requests = map(int, list(cell.values())[:4])
        count = min(requests, clients * (2 if output == 128 else 1))
        same = (
            TraceRequest(arrival_s=0.0, prompt_tokens=prompt, output_tokens=output)
            for _ in range(count)
        )
        cost = Roofline(RooflineConfig(gpu=load_gpu("H100"), shape=QWEN_8B))
        executor = FakeExecutor(max_num_seqs=1024, cost=cost)
        report = replay(ClosedLoop(same, clients), config, executor)
        assert report.output_tokens_per_s is not None and report.itl_s.p99 is not None
        ratios = report.output_tokens_per_s, 1e3 * report.itl_s.p99
        real = float(cell["output_tokens_per_s"]), float(cell["itl_p99_ms"])
        errors.append([one / other - 1 for one, other in zip(ratios, real, strict=True)])
    tokens, gaps = np.abs(errors).T
    assert len(errors) == 18 and abs(np.mean(errors, axis=0)[0]) < 0.04
    assert tokens.max() < 0.15 and np.median(gaps) < 0.12


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
    model_type="qwen3",
    hidden_size=4096,
    intermediate_size=12288,
    num_hidden_layers=36,
    num_attention_heads=32,
    num_key_value_heads=8,
    head_dim=128,
    vocab_size=151936,
)


def device(total_bytes: float, **more: Any) -> Gpu:
    return structs.replace(GPU, memory_bytes=int(total_bytes), **more)


def blocks(total_bytes: float, shape: ModelShape, tp: int = 1, **settings: object) -> int:
    config = RooflineConfig(gpu=device(total_bytes), shape=shape, tensor_parallel_size=tp)
    return pool_blocks(config, PoolSettings(**settings))  # type: ignore[arg-type]


# Real runs by card: memory as CUDA reports it, and blocks of 16 in their logs or records. Versions,
# from above: 0.19.0, 0.14 or so, 0.28.0, 0.28.0, 0.31.0 and 0.24.0.
PRO_6000_BYTES, MORE = 101_976_440_832, {"gpu_memory_utilization": 0.92}
RUNS = {
    "RTX 4090": (25_250_627_584, LLAMA_8B, 1, {"rules": "vllm-0.19"}, 2_588),
    "L20": (47.37 * GIB, QWEN_8B, 1, {"rules": "vllm-0.19"}, 11_804),
    "RTX PRO 6000": (PRO_6000_BYTES, LLAMA_8B, 1, MORE | {"max_rows": 128}, 35_913),
    "2 x RTX PRO 6000": (PRO_6000_BYTES, QWEN_32B, 2, MORE | {"max_rows": 128}, 28_884),
    "A100": (79.25 * GIB, LLAMA_8B, 1, MORE, 28_781),
    "RTX 5090": (31.4 * GIB, QWEN_8B, 1, MORE, 5_565),
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


def test_recurrent_layers_have_state_pages_in_place_of_kv(tmp_path: Path) -> None:
    delta = {
        "layer_types": ["linear_attention"] * 3 + ["full_attention"],
        "linear_num_key_heads": 2,
        "linear_num_value_heads": 4,
        "linear_key_head_dim": 8,
        "linear_value_head_dim": 8,
        "linear_conv_kernel_dim": 4,
    }
    mamba = {"layer_types": ["mamba"], "mamba_n_heads": 4, "mamba_d_head": 8, "mamba_d_state": 8}
    mamba |= {"mamba_n_groups": 2, "mamba_d_conv": 4}
    conv = {"layer_types": ["conv", "full_attention"], "conv_L_cache": 3}
    sizes = {"hidden_size": 64, "intermediate_size": 128, "num_attention_heads": 4}
    shapes = []
    for more in (delta, mamba, conv):
        fields = sizes | {"vocab_size": 99, "num_hidden_layers": len(more["layer_types"])} | more
        (tmp_path / "config.json").write_text(json.dumps(fields))
        shapes.append(load_shape(str(tmp_path)))
    # q, k, v, z, the output and the rates; the states of the heads and three inputs of the kernel.
    layer = 64 * (2 * 16 + 3 * 32 + 4), 4 * 8 * 8 + 3 * 64
    for shape, count in zip(shapes, (3, 1), strict=False):
        assert (shape.recurrent_weights, shape.state_values) == (64 * (64 + 64 + 4), layer[1])
        assert shape.recurrent_weights == layer[0] and shape.recurrent_layers == count
        assert shape.state_page_bytes == 4 * count * layer[1]
    assert shapes[2].recurrent_weights == 4 * 64**2 and shapes[2].state_page_bytes == 4 * 2 * 64
    hybrid = shapes[0]
    assert hybrid.attention_layers == 1 and hybrid.kv_token_bytes == 2 * 2 * 4 * 16
    # A decoding row reads its states; the pool has fewer blocks.
    byte_s = 1 / (GPU.memory_bytes_per_s * IDEAL["memory_efficiency"])
    rates = Roofline(config(shape=hybrid))._target
    assert rates.state_s == hybrid.state_page_bytes * byte_s
    flop_s = 1 / (GPU.bf16_flops * IDEAL["compute_efficiency"])
    operations = 2 * hybrid.token_weights + 6 * hybrid.recurrent_layers * hybrid.state_values
    assert rates.token_s == pytest.approx(operations * flop_s)
    device = RooflineConfig(gpu=load_gpu("H100"), shape=hybrid)
    lost = pool_blocks(device) - pool_blocks(device, PoolSettings(state_pages=1000))
    pages = 1000 * hybrid.state_page_bytes / (16 * hybrid.kv_token_bytes)
    assert lost == pytest.approx(pages, abs=1)


@pytest.mark.parametrize(
    ("name", "billions", "active"),
    [("qwen3.5-4b", 4.1, 3.5), ("qwen3.5-9b", 8.8, 6.8), ("qwen3.6-35b-a3b", 34.6, 2.4)],
)
def test_shapes_of_models_with_recurrent_layers(name: str, billions: float, active: float) -> None:
    """The number of weights is the model's, and a page of states of Qwen3.5-4B has 53 MB."""
    shape = load_shape(name)
    assert shape.weight_bytes / 2e9 == pytest.approx(billions, rel=0.01)
    assert shape.token_weights / 1e9 == pytest.approx(active, rel=0.05)
    assert shape.recurrent_layers * 4 == shape.num_hidden_layers * 3
    if name == "qwen3.5-4b":
        assert shape.state_page_bytes == 24 * 4 * (32 * 128 * 128 + 3 * 8192)


def test_a_log_of_recurrent_layers_sets_the_pages() -> None:
    scenario = Scenario(trace="log", cost="prices.json")
    for pages, expected in ((40, (40, 3)), (0, (None, None))):
        recorded = make_config(num_state_pages=pages, state_interval=3)
        filled, names = as_recorded(scenario, recorded)
        assert (filled.num_state_pages, filled.state_interval) == expected
        assert ("state_interval" in names) == (pages > 0)
