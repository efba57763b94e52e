"""A Llama in Hugging Face's files as a GGUF file, by the `gguf` package."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors import safe_open

_LAYER = {
    "input_layernorm": "attn_norm",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "post_attention_layernorm": "ffn_norm",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
}
_WHOLE = {"model.embed_tokens": "token_embd", "model.norm": "output_norm", "lm_head": "output"}


def write_gguf(model: Path, path: Path, dtype: str) -> None:
    """`dtype` is float16 or float32, of matrices; vectors are float32, as that engine wants them.
    Without a tokenizer: what runs it gives token ids. Raises ValueError for other families."""
    from gguf import GGUFWriter

    fields = json.loads((model / "config.json").read_text())
    unusual = fields.get("attention_bias") or fields.get("mlp_bias") or _is_scaled(fields)
    if fields["model_type"] != "llama" or unusual:
        raise ValueError(f"{model.name}: only plain Llamas are converted")
    heads, kv_heads = fields["num_attention_heads"], fields["num_key_value_heads"]
    head_dim = fields.get("head_dim") or fields["hidden_size"] // heads
    writer = GGUFWriter(path, "llama")
    writer.add_context_length(fields["max_position_embeddings"])
    writer.add_embedding_length(fields["hidden_size"])
    writer.add_block_count(fields["num_hidden_layers"])
    writer.add_feed_forward_length(fields["intermediate_size"])
    writer.add_head_count(heads)
    writer.add_head_count_kv(kv_heads)
    writer.add_key_length(head_dim)
    writer.add_value_length(head_dim)
    writer.add_rope_dimension_count(head_dim)
    writer.add_rope_freq_base(_rope_theta(fields))
    writer.add_layer_norm_rms_eps(fields["rms_norm_eps"])
    writer.add_vocab_size(fields["vocab_size"])
    writer.add_tokenizer_model("no_vocab")
    for file in sorted(model.glob("*.safetensors")):
        with safe_open(file, framework="pt") as tensors:
            for name in tensors.keys():  # noqa: SIM118 - it is no dictionary
                found = tensors.get_tensor(name).to(torch.float32).numpy()
                turned = {"q_proj": heads, "k_proj": kv_heads}.get(name.split(".")[-2])
                if turned is not None:
                    found = _interleaved(found, turned)
                kept = np.float32 if found.ndim == 1 else np.dtype(dtype)
                writer.add_tensor(_name(name), np.ascontiguousarray(found, dtype=kept))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def _is_scaled(fields: dict[str, Any]) -> bool:
    parameters = fields.get("rope_parameters") or fields.get("rope_scaling") or {}
    return parameters.get("rope_type", "default") != "default"


def _rope_theta(fields: dict[str, Any]) -> float:
    parameters = fields.get("rope_parameters") or fields
    return float(parameters.get("rope_theta", 10_000.0))


def _name(name: str) -> str:
    whole = _WHOLE.get(name.removesuffix(".weight"))
    if whole is not None:
        return f"{whole}.weight"
    _, _, layer, rest = name.split(".", 3)
    return f"blk.{layer}.{_LAYER[rest.removesuffix('.weight')]}.weight"


def _interleaved(matrix: np.ndarray, heads: int) -> np.ndarray:
    """Rows as RoPE pairs them there: neighbours, where these files pair halves."""
    rows, columns = matrix.shape
    halves = matrix.reshape(heads, 2, rows // heads // 2, columns)
    return halves.swapaxes(1, 2).reshape(rows, columns)
