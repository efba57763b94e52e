"""The decoder of every supported family on a GPU, over a ragged batch."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from cbatch.runtime.gpu.attention import PagedAttention
from cbatch.runtime.gpu.device import current
from cbatch.runtime.layers import Layer, LayerBuilder
from cbatch.runtime.model.checkpoint import open_checkpoint, warn_unread
from cbatch.runtime.model.config import ModelConfig, UnsupportedModelError
from cbatch.runtime.model.records import Attention, Norm
from cbatch.runtime.model.rope import RotaryTable, interleave_halves
from cbatch.runtime.model.weight_files import WeightSource
from triton_kernels.layers.activation import silu_mul
from triton_kernels.layers.kv_write import kv_write
from triton_kernels.layers.norm import rms_norm
from triton_kernels.products.dense import MANY_ROWS, dense, keeps_bits
from triton_kernels.products.quantised import Packed, pack, quantised

_INVARIANCE_TEST_ROWS = MANY_ROWS + 44  # with more than MANY_ROWS rows, tiles differ


class Dense(NamedTuple):
    """A linear layer computed by a library, and the weight of the norm before it. A row's bits may
    depend on the number of rows."""

    weight: Tensor  # [out, in]
    bias: Tensor | None
    norm: Tensor | None  # fp32 [in]

    def __call__(self, x: Tensor) -> Tensor:
        return F.linear(x, self.weight, self.bias)

    def into(self, x: Tensor, out: Tensor) -> None:
        torch.mm(x, self.weight.t(), out=out)
        if self.bias is not None:
            out.add_(self.bias)


class InvariantDense(Dense):
    """A linear layer computed by the project's batch-invariant kernel."""

    def __call__(self, x: Tensor) -> Tensor:
        out = x.new_empty(len(x), len(self.weight))
        self.into(x, out)
        return out

    def into(self, x: Tensor, out: Tensor) -> None:
        dense(x, self.weight, self.bias, out)


class QuantisedDense(NamedTuple):
    """A linear layer with 4- or 8-bit weights, computed by the project's batch-invariant kernel."""

    packed: Packed
    bias: Tensor | None
    norm: Tensor | None  # fp32 [in]

    def __call__(self, x: Tensor) -> Tensor:
        out = x.new_empty(len(x), self.packed.shape[0])
        self.into(x, out)
        return out

    def into(self, x: Tensor, out: Tensor) -> None:
        quantised(x, self.packed, self.bias, out)


class ProductBuilder(LayerBuilder[Any]):
    """Builds layers for a GPU. Norm weights are not folded into the linear layers, and only weights
    that are quantised in the file are packed."""

    def _linear(self, weight: Tensor, bias: Tensor | None, in_scale: Tensor | None) -> Any:
        kind = InvariantDense if self.numerics == "invariant" else Dense
        return kind(weight.contiguous(), bias, in_scale)

    def _packed(self, names: list[str]) -> list[Packed] | None:
        """Return quantised tensors in one format of the kernel; None if that is impossible."""
        parts = []
        for name in names:
            blocks = self.source.blocks(name)
            packed = blocks and pack(blocks.type.name, torch.from_numpy(blocks.rows))
            if packed is None:
                return None
            parts.append(packed)
        if len({packed.codes.dtype for packed in parts}) > 1:
            return None
        if any(packed.offsets is not None for packed in parts):
            parts = [
                p if p.offsets is not None else p._replace(offsets=-8 * p.scales) for p in parts
            ]
        return parts

    def _quantised(
        self,
        parts: list[Packed],
        fuse: Callable[[list[Tensor]], Tensor],
        bias: Tensor | None,
        in_scale: Tensor | None,
    ) -> Any:
        fields = [[f for f in field if f is not None] for field in zip(*parts, strict=True)]
        fused = [fuse(each).contiguous().to(self.device) if each else None for each in fields]
        return QuantisedDense(Packed(*fused), bias, in_scale)  # type: ignore[arg-type]

    def _as_stored(self, names: list[str], bias: Tensor | None, in_scale: Tensor | None) -> Any:
        parts = self._packed(names)
        return None if parts is None else self._quantised(parts, torch.cat, bias, in_scale)

    def _qkv(
        self, attention: str, m: Attention, norm: Tensor | None, shift: Tensor | None = None
    ) -> Any:
        parts = self._packed([f"{attention}.{letter}_proj.weight" for letter in "qkv"])
        if parts is None:
            return super()._qkv(attention, m, norm, shift)

        def fuse(qkv: list[Tensor]) -> Tensor:
            q, k, v = qkv
            parts = (*(interleave_halves(part, m.rope, m.key_dim) for part in (q, k)), v)
            heads = [part.view(m.kv_heads, -1, m.key_dim, part.shape[1]) for part in parts]
            return torch.cat(heads, dim=1).flatten(0, 2)

        bias = self._heads(attention, m, "qkv", "bias") if m.bias else None
        return self._quantised(parts, fuse, bias, norm)

    def _norm(self, place: str, norm: Norm | None) -> Tensor | None:
        return None if norm is None else self._norm_weight(place, norm)


