"""The Llama shape used to train the demo pair, with Hugging Face tensor names throughout.

Training needs only this module and torch; serving uses `cbatch.runtime`. The state dict has the
tensors of `model.safetensors`. `tests/tools/demo_pair` compares the logits with transformers'.
"""

from __future__ import annotations

import dataclasses
import json
from dataclasses import dataclass
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor, nn


@dataclass(frozen=True)
class NetConfig:
    """Sizes of a Llama-shaped model; its embedding is always tied to the LM head."""

    hidden_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    intermediate_size: int
    vocab_size: int = 4096
    max_positions: int = 1024
    rope_theta: float = 10000.0
    rms_norm_eps: float = 1e-5

    def to_hf(self, eos_token_id: int) -> dict[str, object]:
        """Return the `config.json` of this shape for transformers."""
        return {
            "architectures": ["LlamaForCausalLM"],
            "model_type": "llama",
            **{hf_name: getattr(self, name) for name, hf_name in _IN_CONFIG.items()},
            "rope_scaling": None,
            "hidden_act": "silu",
            "attention_bias": False,
            "mlp_bias": False,
            "tie_word_embeddings": True,
            "bos_token_id": eos_token_id,
            "eos_token_id": eos_token_id,
            "torch_dtype": "bfloat16",
        }

    @classmethod
    def from_hf(cls, path: Path) -> NetConfig:
        """Read a config written by `to_hf`. Raises KeyError for a config of another family."""
        raw = json.loads(path.read_text())
        return cls(**{name: raw[hf_name] for name, hf_name in _IN_CONFIG.items()})


_IN_CONFIG = {field.name: field.name for field in dataclasses.fields(NetConfig)} | {
    "num_layers": "num_hidden_layers",
    "num_heads": "num_attention_heads",
    "num_kv_heads": "num_key_value_heads",
    "max_positions": "max_position_embeddings",
}


# Hidden size, layers, heads, KV heads, head size, MLP size. On a CPU a small pass costs time per
# layer, so the draft has one layer (see the card).
TARGET = NetConfig(256, 12, 8, 4, 32, 352)
DRAFT = NetConfig(128, 1, 4, 2, 32, 384)


class PaddedKVCache:
    """Keys and values of a batch whose rows are left-padded to one length.

    `keys` and `values` are [layer, batch, kv_head, position, head_dim], of which `length` positions
    are filled. `pad` [batch] is the number of leading padding positions of each row.
    """

    def __init__(self, config: NetConfig, pad: Tensor, capacity: int) -> None:
        shape = (config.num_layers, pad.numel(), config.num_kv_heads, capacity, config.head_dim)
        self.keys = torch.zeros(shape, device=pad.device)
        self.values = torch.zeros(shape, device=pad.device)
        self.pad = pad
        self.length = 0

    def positions(self, num_new: int) -> Tensor:
        """Return the RoPE positions [batch, num_new] of the next `num_new` tokens."""
        columns = torch.arange(self.length, self.length + num_new, device=self.pad.device)
        return (columns[None] - self.pad[:, None]).clamp_min(0)

    def mask(self, num_new: int) -> Tensor:
        """Return a boolean mask [batch, 1, num_new, length + num_new]; padding sees only itself."""
        keys = torch.arange(self.length + num_new, device=self.pad.device)
        queries = keys[self.length :, None]
        visible = (keys[None] <= queries)[None] & (keys >= self.pad[:, None])[:, None]
        return (visible | (keys[None] == queries)[None])[:, None]


class Attention(nn.Module):
    def __init__(self, config: NetConfig, layer: int) -> None:
        super().__init__()
        self.config, self.layer = config, layer
        q_size = config.num_heads * config.head_dim
        kv_size = config.num_kv_heads * config.head_dim
        self.q_proj = nn.Linear(config.hidden_size, q_size, bias=False)
        self.k_proj = nn.Linear(config.hidden_size, kv_size, bias=False)
        self.v_proj = nn.Linear(config.hidden_size, kv_size, bias=False)
        self.o_proj = nn.Linear(q_size, config.hidden_size, bias=False)

    def forward(
        self,
        x: Tensor,
        rope: tuple[Tensor, Tensor],
        cache: PaddedKVCache | None,
        mask: Tensor | None,
    ) -> Tensor:
        batch, length, _ = x.shape
        split = (batch, length, -1, self.config.head_dim)
        q = rotate(self.q_proj(x).view(split).transpose(1, 2), rope)
        k = rotate(self.k_proj(x).view(split).transpose(1, 2), rope)
        v = self.v_proj(x).view(split).transpose(1, 2)
        if cache is not None:
            end = cache.length + length
            cache.keys[self.layer, :, :, cache.length : end] = k
            cache.values[self.layer, :, :, cache.length : end] = v
            k, v = cache.keys[self.layer, :, :, :end], cache.values[self.layer, :, :, :end]
        out = self._attend(q, k, v, mask)
        return self.o_proj(out.transpose(1, 2).reshape(batch, length, -1))

    def _attend(self, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None) -> Tensor:
        groups = self.config.num_heads // self.config.num_kv_heads
        if mask is None:
            k, v = k.repeat_interleave(groups, dim=1), v.repeat_interleave(groups, dim=1)
            return F.scaled_dot_product_attention(q, k, v, is_causal=True)
        # Instead of copying a long cache for each query head, the heads of a group become queries.
        grouped = q.reshape(q.shape[0], self.config.num_kv_heads, -1, self.config.head_dim)
        out = F.scaled_dot_product_attention(grouped, k, v, attn_mask=mask.repeat(1, 1, groups, 1))
        return out.view_as(q)


