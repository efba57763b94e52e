"""A directory of any family as a GGUF file, as llama.cpp's converter writes it."""

from __future__ import annotations

import json
import re
from collections import defaultdict
from pathlib import Path
from typing import Any

import gguf
import torch
from safetensors.torch import load_file
from torch import Tensor

from bench.peers.gguf_files import F32, Stored, llama3_factors, stored

# model_type -> general.architecture, where the names differ.
_ARCHITECTURES = {
    "mistral": "llama",
    "mixtral": "llama",
    "ministral3": "mistral3",
    "gemma3_text": "gemma3",
    "gemma4_text": "gemma4",
    "phi": "phi2",
    "qwen2_moe": "qwen2moe",
    "qwen3_moe": "qwen3moe",
    "olmo3": "olmo2",
    "gpt_oss": "gpt-oss",
    "cohere": "command-r",
}
_PERMUTED = ("llama", "mistral3", "smollm3", "arcee", "granite", "granitemoe")
_ADDS_1 = ("gemma", "gemma2", "gemma3", "nemotron")
_LAYER_NORM = ("phi2", "starcoder2", "stablelm", "nemotron", "command-r", "cohere2")
# GGUF key -> field of config.json; written if the field is there.
_FIELDS = {
    "attn_logit_softcapping": "attn_logit_softcapping",
    "final_logit_softcapping": "final_logit_softcapping",
    "attention.scale": "attention_multiplier",
    "embedding_scale": "embedding_multiplier",
    "residual_scale": "residual_multiplier",
    "logit_scale": ("logits_scaling", "logit_scale"),
    "expert_count": ("num_local_experts", "num_experts"),
    "expert_used_count": "num_experts_per_tok",
    "expert_feed_forward_length": "moe_intermediate_size",
    "expert_shared_feed_forward_length": "shared_expert_intermediate_size",
}
_EPS = ("rms_norm_eps", "layer_norm_eps", "norm_epsilon", "norm_eps")
_EXPERT = re.compile(r"(.+\.experts)\.(\d+)\.(\w+)\.weight")
_NO_WINDOW = ("qwen2", "qwen3", "qwen2moe", "qwen3moe", "starcoder2", "smollm3")


def architecture_of(folder: Path) -> str:
    kind = json.loads((folder / "config.json").read_text())["model_type"]
    return _ARCHITECTURES.get(kind, kind)


def converted(folder: Path, kind: int = F32) -> tuple[dict[str, Any], dict[str, Stored]]:
    """Return metadata and tensors of a Hugging Face directory, without its tokenizer."""
    c = json.loads((folder / "config.json").read_text())
    arch = architecture_of(folder)
    rope = c.get("rope_parameters") or {}
    rope = rope.get("full_attention", rope)
    head_dim = c.get("head_dim") or c["hidden_size"] // c["num_attention_heads"]
    tensors = dict(_renamed(folder, c, arch))
    if rope.get("rope_type") == "llama3":
        tensors["rope_freqs.weight"] = llama3_factors(rope, head_dim)
    for length in ("short", "long"):
        if f"{length}_factor" in rope:
            tensors[f"rope_factors_{length}.weight"] = torch.tensor(rope[f"{length}_factor"])
    values = {
        "block_count": c["num_hidden_layers"],
        "context_length": c["max_position_embeddings"],
        "embedding_length": c["hidden_size"],
        "feed_forward_length": c["intermediate_size"],
        "attention.head_count": c["num_attention_heads"],
        "attention.head_count_kv": c["num_key_value_heads"],
        "rope.freq_base": float(rope["rope_theta"]),
        "rope.dimension_count": int(head_dim * rope.get("partial_rotary_factor", 1)),
        "vocab_size": c["vocab_size"],  # llama.cpp needs it without a tokenizer
    }
    if c.get("head_dim"):
        values |= {"attention.key_length": head_dim, "attention.value_length": head_dim}
    norm = "layer_norm_epsilon" if arch in _LAYER_NORM else "layer_norm_rms_epsilon"
    values[f"attention.{norm}"] = next(c[name] for name in _EPS if name in c)
    for key, fields in _FIELDS.items():
        numbers = [c[f] for f in ([fields] if isinstance(fields, str) else fields) if f in c]
        if numbers and numbers[0] is not None:
            values[key] = numbers[0]
    if arch == "gpt-oss":
        values["expert_feed_forward_length"] = c["intermediate_size"]
    values |= _windows(c, arch) | _scaling(c, rope, arch)
    if arch == "gemma4":
        heads = {int(i): row for i, row in c["per_layer_config"].items()}
        values |= _by_layer(c, heads)
        full = next(iter(heads.values()))["head_dim"] // 2
        ones = int(full * rope["partial_rotary_factor"])
        tensors["rope_freqs.weight"] = torch.tensor([1.0] * ones + [1e30] * (full - ones))
    metadata = {"general.architecture": arch} | {f"{arch}.{k}": v for k, v in values.items()}
    metadata |= {
        "tokenizer.ggml.model": "no_vocab",
        "tokenizer.ggml.eos_token_id": c["eos_token_id"],
    }
    kinds = {name: F32 if "ffn_gate_inp" in name else kind for name in tensors}  # routers
    stored_of = {name: stored(tensor, kinds[name]) for name, tensor in tensors.items()}
    for name, wide in stored_of.items():
        if wide.shape[0] == 1 < len(wide.shape):  # llama.cpp's quantiser drops such dimensions
            stored_of[name] = wide._replace(shape=wide.shape[1:])
    return metadata, stored_of


