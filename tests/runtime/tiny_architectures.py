"""Tiny architectures of transformers with random weights, to test serving its modelling code.
Windows are shorter than a test's sequences."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

SEVERAL = (  # of different kinds
    *("cohere2", "deepseek_v3", "gemma2", "gemma3_text", "glm4", "gpt2", "gpt_neox", "gpt_oss"),
    *("granite", "mixtral", "olmo2", "phi3", "qwen3_moe", "stablelm"),
)
EVERY = (
    *("afmoe", "apertus", "arcee", "aria_text", "axk1", "biogpt", "bitnet", "cohere", "cohere2"),
    *("cohere2_moe", "ctrl", "cwm", "deepseek_v2", "deepseek_v3", "dots1", "ernie4_5"),
    *("ernie4_5_moe", "exaone4", "exaone_moe", "flex_olmo", "gemma", "gemma2", "gemma3_text"),
    *("gemma4_text", "gemma4_unified_text", "glm", "glm4", "glm4_moe", "glm4_moe_lite", "gpt2"),
    *("gpt_bigcode", "gpt_neox", "gpt_oss", "granite", "granite_swa", "granitemoe"),
    *("granitemoe_swa", "granitemoeshared", "helium", "hunyuan_v1_dense", "hunyuan_v1_moe"),
    *("hy_v3", "hyperclovax", "internlm3", "iquestcoder", "jais2", "jetmoe", "laguna", "lfm2"),
    *("lfm2_moe", "llama", "llama4_text", "mellum", "minicpm3", "minimax_m2", "minimax_m3_vl_text"),
    *("ministral", "ministral3", "mistral", "mixtral", "modernbert-decoder", "moshi", "nanochat"),
    *("nemotron", "olmo", "olmo2", "olmo3", "olmoe", "opt", "persimmon", "phi", "phi3", "phimoe"),
    *("qwen2", "qwen2_moe", "qwen3", "qwen3_moe", "seed_oss", "smollm3", "solar_open", "stablelm"),
    *("starcoder2", "vaultgemma", "youtu"),
)
_COMMON: dict[str, Any] = {
    "hidden_size": 64,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "intermediate_size": 128,
    "vocab_size": 128,
    "max_position_embeddings": 256,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
_EXPERTS: dict[str, Any] = {
    "num_experts": 4,
    "num_local_experts": 4,
    "n_routed_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 64,
    "shared_expert_intermediate_size": 64,
    "decoder_sparse_step": 1,
    "n_group": 1,
    "topk_group": 1,
    "first_k_dense_replace": 1,
    "n_shared_experts": 1,
}
_EXPERT_NAMES = (
    *("axk1", "deepseek", "dots", "hy_v3", "laguna", "minimax", "mixtral", "moe", "oss"),
    *("solar_open",),
)
_LATENT: dict[str, Any] = {  # multi-head latent attention
    "kv_lora_rank": 16,
    "q_lora_rank": 24,
    "qk_rope_head_dim": 16,
    "qk_nope_head_dim": 16,
    "v_head_dim": 16,
    "num_key_value_heads": 4,
}
_DEEPSEEK = _LATENT | {"head_dim": 8, "qk_rope_head_dim": 8}
_DELTA: dict[str, Any] = {
    "linear_num_value_heads": 4,
    "linear_num_key_heads": 2,
    "linear_key_head_dim": 12,
    "linear_value_head_dim": 20,
}
_WINDOW = {"sliding_window": 8}
_OWN: dict[str, dict[str, Any]] = {
    "axk1": _DEEPSEEK,
    "cohere2": _WINDOW,
    "deepseek_v2": _DEEPSEEK,
    "deepseek_v3": _DEEPSEEK,
    "exaone4": _WINDOW,
    "gemma2": _WINDOW | {"query_pre_attn_scalar": 16},
    "gemma3_text": _WINDOW | {"query_pre_attn_scalar": 16},
    "gemma4_text": _WINDOW
    | {
        "vocab_size_per_layer_input": 128,
        "hidden_size_per_layer_input": 16,
        "num_global_key_value_heads": 2,
        "global_head_dim": 16,
        "num_kv_shared_layers": 0,
    },
    "glm4_moe_lite": _LATENT,
    "granitemoehybrid": {
        "layer_types": ["linear_attention", "full_attention"] * 2,
        "mamba_n_heads": 4,
        "mamba_n_groups": 2,
        "mamba_d_state": 18,
        "mamba_d_conv": 4,
        "shared_intermediate_size": 128,
        "intermediate_size": 64,
        "num_local_experts": 4,
        "num_experts_per_tok": 2,
    },
    "falcon_h1": {
        "mamba_d_ssm": 80,
        "mamba_n_heads": 4,
        "mamba_n_groups": 2,
        "mamba_d_state": 18,
        "mamba_norm_before_gate": False,
        "attention_in_multiplier": 0.7,
        "attention_out_multiplier": 1.3,
        "key_multiplier": 0.4,
        "ssm_in_multiplier": 1.2,
        "ssm_out_multiplier": 0.8,
        "ssm_multipliers": [0.9, 0.6, 0.5, 1.4, 1.1],
        "mlp_multipliers": [0.9, 1.2],
        "embedding_multiplier": 5.5,
        "lm_head_multiplier": 0.3,
    },
    "gpt2": {"n_embd": 64, "n_layer": 4, "n_head": 4, "n_positions": 256},
    "gpt_oss": _WINDOW,
    "laguna": {"num_attention_heads_per_layer": [4] * 4},
    "lfm2": {"layer_types": ["full_attention"] * 4},
    "lfm2_moe": {"layer_types": ["full_attention"] * 4, "num_dense_layers": 1},
    "minicpm3": _LATENT,
    "mistral": _WINDOW,
    "olmo3": _WINDOW,
    "nemotron_h": {
        "layers_block_type": [
            *("linear_attention", "mlp", "linear_attention", "full_attention", "mlp"),
            "linear_attention",
        ],
        "mamba_num_heads": 4,
        "mamba_head_dim": 20,
        "n_groups": 2,
        "ssm_state_size": 18,
    },
    "opt": {"ffn_dim": 128, "word_embed_proj_dim": 64},
    "phi3": {"sliding_window": None, "original_max_position_embeddings": 256},
    "qwen3_next": _DELTA | _EXPERTS,
    "qwen3_5_text": _DELTA,
    "qwen3_5_moe_text": _DELTA,
    "youtu": _LATENT,
}


def tiny_config(kind: str) -> Any:
    """Return the configuration of a `model_type`, with those of the fields above that it has."""
    from transformers import AutoConfig

    fields = _COMMON | (_EXPERTS if any(n in kind for n in _EXPERT_NAMES) else {})
    fields = fields | _OWN.get(kind, {})
    base = AutoConfig.for_model(kind)
    known = set(base.to_dict()) | set(getattr(base, "attribute_map", {}))
    return AutoConfig.for_model(kind, **{k: v for k, v in fields.items() if k in known})


def make_tiny(kind: str, folder: Path, seed: int = 0, dtype: torch.dtype = torch.float32) -> Any:
    """Write a model of a `model_type` to `folder`, and return it as read from there. Raises
    ValueError if none of a reasonable size results."""
    from transformers import AutoModelForCausalLM

    config = tiny_config(kind)
    config.architectures = None
    with torch.device("meta"):
        size = AutoModelForCausalLM.from_config(config, dtype=dtype).num_parameters()
    if size > 5e7:
        raise ValueError(f"{kind}: {size} weights are not tiny")
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        net = AutoModelForCausalLM.from_config(config, dtype=dtype, attn_implementation="eager")
        with torch.no_grad():
            for parameter in net.parameters():
                if parameter.dim() > 1:
                    parameter.normal_(std=0.08)
    net.save_pretrained(folder)
    loaded = AutoModelForCausalLM.from_pretrained(folder, dtype=dtype, attn_implementation="eager")
    return loaded.eval()