class Mlp(nn.Module):
    def __init__(self, config: NetConfig) -> None:
        super().__init__()
        self.gate_proj = nn.Linear(config.hidden_size, config.intermediate_size, bias=False)
        self.up_proj = nn.Linear(config.hidden_size, config.intermediate_size, bias=False)
        self.down_proj = nn.Linear(config.intermediate_size, config.hidden_size, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.down_proj(F.silu(self.gate_proj(x)) * self.up_proj(x))


class DecoderLayer(nn.Module):
    def __init__(self, config: NetConfig, layer: int) -> None:
        super().__init__()
        self.self_attn = Attention(config, layer)
        self.mlp = Mlp(config)
        self.input_layernorm = nn.RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.post_attention_layernorm = nn.RMSNorm(config.hidden_size, config.rms_norm_eps)

    def forward(
        self,
        x: Tensor,
        rope: tuple[Tensor, Tensor],
        cache: PaddedKVCache | None,
        mask: Tensor | None,
    ) -> Tensor:
        x = x + self.self_attn(self.input_layernorm(x), rope, cache, mask)
        return x + self.mlp(self.post_attention_layernorm(x))


class Body(nn.Module):
    def __init__(self, config: NetConfig) -> None:
        super().__init__()
        self.embed_tokens = nn.Embedding(config.vocab_size, config.hidden_size)
        self.layers = nn.ModuleList(DecoderLayer(config, i) for i in range(config.num_layers))
        self.norm = nn.RMSNorm(config.hidden_size, config.rms_norm_eps)


class Llama(nn.Module):
    """Decoder with a tied LM head: token ids [batch, length] to logits [batch, length, vocab]."""

    def __init__(self, config: NetConfig) -> None:
        super().__init__()
        self.config = config
        self.model = Body(config)
        exponents = torch.arange(0, config.head_dim, 2) / config.head_dim
        angles = torch.outer(torch.arange(config.max_positions), config.rope_theta**-exponents)
        self.register_buffer("cos", angles.cos().repeat(1, 2), persistent=False)
        self.register_buffer("sin", angles.sin().repeat(1, 2), persistent=False)

    def init_weights(self) -> Llama:
        """Draw weights from Normal(0.02), with smaller residual projections in deeper nets
        (GPT-2)."""
        residual_std = 0.02 / (2 * self.config.num_layers) ** 0.5
        for name, weight in self.named_parameters():
            if weight.ndim == 2:
                residual = name.endswith(("o_proj.weight", "down_proj.weight"))
                nn.init.normal_(weight, std=residual_std if residual else 0.02)
        return self

    def forward(self, ids: Tensor, cache: PaddedKVCache | None = None) -> Tensor:
        length = ids.shape[1]
        mask = None
        if cache is None:
            rope = self.cos[:length], self.sin[:length]
        else:
            positions = cache.positions(length)
            rope = self.cos[positions][:, None], self.sin[positions][:, None]
            mask = cache.mask(length)
        x = self.model.embed_tokens(ids)
        for layer in self.model.layers:
            x = layer(x, rope, cache, mask)
        if cache is not None:
            cache.length += length
        return F.linear(self.model.norm(x), self.model.embed_tokens.weight)


def rotate(x: Tensor, rope: tuple[Tensor, Tensor]) -> Tensor:
    """Apply rotary embedding in the half-split layout of Hugging Face Llama weights."""
    cos, sin = rope
    first, second = x.chunk(2, dim=-1)
    return x * cos + torch.cat((-second, first), dim=-1) * sin
