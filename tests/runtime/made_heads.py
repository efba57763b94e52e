"""Heads with random weights, in all published layouts, and their equations in plain torch."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from safetensors.torch import save_file
from torch import Tensor

from cbatch.runtime.batch import RaggedBatch
from cbatch.runtime.kv_cache import KVCache
from tests.runtime.engines import VOCAB, NoisyWeights, tiny_model

HIDDEN, HEADS, KV_HEADS, DIM, INNER = 32, 4, 2, 8, 40
EPS, THETA = 1e-5, 10000.0
DRAFTS = 40  # number of ids in a reduced vocabulary
LAYERS = (0, 1, 2)
CLOSE = {"rtol": 1e-4, "atol": 1e-4}


def draft_ids() -> Tensor:
    generator = torch.Generator().manual_seed(3)
    return torch.randperm(VOCAB, generator=generator)[:DRAFTS].sort().values


def eagle3_tensors(seed: int = 0, *, reads: int = 3, drafts: int = DRAFTS) -> dict[str, Tensor]:
    """Return tensors under the names that speculators uses."""
    g = torch.Generator().manual_seed(seed)

    def made(*shape: int, scale: float = 1.0) -> Tensor:
        return torch.randn(shape, generator=g) * scale / shape[-1] ** 0.5

    def norm(*shape: int) -> Tensor:
        return 1 + 0.2 * torch.randn(shape, generator=g)

    layer = {
        "self_attn.q_proj.weight": made(HEADS * DIM, 2 * HIDDEN, scale=2),
        "self_attn.k_proj.weight": made(KV_HEADS * DIM, 2 * HIDDEN, scale=2),
        "self_attn.v_proj.weight": made(KV_HEADS * DIM, 2 * HIDDEN),
        "self_attn.o_proj.weight": made(HIDDEN, HEADS * DIM),
        "mlp.gate_proj.weight": made(INNER, HIDDEN),
        "mlp.up_proj.weight": made(INNER, HIDDEN),
        "mlp.down_proj.weight": made(HIDDEN, INNER),
        "input_layernorm.weight": norm(HIDDEN),
        "hidden_norm.weight": norm(HIDDEN),
        "post_attention_layernorm.weight": norm(HIDDEN),
    }
    tensors = {f"layers.0.{name}": tensor for name, tensor in layer.items()}
    tensors |= {
        "fc.weight": made(HIDDEN, reads * HIDDEN),
        "norm.weight": norm(HIDDEN),
        "lm_head.weight": made(drafts, HIDDEN, scale=6),
    }
    if drafts < VOCAB:
        ids = draft_ids()
        tensors["d2t"] = ids - torch.arange(drafts)
        mask = torch.zeros(VOCAB, dtype=torch.bool)
        mask[ids] = True
        tensors["t2d"] = mask
    return tensors


def llama_fields() -> dict[str, Any]:
    return {
        "model_type": "llama",
        "hidden_size": HIDDEN,
        "num_attention_heads": HEADS,
        "num_key_value_heads": KV_HEADS,
        "intermediate_size": INNER,
        "num_hidden_layers": 1,
        "vocab_size": VOCAB,
        "rms_norm_eps": EPS,
        "max_position_embeddings": 256,
        "rope_theta": THETA,
    }


def eagle3_config(**fields: Any) -> dict[str, Any]:
    """Return the configuration that speculators writes for a head that reads `LAYERS`."""
    return {
        "architectures": ["Eagle3Speculator"],
        "speculators_model_type": "eagle3",
        "draft_vocab_size": DRAFTS,
        "norm_before_residual": False,
        "eagle_aux_hidden_state_layer_ids": list(LAYERS),
        "transformer_layer_config": llama_fields(),
        **fields,
    }


def write_head(folder: Path, config: dict[str, Any], tensors: dict[str, Tensor]) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config), encoding="utf-8")
    save_file({name: t.contiguous() for name, t in tensors.items()}, folder / "model.safetensors")
    return folder


class Reference:
    """The equations of EAGLE-3 over one sequence, from its files' tensors; `embedding` and states
    are the target's."""

    def __init__(self, tensors: dict[str, Tensor], embedding: Tensor, **flags: bool) -> None:
        self.t = {name: x.float() for name, x in tensors.items() if x.is_floating_point()}
        self.embedding, self.flags = embedding.float(), flags

    def fuse(self, states: Tensor) -> Tensor:
        """Combine states, [T, layers, H], to [T, H]."""
        if "input_norm.weight" in self.t:
            states = _rms(states.flatten(1), self.t["input_norm.weight"]).view(states.shape)
        elif "fc_norm.0.weight" in self.t:
            norms = [self.t[f"fc_norm.{i}.weight"] for i in range(states.shape[1])]
            states = torch.stack([_rms(states[:, i], w) for i, w in enumerate(norms)], dim=1)
        return states.flatten(1) @ self.t["fc.weight"].T

    def logits(self, tokens: list[int], states: Tensor, drafts: list[int]) -> Tensor:
        """Return the logits of the draft after `tokens` and `drafts`; all states but the last are
        known. Pair t is (token t + 1, state t), at position t."""
        carry = list(self.fuse(states[: len(tokens) - 1]))
        for depth in range(len(drafts) + 1):
            y = self._last(tokens + drafts[:depth], torch.stack(carry))
            normed = self._normed(y)
            carry.append(normed if self.flags.get("norm_output") else y)
        return normed @ self.t["lm_head.weight"].T

    def _normed(self, y: Tensor) -> Tensor:
        return _rms(y, self.t["norm.weight"])

    def _last(self, tokens: list[int], given: Tensor) -> Tensor:
        """Return the layer's output for the last pair."""
        t, p = self.t, "layers.0."
        embedded = _rms(self.embedding[tokens[1:]], t[p + "input_layernorm.weight"])
        normed = _rms(given, t[p + "hidden_norm.weight"])
        both = torch.cat((embedded, normed), dim=1)
        split = lambda x: x.view(len(both), -1, DIM).transpose(0, 1)  # noqa: E731
        q, k, v = (split(both @ t[f"{p}self_attn.{n}_proj.weight"].T) for n in "qkv")
        q, k = _rope(q), _rope(k)
        k, v = (x.repeat_interleave(HEADS // KV_HEADS, 0) for x in (k, v))
        weights = (q[:, -1:] @ k.mT / DIM**0.5).softmax(-1)
        out = (weights @ v)[:, 0].flatten() @ t[p + "self_attn.o_proj.weight"].T
        y = (normed if self.flags.get("norm_before_residual") else given)[-1] + out
        z = _rms(y, t[p + "post_attention_layernorm.weight"])
        inner = F.silu(z @ t[p + "mlp.gate_proj.weight"].T) * (z @ t[p + "mlp.up_proj.weight"].T)
        return y + inner @ t[p + "mlp.down_proj.weight"].T


class FirstReference(Reference):
    """The equations of EAGLE-1 and 2: one state, after the target's last norm. There is no norm
    before the layer, and none before the target's head."""

    def __init__(
        self, tensors: dict[str, Tensor], embedding: Tensor, norm: Tensor, head: Tensor
    ) -> None:
        super().__init__({**tensors, "lm_head.weight": head, "norm.weight": norm}, embedding)

    def fuse(self, states: Tensor) -> Tensor:
        return _rms(states[:, 0], self.t["norm.weight"])

    def _normed(self, y: Tensor) -> Tensor:
        return y

    def _last(self, tokens: list[int], given: Tensor) -> Tensor:
        t, p = self.t, "layers.0."
        both = torch.cat((self.embedding[tokens[1:]], given), dim=1)
        x = both @ t["fc.weight"].T + t.get("fc.bias", torch.zeros(HIDDEN))
        split = lambda y: y.view(len(x), -1, DIM).transpose(0, 1)  # noqa: E731
        q, k, v = (split(x @ t[f"{p}self_attn.{n}_proj.weight"].T) for n in "qkv")
        q, k = _rope(q), _rope(k)
        k, v = (y.repeat_interleave(HEADS // KV_HEADS, 0) for y in (k, v))
        weights = (q[:, -1:] @ k.mT / DIM**0.5).softmax(-1)
        a = x[-1] + (weights @ v)[:, 0].flatten() @ t[p + "self_attn.o_proj.weight"].T
        z = _rms(a, t[p + "post_attention_layernorm.weight"])
        inner = F.silu(z @ t[p + "mlp.gate_proj.weight"].T) * (z @ t[p + "mlp.up_proj.weight"].T)
        return a + inner @ t[p + "mlp.down_proj.weight"].T


def eagle1_tensors(seed: int = 0, *, bias: bool = True) -> dict[str, Tensor]:
    tensors = eagle3_tensors(seed, reads=2, drafts=VOCAB)
    for name in ("norm.weight", "lm_head.weight"):
        del tensors[name]
    for name in ("input_layernorm", "hidden_norm"):
        del tensors[f"layers.0.{name}.weight"]
    for letter in "qkv":
        name = f"layers.0.self_attn.{letter}_proj.weight"
        tensors[name] = tensors[name][:, :HIDDEN] * 2
    if bias:
        tensors["fc.bias"] = torch.randn(HIDDEN, generator=torch.Generator().manual_seed(seed + 1))
    return tensors


def _rms(x: Tensor, weight: Tensor) -> Tensor:
    return x * (x.pow(2).mean(-1, keepdim=True) + EPS).rsqrt() * weight


def _rope(x: Tensor) -> Tensor:
    """Rotate [heads, T, dim]; the first row is at position 0."""
    exponents = torch.arange(0, DIM, 2) / DIM
    angles = torch.outer(torch.arange(x.shape[1]).float(), THETA**-exponents).repeat(1, 2)
    first, second = x.chunk(2, dim=-1)
    return x * angles.cos() + torch.cat((-second, first), dim=-1) * angles.sin()


def medusa_tensors(seed: int = 0, *, heads: int = 4, blocks: int = 1) -> dict[str, Tensor]:
    """Return tensors under the names that FasterDecoding uses."""
    g = torch.Generator().manual_seed(seed)
    tensors = {}
    for i in range(heads):
        for j in range(blocks):
            tensors[f"{i}.{j}.linear.weight"] = torch.randn(HIDDEN, HIDDEN, generator=g) / 4
            tensors[f"{i}.{j}.linear.bias"] = torch.randn(HIDDEN, generator=g)
        tensors[f"{i}.{blocks}.weight"] = torch.randn(VOCAB, HIDDEN, generator=g) * 2
    return tensors


def medusa_config(**fields: Any) -> dict[str, Any]:
    return {"medusa_num_heads": 4, "medusa_num_layers": 1, **fields}


class MedusaReference:
    """The equations of Medusa, with the block's z + SiLU(W z + b); `norm` is the target's last."""

    def __init__(self, tensors: dict[str, Tensor], norm: Tensor) -> None:
        self.t, self.norm = tensors, norm

    def logits(self, tokens: list[int], states: Tensor, drafts: list[int]) -> Tensor:
        """Return the logits of the draft after `tokens` and `drafts`; all states but the last are
        known. The head of depth i predicts i places ahead from the last known state."""
        z, head, block = _rms(states[len(tokens) - 2, 0], self.norm), len(drafts), 0
        while f"{head}.{block}.linear.weight" in self.t:
            name = f"{head}.{block}.linear."
            z = z + F.silu(self.t[name + "weight"] @ z + self.t[name + "bias"])
            block += 1
        return self.t[f"{head}.{block}.weight"] @ z


def target_head() -> Tensor:
    return NoisyWeights(1).get("lm_head.weight", (VOCAB, HIDDEN))


def embedding() -> Tensor:
    return NoisyWeights(1).get("model.embed_tokens.weight", (VOCAB, HIDDEN))


class Cold:
    """Drafts without any history: the equations, over the whole sequence."""

    def __init__(self, reference: Reference | MedusaReference, layers: tuple[int, ...]) -> None:
        self.reference, self.model = reference, tiny_model()
        self.model.keep_hidden(layers)

    def logits(self, tokens: list[int], drafts: list[int]) -> Tensor:
        return self.reference.logits(tokens, self.states(tokens), drafts)

    def states(self, tokens: list[int]) -> Tensor:
        model = self.model
        kv = KVCache(model.config, 64, 4, model.dtype, model.device)
        hidden = model.allocate_hidden(len(tokens))
        model.forward(self.batch(tokens), kv, hidden)
        assert hidden is not None
        return hidden

    @staticmethod
    def batch(tokens: list[int], start: int = 0) -> RaggedBatch:
        """Return a batch of one sequence from position `start` on, with logits of all rows."""
        n = len(tokens)
        lens, ends = np.array([n], dtype=np.int32), np.array([start + n], dtype=np.int32)
        tables, every = np.arange(64, dtype=np.int32)[None], torch.arange(n)
        return RaggedBatch(torch.tensor(tokens), every + start, lens, ends, tables, every)
