"""A directory of any family as a GGUF file, as llama.cpp's converter writes it."""

from __future__ import annotations

import json
import math
import re
from collections import defaultdict
from pathlib import Path
from typing import Any

import gguf
import torch
from safetensors.torch import load_file
from torch import Tensor

from bench.peers.gguf_files import F32, Stored, stored

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
    "lfm2_moe": "lfm2moe",
    "granitemoehybrid": "granitehybrid",
    "falcon_h1": "falcon-h1",
    "qwen3_next": "qwen3next",
    "qwen3_5_text": "qwen35",
    "qwen3_5_moe_text": "qwen35moe",
}
_PERMUTED = ("llama", "mistral3", "smollm3", "arcee", "granite", "granitemoe", "granitehybrid")
_PERMUTED = (*_PERMUTED, "nemotron_h")
_QWEN_HYBRIDS = ("qwen3next", "qwen35", "qwen35moe")
_ADDS_1 = ("gemma", "gemma2", "gemma3", "nemotron", *_QWEN_HYBRIDS)
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
    "expert_shared_feed_forward_length": (
        *("shared_expert_intermediate_size", "shared_intermediate_size"),
    ),
    "leading_dense_block_count": "num_dense_layers",
    "shortconv.l_cache": "conv_L_cache",
    "ssm.conv_kernel": ("linear_conv_kernel_dim", "mamba_d_conv", "conv_kernel"),
    "ssm.state_size": ("linear_key_head_dim", "mamba_d_state", "ssm_state_size"),
    "ssm.group_count": ("linear_num_key_heads", "mamba_n_groups", "n_groups"),
    "ssm.time_step_rank": ("linear_num_value_heads", "mamba_n_heads", "mamba_num_heads"),
}
_HEAD_DIMS = ("linear_value_head_dim", "mamba_d_head", "mamba_head_dim")
_NOT_QUANTISED = ("ffn_gate_inp", "conv1d", "shortconv.conv", "ssm_norm")
_EPS = ("rms_norm_eps", "layer_norm_eps", "norm_epsilon", "norm_eps", "layer_norm_epsilon")
_EXPERT = re.compile(r"(.+\.experts)\.(\d+)\.(\w+)\.weight")
_NO_WINDOW = ("qwen2", "qwen3", "qwen2moe", "qwen3moe", "starcoder2", "smollm3")


def architecture_of(folder: Path) -> str:
    kind = json.loads((folder / "config.json").read_text())["model_type"]
    return _ARCHITECTURES.get(kind, kind)


