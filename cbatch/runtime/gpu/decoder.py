"""The decoder of every supported family on a GPU, over a ragged batch."""

from __future__ import annotations

from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from cbatch.runtime.gpu.attention import PagedAttention
from cbatch.runtime.gpu.device import current
from cbatch.runtime.gpu.experts import bytes_per_token
from cbatch.runtime.gpu.layers import FlatTokens, LayerPass, bytes_of_mixer, lower
from cbatch.runtime.gpu.products import ProductBuilder
from cbatch.runtime.gpu.support import unsupported_on_gpu
from cbatch.runtime.model.checkpoint import open_checkpoint, warn_unread
from cbatch.runtime.model.config import ModelConfig, UnsupportedModelError
from cbatch.runtime.model.records import Attention, Experts
from cbatch.runtime.model.rope import RotaryTable
from cbatch.runtime.model.weight_files import WeightSource
from triton_kernels.products.dense import MANY_ROWS, keeps_bits
from triton_kernels.products.quantised import Packed

_INVARIANCE_TEST_ROWS = MANY_ROWS + 44  # with more than MANY_ROWS rows, tiles differ


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
        with torch.inference_mode():
            self.embedding, layers, self.head = builder.build()
            self.layers = [lower(*each) for each in enumerate(layers)]
            self.matrix_bytes = self._matrix_bytes()
            self.kv_scales = [_kv_scales(source, i) for i in range(config.num_layers)]
            mixers = [each.mixer for each in config.layers]
            self._rotary = [
                (m.rope, m.key_dim) if isinstance(m, Attention) else None for m in mixers
            ]
            self._tables = {each: RotaryTable(*each, device) for each in self._rotary if each}
        # Other implementations round this factor to the model's type.
        self._embedding_scale = torch.tensor(config.embedding_scale).to(dtype).item()

    @property
    def code(self) -> str:
        """A description of the modelling code in use."""
        return f"our own ({self.config.family})"

    def _products(self) -> list[Any]:
        return [p for layer in self.layers for p in layer.products()] + [self.head]

    def _matrix_bytes(self) -> int | None:
        """Return the bytes of all matrices; None if no matrix is quantised."""
        weights = [weight for product in self._products() for weight in product.weights]
        if not any(isinstance(weight, Packed) for weight in weights):
            return None
        sizes = {id(w): w.num_bytes if isinstance(w, Packed) else w.nbytes for w in weights}
        return sum(({id(self.embedding): self.embedding.nbytes} | sizes).values())

    def keeps_bits(self) -> bool:
        """Test a linear layer of each shape for batch invariance. Waits for the device."""
        if self.numerics != "invariant":
            return False
        shapes = {
            (type(p), *(tuple(weight.shape) for weight in p.weights)): p for p in self._products()
        }
        generator = torch.Generator().manual_seed(1)
        with torch.inference_mode(), current(self.device):
            for (_, (_, columns), *_), product in shapes.items():
                x = torch.randn(_INVARIANCE_TEST_ROWS, columns, generator=generator)
                if not keeps_bits(product, x.to(self.dtype).to(self.device)):
                    return False
        return True

    def pass_bytes(self, tokens: int) -> int:
        """Return the bytes of one layer's activations for `tokens` tokens."""
        c = self.config
        mixers = {each.mixer for each in c.layers}
        projected = max((bytes_of_mixer(m, self.dtype.itemsize) for m in mixers), default=0)
        forward = 0
        for f in {each.feed_forward for each in c.layers}:
            if isinstance(f, Experts):
                of_token = bytes_per_token(f, c.hidden_size, self.dtype.itemsize)
            else:
                of_token = 3 * (0 if f is None else f.inner) * self.dtype.itemsize
            forward = max(forward, of_token)
        return tokens * (6 * c.hidden_size * self.dtype.itemsize + projected + forward)

    def cos_sin(self, max_tokens: int) -> list[Tensor | None]:
        """Return the rotary table of positions below `max_tokens`, for `kv_write`, of each layer
        with attention."""
        tables = {each: table.cos_sin(max_tokens) for each, table in self._tables.items()}
        return [None if each is None else tables[each] for each in self._rotary]

    @property
    def final_norm(self) -> Tensor:
        """The weight of the final norm, fp32, for draft heads that read normed states."""
        weight: Tensor = self.head.norm.weight
        return weight

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
        cos_sin: list[Tensor | None],
        hidden: Hidden,
        states: Tensor | None = None,
    ) -> None:
        """Compute all layers over `flat`, for which `attention` is planned. Fills the first rows of
        `hidden`, and `states` [T, layers, hidden] with the states that `keep_hidden` chose."""
        count, at = len(flat.tokens), LayerPass(flat, attention, cos_sin)
        kept = self.hidden_layers if states is not None else ()
        residual, last = hidden.residual[:count], hidden.last[:count]
        residual.zero_()  # each layer adds its input; the first layer adds the embedding
        x = F.embedding(flat.tokens, self.embedding)
        if self._embedding_scale != 1.0:
            x = x * self._embedding_scale
        for index, layer in enumerate(self.layers):
            rows = layer.enter(x, residual)
            if states is not None and index in kept:
                states[:, kept.index(index)].copy_(residual)
            fused = layer.mixer.project(rows, at)
            out = last if layer is self.layers[-1] else None
            x = layer.finish(fused, rows, residual, at, out)
        if states is not None and len(self.layers) in kept:
            states[:, kept.index(len(self.layers))].copy_(residual + last)

    def logits(self, hidden: Hidden, rows: Tensor, out: Tensor) -> None:
        """Write the logits of flat rows `rows` int32 [N] to `out` [N, vocab], of any row stride."""
        residual = hidden.residual.index_select(0, rows)
        x = hidden.last.index_select(0, rows)
        self.head.into(self.head.norm(x, residual), out)
        if self.config.logit_softcap:
            cap = self.config.logit_softcap
            out.div_(cap).tanh_().mul_(cap)


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
    lacking = unsupported_on_gpu(config)
    if lacking is not None:
        problem = f"{path_or_name}: {config.family} ({lacking}) is not supported on a GPU"
        raise UnsupportedModelError(f"{problem}; use model_impl transformers, or device cpu")
    mode = "invariant" if numerics == "invariant" else "fast"
    decoder = Decoder(config, source, served, torch.device(device), mode)
    warn_unread(path_or_name, source.unread())
    return decoder