class FlatTokens(NamedTuple):
    """The T tokens of a pass. Padding rows have slot -1: their K and V are not written."""

    tokens: Tensor  # int32 [T]
    positions: Tensor  # int32 [T], absolute
    slots: Tensor  # int32 [T]: place of K and V in the cache, block * block_size + offset

    def first(self, count: int) -> FlatTokens:
        return FlatTokens(*(field[:count] for field in self))


class Hidden(NamedTuple):
    """The output of a pass over T tokens: hidden states are the sum of the two fields."""

    residual: Tensor  # fp32 [T, hidden], before the last MLP
    last: Tensor  # [T, hidden], output of the last MLP

    @classmethod
    def allocate(cls, max_tokens: int, decoder: Any) -> Hidden:
        shape, device = (max_tokens, decoder.config.hidden_size), decoder.device
        return cls(
            torch.zeros(shape, device=device),
            torch.zeros(shape, dtype=decoder.dtype, device=device),
        )


class Decoder:
    """A model with its weights. The residual stream is fp32, products use the model's dtype. With
    `numerics` "fast" a library computes them: a row's bits may depend on the number of rows.

    `forward` and `logits` never wait for the device, so they can be captured in a graph.
    """

    def __init__(
        self,
        config: ModelConfig,
        source: WeightSource,
        dtype: torch.dtype,
        device: torch.device,
        numerics: str = "fast",
    ) -> None:
        self.config, self.dtype, self.device = config, dtype, device
        self.numerics = numerics
        self.hidden_layers: tuple[int, ...] = ()
        builder = ProductBuilder(config, source, dtype, device, numerics)
        self.layers: list[Layer[Any]]
        with torch.inference_mode():
            self.embedding, self.layers, self.head = builder.build()
            self.matrix_bytes = self._matrix_bytes()
            self.kv_scales = [_kv_scales(source, i) for i in range(config.num_layers)]
            self._rotary = RotaryTable(config.attention.rope, config.attention.key_dim, device)

    @property
    def code(self) -> str:
        """A description of the modelling code in use."""
        return f"our own ({self.config.family})"

    def _products(self) -> list[Any]:
        return [p for layer in self.layers for p in layer.products()] + [self.head]

    def _matrix_bytes(self) -> int | None:
        """Return the bytes of all matrices; None if no matrix is quantised."""
        weights = [weight_of(product) for product in self._products()]
        if not any(isinstance(weight, Packed) for weight in weights):
            return None
        sizes = {id(w): w.num_bytes if isinstance(w, Packed) else w.nbytes for w in weights}
        return sum(({id(self.embedding): self.embedding.nbytes} | sizes).values())

    def keeps_bits(self) -> bool:
        """Test a linear layer of each shape for batch invariance. Waits for the device."""
        if self.numerics != "invariant":
            return False
        shapes = {(type(p), tuple(weight_of(p).shape)): p for p in self._products()}
        generator = torch.Generator().manual_seed(1)
        with torch.inference_mode(), current(self.device):
            for (_, (_, columns)), product in shapes.items():
                x = torch.randn(_INVARIANCE_TEST_ROWS, columns, generator=generator)
                if not keeps_bits(product, x.to(self.dtype).to(self.device)):
                    return False
        return True

    def pass_bytes(self, tokens: int) -> int:
        """Return the bytes of one layer's activations for `tokens` tokens."""
        c = self.config
        projected = c.attention.row_width + c.attention.heads * c.attention.key_dim
        width = 4 * c.hidden_size + projected + 3 * c.widest_inner
        return tokens * width * self.dtype.itemsize

    def cos_sin(self, max_tokens: int) -> Tensor:
        """Return the rotary table of positions below `max_tokens`, for `kv_write`."""
        return self._rotary.cos_sin(max_tokens)

    @property
    def eps(self) -> float:
        """The epsilon of the final norm."""
        return 0.0 if self.config.norm is None else self.config.norm.eps

    @property
    def final_norm(self) -> Tensor:
        """The weight of the final norm, fp32, for draft heads that read normed states."""
        norm: Tensor = self.head.norm
        return norm

    def keep_hidden(self, layers: tuple[int, ...]) -> None:
        """Choose the layers whose inputs `forward` keeps, as `Model.keep_hidden` does."""
        self.hidden_layers = layers

    def allocate_hidden(self, num_rows: int) -> Tensor | None:
        """Return memory for the states [T, layers, hidden] that `forward` keeps, if any."""
        if not self.hidden_layers:
            return None
        shape = num_rows, len(self.hidden_layers), self.config.hidden_size
        return torch.empty(shape, dtype=self.dtype, device=self.device)

    def forward(
        self,
        flat: FlatTokens,
        attention: PagedAttention,
        cos_sin: Tensor,
        hidden: Hidden,
        states: Tensor | None = None,
    ) -> None:
        """Compute all layers over `flat`, for which `attention` is planned. Fills the first rows of
        `hidden`, and `states` [T, layers, hidden] with the states that `keep_hidden` chose."""
        count = len(flat.tokens)
        kept = self.hidden_layers if states is not None else ()
        residual = hidden.residual[:count]
        residual.zero_()  # each layer adds its input; the first layer adds the embedding
        x = F.embedding(flat.tokens, self.embedding)
        last = len(self.layers) - 1
        for index, layer in enumerate(self.layers):
            eps = layer.record.mixer.norm.eps  # type: ignore[union-attr]
            normed = rms_norm(x, layer.qkv.norm, eps, residual, early=True)
            if states is not None and index in kept:
                states[:, kept.index(index)].copy_(residual)
            fused = project(layer, index, normed, flat, attention, cos_sin)
            x = attend_and_gate(layer, index, fused, attention, residual)
            if index < last:
                x = layer.down(x)
        self.layers[last].down.into(x, hidden.last[:count])
        if states is not None and last + 1 in kept:
            states[:, kept.index(last + 1)].copy_(residual + hidden.last[:count])

    def logits(self, hidden: Hidden, rows: Tensor, out: Tensor) -> None:
        """Write the logits of flat rows `rows` int32 [N] to `out` [N, vocab], of any row stride."""
        residual = hidden.residual.index_select(0, rows)
        x = hidden.last.index_select(0, rows)
        normed = rms_norm(x, self.head.norm, self.eps, residual, early=True)
        self.head.into(normed, out)


