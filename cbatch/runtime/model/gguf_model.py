"""Config and weights of a GGUF file, under the names of Hugging Face's files."""

from __future__ import annotations

import math
from collections import Counter
from typing import Any

import msgspec
import numpy as np
import torch
from torch import Tensor

from cbatch.runtime.model.config import ModelConfig
from cbatch.runtime.model.config_json import parse_config
from cbatch.runtime.model.end_tokens import END_TOKENS
from cbatch.runtime.model.gguf_file import Gguf, GgufTensor
from cbatch.runtime.model.records import Attention, Rope
from cbatch.runtime.model.weight_files import WeightSource

_ARCHITECTURES = ("llama", "qwen2", "qwen3")
# Fields of config.json -> their GGUF keys, without the prefix of the architecture.
_KEYS = {
    "hidden_size": "embedding_length",
    "num_hidden_layers": "block_count",
    "intermediate_size": "feed_forward_length",
    "max_position_embeddings": "context_length",
    "num_attention_heads": "attention.head_count",
    "num_key_value_heads": "attention.head_count_kv",
    "head_dim": "attention.key_length",
    "rms_norm_eps": "attention.layer_norm_rms_epsilon",
    "rope_theta": "rope.freq_base",
    "sliding_window": "attention.sliding_window",
    "num_experts": "expert_count",
    "rope_scaling.rope_type": "rope.scaling.type",
    "rope_scaling.factor": "rope.scaling.factor",
    "rope_scaling.original_max_position_embeddings": "rope.scaling.original_context_length",
    "rope_scaling.attention_factor": "rope.scaling.attn_factor",
    "rope_scaling.beta_fast": "rope.scaling.yarn_beta_fast",
    "rope_scaling.beta_slow": "rope.scaling.yarn_beta_slow",
}
# Keys with a single supported value.
_ONLY_SUPPORTED_VALUES = {
    "attention.causal": True,
    "attention.scale": 0.0,
    "rope.scaling.yarn_ext_factor": 1.0,
    "rope.scaling.yarn_log_multiplier": 0.0,
}
_CONTROL = 3  # the token type of control tokens
_MAX_NAME_CHARS = 64  # of metadata strings that are names
_EMBEDDING, _ROPE_FACTORS = "token_embd.weight", "rope_freqs.weight"
_TOP_LEVEL = {
    "model.embed_tokens.weight": _EMBEDDING,
    "model.norm.weight": "output_norm.weight",
    "lm_head.weight": "output.weight",
}
_LAYER = {
    "input_layernorm": "attn_norm",
    "post_attention_layernorm": "ffn_norm",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "self_attn.q_norm": "attn_q_norm",
    "self_attn.k_norm": "attn_k_norm",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
}


def config_of(file: Gguf) -> ModelConfig:
    """Return the config of a GGUF file. Raises ModelError naming the file and the key or tensor."""
    arch, tensors = _scalar(file, "general.architecture"), file.tensors
    if arch not in _ARCHITECTURES:
        problem = f"{arch!r} is not supported; supported: {', '.join(_ARCHITECTURES)}"
        raise file.error("general.architecture", problem)
    for key, allowed in _ONLY_SUPPORTED_VALUES.items():
        value = _scalar(file, f"{arch}.{key}", allowed)
        if value != allowed:
            raise file.error(f"{arch}.{key}", f"{value!r} is not supported; supported: {allowed!r}")
    if _EMBEDDING not in tensors:
        raise file.error(f"tensor {_EMBEDDING}", "is missing")
    names = {field: f"{arch}.{key}" for field, key in _KEYS.items()}
    values = {field: _scalar(file, key) for field, key in names.items()}
    if values["rms_norm_eps"] is None:
        raise file.error(names["rms_norm_eps"], "is missing")
    layers = values["num_hidden_layers"]
    if isinstance(layers, int) and layers > len(tensors):
        raise file.error(names["num_hidden_layers"], f"{layers} for {len(tensors)} tensors")
    rotated = f"{arch}.rope.dimension_count"
    head_dim = values["head_dim"] = values["head_dim"] or _scalar(file, rotated)
    for key in (rotated, f"{arch}.attention.value_length"):
        if _scalar(file, key, head_dim) != head_dim and head_dim is not None:
            problem = f"{_scalar(file, key)!r} is not supported; a key has {head_dim!r}"
            raise file.error(key, problem)
    window = values["sliding_window"] or None
    values |= {
        "model_type": "mistral" if arch == "llama" and window else arch,
        "sliding_window": window,
        "num_experts": values["num_experts"] or None,
        "rope_scaling": _rope_scaling(file, arch, values),
        "vocab_size": tensors[_EMBEDDING].shape[0],
        "tie_word_embeddings": "output.weight" not in tensors,
        "bos_token_id": _scalar(file, "tokenizer.ggml.bos_token_id"),
        "eos_token_id": _end_ids(file),
        "torch_dtype": _dtype(file),
    }
    names |= {f"{each}_token_id": f"tokenizer.ggml.{each}_token_id" for each in ("bos", "eos")}
    biased = {part: f"blk.0.{part}.bias" in tensors for part in ("attn_q", "attn_output", "ffn_up")}
    config = parse_config(values, file.path, names)
    config = config.with_mixers(bias=biased["attn_q"], out_bias=biased["attn_output"])
    config = config.with_feed_forwards(bias=biased["ffn_up"])
    for name, ids in (("bos", [config.bos_token_id]), ("eos", config.eos_token_ids)):
        for token in ids:
            if token is not None and token >= config.vocab_size:
                problem = f"{token} is not a token of {config.vocab_size}"
                raise file.error(names[f"{name}_token_id"], problem)
    tokens = len(_array(file, "tokenizer.ggml.tokens"))
    if tokens > config.vocab_size:
        problem = f"{tokens} tokens, but {_EMBEDDING} has {config.vocab_size} rows"
        raise file.error("tokenizer.ggml.tokens", problem)
    _check_tensors(file, config)
    if _ROPE_FACTORS not in tensors:
        return config
    return config.with_mixers(rope=_with_factors(file, config.attention))


