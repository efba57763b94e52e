"""A writer of GGUF files, from values or from a Hugging Face model. It follows the format's
description and shares no code with the reader, so that its files test the reader."""

from __future__ import annotations

import json
import math
import struct
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from safetensors.torch import load_file
from torch import Tensor

F32, F16, Q8_0, BF16 = 0, 1, 8, 30


class Stored(NamedTuple):
    kind: int
    shape: tuple[int, ...]
    data: bytes


def gguf_bytes(
    metadata: dict[str, Any], tensors: dict[str, Stored], version: int = 3, alignment: int = 32
) -> bytes:
    return b"".join(_pieces(metadata, tensors, version, alignment))


def write_gguf(model: Path, path: Path, kind: int) -> None:
    """Write a Hugging Face directory as a GGUF file, with the vocabulary size, which llama.cpp
    needs. The file has no tokenizer and serves token ids only."""
    metadata, tensors = convert(model, kind)
    metadata["tokenizer.ggml.model"] = "no_vocab"
    vocab_size = tensors["token_embd.weight"].shape[0]
    metadata[f"{metadata['general.architecture']}.vocab_size"] = vocab_size
    with path.open("wb") as file:
        file.writelines(_pieces(metadata, tensors, 3, 32))


def _pieces(
    metadata: dict[str, Any], tensors: dict[str, Stored], version: int, alignment: int
) -> Iterator[bytes]:
    head = b"GGUF" + struct.pack("<IQQ", version, len(tensors), len(metadata))
    for key, value in metadata.items():
        head += _string(key) + _typed(value)
    offset = 0
    for name, tensor in tensors.items():
        dims = tensor.shape[::-1]
        head += _string(name) + struct.pack(f"<I{len(dims)}Q", len(dims), *dims)
        head += struct.pack("<IQ", tensor.kind, offset)
        offset += len(tensor.data) + -len(tensor.data) % alignment
    for data in (head, *(tensor.data for tensor in tensors.values())):
        yield data
        yield bytes(-len(data) % alignment)


def stored(tensor: Tensor, kind: int = F32) -> Stored:
    """Return the tensor stored as `kind`; vectors are fp32, as converters leave them."""
    kind = F32 if tensor.ndim == 1 else kind
    if kind == Q8_0:
        blocks = tensor.float().reshape(-1, 32).numpy()
        scale = (np.abs(blocks).max(axis=1, keepdims=True) / 127).astype("<f2")
        codes = np.round(blocks / np.maximum(scale.astype("f4"), 1e-12)).astype(np.int8)
        data = np.concatenate([scale.view(np.uint8), codes.view(np.uint8)], axis=1).tobytes()
    else:
        dtype = {F32: torch.float32, F16: torch.float16, BF16: torch.bfloat16}[kind]
        data = tensor.to(dtype).contiguous().view(torch.uint8).numpy().tobytes()
    return Stored(kind, tuple(tensor.shape), data)


_LAYER = {
    "input_layernorm": "attn_norm",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "self_attn.q_norm": "attn_q_norm",
    "self_attn.k_norm": "attn_k_norm",
    "post_attention_layernorm": "ffn_norm",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
}
_WHOLE = {"model.embed_tokens": "token_embd", "model.norm": "output_norm", "lm_head": "output"}
_ORIGINAL = {short: name for name, short in (_LAYER | _WHOLE).items()}


def original_name(name: str) -> str | None:
    """Return the Hugging Face name of a GGUF tensor, or None if it has none."""
    part, _, ending = name.rpartition(".")
    if part in _ORIGINAL:
        return f"{_ORIGINAL[part]}.{ending}"
    _, layer, rest = part.split(".") if part.startswith("blk.") else ("", "", part)
    return f"model.layers.{layer}.{_ORIGINAL[rest]}.{ending}" if layer else None


def convert(model: Path, kind: int = F32) -> tuple[dict[str, Any], dict[str, Stored]]:
    """Return metadata and tensors of a Hugging Face directory without a tokenizer, as llama.cpp's
    converter would."""
    c = json.loads((model / "config.json").read_text())
    arch = {"mistral": "llama"}.get(c["model_type"], c["model_type"])
    heads = {"q_proj": c["num_attention_heads"], "k_proj": c["num_key_value_heads"]}
    head_dim = c.get("head_dim") or c["hidden_size"] // c["num_attention_heads"]
    rope = c.get("rope_parameters") or {"rope_theta": c["rope_theta"]}
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
    }
    if arch == "llama" and c.get("sliding_window"):
        values["attention.sliding_window"] = c["sliding_window"]
    tensors = {}
    if rope.get("rope_type") in ("linear", "yarn"):
        values |= {"rope.scaling.type": rope["rope_type"], "rope.scaling.factor": rope["factor"]}
    if rope.get("rope_type") == "yarn":
        original = rope["original_max_position_embeddings"]
        values["rope.scaling.original_context_length"] = original
    if rope.get("rope_type") == "llama3":
        tensors["rope_freqs.weight"] = stored(_llama3_factors(rope, head_dim))
    for file in sorted(model.glob("*.safetensors")):
        for name, tensor in load_file(file).items():
            part, _, ending = name.rpartition(".")
            turned = heads.get(part.rpartition(".")[2]) if arch == "llama" else None
            if turned:  # llama.cpp wants the two halves of a rotary pair next to each other
                tensor = tensor.unflatten(0, (turned, 2, -1)).transpose(1, 2).flatten(0, 2)
            if part not in _WHOLE:
                _, _, layer, rest = part.split(".", 3)
            short = _WHOLE.get(part) or f"blk.{layer}.{_LAYER[rest]}"
            tensors[f"{short}.{ending}"] = stored(tensor, kind)
    metadata = {"general.architecture": arch} | {f"{arch}.{k}": v for k, v in values.items()}
    return metadata | {"tokenizer.ggml.eos_token_id": c["eos_token_id"]}, tensors


def _llama3_factors(rope: dict[str, Any], head_dim: int) -> Tensor:
    original, factors = rope["original_max_position_embeddings"], []
    low, high = rope["low_freq_factor"], rope["high_freq_factor"]
    for i in range(0, head_dim, 2):
        turns = original * rope["rope_theta"] ** (-i / head_dim) / (2 * math.pi)
        smooth = min(max((turns - low) / (high - low), 0.0), 1.0)
        factors.append(1 / ((1 - smooth) / rope["factor"] + smooth))
    return torch.tensor(factors)


def _string(text: str) -> bytes:
    return struct.pack("<Q", len(text.encode())) + text.encode()


def _typed(value: Any, in_array: bool = False) -> bytes:
    """Return the type code of a value, and the value, in bytes."""
    if isinstance(value, list):
        items = [_typed(item, in_array=True) for item in value]
        kind = items[0][:4] if items else struct.pack("<I", 4)
        return (
            struct.pack("<I", 9)
            + kind
            + struct.pack("<Q", len(items))
            + b"".join(item[4:] for item in items)
        )
    if isinstance(value, str):
        return struct.pack("<I", 8) + _string(value)
    kind, form = {bool: (7, "?"), float: (6, "f")}.get(type(value), (5, "i"))
    if form == "i" and not in_array and value >= 0:
        kind, form = 4, "I"  # llama.cpp requires unsigned sizes and ids
    return struct.pack(f"<I{form}", kind, value)
