"""One decoder for every supported family, over a ragged flat batch and paged KV."""

from __future__ import annotations

import math
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
import torch.nn.functional as F
from numpy.typing import NDArray
from torch import Tensor

from cbatch.runtime.attention import HeadShape
from cbatch.runtime.config import ModelConfig, ModelError, load_config
from cbatch.runtime.kv import KVCache
from cbatch.runtime.layout import AttentionPlanner, StepLayout
from cbatch.runtime.linear import Linear, RowPadding, make_plan
from cbatch.runtime.numerics import Numerics, resolve_numerics, weight_shapes
from cbatch.runtime.rope import RotaryTable, interleave_halves
from cbatch.runtime.weights import (
    RandomWeights,
    Safetensors,
    WeightSource,
    resolve_directory,
    resolve_dtype,
)

# Elementwise kernels treat the end of a thread's share differently from the rest (scalar against
# vector code). Up to this many elements a call has one share, and its layout is fixed.
_ONE_SHARE = 32768
_NORM_GAP = 16  # columns behind the residual stream: 64 bytes, to keep rows aligned
_MOST_SPARE_ROWS = 8


@dataclass
class RaggedBatch:
    """Tokens of B sequences, flat: the rows of a sequence are consecutive, lengths differ freely.

    tokens, positions: int64 [T] on the model's device. query_lens, context_lens: int32 [B]; the
    last row of sequence b stands at position `context_lens[b] - 1`, and that many positions are in
    KV after the pass. block_tables: int32 [B, blocks], block ids by absolute block index (entries
    beyond the context are not read). logits_index: int64 [N], rows whose logits are wanted.
    """

    tokens: Tensor
    positions: Tensor
    query_lens: NDArray[np.int32]
    context_lens: NDArray[np.int32]
    block_tables: NDArray[np.int32]
    logits_index: Tensor


@dataclass
class _Layer:
    window: int | None
    qkv: Linear
    qk_weight: Tensor | None  # [group + 1, head_dim], q rows then k, where the family norms them
    out: Linear
    gate_up: Linear
    down: Linear

    def products(self) -> tuple[Linear, ...]:
        return self.qkv, self.out, self.gate_up, self.down


class _Memory:
    """Working memory for up to `capacity` rows."""

    def __init__(self, config: ModelConfig, capacity: int, device: torch.device) -> None:
        h = HeadShape.of(config)
        self.capacity, self.hidden_size = capacity, config.hidden_size
        self.heads = h
        self.residual = torch.zeros(capacity, config.hidden_size + _NORM_GAP, device=device)
        # sqrt(sum(x^2) + n eps) is then one norm of the padded row.
        self.residual[:, config.hidden_size] = (config.hidden_size * config.rms_norm_eps) ** 0.5
        # Spare rows: products over queries read past the last one (see `Group.bind_rows`).
        self.fused = torch.zeros(capacity + _MOST_SPARE_ROWS, h.row_width, device=device)
        self.attended = torch.zeros(capacity + 1, config.num_heads * h.head_dim, device=device)
        self._views: dict[tuple[int, int], _Buffers] = {}

    def rows(self, num_rows: int, padded: int) -> _Buffers:
        found = self._views.get((num_rows, padded))
        if found is None:
            found = self._views[num_rows, padded] = _Buffers(self, num_rows, padded)
        return found


class _Buffers:
    """Views into the working memory for T rows, and behind them padding up to P."""

    def __init__(self, memory: _Memory, num_rows: int, padded: int) -> None:
        h = memory.heads
        self.residual = memory.residual[:padded]
        self.x = self.residual[:, : memory.hidden_size]
        self.fused = memory.fused[:num_rows]
        self.turned = memory.fused[:padded].view(torch.complex64)
        self.kv = self.fused.view(-1, h.roles * h.head_dim)[:, h.group * h.head_dim :]
        self.attended = memory.attended[: num_rows + 1]  # and a row that belongs to no one
        self.heads_out = memory.attended[:padded]