def _by_layer(c: dict[str, Any], heads: dict[int, dict[str, int]]) -> dict[str, Any]:
    layers, shared = range(c["num_hidden_layers"]), c["num_kv_shared_layers"]
    full = next(iter(heads.values()))["head_dim"]
    values = {
        "attention.shared_kv_layers": shared,
        "embedding_length_per_layer_input": c["hidden_size_per_layer_input"],
        "attention.head_count_kv": [
            heads.get(i, {}).get("num_key_value_heads", c["num_key_value_heads"]) for i in layers
        ],
    }
    for key in ("attention.key_length", "attention.value_length", "rope.dimension_count"):
        values |= {key: full, f"{key}_swa": c["head_dim"]}
    if c["use_double_wide_mlp"]:
        inner = c["intermediate_size"]
        rows = [inner * (1 + (i >= len(layers) - shared)) for i in layers]
        values["feed_forward_length"] = rows
    return values


def _windows(c: dict[str, Any], arch: str) -> dict[str, Any]:
    window, types = c.get("sliding_window"), c.get("layer_types")
    if not window or arch in _NO_WINDOW:
        return {}
    values = {"attention.sliding_window": window}
    if types and arch not in ("llama", "phi3"):
        flags = [kind == "sliding_attention" for kind in types]
        values["attention.sliding_window_pattern"] = flags
    return values


def _scaling(c: dict[str, Any], rope: dict[str, Any], arch: str) -> dict[str, Any]:
    kind = rope.get("rope_type")
    original = rope.get("original_max_position_embeddings")
    values: dict[str, Any] = {}
    if kind in ("linear", "yarn"):
        values |= {"rope.scaling.type": kind, "rope.scaling.factor": rope["factor"]}
    if kind == "yarn":
        values["rope.scaling.original_context_length"] = original
    if arch == "mistral3":
        values["rope.scaling.yarn_log_multiplier"] = rope["mscale_all_dim"]
        values["attention.temperature_scale"] = rope["llama_4_scaling_beta"]
    if kind == "longrope":
        original = c["original_max_position_embeddings"]
        scale = c["max_position_embeddings"] / original
        extra = torch.tensor(scale).log() / torch.tensor(original).log()
        values["rope.scaling.attn_factor"] = float((1 + extra).sqrt()) if scale > 1 else 1.0
        values["rope.scaling.original_context_length"] = original
    if arch in ("gemma3", "gemma4"):
        values["rope.freq_base_swa"] = c["rope_parameters"]["sliding_attention"]["rope_theta"]
    return values


def _renamed(folder: Path, c: dict[str, Any], arch: str) -> list[tuple[str, Tensor]]:
    """Return the tensors under their names in GGUF files, with the changes of the converter."""
    names = gguf.get_tensor_name_map(
        next(key for key, name in gguf.MODEL_ARCH_NAMES.items() if name == arch),
        c["num_hidden_layers"],
    )
    loaded: dict[str, Tensor] = {}
    experts: dict[str, dict[int, Tensor]] = defaultdict(dict)
    for file in sorted(folder.glob("*.safetensors")):
        for name, tensor in load_file(file).items():
            if match := _EXPERT.fullmatch(name):
                experts[f"{match[1]}.{match[3]}.weight"][int(match[2])] = tensor
            else:
                loaded[name] = tensor
    for name, parts in experts.items():
        loaded[name] = torch.stack([parts[i] for i in range(len(parts))])
    heads = {"q_proj": c["num_attention_heads"], "k_proj": c["num_key_value_heads"]}
    renamed = []
    for name, tensor in _split_experts(loaded):
        if arch in _ADDS_1 and name.endswith("norm.weight"):
            tensor = tensor + 1
        count = heads.get(name.split(".")[-2])
        if arch in _PERMUTED and count:
            tensor = tensor.unflatten(0, (count, 2, -1)).transpose(1, 2).flatten(0, 2)
        name += ".weight" if name.endswith("layer_scalar") else ""
        new = names.get_name(name, (".weight", ".bias"))
        assert new is not None, f"{name} has no name in GGUF files"
        renamed.append((new, tensor))
    return renamed


def _split_experts(loaded: dict[str, Tensor]) -> list[tuple[str, Tensor]]:
    """Return gate and up apart, and the experts' matrices as [experts, outputs, inputs]."""
    renamed = []
    for name, tensor in loaded.items():
        module, _, kind = name.rpartition(".")
        if kind == "sinks":
            renamed.append((f"{name}.weight", tensor))
        elif name.endswith("input_linear.weight"):  # of Granite: gate, then up
            for part, half in zip(("gate", "up"), tensor.chunk(2, dim=1), strict=True):
                layer = module.split(".")[2]
                renamed.append((f"model.layers.{layer}.mlp.experts.{part}_proj.weight", half))
        elif name.endswith("output_linear.weight"):
            layer = module.split(".")[2]
            renamed.append((f"model.layers.{layer}.mlp.experts.down_proj.weight", tensor))
        elif module.endswith("mlp.experts"):  # of gpt-oss: rows alternate, inputs first
            ending = ".bias" if kind.endswith("_bias") else ".weight"
            tensor = tensor if tensor.dim() == 2 else tensor.transpose(1, 2)
            if kind.startswith("gate_up"):
                renamed.append((f"{module}.gate_proj{ending}", tensor[:, ::2]))
                renamed.append((f"{module}.up_proj{ending}", tensor[:, 1::2]))
            else:
                renamed.append((f"{module}.down_proj{ending}", tensor))
        else:
            renamed.append((name, tensor))
    return renamed
