"""A decoder's pass by plain torch: the reference of the compiled pass, and its substitute where
there is no compiler. It makes no promise about bits."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial

import numpy as np
import torch
import torch.nn.functional as F
from numpy.typing import NDArray
from torch import Tensor

from cbatch.runtime.batch import PASS_ERRORS
from cbatch.runtime.cpu.linear import Linear
from cbatch.runtime.cpu.torch_attention import TorchStep, attend, plan_step
from cbatch.runtime.cpu.torch_recurrence import StateRows, mix, plan_states
from cbatch.runtime.kv_cache import KVCache
from cbatch.runtime.layers import Layer, PairWeights
from cbatch.runtime.model.config import ModelConfig
from cbatch.runtime.model.records import (
    Attention,
    Branch,
    Experts,
    FeedForward,
    Norm,
    Recurrence,
)
from cbatch.runtime.model.rope import RotaryTable
from cbatch.runtime.rank_group import RankGroup

_SIGMOID_EPS = 1e-6  # added to a sum of sigmoids
_ACTIVATIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "silu": F.silu,
    "gelu_tanh": lambda x: F.gelu(x, approximate="tanh"),
    "relu_squared": lambda x: F.relu(x).square(),
}


class TorchPass:
    """The layers of a model, from its embedding to its logits, with the methods of
    `CompiledDecoder`."""

    def __init__(
        self,
        config: ModelConfig,
        embedding: Tensor,
        layers: Sequence[Layer[Linear]],
        head: Linear,
        ranks: RankGroup | None = None,
        pair: PairWeights | None = None,
    ) -> None:
        self.config, self.embedding, self.layers, self.head = config, embedding, layers, head
        self.ranks, self._pair = ranks, pair or PairWeights()
        mixers = [each.mixer for each in config.layers if isinstance(each.mixer, Attention)]
        self._rotary = {m.rope: RotaryTable(m.rope, m.key_dim, "cpu") for m in mixers}
        self._kept: tuple[int, ...] = ()

    def keep(self, layers: tuple[int, ...]) -> None:
        """Let passes return the inputs of these layers; see `CompiledDecoder.keep`."""
        self._kept = layers

    def run(
        self,
        tokens: Tensor,
        query_lens: NDArray[np.int32],
        context_lens: NDArray[np.int32],
        tables: NDArray[np.int32],
        logit_rows: Tensor,
        kv: KVCache,
        progress: NDArray[np.int64] | None,
        states: Tensor | None = None,
        hidden: Tensor | None = None,
        state_tables: NDArray[np.int32] | None = None,
        state_slots: NDArray[np.int32] | None = None,
    ) -> Tensor:
        """Run a pass; see `CompiledDecoder.run`."""
        status = _status(tokens, self.config.vocab_size, logit_rows) or _status_of_blocks(
            len(tokens), query_lens, context_lens, tables, kv
        )
        if status:
            raise IndexError(PASS_ERRORS[status])
        step = plan_step(query_lens, context_lens, tables, kv.block_size)
        self._sequences: list[StateRows] = []
        if kv.state is not None:
            self._sequences = plan_states(query_lens, context_lens, kv, state_tables, state_slots)
        x, pairs = self._input(tokens, states)
        before = x
        for index, layer in enumerate(self.layers):
            if hidden is not None and index in self._kept:
                hidden[:, self._kept.index(index)] = x
            read = before if layer.record.joint else x
            before, x = x, self._layer(index, layer, x, read, None if index else pairs, step, kv)
            if progress is not None:
                progress[0] += 1
        if hidden is not None and len(self.layers) in self._kept:
            hidden[:, self._kept.index(len(self.layers))] = x
        x = x[logit_rows]
        if states is not None and hidden is not None:
            hidden[:, 0] = x
        logits = self.head(_normed(x, self.config.norm))
        if self.config.logit_softcap:
            logits = _capped(logits, self.config.logit_softcap)
        if self.ranks is None:
            return logits
        if not len(logits):
            return logits.new_empty(0, self.config.vocab_size)
        return self.ranks.columns(logits, self.config.vocab_size)

    def _input(self, tokens: Tensor, states: Tensor | None) -> tuple[Tensor, Tensor | None]:
        """Return the residual stream, and for a draft head the rows of its first projections."""
        scale = torch.tensor(self.config.embedding_scale).to(self.embedding.dtype)
        x, pair = self.embedding[tokens].float() * scale, self.config.input
        if pair is None or states is None:
            return x, None
        token, state = (
            _normed(each, norm) * (1.0 if weight is None else weight)
            for each, norm, weight in zip(
                (x, states), (pair.token_norm, pair.state_norm), self._pair[2:], strict=True
            )
        )
        rows = torch.cat([token, state], dim=1)
        if self._pair.input_layer is not None:
            return self._pair.input_layer(rows), None
        return state if pair.normed_residual else states, rows

    def _layer(
        self,
        index: int,
        layer: Layer[Linear],
        x: Tensor,
        read: Tensor,
        pairs: Tensor | None,
        step: TorchStep,
        kv: KVCache,
    ) -> Tensor:
        mixer, feed_forward = layer.record.mixer, layer.record.feed_forward
        rows = _normed(read, mixer.norm) if pairs is None else pairs
        if isinstance(mixer, Recurrence):
            mixed = self._recurred(index, layer, mixer, rows, kv)
        else:
            q, k, v, gate = self._heads(layer, mixer, rows, step)
            first_key = int(self.config.input is not None)  # position 0 has no state before it
            mixed = attend(mixer, layer.sinks, step, kv, index, q, k, v, first_key).flatten(1)
            mixed = mixed * gate.sigmoid() if mixer.gate else mixed
        mixed = self._summed(layer.out(mixed))
        after = x + _joined(mixer, mixed, layer.after_attention)
        if feed_forward is None:
            return after
        rows = _normed(x if layer.record.parallel else after, feed_forward.norm)
        if isinstance(feed_forward, Experts):
            output = _mix(layer, feed_forward, rows)
        else:
            assert layer.down is not None
            inner = _activated(feed_forward, layer.gate_up(rows), layer.xielu)
            output = self._summed(layer.down(inner))
        return after + _joined(feed_forward, output, layer.after_forward)

    def _recurred(
        self, index: int, layer: Layer[Linear], m: Recurrence, rows: Tensor, kv: KVCache
    ) -> Tensor:
        assert layer.recurrence is not None and kv.state is not None
        memory = kv.state.layers[index]
        assert memory is not None
        lengths = [sequence.length for sequence in self._sequences]
        parts = zip(layer.qkv(rows).split(lengths), self._sequences, strict=True)
        return torch.cat([mix(m, layer.recurrence, memory, *part) for part in parts])

    def _heads(
        self, layer: Layer[Linear], m: Attention, rows: Tensor, step: TorchStep
    ) -> list[Tensor]:
        """Return queries [heads, T, key_dim], keys and values [kv_heads, T, dim] of a layer, and
        gates [T, heads * value_dim] if it has them."""
        fused = layer.qkv(rows).view(len(rows), m.kv_heads, -1)
        width = (m.group + 1) * m.key_dim
        qk = fused[..., :width].unflatten(-1, (m.group + 1, m.key_dim))
        if not m.norms_rotated:
            qk = _qk_normed(m, qk, layer.qk_weight)
        qk = torch.view_as_complex(qk.unflatten(-1, (-1, 2)).contiguous())
        factors = self._rotary[m.rope].cos_sin(int(step.positions.max()) + 1)[step.positions]
        qk = torch.view_as_real(qk * torch.view_as_complex(factors)[:, None, None]).flatten(-2)
        if m.norms_rotated:
            qk = _qk_normed(m, qk, layer.qk_weight)
        q, k = qk[:, :, : m.group].flatten(1, 2), qk[:, :, m.group]
        v, gate = fused[..., width : width + m.value_dim], fused[..., width + m.value_dim :]
        return [*(each.transpose(0, 1) for each in (q, k, v)), gate.flatten(1)]

    def _summed(self, partial: Tensor) -> Tensor:
        return partial if self.ranks is None else self.ranks.sum(partial)


def _status(tokens: Tensor, vocab_size: int, logit_rows: Tensor) -> int:
    """Return the number of an error in `PASS_ERRORS`, or 0."""
    for status, ids, end in ((1, tokens, vocab_size), (3, logit_rows, len(tokens))):
        if ((ids < 0) | (ids >= end)).any():
            return status
    return 0


def _status_of_blocks(
    rows: int,
    query_lens: NDArray[np.int32],
    context_lens: NDArray[np.int32],
    tables: NDArray[np.int32],
    kv: KVCache,
) -> int:
    counts = -(-context_lens // kv.block_size)
    width = tables.shape[1]
    if (query_lens > context_lens).any() or (counts > width).any() or query_lens.sum() != rows:
        return 2
    used = tables[np.arange(width) < counts[:, None]]
    return 2 if ((used < 0) | (used > kv.scratch_block)).any() else 0


def _normed(x: Tensor, norm: Norm | None) -> Tensor:
    """Return x / sqrt(sum(x^2) + n eps), of the centred x for LayerNorm. The weight of a norm times
    sqrt(n) belongs to what reads the result."""
    if norm is None:
        return x
    if norm.centred:
        x = x - x.mean(-1, keepdim=True)
    return x * (x.square().sum(-1, keepdim=True) + x.shape[-1] * norm.eps).rsqrt()


def _joined(branch: Branch, output: Tensor, weight: Tensor | None) -> Tensor:
    """Return what is added to the residual stream."""
    if weight is not None:
        output = _normed(output, branch.out_norm) * weight
    return output * branch.out_scale


def _qk_normed(m: Attention, qk: Tensor, weight: Tensor | None) -> Tensor:
    """Norm the queries and keys [T, kv_heads, group + 1, key_dim] of each token."""
    if m.qk_norm is None or weight is None:
        return qk
    eps = m.qk_norm.eps
    if not m.norms_whole:
        return F.rms_norm(qk, (m.key_dim,), eps=eps) * weight
    parts = qk.split([m.group, 1], dim=2)
    normed = [x * (x.square().mean((1, 2, 3), keepdim=True) + eps).rsqrt() for x in parts]
    return torch.cat(normed, 2) * weight


def _capped(x: Tensor, cap: float) -> Tensor:
    return cap * torch.tanh(x / cap)


def _xielu(x: Tensor, factors: Tensor) -> Tensor:
    above, below, linear = factors
    return torch.where(x > 0, above * x * x, below * (torch.expm1(x) - x)) + linear * x


def _activated(f: FeedForward | Experts, gate_up: Tensor, xielu: Tensor | None = None) -> Tensor:
    if isinstance(f, Experts) and f.activation == "clamped":
        gate, up = gate_up.chunk(2, dim=-1)
        gate, up = gate.clamp(max=f.limit), up.clamp(-f.limit, f.limit)
        return gate * torch.sigmoid(f.alpha * gate) * (up + 1)
    act = _ACTIVATIONS[f.activation] if xielu is None else partial(_xielu, factors=xielu)
    if isinstance(f, FeedForward) and not f.gated:
        return act(gate_up)
    gate, up = gate_up.chunk(2, dim=-1)
    return act(gate) * up


def _mix(layer: Layer[Linear], f: Experts, rows: Tensor) -> Tensor:
    """Return the weighted sum of each row's experts, in the order of the experts."""
    if layer.router_norm is not None:
        rows = rows * layer.router_norm
    scores = layer.gate_up(rows)
    every = scores[:, : f.count]
    if f.sigmoid:
        every = every.sigmoid()
        bias = layer.router_bias
        chosen = (every if bias is None else every + bias).topk(f.chosen).indices
        weights = every.gather(1, chosen)
        if f.normalized:
            weights = weights / (weights.sum(-1, keepdim=True) + _SIGMOID_EPS)
        weights = weights * f.scale
    else:
        top, chosen = every.topk(f.chosen)
        weights = top.softmax(-1) if f.normalized else every.softmax(-1).gather(1, chosen)
    output = torch.zeros_like(rows)
    for number, (gate_up, down) in enumerate(layer.experts):
        if number < f.count:
            at, place = (chosen == number).nonzero(as_tuple=True)
            weight = weights[at, place]
        else:
            at, weight = torch.arange(len(rows)), scores[:, f.count].sigmoid()
        if len(at):
            output[at] += weight[:, None] * down(_activated(f, gate_up(rows[at])))
    return output