def _scalar(file: Gguf, key: str, default: Any = None) -> Any:
    """Return the value of a key for all layers. An array of equal values counts as that value."""
    value = file.metadata.get(key, default)
    if isinstance(value, np.ndarray) and len(value) and (value == value[0]).all():
        return value[0].item()
    if isinstance(value, np.ndarray | list):
        raise file.error(key, f"an array of {len(value)} values; one for all layers is supported")
    if isinstance(value, str) and len(value) > _MAX_NAME_CHARS:
        raise file.error(key, f"{value[:_MAX_NAME_CHARS]!r} and more is not a name")
    return value


def _array(file: Gguf, key: str) -> Any:
    value = file.metadata.get(key, [])
    if not isinstance(value, np.ndarray | list):
        raise file.error(key, f"must be an array, got {value!r:.40}")
    return value


def _rope_scaling(file: Gguf, arch: str, values: dict[str, Any]) -> dict[str, Any] | None:
    """Return the rope scaling in config.json's form; removes its fields from `values`."""
    prefix = "rope_scaling."
    scaling = {
        field.removeprefix(prefix): values.pop(field)
        for field in list(values)
        if field.startswith(prefix)
    }
    factor = scaling["factor"] or _scalar(file, f"{arch}.rope.scale_linear")
    scaling["factor"] = factor
    kind = scaling["rope_type"] = scaling["rope_type"] or "linear"
    if kind == "none" or (kind == "linear" and not factor):
        return None
    if kind == "longrope":
        problem = f"{kind!r} is not supported; supported: linear, yarn"
        raise file.error(f"{arch}.rope.scaling.type", problem)
    extra_factor = scaling["attention_factor"] or 1.0
    numbers = all(isinstance(each, int | float) for each in (factor, extra_factor))
    if kind == "yarn" and numbers and factor > 1:
        # GGUF has an additional factor, config.json the whole factor including length scaling.
        scaling["attention_factor"] = extra_factor * (0.1 * math.log(factor) + 1)
    return scaling


def _end_ids(file: Gguf) -> list[Any]:
    """Return the ids of EOS tokens: those named by the metadata, and control tokens with a known
    text."""
    keys = [f"tokenizer.ggml.{name}_token_id" for name in ("eos", "eot", "eom")]
    ids = [_scalar(file, key) for key in keys if key in file.metadata]
    tokens, types = (_array(file, f"tokenizer.ggml.{name}") for name in ("tokens", "token_type"))
    ends = zip(range(len(tokens)), tokens, types, strict=False)
    ids += [i for i, text, kind in ends if kind == _CONTROL and text in END_TOKENS]
    return list(dict.fromkeys(ids))


def _dtype(file: Gguf) -> str:
    """Return the dtype of most values, or bfloat16 if these are quantised."""
    counts: Counter[str] = Counter()
    for tensor in file.tensors.values():
        counts[tensor.type.name] += math.prod(tensor.shape)
    most_common = counts.most_common(1)[0][0]
    return {"F32": "float32", "F16": "float16"}.get(most_common, "bfloat16")