def project(
    layer: Layer[Any],
    index: int,
    normed: Tensor,
    flat: FlatTokens,
    attention: PagedAttention,
    cos_sin: Tensor,
) -> Tensor:
    """Write K and V to the cache; return q, k and v [T, kv_heads, group + 2, head_dim]."""
    fused: Tensor = layer.qkv(normed)
    m = layer.record.mixer
    fused = fused.view(len(normed), m.kv_heads, m.group + 2, m.key_dim)
    k_pages, v_pages = attention.pages(index)
    k_scale, v_scale = attention.scales[index]
    kv_write(
        fused,
        flat.positions,
        flat.slots,
        cos_sin,
        k_pages,
        v_pages,
        qk_weight=layer.qk_weight,
        eps=0.0 if m.qk_norm is None else m.qk_norm.eps,
        k_scale=k_scale,
        v_scale=v_scale,
        early=True,
    )
    return fused


def attend_and_gate(
    layer: Layer[Any],
    index: int,
    fused: Tensor,
    attention: PagedAttention,
    residual: Tensor,
) -> Tensor:
    """Attend, add the result to `residual`, and return the input of the layer's down projection."""
    m, eps = layer.record.mixer, layer.record.feed_forward.norm.eps  # type: ignore[union-attr]
    x = layer.out(attention.run(index, m.window, fused[:, :, : m.group]))
    normed = rms_norm(x, layer.gate_up.norm, eps, residual, early=True)
    return silu_mul(layer.gate_up(normed), early=True)


def weight_of(product: Dense | QuantisedDense) -> Tensor | Packed:
    return product.packed if isinstance(product, QuantisedDense) else product.weight


def _kv_scales(source: WeightSource, layer: int) -> tuple[float, float]:
    """Return the checkpoint's fp8 scales, the divisors of K and V; 1 for a missing scale."""
    k, v = (source.scalar(f"model.layers.{layer}.self_attn.{n}_scale") for n in "kv")
    return k or 1.0, v or 1.0


def load_decoder(
    path_or_name: str | Path,
    *,
    dtype: str | torch.dtype = "auto",
    device: str | torch.device = "cuda",
    numerics: str = "fast",
    random_weights_seed: int | None = None,
) -> Decoder:
    """Load a model from a directory, GGUF file or hub name; see `open_checkpoint`. Raises
    UnsupportedModelError for an architecture that the GPU decoder lacks."""
    config, source, served = open_checkpoint(path_or_name, dtype, random_weights_seed)
    if not config.plain:
        problem = f"{path_or_name}: {config.family} is not supported by our own pass on a GPU"
        raise UnsupportedModelError(f"{problem}; use model_impl transformers, or device cpu")
    mode = "invariant" if numerics == "invariant" else "fast"
    decoder = Decoder(config, source, served, torch.device(device), mode)
    warn_unread(path_or_name, source.unread())
    return decoder
