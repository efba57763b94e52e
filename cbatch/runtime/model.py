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
from cbatch.runtime.compiled.decoder import CompiledDecoder
from cbatch.runtime.config import ModelConfig, ModelError, load_config
from cbatch.runtime.groups import StepBuffers
from cbatch.runtime.index import I64, iota
from cbatch.runtime.kv import KVCache
from cbatch.runtime.layers import Layer, LayerBuilder
from cbatch.runtime.layout import AttentionPlanner, StepLayout
from cbatch.runtime.linear import RowPadding
from cbatch.runtime.numerics import Numerics, resolve_numerics
from cbatch.runtime.rope import RotaryTable
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
_FEW_ROWS = 8  # computed in about the time of one


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
        self.num_rows, self.padded = num_rows, padded
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
            builder = LayerBuilder(config, source, dtype, device, numerics)
            self._embedding, self.layers, self.head = builder.build()
            self._rotary = RotaryTable(
                config.rope,
                config.head_dim,
                config.num_kv_heads,
                config.group_size,
                config.max_position_tokens,
                device,
            )
            self._memory = _Memory(config, 0, device)
        self._padding = self._common_padding()
        self._compiled = CompiledDecoder.of(
            config, self._embedding, self.layers, self.head, self._rotary
        )

    def forward(self, batch: RaggedBatch, kv: KVCache) -> Tensor:
        """Logits fp32 [N, vocab] of `batch.logits_index`.

        Writes K and V of all T tokens, then attends. The result is the caller's to change.
        """
        if torch.is_inference_mode_enabled():
            return self._forward(batch, kv)
        with torch.inference_mode():
            return self._forward(batch, kv)

    def _forward(self, batch: RaggedBatch, kv: KVCache) -> Tensor:
        if self._compiled is not None:
            self._checked(int(batch.context_lens.max()) - 1)
            lens = batch.query_lens, batch.context_lens
            return self._compiled.run(
                batch.tokens, *lens, batch.block_tables, batch.logits_index, kv
            )
        buffers = self._buffers(batch.tokens.shape[0])
        turn, layout = self._plan(batch, kv, buffers)
        return self._pass(batch.tokens, turn, layout, buffers, kv, batch.logits_index)

    def _buffers(self, num_rows: int) -> _Buffers:
        padded = self._padding.rows(num_rows)
        if padded > self._memory.capacity:
            self._memory = _Memory(self.config, 2 * padded, self.device)
        return self._memory.rows(num_rows, padded)

    def _pass(
        self,
        tokens: Tensor,
        turn: Tensor,
        layout: StepLayout,
        buffers: _Buffers,
        kv: KVCache,
        wanted: Tensor,
    ) -> Tensor:
        """All layers over a planned step, then the logits of the rows `wanted`."""
        num_wanted, padded = wanted.shape[0], buffers.padded
        # With many rows of which few are wanted, the rest need no second half of the last layer.
        unfinished = num_wanted < buffers.num_rows and buffers.num_rows > _FEW_ROWS
        # A single token's row spreads over the padding.
        buffers.x.copy_(self._embedding.index_select(0, _pad_index(tokens, padded)))
        last = len(self.layers) - 1
        for index, layer in enumerate(self.layers):
            self._project(layer, buffers, turn)
            kv.token_rows[index].index_copy_(0, layout.slots, buffers.kv.to(kv.data.dtype))
            if index == last and not num_wanted:
                return torch.empty(0, self.config.vocab_size, device=self.device)
            for group in layout.groups[layer.window]:
                group.run(kv.block_rows[index])
            if index < last or not unfinished:
                _finish_layer(layer, buffers.residual, buffers.x, buffers.heads_out)
        if num_wanted == buffers.num_rows:
            logits = self.head.product(_normed(buffers.residual, buffers.x), padded)
            return logits if num_wanted == padded else logits[:num_wanted]
        return self._wanted_logits(buffers, wanted, unfinished)

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
        self, batch: RaggedBatch, kv: KVCache, buffers: _Buffers
    ) -> tuple[Tensor, StepLayout]:
        """The turn of each row; where its K and V go, and its attention."""
        query_lens = batch.query_lens.astype(np.int64)
        contexts = batch.context_lens.astype(np.int64)
        last_position = self._checked(int(contexts.max()) - 1)
        turn = self._rotary.rows(_pad_index(batch.positions, buffers.padded), last_position)
        step = StepBuffers(kv, batch.block_tables, buffers.fused, buffers.attended)
        layout = self._planner.plan(step, query_lens, contexts, batch.positions.cpu().numpy())
        return turn, layout

    def _checked(self, last_position: int) -> int:
        if last_position >= self.config.max_position_tokens:
            raise ValueError(
                f"context_lens: {last_position + 1} tokens exceed the model's context of "
                f"{self.config.max_position_tokens}"
            )
        return last_position

    def _project(self, layer: Layer, buffers: _Buffers, turn: Tensor) -> None:
        """Turned queries and keys, and values, of all rows into the step's buffer."""
        padded = buffers.padded
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


