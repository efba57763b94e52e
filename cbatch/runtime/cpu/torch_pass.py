"""A decoder's pass in torch, for machines without our kernels."""

from __future__ import annotations

import math
from collections.abc import Iterable

import numpy as np
import torch
import torch.nn.functional as F
from numpy.typing import NDArray
from torch import Tensor

from cbatch.runtime.batch import RaggedBatch
from cbatch.runtime.compiled import CompiledProduct
from cbatch.runtime.cpu.attention.group import HeadShape
from cbatch.runtime.cpu.attention.groups import StepBuffers
from cbatch.runtime.cpu.attention.layout import AttentionPlanner, StepLayout
from cbatch.runtime.cpu.linear import Linear, RowPadding
from cbatch.runtime.kv_cache import KVCache
from cbatch.runtime.layers import Layer
from cbatch.runtime.model.config import ModelConfig
from cbatch.runtime.model.rope import RotaryTable
from cbatch.runtime.rank_group import RankGroup

# Largest elementwise call that torch runs on one thread, in elements. With several threads, the end
# of each thread's share is computed by scalar instead of vector code.
_ONE_THREAD_ELEMENTS = 32768
_NORM_GAP = 16  # columns after the residual stream: 64 bytes, to keep rows aligned
_MAX_SPARE_ROWS = 8
_FEW_ROWS = 8  # rows that are computed in about the time of one row


class _Buffers:
    def __init__(self, config: ModelConfig, num_rows: int, padded: int) -> None:
        h, hidden = HeadShape.of(config), config.hidden_size
        self.num_rows, self.padded = num_rows, padded
        self.residual = torch.zeros(padded, hidden + _NORM_GAP)
        # With this column, sqrt(sum(x^2) + n eps) is the norm of a row of `residual`.
        self.residual[:, hidden] = (hidden * config.rms_norm_eps) ** 0.5
        self.x = self.residual[:, :hidden]
        # Spare rows: products over queries read beyond the last row (see `Group.bind_rows`).
        fused = torch.zeros(padded + _MAX_SPARE_ROWS, h.row_width)
        self.rotated = fused[:padded].view(torch.complex64)
        self.fused = fused[:num_rows]
        self.kv = self.fused.view(-1, h.roles * h.head_dim)[:, h.group * h.head_dim :]
        attended = torch.zeros(max(padded, num_rows + 1), config.num_heads * h.head_dim)
        self.attended = attended[: num_rows + 1]  # one more row for results of padding
        self.heads_out = attended[:padded]


