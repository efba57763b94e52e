"""GGUF files, by the package gguf: from values and tensors, or from a Hugging Face directory."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any, NamedTuple

import gguf
import numpy as np
import torch
from gguf import GGMLQuantizationType, GGUFValueType
from safetensors.torch import load_file
from torch import Tensor

F32, F16, Q8_0, BF16 = (GGMLQuantizationType[name] for name in ("F32", "F16", "Q8_0", "BF16"))
_ENDINGS = (".weight", ".bias")


class Stored(NamedTuple):
    kind: int
    shape: tuple[int, ...]
    data: bytes


def stored(tensor: Tensor, kind: int = F32) -> Stored:
    """Return the tensor stored as `kind`; vectors are fp32, as converters leave them."""
    number = GGMLQuantizationType(F32 if tensor.ndim == 1 else kind)
    blocks = gguf.quantize(tensor.float().contiguous().numpy(), number)
    return Stored(number, tuple(tensor.shape), blocks.tobytes())


def write_gguf(
    path: Path, metadata: dict[str, Any], tensors: dict[str, Stored], alignment: int = 32
) -> None:
    writer = gguf.GGUFWriter(path, "")
    writer.kv_data = [{}]  # the architecture is in `metadata`
    writer.data_alignment = alignment
    for key, value in metadata.items():
        kind = GGUFValueType.get_type(value)
        if kind is GGUFValueType.INT32 and value >= 0:
            kind = GGUFValueType.UINT32  # llama.cpp requires unsigned sizes and ids
        writer.add_key_value(key, value, kind)
    for name, (number, shape, data) in tensors.items():
        writer.add_tensor(name, np.frombuffer(data, np.int8), shape, number)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def convert(model: Path, kind: int = F32) -> tuple[dict[str, Any], dict[str, Stored]]:
    """Return metadata and tensors of a Hugging Face directory without a tokenizer, as llama.cpp's
    converter would."""
    c = json.loads((model / "config.json").read_text())
    arch = {"mistral": "llama"}.get(c["model_type"], c["model_type"])
    heads = {"attn_q": c["num_attention_heads"], "attn_k": c["num_key_value_heads"]}
    head_dim = c.get("head_dim") or c["hidden_size"] // c["num_attention_heads"]
    rope = c.get("rope_parameters") or {"rope_theta": c["rope_theta"]}
    scaling = rope.get("rope_type")
    values = {
        "block_count": c["num_hidden_layers"],
        "context_length": c["max_position_embeddings"],
        "embedding_length": c["hidden_size"],
        "feed_forward_length": c["intermediate_size"],
        "attention.head_count": c["num_attention_heads"],
        "attention.head_count_kv": c["num_key_value_heads"],
        "attention.key_length": head_dim,
        "attention.value_length": head_dim,
        "attention.layer_norm_rms_epsilon": c["rms_norm_eps"],
        "rope.dimension_count": head_dim,
        "rope.freq_base": float(rope["rope_theta"]),
        "vocab_size": c["vocab_size"],  # llama.cpp needs it without a tokenizer
    }
    if arch == "llama" and c.get("sliding_window"):
        values["attention.sliding_window"] = c["sliding_window"]
    if scaling in ("linear", "yarn"):
        values |= {"rope.scaling.type": scaling, "rope.scaling.factor": rope["factor"]}
    if scaling == "yarn":
        original = rope["original_max_position_embeddings"]
        values["rope.scaling.original_context_length"] = original
    names = gguf.get_tensor_name_map(
        next(key for key, name in gguf.MODEL_ARCH_NAMES.items() if name == arch),
        c["num_hidden_layers"],
    )
    tensors = (
        {"rope_freqs.weight": stored(llama3_factors(rope, head_dim))} if scaling == "llama3" else {}
    )
    for file in sorted(model.glob("*.safetensors")):
        for original_name, tensor in load_file(file).items():
            name = names.get_name(original_name, _ENDINGS)
            assert name is not None, f"{original_name} has no name in GGUF files"
            turned = heads.get(name.split(".")[-2]) if arch == "llama" else None
            if turned:  # llama.cpp wants the two halves of a rotary pair next to each other
                tensor = tensor.unflatten(0, (turned, 2, -1)).transpose(1, 2).flatten(0, 2)
            tensors[name] = stored(tensor, kind)
    metadata = {"general.architecture": arch} | {f"{arch}.{k}": v for k, v in values.items()}
    return metadata | {
        "tokenizer.ggml.model": "no_vocab",
        "tokenizer.ggml.eos_token_id": c["eos_token_id"],
    }, tensors


def llama3_factors(rope: dict[str, Any], head_dim: int) -> Tensor:
    """Return what Llama 3's scaling divides each frequency by."""
    low, high = rope["low_freq_factor"], rope["high_freq_factor"]
    exponents = torch.arange(0, head_dim, 2) / head_dim
    turns = rope["original_max_position_embeddings"] / rope["rope_theta"] ** exponents
    smooth = ((turns / (2 * math.pi) - low) / (high - low)).clamp(0, 1)
    return 1 / ((1 - smooth) / rope["factor"] + smooth)
