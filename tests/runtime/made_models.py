"""Small complete models, made quickly: GGUF files of all types, and a Hugging Face directory."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors.torch import save_file
from tokenizers import Tokenizer, normalizers, processors

from cbatch.runtime.model.gguf_file import TYPES
from tests.gguf_files import F32, Stored, original_names
from tests.runtime.test_gguf_blocks import blocks
from tests.text.test_gguf_tokenizer import BYTE_LEVEL, SENTENCE_PIECE
from tests.text.toy_tokenizers import byte_level

TEMPLATE = "{% for m in messages %}{{ m['role'] + ': ' + m.content }}{{ eos_token }}{% endfor %}"
VOCAB, HEADS, KV_HEADS = 352, 4, 2
_KINDS = {each.name: (number, each) for number, each in TYPES.items()}
# By model: its architecture, the types of its matrices (used in turn), and its tokenizer.
MADE: dict[str, tuple[str, tuple[str, ...], dict[str, Any]]] = {
    "plain": ("llama", ("F32",), BYTE_LEVEL),
    "halves": ("qwen2", ("BF16", "BF16", "F16"), BYTE_LEVEL),
    "mixed": ("qwen3", ("BF16", "Q8_0", "F32"), BYTE_LEVEL),
    "fours": ("llama", ("Q4_0", "Q4_1", "IQ4_NL"), SENTENCE_PIECE),
    "fives": ("qwen2", ("Q8_0", "Q5_0", "Q5_1"), BYTE_LEVEL),
    "supers": ("llama", ("Q6_K", "Q4_K", "Q5_K", "IQ4_XS"), BYTE_LEVEL),
    "few bits": ("llama", ("Q2_K", "Q3_K", "IQ3_S", "MXFP4"), BYTE_LEVEL),
}


def _shapes(arch: str, hidden: int, dim: int) -> dict[str, tuple[int, ...]]:
    """Return the tensor shapes of a model with one layer, whose MLP is as wide as its hidden
    states."""
    q, kv = HEADS * dim, KV_HEADS * dim
    layer: dict[str, tuple[int, ...]] = {
        "attn_norm.weight": (hidden,),
        "attn_q.weight": (q, hidden),
        "attn_k.weight": (kv, hidden),
        "attn_v.weight": (kv, hidden),
        "attn_output.weight": (hidden, q),
        "ffn_norm.weight": (hidden,),
        "ffn_gate.weight": (hidden, hidden),
        "ffn_up.weight": (hidden, hidden),
        "ffn_down.weight": (hidden, hidden),
    }
    if arch == "qwen2":
        layer |= {"attn_q.bias": (q,), "attn_k.bias": (kv,), "attn_v.bias": (kv,)}
    if arch == "qwen3":
        layer |= {"attn_q_norm.weight": (dim,), "attn_k_norm.weight": (dim,)}
    whole = {"token_embd.weight": (VOCAB, hidden), "output_norm.weight": (hidden,)}
    return whole | {f"blk.0.{name}": shape for name, shape in layer.items()}


def gguf_parts(name: str) -> tuple[dict[str, Any], dict[str, Stored]]:
    """Return metadata and tensors of one model of `MADE`."""
    arch, kinds, tokenizer = MADE[name]
    hidden = max(64, *(_KINDS[kind][1].elements for kind in kinds))
    dim = hidden // HEADS
    values: dict[str, Any] = {
        "embedding_length": hidden,
        "block_count": 1,
        "feed_forward_length": hidden,
        "context_length": 200,
        "attention.head_count": HEADS,
        "attention.head_count_kv": KV_HEADS,
        "attention.key_length": dim,
        "attention.layer_norm_rms_epsilon": 1e-5,
        "rope.freq_base": 10000.0,
    }
    shapes = _shapes(arch, hidden, dim)
    if name == "plain":  # Llama 3's scaling
        shapes["rope_freqs.weight"] = (dim // 2,)
    if name == "supers":
        values |= {"rope.scaling.type": "yarn", "rope.scaling.factor": 2.0}
        values |= {"rope.scaling.original_context_length": 100, "attention.sliding_window": 30}
        values |= {"rope.scaling.yarn_beta_fast": 16.0, "rope.scaling.yarn_beta_slow": 2.0}
        values |= {"rope.scaling.attn_factor": 1.5, "attention.value_length": dim}
        shapes["output.weight"] = (VOCAB, hidden)
    tensors = {}
    for at, (tensor, shape) in enumerate(shapes.items()):
        tensors[tensor] = _stored(kinds[at % len(kinds)] if len(shape) > 1 else "F32", shape)
    metadata = {"general.architecture": arch} | {f"{arch}.{k}": v for k, v in values.items()}
    sampling = {"temp": 0.7, "top_k": 40, "top_p": 0.9, "min_p": 0.1, "penalty_repeat": 1.1}
    metadata |= {f"general.sampling.{key}": value for key, value in sampling.items()}
    metadata |= {"general.alignment": 32, "split.count": 1, "tokenizer.ggml.add_bos_token": True}
    return metadata | tokenizer | {"tokenizer.chat_template": TEMPLATE}, tensors


def _stored(kind: str, shape: tuple[int, ...]) -> Stored:
    number, (_, elements, _) = _KINDS[kind]
    count = int(np.prod(shape))
    if elements == 1:
        drawn = torch.randn(count, generator=torch.Generator().manual_seed(count)) * 0.1
        values = drawn.abs() + 0.5 if len(shape) == 1 else drawn
        dtype = {"F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}[kind]
        return Stored(number, shape, values.to(dtype).view(torch.uint8).numpy().tobytes())
    return Stored(number, shape, blocks(kind, count // elements).tobytes())


def make_directory(folder: Path) -> None:
    """Write the model `plain` in the Hugging Face layout."""
    _, tensors = gguf_parts("plain")
    weights = {}
    names = original_names()
    for name, tensor in tensors.items():
        original = names.get(name)
        if original is not None:
            assert tensor.kind == F32
            weights[original] = torch.frombuffer(bytearray(tensor.data), dtype=torch.float32).view(
                tensor.shape
            )
    save_file(weights, folder / "model.safetensors")
    values = {
        "architectures": ["LlamaForCausalLM"],
        "vocab_size": VOCAB,
        "hidden_size": 64,
        "intermediate_size": 64,
        "num_hidden_layers": 1,
        "num_attention_heads": HEADS,
        "num_key_value_heads": KV_HEADS,
        "max_position_embeddings": 200,
        "rms_norm_eps": 1e-5,
        "rope_theta": 10000.0,
        "rope_scaling": {"rope_type": "linear", "factor": 2.0},
        "tie_word_embeddings": True,
        "eos_token_id": [2],
        "torch_dtype": "float32",
    }
    config = {"eos_token": "<|endoftext|>", "chat_template": TEMPLATE}
    generation = {"temperature": 0.7, "top_k": 40, "top_p": 0.9, "eos_token_id": 2}
    index = {"weight_map": dict.fromkeys(weights, "model.safetensors")}
    for name, content in (
        ("model.safetensors.index.json", index),
        ("config.json", values),
        ("tokenizer_config.json", config),
        ("generation_config.json", generation),
    ):
        (folder / name).write_text(json.dumps(content))
    tokenizer = Tokenizer.from_str(byte_level(VOCAB).to_str())
    tokenizer.normalizer = normalizers.NFC()
    tokenizer.post_processor = processors.TemplateProcessing(
        single="<|endoftext|> $A", special_tokens=[("<|endoftext|>", 0)]
    )
    tokenizer.save(str(folder / "tokenizer.json"))