class RunAhead:
    """Up to `passes` passes of one token a row, each a position further than the one before: what
    does not depend on the tokens is laid out at once.

    `positions` int64 [B] of the first pass; `tables` [B, blocks] hold the blocks of all passes. No
    other step of the model may come between, and the caller is in inference mode.
    """

    def __init__(
        self, model: Model, kv: KVCache, positions: I64, tables: NDArray[np.int32], passes: int
    ) -> None:
        self._model, self._kv, self._tables = model, kv, tables
        self._contexts = (positions + 1).astype(np.int32)  # of the next pass
        self._ones = np.ones_like(self._contexts)
        self._wanted = torch.from_numpy(iota(len(positions))).to(model.device)
        last_position = model._checked(int(positions.max()) + passes - 1)
        self._planned: _PlannedAhead | None = None
        if model._compiled is None:
            self._planned = _PlannedAhead(model, kv, positions, tables, passes, last_position)

    def next(self, tokens: Tensor) -> Tensor:
        """Logits fp32 [B, vocab] after int64 `tokens` [B] at the next position of each row."""
        if self._planned is not None:
            return self._planned.next(tokens, self._wanted)
        lens = self._ones, self._contexts
        logits = self._model._compiled.run(tokens, *lens, self._tables, self._wanted, self._kv)
        self._contexts += 1
        return logits


class _PlannedAhead:
    """The passes of `RunAhead` by operations of torch: turns and attention of all of them."""

    def __init__(
        self,
        model: Model,
        kv: KVCache,
        positions: I64,
        tables: NDArray[np.int32],
        passes: int,
        last_position: int,
    ) -> None:
        self._model, self._kv = model, kv
        self._rows = len(positions)
        self._contexts, self._tables = positions + 1, tables
        self._pass = 0
        buffers = model._buffers(self._rows)
        spread = self._rows if self._rows == 1 else buffers.padded  # one row broadcasts
        grid = np.zeros((passes, spread), dtype=np.int64)
        grid[:, : self._rows] = positions + iota(passes)[:, None]
        every = torch.from_numpy(grid.reshape(-1)).to(model.device)
        self._turns = model._rotary.rows(every, last_position).split(spread)
        step = StepBuffers(kv, tables, buffers.fused, buffers.attended)
        self._layouts = model._planner.plan_ahead(step, self._contexts, passes)

    def next(self, tokens: Tensor, wanted: Tensor) -> Tensor:
        model, at = self._model, self._pass
        buffers = model._buffers(self._rows)
        layout = self._layouts.next() if self._layouts else self._laid_out(buffers)
        self._pass += 1
        return model._pass(tokens, self._turns[at], layout, buffers, self._kv, wanted)

    def _laid_out(self, buffers: _Buffers) -> StepLayout:
        """Where passes cannot be laid out ahead: one by one."""
        step = StepBuffers(self._kv, self._tables, buffers.fused, buffers.attended)
        contexts = self._contexts + self._pass
        return self._model._planner.plan(step, np.ones_like(contexts), contexts, contexts - 1)


def _finish_layer(layer: Layer, residual: Tensor, x: Tensor, heads_out: Tensor) -> None:
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
