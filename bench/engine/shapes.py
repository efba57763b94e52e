"""Models of a given shape with random weights, written as Hugging Face directories, so that ours
and a peer load the same files."""

from __future__ import annotations

from pathlib import Path
from typing import Any

# The common fields of a Llama; head_dim follows from the hidden size.
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
}


def write_random_model(shape: str, folder: Path, dtype: str) -> Path:
    """Save a Llama of that shape with seeded random weights; returns its directory.

    The end-of-sequence id is the last of the vocabulary, which benchmarks ignore.
    """
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    fields = SHAPES[shape]
    torch.manual_seed(0)
    config = LlamaConfig(
        **fields,
        max_position_embeddings=2048,
        # Products keep the size of what they take. With the usual 0.02 layers hardly count beside
        # the embeddings, and tokens are the same whatever attention does.
        initializer_range=fields["hidden_size"] ** -0.5,
        bos_token_id=0,
        eos_token_id=fields["vocab_size"] - 1,
        pad_token_id=0,
    )
    model = LlamaForCausalLM(config).to(getattr(torch, dtype))
    path = folder / shape
    model.save_pretrained(path)
    return path
