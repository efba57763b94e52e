"""One decoder for every supported family, over a ragged flat batch and paged KV."""

from __future__ import annotations

import math
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import torch
import torch.nn.functional as F
from numpy.typing import NDArray
from torch import Tensor

from cbatch.runtime.batch import RaggedBatch
from cbatch.runtime.cpu.attention.group import HeadShape
from cbatch.runtime.cpu.attention.groups import StepBuffers
from cbatch.runtime.cpu.attention.layout import AttentionPlanner, StepLayout
from cbatch.runtime.cpu.compiled_pass import CompiledDecoder
from cbatch.runtime.cpu.layers import CpuLayerBuilder
from cbatch.runtime.cpu.linear import Linear, RowPadding
from cbatch.runtime.cpu.numerics import resolve_numerics
from cbatch.runtime.kv_cache import KVCache
from cbatch.runtime.layers import Layer
from cbatch.runtime.model.checkpoint import open_checkpoint, warn_unread
from cbatch.runtime.model.config import ModelConfig, ModelError, UnsupportedModelError
from cbatch.runtime.model.rope import RotaryTable
from cbatch.runtime.model.shapes import Numerics, head_rows
from cbatch.runtime.model.sharding import ShardedWeights, shard_config
from cbatch.runtime.model.weight_files import WeightSource
from cbatch.runtime.rank_group import RankGroup

# Elementwise kernels compute the end of a thread's share differently (scalar, not vector code). Up
# to this number of elements, a call has one share, whose layout is fixed.
_ONE_SHARE = 32768
_NORM_GAP = 16  # columns after the residual stream: 64 bytes, to keep rows aligned
_MOST_SPARE_ROWS = 8
_FEW_ROWS = 8  # rows that are computed in about the time of one


class _Buffers:
    """Memory of one pass over T rows, padded to P."""

    def __init__(self, config: ModelConfig, num_rows: int, padded: int) -> None:
        h, hidden = HeadShape.of(config), config.hidden_size
        self.num_rows, self.padded = num_rows, padded
        self.residual = torch.zeros(padded, hidden + _NORM_GAP)
        # With this column, sqrt(sum(x^2) + n eps) is the norm of a row of `residual`.
        self.residual[:, hidden] = (hidden * config.rms_norm_eps) ** 0.5
        self.x = self.residual[:, :hidden]
        # Spare rows: products over queries read beyond the last row (see `Group.bind_rows`).
        fused = torch.zeros(padded + _MOST_SPARE_ROWS, h.row_width)
        self.rotated = fused[:padded].view(torch.complex64)
        self.fused = fused[:num_rows]
        self.kv = self.fused.view(-1, h.roles * h.head_dim)[:, h.group * h.head_dim :]
        attended = torch.zeros(max(padded, num_rows + 1), config.num_heads * h.head_dim)
        self.attended = attended[: num_rows + 1]  # one more row for results of padding
        self.heads_out = attended[:padded]


