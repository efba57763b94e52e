"""Models of a given shape with random weights, written as Hugging Face directories, so that cbatch
and its peers load the same files."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

# Fields of config.json; `model_type` is llama unless given.
SHAPES: dict[str, dict[str, Any]] = {
    "llama-100m": {
        "hidden_size": 768,
        "num_hidden_layers": 12,
        "num_attention_heads": 12,
        "num_key_value_heads": 4,
        "intermediate_size": 2048,
        "vocab_size": 32_000,
        "tie_word_embeddings": True,
    },
    "llama-1m": {
        "hidden_size": 64,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "intermediate_size": 128,
        "vocab_size": 4_096,
        "tie_word_embeddings": True,
    },
    "llama-1b": {
        "hidden_size": 2048,
        "num_hidden_layers": 16,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
        "intermediate_size": 8192,
        "vocab_size": 128_256,
        "tie_word_embeddings": True,
        "max_position_embeddings": 131_072,
        "rope_parameters": {
            "rope_type": "llama3",
            "rope_theta": 500_000.0,
            "factor": 32.0,
            "low_freq_factor": 1.0,
            "high_freq_factor": 4.0,
            "original_max_position_embeddings": 8192,
        },
    },
    "qwen3-0.6b": {
        "model_type": "qwen3",
        "hidden_size": 1024,
        "num_hidden_layers": 28,
        "num_attention_heads": 16,
        "num_key_value_heads": 8,
        "head_dim": 128,
        "intermediate_size": 3072,
        "vocab_size": 151_936,
        "tie_word_embeddings": True,
        "max_position_embeddings": 40_960,
        "rope_parameters": {"rope_type": "default", "rope_theta": 1_000_000.0},
        "rms_norm_eps": 1e-6,
    },
}

# Small models of families that differ from Llama by flags of the decoder.
_SMALL = {
    "vocab_size": 4096,
    "hidden_size": 256,
    "num_hidden_layers": 6,
    "num_attention_heads": 8,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "max_position_embeddings": 512,
}
_WIDE = _SMALL | {"intermediate_size": 768}
_MIXTURE = _SMALL | {"num_experts_per_tok": 4}
FLAGGED: dict[str, dict[str, Any]] = {
    "gemma-3": _WIDE | {"model_type": "gemma3_text", "sliding_window": 32},
    "phi": _WIDE | {"model_type": "phi"},
    "qwen3-moe": _MIXTURE
    | {"model_type": "qwen3_moe", "num_experts": 16, "moe_intermediate_size": 192},
    "gpt-oss": _MIXTURE
    | {
        "model_type": "gpt_oss",
        "num_local_experts": 16,
        "intermediate_size": 192,
        "sliding_window": 32,
    },
}


# Number of random values drawn. Weights repeat them, since drawing a billion values takes a minute.
# A prime number, so that no two rows of a matrix are equal.
_NUM_DRAWN = 16_777_259


def write_random_model(shape: str, folder: Path, dtype: str) -> Path:
    """Save a model of the given shape with seeded random weights. Return its directory.

    The end-of-sequence id is the last id of the vocabulary; benchmarks ignore it.
    """
    from transformers import AutoConfig, AutoModelForCausalLM

    fields = {"model_type": "llama", "max_position_embeddings": 2048} | (SHAPES | FLAGGED)[shape]
    config = AutoConfig.for_model(
        **fields,
        bos_token_id=0,
        eos_token_id=fields["vocab_size"] - 1,
        pad_token_id=0,
    )
    torch_dtype = getattr(torch, dtype)
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config, dtype=torch_dtype)
    # With this scale matrix products keep the size of their inputs. With the usual 0.02 the layers
    # would hardly change the embeddings, and the tokens would not depend on attention.
    scale = fields["hidden_size"] ** -0.5
    values = (
        torch.randn(_NUM_DRAWN, generator=torch.Generator().manual_seed(0))
        .mul_(scale)
        .to(torch_dtype)
    )
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