class Model:
    """A decoder with its weights. Not reentrant: one forward pass at a time."""

    def __init__(
        self,
        config: ModelConfig,
        source: WeightSource,
        dtype: torch.dtype,
        device: torch.device,
        numerics: Numerics,
    ) -> None:
        self.config, self.dtype, self.device = config, dtype, device
        self.numerics, self.invariance_cost = numerics.mode, numerics.cost
        self._heads = HeadShape.of(config)
        self._planner = AttentionPlanner(config)
        with torch.inference_mode():
            builder = _Builder(config, source, dtype, device, numerics)
            self._embedding, self.layers, self.head = builder.build()
            self._rotary = RotaryTable(
                config.rope,
                config.head_dim,
                config.num_kv_heads,
                config.group_size,
                config.max_position_tokens,
                device,
            )
            self._memory = _Memory(config, 64, device)
        self._padding = self._common_padding()

    def forward(self, batch: RaggedBatch, kv: KVCache) -> Tensor:
        """Logits fp32 [N, vocab] of `batch.logits_index`.

        Writes K and V of all T tokens, then attends. The result is the caller's to change.
        """
        if torch.is_inference_mode_enabled():
            return self._forward(batch, kv)
        with torch.inference_mode():
            return self._forward(batch, kv)

    def _forward(self, batch: RaggedBatch, kv: KVCache) -> Tensor:
        num_rows, num_wanted = batch.tokens.shape[0], batch.logits_index.shape[0]
        padded = self._padding.rows(num_rows)
        if padded > self._memory.capacity:
            self._memory = _Memory(self.config, 2 * padded, self.device)
        buffers = self._memory.rows(num_rows, padded)
        turn, layout = self._plan(batch, kv, buffers, padded)
        # A single token's row spreads over the padding.
        buffers.x.copy_(self._embedding.index_select(0, _pad_index(batch.tokens, padded)))
        last = len(self.layers) - 1
        for index, layer in enumerate(self.layers):
            self._project(layer, buffers, turn, padded)
            kv.token_rows[index].index_copy_(0, layout.slots, buffers.kv.to(kv.data.dtype))
            if index == last and not num_wanted:
                return torch.empty(0, self.config.vocab_size, device=self.device)
            for group in layout.groups[layer.window]:
                group.run(kv.block_rows[index])
            if index < last or num_wanted == num_rows:
                _finish_layer(layer, buffers.residual, buffers.x, buffers.heads_out)
        if num_rows == num_wanted == 1:
            return self.head.product(_normed(buffers.residual, buffers.x), padded)[:1]
        return self._wanted_logits(buffers, batch.logits_index, num_wanted != num_rows)

    def _wanted_logits(self, buffers: _Buffers, index: Tensor, unfinished: bool) -> Tensor:
        """Logits of some rows; `unfinished`: the last layer still lacks its second half, which
        these rows alone need."""
        count = index.shape[0]
        rows = self._padding.rows(count)
        wanted = _pad_index(index, rows)
        if wanted.shape[0] < rows:
            wanted = wanted.repeat(rows)
        residual = buffers.residual.index_select(0, wanted)
        x = residual[:, : self.config.hidden_size]
        if unfinished:
            _finish_layer(self.layers[-1], residual, x, buffers.heads_out.index_select(0, wanted))
        logits = self.head.product(_normed(residual, x), rows)
        return logits if rows == count else logits[:count]

    def _plan(
        self, batch: RaggedBatch, kv: KVCache, buffers: _Buffers, padded: int
    ) -> tuple[Tensor, StepLayout]:
        """The turn of each row; where its K and V go, and its attention."""
        query_lens = batch.query_lens.astype(np.int64)
        contexts = batch.context_lens.astype(np.int64)
        last_position = int(contexts.max()) - 1
        if last_position >= self.config.max_position_tokens:
            raise ValueError(
                f"context_lens: {last_position + 1} tokens exceed the model's context of "
                f"{self.config.max_position_tokens}"
            )
        turn = self._rotary.rows(_pad_index(batch.positions, padded), last_position)
        layout = self._planner.plan(
            kv,
            query_lens,
            contexts,
            batch.positions,
            batch.block_tables,
            buffers.fused,
            buffers.attended,
        )
        return turn, layout

    def _project(self, layer: _Layer, buffers: _Buffers, turn: Tensor, padded: int) -> None:
        """Turned queries and keys, and values, of all rows into the step's buffer."""
        fused = layer.qkv.product(_normed(buffers.residual, buffers.x), padded)
        if layer.qk_weight is not None:
            h = self._heads
            rows = fused.view(-1, h.kv_heads, h.roles, h.head_dim)[:, :, : h.group + 1]
            rows.copy_(F.rms_norm(rows, (h.head_dim,), eps=self.config.rms_norm_eps))
            rows.mul_(layer.qk_weight)
        pairs = fused.view(torch.complex64)
        step = max(1, _ONE_SHARE // turn.shape[1])
        if padded <= step:
            torch.mul(pairs, turn, out=buffers.turned)
            return
        for at in range(0, padded, step):
            part = slice(at, at + step)
            torch.mul(pairs[part], turn[part], out=buffers.turned[part])

    def _common_padding(self) -> RowPadding:
        """The padding that suits every product."""
        plans = [linear.plan for layer in self.layers for linear in layer.products()]
        paddings = [plan.padding for plan in (*plans, self.head.plan)]
        return RowPadding(
            max(p.minimum for p in paddings), math.lcm(*(p.multiple for p in paddings))
        )


def _finish_layer(layer: _Layer, residual: Tensor, x: Tensor, heads_out: Tensor) -> None:
    """Output projection and MLP; `x` is the view of `residual` without its gap."""
    rows = residual.shape[0]
    x.add_(layer.out.product(heads_out, rows))
    gate_up = layer.gate_up.product(_normed(residual, x), rows)
    x.add_(layer.down.product(_swiglu(gate_up), rows))


def _normed(residual: Tensor, x: Tensor) -> Tensor:
    """x / sqrt(sum(x^2) + n eps): RMSNorm but for its weight and sqrt(n), which the next product
    holds (`Linear.in_scale`). `x` is the view of `residual` without its gap."""
    return x / torch.linalg.vector_norm(residual, dim=-1, keepdim=True)


def _swiglu(gate_up: Tensor) -> Tensor:
    """silu(gate) * up of [T, gate | up]."""
    rows, width = gate_up.shape[0], gate_up.shape[1] // 2
    gate, up = gate_up[:, :width], gate_up[:, width:]
    step = max(1, _ONE_SHARE // width)
    if rows <= step:
        return F.silu(gate).mul_(up)
    return torch.cat([F.silu(part) for part in gate.split(step)]).mul_(up)


def _pad_index(index: Tensor, rows: int) -> Tensor:
    """`index` with valid but meaningless entries behind it; one alone may broadcast."""
    count = index.shape[0]
    return index if count == rows or count == 1 else F.pad(index, (0, rows - count))


class _Builder:
    """Fuses the tensors of a checkpoint into the layers above."""

    def __init__(
        self,
        config: ModelConfig,
        source: WeightSource,
        dtype: torch.dtype,
        device: torch.device,
        numerics: Numerics,
    ) -> None:
        self.config, self.source, self.dtype, self.device = config, source, dtype, device
        self.numerics, self.counts = numerics, weight_shapes(config)

    def build(self) -> tuple[Tensor, list[_Layer], Linear]:
        c = self.config
        embedding = self._get("model.embed_tokens.weight", c.vocab_size, c.hidden_size)
        layers = [self._layer(i) for i in range(c.num_layers)]
        head = embedding
        if not c.tie_embeddings:
            head = self._get("lm_head.weight", c.vocab_size, c.hidden_size)
        return embedding, layers, self._linear(head, None, self._norm("model.norm.weight"))

    def _linear(self, weight: Tensor, bias: Tensor | None, in_scale: Tensor | None) -> Linear:
        shape = (weight.shape[0], weight.shape[1])
        plan = make_plan(
            shape,
            self.dtype,
            self.device,
            invariant=self.numerics.mode == "invariant",
            may_pack=self.numerics.may_pack,
            count=self.counts[shape],
        )
        return Linear(weight, bias, in_scale, plan)

    def _get(self, name: str, *shape: int) -> Tensor:
        return self.source.get(name, shape).to(self.device, self.dtype)

    def _norm(self, name: str) -> Tensor:
        """Weight of a norm times sqrt(n), fp32 (see `_normed`)."""
        size = self.config.hidden_size
        return self._get(name, size).float() * size**0.5

    def _layer(self, index: int) -> _Layer:
        c, name = self.config, f"model.layers.{index}"
        attention, mlp = f"{name}.self_attn", f"{name}.mlp"
        width = c.num_heads * c.head_dim
        out = self._get(f"{attention}.o_proj.weight", c.hidden_size, width)
        out_bias = down_bias = gate_up_bias = None
        if c.attention_out_bias:
            out_bias = self._get(f"{attention}.o_proj.bias", c.hidden_size)
        halves = ("gate_proj", "up_proj")
        gate_up = [
            self._get(f"{mlp}.{n}.weight", c.intermediate_size, c.hidden_size) for n in halves
        ]
        down = self._get(f"{mlp}.down_proj.weight", c.hidden_size, c.intermediate_size)
        if c.mlp_bias:
            biases = [self._get(f"{mlp}.{n}.bias", c.intermediate_size) for n in halves]
            gate_up_bias = torch.cat(biases)
            down_bias = self._get(f"{mlp}.down_proj.bias", c.hidden_size)
        return _Layer(
            window=c.sliding_window[index],
            qkv=self._qkv(attention, self._norm(f"{name}.input_layernorm.weight")),
            qk_weight=self._qk_weight(attention) if c.qk_norm else None,
            out=self._linear(out, out_bias, None),
            gate_up=self._linear(
                torch.cat(gate_up),
                gate_up_bias,
                self._norm(f"{name}.post_attention_layernorm.weight"),
            ),
            down=self._linear(down, down_bias, None),
        )

    def _qkv(self, attention: str, norm: Tensor) -> Linear:
        """Rows [kv_heads, group + 2, head_dim]: see `HeadShape`."""
        c = self.config
        weight = self._fuse(attention, "weight", c.hidden_size)
        bias = self._fuse(attention, "bias") if c.attention_bias else None
        return self._linear(weight, bias, norm)

    def _fuse(self, attention: str, kind: str, *columns: int) -> Tensor:
        c = self.config
        parts = []
        for letter, heads in (("q", c.num_heads), ("k", c.num_kv_heads), ("v", c.num_kv_heads)):
            part = self._get(f"{attention}.{letter}_proj.{kind}", heads * c.head_dim, *columns)
            if letter != "v":
                part = interleave_halves(part, c.head_dim)
            parts.append(part.view(c.num_kv_heads, -1, c.head_dim, *columns))
        return torch.cat(parts, dim=1).flatten(0, 2)

    def _qk_weight(self, attention: str) -> Tensor:
        c = self.config
        q, k = (
            interleave_halves(self._get(f"{attention}.{n}_norm.weight", c.head_dim), c.head_dim)
            for n in "qk"
        )
        return torch.stack([q] * c.group_size + [k]).float()


def load_model(
    path_or_name: str | Path,
    *,
    dtype: str | torch.dtype = "auto",
    device: str | torch.device = "cpu",
    numerics: str = "auto",
    random_weights_seed: int | None = None,
) -> Model:
    """A model from a Hugging Face directory or hub name.

    `random_weights_seed` draws the weights instead (only config.json is read). Raises ModelError
    for whatever in the checkpoint cannot be served, naming file and field or tensor.
    """
    if numerics not in ("auto", "invariant", "fast"):
        raise ModelError(f"numerics: must be auto, invariant or fast, got {numerics!r}")
    directory = resolve_directory(path_or_name, weights=random_weights_seed is None)
    config = load_config(directory)
    source: WeightSource
    if random_weights_seed is None:
        source = Safetensors(directory)
    else:
        source = RandomWeights(random_weights_seed)
    served, where = resolve_dtype(dtype, config.torch_dtype), torch.device(device)
    return Model(config, source, served, where, resolve_numerics(numerics, config, served, where))