class Model:
    """A decoder with its weights. Not reentrant: one forward pass at a time.

    A pass counts up `progress`, int64 [1], at least once per layer, for a watching thread. None: no
    thread watches.
    """

    def __init__(
        self,
        config: ModelConfig,
        source: WeightSource,
        dtype: torch.dtype,
        numerics: Numerics,
        ranks: RankGroup | None = None,
    ) -> None:
        """Load the weights. With `ranks`, config and source are this rank's (see `sharding`), and
        all ranks must make the same passes."""
        self.config, self.dtype, self.device = config, dtype, torch.device("cpu")
        self.ranks = ranks
        self.numerics = numerics.mode
        self.progress: NDArray[np.int64] | None = None
        self.hidden_layers: tuple[int, ...] = ()
        self._heads = HeadShape.of(config)
        self._planner = AttentionPlanner(config)
        with torch.inference_mode():
            logits = None if ranks is None else head_rows(config, ranks.size)
            builder = CpuLayerBuilder(config, source, dtype, self.device, numerics, logits)
            self.embedding, self.layers, self.head = builder.build()
            self.final_norm = builder.final_norm()
            self._rotary = RotaryTable(
                config.rope,
                config.head_dim,
                config.num_kv_heads,
                config.group_size,
                self.device,
            )
        self._padding = self._common_padding()
        self.compiled = CompiledDecoder.of(config, self.embedding, self.layers, self.head, ranks)
        if self.compiled is None and not config.plain:
            problem = f"{config.family} needs compiled kernels in {dtype}"
            remedy = "install a C compiler (gcc), or use model_impl transformers"
            raise UnsupportedModelError(f"model: {problem}; {remedy}")

    @property
    def code(self) -> str:
        """The modelling code in use, in words."""
        return f"our own ({self.config.family})"

    @property
    def block_bytes(self) -> int | None:
        """Bytes of all matrices, if some of them are quantised; None: they follow from `dtype`."""
        products = [linear.compiled for linear in self.linears()]
        compiled = [product for product in products if product is not None]
        if not any(product.block_types for product in compiled):
            return None
        return sum(product.num_bytes for product in compiled)

    def linears(self) -> Iterator[Linear]:
        """Yield every product of a pass."""
        for layer in self.layers:
            yield from layer.products()
        yield self.head

    def keep_hidden(self, layers: tuple[int, ...]) -> None:
        """Let passes return the residual stream of all rows before these layers, in this order.
        Number `num_layers` means the output of the last layer, before the final norm."""
        self.hidden_layers = layers
        if self.compiled is not None:
            self.compiled.keep(layers)

    def room_for_hidden(self, num_rows: int) -> Tensor | None:
        """Return memory for what `forward` keeps of `num_rows` rows; None if it keeps nothing."""
        if not self.hidden_layers:
            return None
        return torch.empty(num_rows, len(self.hidden_layers), self.config.hidden_size)

    def forward(self, batch: RaggedBatch, kv: KVCache, hidden: Tensor | None = None) -> Tensor:
        """Compute logits, fp32 [N, vocab], of the rows `batch.logits_index`.

        Writes K and V of all T tokens, then attends. The caller owns the result. Kept states
        (`keep_hidden`) are written to `hidden`, fp32 [T, layers, hidden_size].
        """
        if torch.is_inference_mode_enabled():
            return self._forward(batch, kv, hidden)
        with torch.inference_mode():
            return self._forward(batch, kv, hidden)

    def _forward(self, batch: RaggedBatch, kv: KVCache, hidden: Tensor | None) -> Tensor:
        if self.compiled is not None:
            self._checked(int(batch.context_lens.max()) - 1)
            lens, logit_rows = (batch.query_lens, batch.context_lens), batch.logits_index
            return self.compiled.run(
                batch.tokens,
                *lens,
                batch.block_tables,
                logit_rows,
                kv,
                self.progress,
                hidden=hidden,
            )
        num_rows = batch.tokens.shape[0]
        buffers = _Buffers(self.config, num_rows, self._padding.rows(num_rows))
        rotary, layout = self._plan(batch, kv, buffers)
        logit_rows = batch.logits_index
        logits = self._pass(batch.tokens, rotary, layout, buffers, kv, logit_rows, hidden)
        if self.ranks is None or not len(logit_rows):
            return logits
        return self.ranks.columns(logits, self.config.vocab_size)

    def _pass(
        self,
        tokens: Tensor,
        rotary: Tensor,
        layout: StepLayout,
        buffers: _Buffers,
        kv: KVCache,
        logit_rows: Tensor,
        hidden: Tensor | None,
    ) -> Tensor:
        """Run all layers over a planned step, then compute the logits of `logit_rows`. With several
        ranks, return this rank's columns of the logits."""
        num_logits, padded = logit_rows.shape[0], buffers.padded
        kept = self.hidden_layers if hidden is not None else ()
        keeps_all = len(self.layers) in kept
        # If few of many rows need logits, only these need the second half of the last layer.
        unfinished = num_logits < buffers.num_rows and buffers.num_rows > _FEW_ROWS
        unfinished &= not keeps_all
        # The row of a single token is broadcast to the padding rows.
        assert isinstance(self.embedding, Tensor), "block weights need compiled products"
        buffers.x.copy_(self.embedding.index_select(0, _pad_index(tokens, padded)))
        last = len(self.layers) - 1
        for index, layer in enumerate(self.layers):
            if hidden is not None and index in kept:
                hidden[:, kept.index(index)] = buffers.x[: buffers.num_rows]
            self._project(layer, buffers, rotary)
            if self.progress is not None:
                self.progress[0] += 1
            kv.token_rows[index].index_copy_(0, layout.slots, buffers.kv.to(kv.data.dtype))
            if index == last and not num_logits and not keeps_all:
                return torch.empty(0, self.config.vocab_size)
            for group in layout.groups[layer.window]:
                group.run(kv.block_rows[index])
            if index < last or not unfinished:
                self._finish_layer(layer, buffers.residual, buffers.x, buffers.heads_out)
        if hidden is not None and keeps_all:
            hidden[:, kept.index(last + 1)] = buffers.x[: buffers.num_rows]
            if not num_logits:
                return torch.empty(0, self.config.vocab_size)
        if num_logits == buffers.num_rows:
            logits = self.head.product(_normed(buffers.residual, buffers.x), padded)
            return logits if num_logits == padded else logits[:num_logits]
        return self._selected_logits(buffers, logit_rows, unfinished)

    def _selected_logits(self, buffers: _Buffers, index: Tensor, unfinished: bool) -> Tensor:
        """Return the logits of some rows. `unfinished`: run the second half of the last layer for
        these rows first."""
        count = index.shape[0]
        rows = self._padding.rows(count)
        logit_rows = _pad_index(index, rows)
        if logit_rows.shape[0] < rows:
            logit_rows = logit_rows.repeat(rows)
        residual = buffers.residual.index_select(0, logit_rows)
        x = residual[:, : self.config.hidden_size]
        if unfinished:
            heads_out = buffers.heads_out.index_select(0, logit_rows)
            self._finish_layer(self.layers[-1], residual, x, heads_out)
        logits = self.head.product(_normed(residual, x), rows)
        return logits if rows == count else logits[:count]

    def _plan(
        self, batch: RaggedBatch, kv: KVCache, buffers: _Buffers
    ) -> tuple[Tensor, StepLayout]:
        """Return the rotation of each row, and the layout of KV writes and attention."""
        query_lens = batch.query_lens.astype(np.int64)
        contexts = batch.context_lens.astype(np.int64)
        last_position = self._checked(int(contexts.max()) - 1)
        rotary = self._rotary.rows(_pad_index(batch.positions, buffers.padded), last_position)
        step = StepBuffers(kv, batch.block_tables, buffers.fused, buffers.attended)
        layout = self._planner.plan(step, query_lens, contexts, batch.positions.numpy())
        return rotary, layout

    def _checked(self, last_position: int) -> int:
        if last_position >= self.config.max_position_tokens:
            raise ValueError(
                f"context_lens: {last_position + 1} tokens exceed the model's context of "
                f"{self.config.max_position_tokens}"
            )
        return last_position

    def _project(self, layer: Layer[Linear], buffers: _Buffers, rotary: Tensor) -> None:
        """Compute rotated queries and keys, and values, of all rows in the step's buffer."""
        padded = buffers.padded
        fused = layer.qkv.product(_normed(buffers.residual, buffers.x), padded)
        if layer.qk_weight is not None:
            h = self._heads
            rows = fused.view(-1, h.kv_heads, h.roles, h.head_dim)[:, :, : h.group + 1]
            rows.copy_(F.rms_norm(rows, (h.head_dim,), eps=self.config.rms_norm_eps))
            rows.mul_(layer.qk_weight)
        # The row of a single token is broadcast to the padding rows.
        pairs, rotary = fused.view(torch.complex64), rotary.expand(padded, -1)
        step = max(1, _ONE_SHARE // rotary.shape[1])
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

    def _common_padding(self) -> RowPadding:
        """Return the padding that suits every product."""
        paddings = [linear.plan.padding for linear in self.linears()]
        return RowPadding(
            max(p.minimum for p in paddings), math.lcm(*(p.multiple for p in paddings))
        )


def _normed(residual: Tensor, x: Tensor) -> Tensor:
    """Return x / sqrt(sum(x^2) + n eps): RMSNorm without its weight and sqrt(n), which the next
    product applies (`Linear.in_scale`). `x` is the view of `residual` without its gap."""
    return x / torch.linalg.vector_norm(residual, dim=-1, keepdim=True)


def _swiglu(gate_up: Tensor) -> Tensor:
    """Return silu(gate) * up of [T, gate | up]."""
    rows, width = gate_up.shape[0], gate_up.shape[1] // 2
    gate, up = gate_up[:, :width], gate_up[:, width:]
    step = max(1, _ONE_SHARE // width)
    if rows <= step:
        return F.silu(gate).mul_(up)
    return torch.cat([F.silu(part) for part in gate.split(step)]).mul_(up)


def _pad_index(index: Tensor, rows: int) -> Tensor:
    """Extend `index` to `rows` entries with valid but arbitrary ones; a single entry broadcasts."""
    count = index.shape[0]
    return index if count == rows or count == 1 else F.pad(index, (0, rows - count))


def load_model(
    path_or_name: str | Path,
    *,
    dtype: str | torch.dtype = "auto",
    numerics: str = "auto",
    random_weights_seed: int | None = None,
    ranks: RankGroup | None = None,
) -> Model:
    """Load a model from a directory, GGUF file or hub name, as `open_checkpoint`. With several
    `ranks`, load this rank's shard."""
    if numerics not in ("auto", "invariant", "fast"):
        raise ModelError(f"numerics: must be auto, invariant or fast, got {numerics!r}")
    config, weights, served = open_checkpoint(path_or_name, dtype, random_weights_seed)
    source = weights
    if ranks is not None:
        source = ShardedWeights(source, config, ranks.rank, ranks.size)
        config = shard_config(config, ranks.size)
    model = Model(config, source, served, resolve_numerics(numerics, config, served), ranks)
    if ranks is None or not ranks.rank:
        warn_unread(path_or_name, weights.unread())
    return model