class TorchPass:
    """The layers of a decoder, computed by torch over planned attention."""

    def __init__(
        self,
        config: ModelConfig,
        embedding: Tensor | CompiledProduct,
        layers: list[Layer[Linear]],
        head: Linear,
        ranks: RankGroup | None,
    ) -> None:
        self.config, self.embedding, self.layers, self.head = config, embedding, layers, head
        self.ranks = ranks
        self._heads = HeadShape.of(config)
        self._planner = AttentionPlanner(config)
        self._rotary = RotaryTable(
            config.rope,
            config.head_dim,
            config.num_kv_heads,
            config.group_size,
            torch.device("cpu"),
        )
        linears = [product for layer in layers for product in layer.products()]
        self._padding = _common_padding([*linears, head])

    def run(
        self,
        batch: RaggedBatch,
        kv: KVCache,
        progress: NDArray[np.int64] | None,
        hidden: Tensor | None,
        kept: tuple[int, ...],
    ) -> Tensor:
        """Return the logits of `batch.logits_index`; write the residual stream before the layers
        `kept` to `hidden`. See `Model.forward`."""
        num_rows = batch.tokens.shape[0]
        buffers = _Buffers(self.config, num_rows, self._padding.rows(num_rows))
        rotary, layout = self._plan(batch, kv, buffers)
        logits = self._pass(batch, rotary, layout, buffers, kv, progress, hidden, kept)
        if self.ranks is None or not len(batch.logits_index):
            return logits
        return self.ranks.columns(logits, self.config.vocab_size)

    def _pass(
        self,
        batch: RaggedBatch,
        rotary: Tensor,
        layout: StepLayout,
        buffers: _Buffers,
        kv: KVCache,
        progress: NDArray[np.int64] | None,
        hidden: Tensor | None,
        kept: tuple[int, ...],
    ) -> Tensor:
        """Run all layers over a planned step, then compute the logits of some rows. With several
        ranks, return this rank's columns of the logits."""
        logit_rows = batch.logits_index
        num_logits, padded = logit_rows.shape[0], buffers.padded
        keeps_all = len(self.layers) in kept
        # If only some rows need logits, only they need the second half of the last layer.
        defers_half = num_logits < buffers.num_rows and buffers.num_rows > _FEW_ROWS
        defers_half &= not keeps_all
        # The row of a single token is broadcast to the padding rows.
        assert isinstance(self.embedding, Tensor), "block weights need compiled products"
        buffers.x.copy_(self.embedding.index_select(0, _pad_index(batch.tokens, padded)))
        last = len(self.layers) - 1
        for index, layer in enumerate(self.layers):
            if hidden is not None and index in kept:
                hidden[:, kept.index(index)] = buffers.x[: buffers.num_rows]
            self._project(layer, buffers, rotary)
            if progress is not None:
                progress[0] += 1
            kv.token_rows[index].index_copy_(0, layout.slots, buffers.kv.to(kv.data.dtype))
            if index == last and not num_logits and not keeps_all:
                return torch.empty(0, self.config.vocab_size)
            for group in layout.groups[layer.window]:
                group.run(kv.block_rows[index])
            if index < last or not defers_half:
                self._finish_layer(layer, buffers.residual, buffers.x, buffers.heads_out)
        if hidden is not None and keeps_all:
            hidden[:, kept.index(last + 1)] = buffers.x[: buffers.num_rows]
            if not num_logits:
                return torch.empty(0, self.config.vocab_size)
        if num_logits == buffers.num_rows:
            logits = self.head.product(_normed(buffers.residual, buffers.x), padded)
            return logits if num_logits == padded else logits[:num_logits]
        return self._selected_logits(buffers, logit_rows, defers_half)

    def _selected_logits(self, buffers: _Buffers, index: Tensor, defers_half: bool) -> Tensor:
        """Return the logits of some rows. With `defers_half`, the second half of the last layer is
        first run for these rows."""
        count = index.shape[0]
        rows = self._padding.rows(count)
        logit_rows = _pad_index(index, rows)
        if logit_rows.shape[0] < rows:
            logit_rows = logit_rows.repeat(rows)
        residual = buffers.residual.index_select(0, logit_rows)
        x = residual[:, : self.config.hidden_size]
        if defers_half:
            heads_out = buffers.heads_out.index_select(0, logit_rows)
            self._finish_layer(self.layers[-1], residual, x, heads_out)
        logits = self.head.product(_normed(residual, x), rows)
        return logits if rows == count else logits[:count]

    def _plan(
        self, batch: RaggedBatch, kv: KVCache, buffers: _Buffers
    ) -> tuple[Tensor, StepLayout]:
        query_lens = batch.query_lens.astype(np.int64)
        contexts = batch.context_lens.astype(np.int64)
        last_position = int(contexts.max()) - 1
        rotary = self._rotary.rows(_pad_index(batch.positions, buffers.padded), last_position)
        step = StepBuffers(kv, batch.block_tables, buffers.fused, buffers.attended)
        layout = self._planner.plan(step, query_lens, contexts, batch.positions.numpy())
        return rotary, layout

    def _project(self, layer: Layer[Linear], buffers: _Buffers, rotary: Tensor) -> None:
        padded = buffers.padded
        fused = layer.qkv.product(_normed(buffers.residual, buffers.x), padded)
        if layer.qk_weight is not None:
            h = self._heads
            rows = fused.view(-1, h.kv_heads, h.roles, h.head_dim)[:, :, : h.group + 1]
            rows.copy_(F.rms_norm(rows, (h.head_dim,), eps=self.config.rms_norm_eps))
            rows.mul_(layer.qk_weight)
        # The row of a single token is broadcast to the padding rows.
        pairs, rotary = fused.view(torch.complex64), rotary.expand(padded, -1)
        step = max(1, _ONE_THREAD_ELEMENTS // rotary.shape[1])
        for at in range(0, padded, step):
            part = slice(at, at + step)
            torch.mul(pairs[part], rotary[part], out=buffers.rotated[part])

    def _finish_layer(
        self, layer: Layer[Linear], residual: Tensor, x: Tensor, heads_out: Tensor
    ) -> None:
        """Apply output projection and MLP. `x` is the view of `residual` without its gap."""
        rows = residual.shape[0]
        x.add_(self._summed(layer.out.product(heads_out, rows)))
        gate_up = layer.gate_up.product(_normed(residual, x), rows)
        x.add_(self._summed(layer.down.product(_swiglu(gate_up), rows)))

    def _summed(self, partial: Tensor) -> Tensor:
        return partial if self.ranks is None else self.ranks.sum(partial)


def _common_padding(linears: Iterable[Linear]) -> RowPadding:
    paddings = [linear.plan.padding for linear in linears]
    return RowPadding(max(p.minimum for p in paddings), math.lcm(*(p.multiple for p in paddings)))


def _normed(residual: Tensor, x: Tensor) -> Tensor:
    """Return x / sqrt(sum(x^2) + n eps): RMSNorm without its weight and sqrt(n), which the next
    product applies (`Linear.in_scale`). `x` is the view of `residual` without its gap."""
    return x / torch.linalg.vector_norm(residual, dim=-1, keepdim=True)


def _swiglu(gate_up: Tensor) -> Tensor:
    rows, width = gate_up.shape[0], gate_up.shape[1] // 2
    gate, up = gate_up[:, :width], gate_up[:, width:]
    step = max(1, _ONE_THREAD_ELEMENTS // width)
    if rows <= step:
        return F.silu(gate).mul_(up)
    return torch.cat([F.silu(part) for part in gate.split(step)]).mul_(up)


def _pad_index(index: Tensor, rows: int) -> Tensor:
    """Extend `index` to `rows` entries by valid, arbitrary indices; a single entry broadcasts."""
    count = index.shape[0]
    return index if count == rows or count == 1 else F.pad(index, (0, rows - count))
