"""Models of a given shape with random weights, written as Hugging Face directories, so that cbatch
and its peers load the same files."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

_LLAMA3_ROPE = {
    "rope_type": "llama3",
    "rope_theta": 500_000.0,
    "factor": 32.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192,
}


def _shape(
    hidden: int, layers: int, heads: int, kv_heads: int, vocab: int, **more: Any
) -> dict[str, Any]:
    """Return fields of config.json, of a Llama unless `more` has another type."""
    return {
        "model_type": "llama",
        "hidden_size": hidden,
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "num_key_value_heads": kv_heads,
        "vocab_size": vocab,
        "max_position_embeddings": 2048,
        "bos_token_id": 0,
        "eos_token_id": vocab - 1,  # benchmarks ignore it
        "pad_token_id": 0,
    } | more


def _small(model_type: str, inner: int, **more: Any) -> dict[str, Any]:
    more |= {"model_type": model_type, "intermediate_size": inner, "head_dim": 32}
    return _shape(256, 6, 8, 2, 4096, max_position_embeddings=512, **more)


def _qwen3_5(hidden: int, layers: int, heads: int, kv_heads: int, **more: int) -> dict[str, Any]:
    rope = {"rope_type": "default", "rope_theta": 1e7, "partial_rotary_factor": 0.25}
    fields = {"head_dim": 256, "linear_num_key_heads": 16, "max_position_embeddings": 262_144}
    fields |= {"rope_parameters": rope, "tie_word_embeddings": True}
    return _shape(
        hidden, layers, heads, kv_heads, 248_320, model_type="qwen3_5_text", **fields, **more
    )


SHAPES: dict[str, dict[str, Any]] = {
    "llama-100m": _shape(768, 12, 12, 4, 32_000, intermediate_size=2048, tie_word_embeddings=True),
    "llama-1m": _shape(64, 2, 4, 2, 4_096, intermediate_size=128, tie_word_embeddings=True),
    "llama-1b": _shape(
        *(2048, 16, 32, 8, 128_256),
        intermediate_size=8192,
        tie_word_embeddings=True,
        max_position_embeddings=131_072,
        rope_parameters=_LLAMA3_ROPE,
    ),
    "qwen3-4b": _shape(
        *(2560, 36, 32, 8, 151_936),
        model_type="qwen3",
        intermediate_size=9728,
        head_dim=128,
        tie_word_embeddings=True,
        max_position_embeddings=40_960,
    ),
    "qwen3.5-0.8b": _qwen3_5(1024, 24, 8, 2, intermediate_size=3584, linear_num_value_heads=16),
    "qwen3.5-4b": _qwen3_5(2560, 32, 16, 4, intermediate_size=9216, linear_num_value_heads=32),
    # Small models of families whose layers differ from Llama's.
    "gemma-3": _small("gemma3_text", 768, sliding_window=32),
    "phi": _small("phi", 768),
    "qwen3-moe": _small(
        "qwen3_moe", 768, num_experts_per_tok=4, num_experts=16, moe_intermediate_size=192
    ),
    "gpt-oss": _small(
        "gpt_oss", 192, num_experts_per_tok=4, num_local_experts=16, sliding_window=32
    ),
}

# Number of random values drawn. Weights repeat them, since drawing a billion values takes a minute.
# A prime number, so that no two rows of a matrix are equal.
_NUM_DRAWN = 16_777_259


def write_random_model(shape: str, folder: Path, dtype: str) -> Path:
    """Save a model of the given shape with seeded random weights. Return its directory."""
    from transformers import AutoConfig, AutoModelForCausalLM

    fields = SHAPES[shape]
    torch_dtype = getattr(torch, dtype)
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(AutoConfig.for_model(**fields), dtype=torch_dtype)
    # With this scale matrix products keep the size of their inputs. With the usual 0.02 the layers
    # would hardly change the embeddings, and the tokens would not depend on attention.
    generator, scale = torch.Generator().manual_seed(0), fields["hidden_size"] ** -0.5
    values = torch.randn(_NUM_DRAWN, generator=generator).mul_(scale).to(torch_dtype)
    weights, start = {}, 0
    for name, parameter in model.named_parameters():
        count = parameter.numel()
        if parameter.ndim == 1:
            weights[name] = torch.ones(count, dtype=torch_dtype)  # a norm
            continue
        repeated = values.repeat(-(-(start + count) // _NUM_DRAWN))[start : start + count]
        weights[name] = repeated.clone().view(parameter.shape)
        start = (start + count) % _NUM_DRAWN
    model.load_state_dict(weights, strict=False, assign=True)
    model.tie_weights()
    path = folder / shape
    model.save_pretrained(path)  # tensors get the names of published checkpoints
    return path
