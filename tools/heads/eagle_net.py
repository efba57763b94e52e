"""An EAGLE-3 head in training: the layer runs several times over a text, each time on its own
previous output (Li et al. 2025, arXiv 2503.01840, "training-time test")."""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tools.heads.target_parts import TargetParts

_MAX_POSITIONS = 8192  # rows of the RoPE table


@dataclass(frozen=True)
class EagleShape:
    hidden_size: int
    num_layers_read: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    intermediate_size: int
    rms_norm_eps: float
    rope_theta: float


class _Attention(nn.Module):
    def __init__(self, shape: EagleShape) -> None:
        super().__init__()
        self.shape = shape
        input_size, dim = 2 * shape.hidden_size, shape.head_dim
        self.q_proj = nn.Linear(input_size, shape.num_heads * dim, bias=False)
        self.k_proj = nn.Linear(input_size, shape.num_kv_heads * dim, bias=False)
        self.v_proj = nn.Linear(input_size, shape.num_kv_heads * dim, bias=False)
        self.o_proj = nn.Linear(shape.num_heads * dim, shape.hidden_size, bias=False)


class _Mlp(nn.Module):
    def __init__(self, shape: EagleShape) -> None:
        super().__init__()
        self.gate_proj = nn.Linear(shape.hidden_size, shape.intermediate_size, bias=False)
        self.up_proj = nn.Linear(shape.hidden_size, shape.intermediate_size, bias=False)
        self.down_proj = nn.Linear(shape.intermediate_size, shape.hidden_size, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.down_proj(F.silu(self.gate_proj(x)) * self.up_proj(x))


class _Layer(nn.Module):
    def __init__(self, shape: EagleShape) -> None:
        super().__init__()
        self.self_attn, self.mlp = _Attention(shape), _Mlp(shape)
        for name in ("input_layernorm", "hidden_norm", "post_attention_layernorm"):
            setattr(self, name, nn.RMSNorm(shape.hidden_size, shape.rms_norm_eps))


class EagleNet(nn.Module):
    """The net, with parameters named like a checkpoint's tensors. It drafts ids of `draft_ids`,
    which ascend."""

    is_sequential = True  # a draft depends on the one before it
    # Weights set by `set_initial_weights`: the usual learning rate would soon undo the fit.
    slow_weights = ("fc.weight", "q_proj.weight", "k_proj.weight", "v_proj.weight", "o_proj.weight")

    def __init__(self, shape: EagleShape, parts: TargetParts, draft_ids: Tensor) -> None:
        super().__init__()
        self.shape, self.parts, self.draft_ids = shape, parts, draft_ids
        self.head_rows = parts.head[draft_ids]
        self.fc = nn.Linear(
            shape.num_layers_read * shape.hidden_size, shape.hidden_size, bias=False
        )
        norms = (nn.RMSNorm(shape.hidden_size, shape.rms_norm_eps) for _ in self._read())
        self.fc_norm = nn.ModuleList(norms)
        self.layers = nn.ModuleList([_Layer(shape)])
        self.norm = nn.RMSNorm(shape.hidden_size, shape.rms_norm_eps)
        exponents = torch.arange(0, shape.head_dim, 2) / shape.head_dim
        angles = torch.outer(torch.arange(_MAX_POSITIONS), shape.rope_theta**-exponents)
        self._cos, self._sin = angles.cos().repeat(1, 2), angles.sin().repeat(1, 2)
        self._init_weights()

    @torch.no_grad()
    def _init_weights(self) -> None:
        for weight in self.parameters():
            if weight.ndim == 2:
                nn.init.normal_(weight, std=0.02)
        self.norm.weight.copy_(self.parts.norm)

    def _read(self) -> range:
        return range(self.shape.num_layers_read)

    def draft(self, tokens: Tensor, states: Tensor, steps: int) -> list[Tensor]:
        """Return logits [B, L - 1, draft ids] of each step j: at t for the token t + 2 + j, as
        drafted from the states up to t. tokens [B, L], states [B, L - 1, layers, hidden]."""
        return [self.logits(state) for state in self.output_states(tokens, states, steps)]

    def output_states(self, tokens: Tensor, states: Tensor, steps: int) -> list[Tensor]:
        """Return the hidden states from which the logits follow, [B, L - 1, hidden] for each
        step."""
        length, state = states.shape[1], self.read(states)
        keys: list[Tensor] = []
        values: list[Tensor] = []
        outputs = []
        for step in range(steps):
            next_tokens = F.pad(tokens[:, 1 + step :], (0, length - (tokens.shape[1] - 1 - step)))
            state = self.step(next_tokens, state, keys, values)
            outputs.append(state)
        return outputs

    def read(self, states: Tensor) -> Tensor:
        """Return the input of the first step, [B, L - 1, hidden], from the target's states."""
        return self.fc(
            torch.cat([self.fc_norm[i](states[:, :, i].float()) for i in self._read()], -1)
        )

    def step(
        self, tokens: Tensor, state: Tensor, keys: list[Tensor], values: list[Tensor]
    ) -> Tensor:
        """Run one step with the next tokens [B, L - 1]; append its K and V. Return the new
        states."""
        return self._layer(self.parts.embedding[tokens].float(), state, keys, values)

    def logits(self, state: Tensor) -> Tensor:
        return F.linear(self.norm(state.float()), self.head_rows.float())

    def _layer(
        self, embedded: Tensor, state: Tensor, keys: list[Tensor], values: list[Tensor]
    ) -> Tensor:
        layer = self.layers[0]
        both = torch.cat(
            (layer.input_layernorm(embedded), layer.hidden_norm(state.float())), dim=-1
        )
        y = state + self._attend(both, keys, values)
        return y + layer.mlp(layer.post_attention_layernorm(y.float()))

    def _attend(self, x: Tensor, keys: list[Tensor], values: list[Tensor]) -> Tensor:
        """Attend, in step j at t, to step 0 at all positions up to t, and to steps 1 to j at t."""
        s, a, step = self.shape, self.layers[0].self_attn, len(keys)
        batch, length, _ = x.shape
        where = slice(step, step + length)
        cos, sin = self._cos[where], self._sin[where]
        split = batch, length, -1, s.head_dim
        q = _rotate(a.q_proj(x).view(split).transpose(1, 2), cos, sin)
        k = _rotate(a.k_proj(x).view(split).transpose(1, 2), cos, sin)
        v = a.v_proj(x).view(split).transpose(1, 2)
        group = s.num_heads // s.num_kv_heads
        keys.append(k.repeat_interleave(group, dim=1))
        values.append(v.repeat_interleave(group, dim=1))
        if not step:
            out = F.scaled_dot_product_attention(q, keys[0], values[0], is_causal=True)
            return a.o_proj(out.transpose(1, 2).reshape(batch, length, -1))
        scale = s.head_dim**-0.5
        scores = (q @ keys[0].mT) * scale
        unseen = torch.ones(length, length, dtype=torch.bool).triu(1)
        scores = scores.masked_fill(unseen, -torch.inf)
        own = [(q * k).sum(-1, keepdim=True) * scale for k in keys[1:]]
        weights = torch.cat((scores, *own), dim=-1).float().softmax(-1).to(q.dtype)
        out = weights[..., :length] @ values[0]
        for i, v in enumerate(values[1:]):
            out = out + weights[..., length + i, None] * v
        return a.o_proj(out.transpose(1, 2).reshape(batch, length, -1))


def _rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotate in the half-split layout of Llama checkpoints."""
    first, second = x.float().chunk(2, dim=-1)
    return (x.float() * cos + torch.cat((-second, first), dim=-1) * sin).to(x.dtype)