def convert(folder: Path, kind: int = F32) -> tuple[dict[str, Any], dict[str, Stored]]:
    """Return metadata and tensors of a Hugging Face directory, without its tokenizer."""
    c = json.loads((folder / "config.json").read_text())
    arch = architecture_of(folder)
    rope = c.get("rope_parameters") or {}
    rope = rope.get("full_attention", rope)
    head_dim = c.get("head_dim") or c["hidden_size"] // c["num_attention_heads"]
    blocks = len(c.get("layers_block_type") or []) or c["num_hidden_layers"]
    tensors = dict(_renamed(folder, c, arch, blocks))
    if rope.get("rope_type") == "llama3":
        tensors["rope_freqs.weight"] = llama3_factors(rope, head_dim)
    for length in ("short", "long"):
        if f"{length}_factor" in rope:
            tensors[f"rope_factors_{length}.weight"] = torch.tensor(rope[f"{length}_factor"])
    values = {
        "block_count": blocks,
        "context_length": c["max_position_embeddings"],
        "embedding_length": c["hidden_size"],
        "feed_forward_length": c.get("intermediate_size"),
        "attention.head_count": c["num_attention_heads"],
        "attention.head_count_kv": c["num_key_value_heads"],
        "rope.freq_base": rope.get("rope_theta"),
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
    if not values.get("expert_count"):
        values.pop("expert_used_count", None)
    if arch == "gpt-oss":
        values["expert_feed_forward_length"] = c["intermediate_size"]
    values |= _windows(c, arch) | _scaling(c, rope, arch) | _recurrent(c, arch, values)
    if arch == "gemma4":
        heads = {int(i): row for i, row in c["per_layer_config"].items()}
        values |= _by_layer(c, heads)
        full = next(iter(heads.values()))["head_dim"] // 2
        ones = int(full * rope["partial_rotary_factor"])
        tensors["rope_freqs.weight"] = torch.tensor([1.0] * ones + [1e30] * (full - ones))
    values = {key: value for key, value in values.items() if value is not None}
    metadata = {"general.architecture": arch} | {f"{arch}.{k}": v for k, v in values.items()}
    metadata |= {
        "tokenizer.ggml.model": "no_vocab",
        "tokenizer.ggml.eos_token_id": c["eos_token_id"],
    }
    stored_of = {}
    for name, tensor in tensors.items():
        small = any(part in name for part in _NOT_QUANTISED) or tensor.shape[-1] % 32
        stored_of[name] = stored(tensor, F32 if small else kind)
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


def _recurrent(c: dict[str, Any], arch: str, values: dict[str, Any]) -> dict[str, Any]:
    """Return the metadata of recurrent layers: which they are, and their width."""
    kinds = c.get("layers_block_type") or c.get("layer_types") or []
    if not {"conv", "linear_attention", "mamba"} & {*kinds} and arch != "falcon-h1":
        return {}
    more: dict[str, Any] = {}
    if arch in _QWEN_HYBRIDS:
        more["full_attention_interval"] = 4
        if arch != "qwen3next":
            more["rope.dimension_sections"] = [1, 1, 0, 0]
    elif arch != "falcon-h1":
        of_layer = {"full_attention": c["num_key_value_heads"]}
        more["attention.head_count_kv"] = [of_layer.get(kind, 0) for kind in kinds]
    if arch == "nemotron_h":
        more["attention.layer_norm_epsilon"] = c["layer_norm_epsilon"]
        more["feed_forward_length"] = [c["intermediate_size"] * (kind == "mlp") for kind in kinds]
    if arch == "lfm2moe":
        more["expert_gating_func"] = 2
    if arch == "granitehybrid":
        more["rope.scaling.finetuned"] = c["position_embedding_type"] == "rope"
    if arch == "lfm2":
        more["feed_forward_length"] = -(-(2 * c["intermediate_size"] // 3) // 256) * 256
    heads = values.get("ssm.time_step_rank")
    if heads:
        more["ssm.inner_size"] = heads * next(c[name] for name in _HEAD_DIMS if name in c)
    return more


def _changed(name: str, tensor: Tensor, c: dict[str, Any], arch: str) -> list[tuple[str, Tensor]]:
    """Return a tensor of a recurrent layer as the converter changes it."""
    if arch in ("qwen35", "qwen35moe"):
        tensor = _tiled_heads(name, tensor, c)
    module, _, kind = name.rpartition(".")
    if arch == "falcon-h1":
        tensor = _multiplied(module.rpartition(".")[2], kind, tensor, c)
    if kind == "A_log":
        tensor = -tensor.exp()
    if kind in ("A_log", "D") and arch not in _QWEN_HYBRIDS:
        tensor = tensor[:, None]
    if kind == "dt_bias":
        name = f"{module}.dt_proj.bias"
    if kind == "expert_bias":
        name = f"{name}.bias"
    if "feed_forward.experts" in name:
        name = name.removeprefix("model.")
    if module.endswith(("conv1d", "conv.conv")) and kind == "weight":
        tensor = tensor[:, 0]
    if module.endswith(("mamba.norm", "mixer.norm")):
        tensor = tensor.view(c.get("mamba_n_groups") or c["n_groups"], -1)
    if module.endswith("in_proj_qkvz"):
        keys, heads = c["linear_num_key_heads"], c["linear_num_value_heads"]
        key_dim, values = c["linear_key_head_dim"], heads // keys * c["linear_value_head_dim"]
        parts = tensor.unflatten(0, (keys, -1)).split([key_dim] * 2 + [values] * 2, dim=1)
        q, k, v, z = (part.flatten(0, 1) for part in parts)
        parent = module.removesuffix("qkvz")
        return [(f"{parent}qkv.weight", torch.cat([q, k, v])), (f"{parent}z.weight", z)]
    if "shared_mlp.input_linear" in name:
        layer, shared = module.partition(".shared_mlp")[0], bool(c["num_local_experts"])
        names = [f"{layer}.mlp.{'shared_expert.' * shared}{n}_proj.weight" for n in ("gate", "up")]
        return list(zip(names, tensor.chunk(2), strict=True))
    if "shared_mlp.output_linear" in name and not c["num_local_experts"]:
        name = name.replace("shared_mlp.output_linear", "mlp.down_proj")
    return [(name, tensor)]


def _multiplied(part: str, kind: str, tensor: Tensor, c: dict[str, Any]) -> Tensor:
    """Return a tensor of Falcon-H1 with its multipliers in it."""
    fields = {
        "q_proj": ["attention_in_multiplier"],
        "k_proj": ["attention_in_multiplier", "key_multiplier"],
        "v_proj": ["attention_in_multiplier"],
        "o_proj": ["attention_out_multiplier"],
        "in_proj": ["ssm_in_multiplier"],
        "out_proj": ["ssm_out_multiplier"],
        "embed_tokens": ["embedding_multiplier"],
        "lm_head": ["lm_head_multiplier"],
    }
    factor = math.prod(c[field] for field in fields.get(part, []))
    factor *= dict(zip(("gate_proj", "down_proj"), c["mlp_multipliers"], strict=True)).get(part, 1)
    tensor = tensor * factor
    if part == "in_proj":
        inner, keys = c["mamba_d_ssm"], c["mamba_n_groups"] * c["mamba_d_state"]
        sections = tensor.split([inner, inner, keys, keys, c["mamba_n_heads"]])
        pairs = zip(sections, c["ssm_multipliers"], strict=True)
        tensor = torch.cat([section * by for section, by in pairs])
    return tensor


def _tiled_heads(name: str, tensor: Tensor, c: dict[str, Any]) -> Tensor:
    """Return value heads in the order [first of each key head, second of each key head, ...]."""
    part = name.partition(".linear_attn.")[2].split(".")[0]
    keys, heads = c["linear_num_key_heads"], c["linear_num_value_heads"]
    if part not in ("A_log", "dt_bias", "conv1d", "out_proj") and not part.startswith("in_proj_"):
        return tensor
    if part == "out_proj":
        return _tiled_heads(name.replace("out_proj", "in_proj_z"), tensor.T, c).T.contiguous()
    first = 2 * keys * c["linear_key_head_dim"] if part in ("conv1d", "in_proj_qkv") else 0
    by_head = tensor[first:].unflatten(0, (keys, heads // keys, -1))
    return torch.cat([tensor[:first], by_head.transpose(0, 1).flatten(0, 2)])


def _renamed(folder: Path, c: dict[str, Any], arch: str, blocks: int) -> list[tuple[str, Tensor]]:
    """Return the tensors under their names in GGUF files, with the changes of the converter."""
    arch_number = next(key for key, name in gguf.MODEL_ARCH_NAMES.items() if name == arch)
    names = gguf.get_tensor_name_map(arch_number, blocks)
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
    changed = [part for each in _split_experts(loaded) for part in _changed(*each, c, arch)]
    for name, tensor in changed:
        if arch in _ADDS_1 and name.endswith("norm.weight") and ".linear_attn." not in name:
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
        elif name.endswith("moe.input_linear.weight"):  # of Granite: gate, then up
            for part, half in zip(("gate", "up"), tensor.chunk(2, dim=1), strict=True):
                layer = module.split(".")[2]
                renamed.append((f"model.layers.{layer}.mlp.experts.{part}_proj.weight", half))
        elif name.endswith("moe.output_linear.weight"):
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


def llama3_factors(rope: dict[str, Any], head_dim: int) -> Tensor:
    """Return what Llama 3's scaling divides each frequency by."""
    low, high = rope["low_freq_factor"], rope["high_freq_factor"]
    exponents = torch.arange(0, head_dim, 2) / head_dim
    turns = rope["original_max_position_embeddings"] / rope["rope_theta"] ** exponents
    smooth = ((turns / (2 * math.pi) - low) / (high - low)).clamp(0, 1)
    return 1 / ((1 - smooth) / rope["factor"] + smooth)
