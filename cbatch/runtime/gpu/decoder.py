"""The decoder of every supported family, from kernels and library products, over flat tokens."""

from __future__ import annotations

from pathlib import Path
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from cbatch.runtime.cpu.layers import Layer, LayerBuilder
from cbatch.runtime.cpu.numerics import Numerics
from cbatch.runtime.gpu.attention import PagedAttention
from cbatch.runtime.model.checkpoint import WeightSource, open_checkpoint
from cbatch.runtime.model.config import ModelConfig
from cbatch.runtime.model.rope import RotaryTable
from triton_kernels.layers.activation import silu_mul
from triton_kernels.layers.kv_write import kv_write
from triton_kernels.layers.norm import rms_norm


class Dense(NamedTuple):
    """A product, and the norm before it."""

    weight: Tensor  # [out, in]
    bias: Tensor | None
    norm: Tensor | None  # fp32 [in]

    def __call__(self, x: Tensor) -> Tensor:
        return F.linear(x, self.weight, self.bias)


class _Builder(LayerBuilder):
    """The same fusion of tensors, for kernels: norms keep their weights, nothing is packed."""

    def _linear(self, weight: Tensor, bias: Tensor | None, in_scale: Tensor | None) -> Dense:
        return Dense(weight, bias, in_scale)

    def _norm(self, name: str) -> Tensor:
        return self._get(name, self.config.hidden_size).float()


class Flat(NamedTuple):
    """T tokens of a pass. Rows of padding have slot -1: they write nothing, and mean nothing."""

    tokens: Tensor  # int32 [T]
    positions: Tensor  # int32 [T], absolute
    slots: Tensor  # int32 [T]: block * block_size + offset, where K and V go

    def first(self, count: int) -> Flat:
        return Flat(*(field[:count] for field in self))


class Hidden(NamedTuple):
    """What a pass leaves of T tokens: the residual stream is the sum of the two."""

    residual: Tensor  # fp32 [T, hidden]
    last: Tensor  # [T, hidden], what the last layer adds

    @classmethod
    def allocate(cls, most_tokens: int, decoder: Decoder) -> Hidden:
        shape, device = (most_tokens, decoder.config.hidden_size), decoder.device
        return cls(
            torch.zeros(shape, device=device),
            torch.zeros(shape, dtype=decoder.dtype, device=device),
        )


class Decoder:
    """A model with its weights. The residual stream is fp32; products are of the model's dtype and
    leave their padding and algorithm to the library, so a row's bits may depend on the row count.

    No method waits for the device or reads from it: a pass can be captured.
    """

    numerics = "fast"

    def __init__(
        self, config: ModelConfig, source: WeightSource, dtype: torch.dtype, device: torch.device
    ) -> None:
        self.config, self.dtype, self.device = config, dtype, device
        builder = _Builder(config, source, dtype, device, Numerics(self.numerics, False))
        self.layers: list[Layer]
        with torch.inference_mode():
            self.embedding, self.layers, self.head = builder.build()
            self._rotary = RotaryTable(
                config.rope, config.head_dim, config.num_kv_heads, config.group_size, device
            )

    def cos_sin(self, most_tokens: int) -> Tensor:
        """Of positions, for `kv_write`."""
        return self._rotary.cos_sin(most_tokens)

    def forward(
        self, flat: Flat, attention: PagedAttention, cos_sin: Tensor, hidden: Hidden
    ) -> None:
        """All layers over `flat`, as `attention` was planned; fills the first rows of `hidden`."""
        c, count = self.config, len(flat.tokens)
        residual = hidden.residual[:count]
        x = F.embedding(flat.tokens, self.embedding)
        residual.copy_(x)
        last = len(self.layers) - 1
        for index, layer in enumerate(self.layers):
            added = residual if index else None
            normed = rms_norm(x, layer.qkv.norm, c.rms_norm_eps, added)
            fused = layer.qkv(normed).view(count, c.num_kv_heads, c.group_size + 2, c.head_dim)
            k_pages, v_pages = attention.pages(index)
            kv_write(
                fused,
                flat.positions,
                flat.slots,
                cos_sin,
                k_pages,
                v_pages,
                qk_weight=layer.qk_weight,
                eps=c.rms_norm_eps,
            )
            x = layer.out(attention.run(index, layer.window, fused[:, :, : c.group_size]))
            gate_up = layer.gate_up(rms_norm(x, layer.gate_up.norm, c.rms_norm_eps, residual))
            x = silu_mul(gate_up)
            if index < last:
                x = layer.down(x)
        down = self.layers[last].down
        torch.mm(x, down.weight.t(), out=hidden.last[:count])
        if down.bias is not None:
            hidden.last[:count].add_(down.bias)

    def logits(self, hidden: Hidden, rows: Tensor, out: Tensor) -> None:
        """Logits of the flat rows `rows` int32 [N], to `out` [N, vocab] (rows may lie apart)."""
        residual = hidden.residual.index_select(0, rows)
        x = hidden.last.index_select(0, rows)
        normed = rms_norm(x, self.head.norm, self.config.rms_norm_eps, residual)
        torch.mm(normed, self.head.weight.t(), out=out)


def load_decoder(
    path_or_name: str | Path,
    *,
    dtype: str | torch.dtype = "auto",
    device: str | torch.device = "cuda",
    random_weights_seed: int | None = None,
) -> Decoder:
    """A model from a directory, GGUF file or hub name, as `open_checkpoint`."""
    config, source, served = open_checkpoint(path_or_name, dtype, random_weights_seed)
    return Decoder(config, source, served, torch.device(device))