def _check_tensors(file: Gguf, config: ModelConfig) -> None:
    """Raise ModelError unless names and shapes of the tensors are those of the config. An unknown
    tensor would mean other arithmetic."""
    shapes = _shapes(config)
    for name, shape in shapes.items():
        tensor = file.tensors.get(name)
        if tensor is None:
            raise file.error(f"tensor {name}", "is missing")
        if tensor.shape != shape:
            problem = f"has shape {list(tensor.shape)}, the metadata say {list(shape)}"
            raise file.error(f"tensor {name}", problem)
        if len(shape) == 1 and tensor.type.elements > 1:
            raise file.error(
                f"tensor {name}", f"type {tensor.type.name} is supported for matrices only"
            )
    for name in file.tensors.keys() - shapes.keys() - {_ROPE_FACTORS}:
        raise file.error(
            f"tensor {name}", f"is not a tensor of a {config.family} model; not supported"
        )


def _shapes(c: ModelConfig) -> dict[str, tuple[int, ...]]:
    hidden, inner, m = c.hidden_size, c.widest_inner, c.attention
    q, kv = m.heads * m.key_dim, m.kv_heads * m.key_dim
    layer: dict[str, tuple[int, ...]] = {
        "attn_norm.weight": (hidden,),
        "attn_q.weight": (q, hidden),
        "attn_k.weight": (kv, hidden),
        "attn_v.weight": (kv, hidden),
        "attn_output.weight": (hidden, q),
        "ffn_norm.weight": (hidden,),
        "ffn_gate.weight": (inner, hidden),
        "ffn_up.weight": (inner, hidden),
        "ffn_down.weight": (hidden, inner),
    }
    if m.bias:
        layer |= {"attn_q.bias": (q,), "attn_k.bias": (kv,), "attn_v.bias": (kv,)}
    if m.out_bias:
        layer |= {"attn_output.bias": (hidden,)}
    if c.feed_forward.bias:
        layer |= {"ffn_gate.bias": (inner,), "ffn_up.bias": (inner,), "ffn_down.bias": (hidden,)}
    if m.qk_norm:
        layer |= {"attn_q_norm.weight": (m.key_dim,), "attn_k_norm.weight": (m.key_dim,)}
    shapes = {_EMBEDDING: (c.vocab_size, hidden), "output_norm.weight": (hidden,)}
    if not c.tie_embeddings:
        shapes["output.weight"] = (c.vocab_size, hidden)
    for i in range(c.num_layers):
        shapes |= {f"blk.{i}.{name}": shape for name, shape in layer.items()}
    return shapes


def _with_factors(file: Gguf, mixer: Attention) -> Rope:
    tensor = file.tensors[_ROPE_FACTORS]
    fits = tensor.shape == (mixer.key_dim // 2,)
    factors = tensor.dequantised(torch.float32) if fits else torch.zeros(1)
    if not (factors > 0).all():
        problem = f"must hold {mixer.key_dim // 2} positive numbers"
        raise file.error(f"tensor {_ROPE_FACTORS}", problem)
    return msgspec.structs.replace(mixer.rope, divisors=tuple(factors.tolist()))


class GgufWeights(WeightSource):
    """The tensors of a GGUF file under the names of Hugging Face's files, widened to `dtype`. With
    `as_stored`, `blocks` returns quantised tensors as they are."""

    def __init__(
        self, file: Gguf, config: ModelConfig, dtype: torch.dtype, *, as_stored: bool = False
    ) -> None:
        self._file, self._config, self._dtype = file, config, dtype
        self._as_stored = as_stored

    def get(self, name: str, shape: tuple[int, ...]) -> Tensor:
        tensor = self.stored(name)
        if tensor.shape != shape:
            problem = f"has shape {list(tensor.shape)}, not {list(shape)}"
            raise self._file.error(f"tensor {tensor.name}", problem)
        return tensor.dequantised(self._dtype)

    def blocks(self, name: str) -> GgufTensor | None:
        stored = self.stored(name) if self._as_stored else None
        return stored if stored is not None and stored.type.elements > 1 else None

    def stored(self, name: str) -> GgufTensor:
        """Return a tensor as stored, rows in the order of Hugging Face's files. In a Llama GGUF,
        the rows of a head's queries and keys alternate between the halves of the head."""
        gguf_name = _gguf_name(name)
        tensor = self._file.tensors.get(gguf_name)
        if tensor is None:
            raise self._file.error(f"tensor {gguf_name}", "is missing")
        m = self._config.attention
        heads = {"attn_q": m.heads, "attn_k": m.kv_heads}.get(gguf_name.split(".")[-2])
        if heads is None or self._config.family not in ("llama", "mistral"):
            return tensor
        rows = tensor.raw.reshape(heads, m.key_dim // 2, 2, -1)
        return tensor._replace(raw=rows.swapaxes(1, 2).reshape(-1))


def _gguf_name(name: str) -> str:
    if name in _TOP_LEVEL:
        return _TOP_LEVEL[name]
    _, _, layer, rest = name.split(".", 3)
    part, _, kind = rest.rpartition(".")
    return f"blk.{layer}.{_LAYER[part]}.{kind}"
