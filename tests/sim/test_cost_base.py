"""Cost models compared with sums done by hand."""

from __future__ import annotations

import json
import math
from pathlib import Path

import pytest

from cbatch.core.request.errors import FieldError
from sim.cost.base import constant_cost
from sim.cost.roofline import (
    Gpu,
    ModelShape,
    Roofline,
    RooflineConfig,
    gpu_names,
    load_gpu,
    load_shape,
)
from tests.checking.cost import LinearCost
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


def test_devices_are_shipped_with_their_sources() -> None:
    expected = {"A100", "H100", "H200", "B200", "L4", "L40S", "RTX4090", "MI300X"}
    assert set(gpu_names()) == expected
    for name in expected:
        gpu = load_gpu(name.lower())
        assert gpu.source and 1e13 < gpu.bf16_flops < 1e16
        assert 1e11 < gpu.memory_bytes_per_s < 1e13 and 2e10 < gpu.memory_bytes < 3e11


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
        (lambda: constant_cost(0), "cost_profile.target_s"),
        (lambda: constant_cost(draft_pass_s=math.inf), "cost_profile.slopes"),
    ],
)
def test_bad_values_name_their_field(make, field: str) -> None:
    with pytest.raises(FieldError) as caught:
        make()
    assert caught.value.field == field


def test_constant_and_linear_by_hand() -> None:
    work = decoding(3, 150, drafts=5, depth=2, ingested_tokens=1)
    assert constant_cost(step_s=0.5, draft_pass_s=0.1).step_s(work) == (0.2, 0.5, 0.0)
    linear = LinearCost(
        base_s=1, token_s=2, context_token_s=3, row_s=4, draft_pass_s=6, draft_token_s=7
    )
    assert linear.step_s(work) == (2 * 6 + 6 * 7, 1 + 8 * 2 + 150 * 3 + 3 * 4, 0.0)
