"""EAGLE and Medusa heads on a GPU. As in `Decoder`, no method waits for the device, except
`first_logits`."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from cbatch.runtime.batch import RaggedBatch
from cbatch.runtime.drafting.heads.eagle import EagleTensors, eagle_vocabulary
from cbatch.runtime.drafting.heads.head import Head
from cbatch.runtime.drafting.heads.medusa import MedusaTensors, medusa_vocabulary
from cbatch.runtime.gpu.attention import PagedAttention
from cbatch.runtime.gpu.decoder import Decoder, Hidden
from cbatch.runtime.gpu.layers import FlatTokens, LayerPass, lower
from cbatch.runtime.gpu.modelling import lay_out
from cbatch.runtime.gpu.products import ProductBuilder
from cbatch.runtime.kv_cache import KVCache
from cbatch.runtime.model.head_config import HeadConfig
from cbatch.runtime.model.head_weights import HeadWeights
from cbatch.runtime.model.rope import RotaryTable
from triton_kernels.layers.norm import norm_rows

FIRST_KEY = 1  # first key's position: a head reads the state before a token; position 0 has none


class _EagleProducts(ProductBuilder, EagleTensors[Any]):
    pass


class _MedusaProducts(ProductBuilder, MedusaTensors[Any]):
    pass


class GpuHead(Head):
    """A head on a GPU. States are of the target's dtype."""

    def __init__(self, head: HeadConfig, target: Decoder, vocabulary: Tensor | None) -> None:
        super().__init__(head, target)
        self.vocabulary = vocabulary if vocabulary is None else vocabulary.to(self.device)
        self.kv_scales = [(1.0, 1.0)] * self.config.num_layers

    @property
    def state_bytes(self) -> int:
        """Bytes of the state that the head reads at a position. Each block keeps one state."""
        return self.config.hidden_size * self.dtype.itemsize

    def pass_bytes(self, tokens: int) -> int:
        """Return the bytes that a pass over `tokens` allocates."""
        c = self.config
        widest = len(self.head.hidden_layers) * c.hidden_size
        mixers = [layer.mixer for layer in c.layers]
        projected = sum(m.row_width + m.heads * m.key_dim for m in mixers)
        width = 2 * widest + 8 * c.hidden_size + projected + 3 * c.widest_inner
        return tokens * width * self.dtype.itemsize

    def _put(self, product: Any, x: Tensor, out: Tensor) -> None:
        """Write logits of `x` to `out` [N, vocab], only for the ids that the head drafts."""
        if self.vocabulary is None:
            product.into(x, out)
        else:
            out.index_copy_(1, self.vocabulary, product(x))

    def first_logits(self, batch: RaggedBatch, kv: KVCache, hidden: Tensor) -> Tensor:
        shape, lowest = (len(hidden), self.config.vocab_size), torch.finfo(self.dtype).min
        out = torch.full(shape, lowest, dtype=self.dtype, device=self.device)
        self._write_first(batch, kv, self.fuse(hidden).roll(1, 0), out)
        return out.float().cpu()

    def _write_first(self, batch: RaggedBatch, kv: KVCache, states: Tensor, out: Tensor) -> None:
        """Write logits of the first draft after each token, given the state before it."""
        raise NotImplementedError


class GpuEagleHead(GpuHead):
    """EAGLE head with the equations of `cbatch.runtime.cpu.drafters.eagle_head.EagleHead`."""

    def __init__(
        self, head: HeadConfig, weights: HeadWeights, target: Decoder, target_head: Tensor
    ) -> None:
        vocabulary = eagle_vocabulary(head, weights)
        super().__init__(head, target, vocabulary)
        c = self.config
        with torch.inference_mode():
            own = _EagleProducts(head, weights, target, target.numerics)
            self._norms, self._fc = own.read_norms(target), own.state_fusing_layer(target)
            self._layer, self._input_layer = lower(0, own.layer()), own.input_layer()
            if self._input_layer is None:
                self._token_norm, self._state_norm = own.pair_norms()
            self._lm_head: Any = own.lm_head(vocabulary, target_head)
            self._embedding = own.embedding(target)
            self._rotary = RotaryTable(c.attention.rope, c.attention.key_dim, self.device)
        products = [*self._layer.products(), self._lm_head, self._fc, self._input_layer]
        self.matrix_bytes = sum(each.weight.nbytes for each in products if each is not None)

    def cos_sin(self, max_tokens: int) -> list[Tensor]:
        return [self._rotary.cos_sin(max_tokens)]

    def fuse(self, hidden: Tensor) -> Tensor:
        """Return the head's input states [T, hidden], made from the target's [T, layers, H]."""
        eps = self.head.eps
        if self.head.kind == "eagle":
            assert self._norms is not None
            return norm_rows(hidden[:, 0], self._norms, eps)
        read = hidden.flatten(1)
        if self._norms is not None and self.head.input_norm:
            read = norm_rows(read, self._norms, eps)
        elif self._norms is not None:
            layers = enumerate(self._norms)
            read = torch.cat([norm_rows(hidden[:, i], norm, eps) for i, norm in layers], dim=1)
        fused: Tensor = self._fc(read)  # type: ignore[misc]
        return fused

    def forward(
        self,
        flat: FlatTokens,
        states: Tensor,
        attention: PagedAttention,
        cos_sin: list[Tensor],
        hidden: Hidden,
    ) -> None:
        """Compute as `Decoder.forward` does, from tokens and the states [T, hidden] before them."""
        count = len(flat.tokens)
        fused, stream = self.project(flat, states, attention, cos_sin)
        residual, last = hidden.residual[:count], hidden.last[:count]
        residual.copy_(stream)
        self._layer.finish(fused, stream, residual, LayerPass(flat, attention, cos_sin), last)

    def project(
        self, flat: FlatTokens, states: Tensor, attention: PagedAttention, cos_sin: list[Tensor]
    ) -> tuple[Tensor, Tensor]:
        """Write K and V of tokens, each with the state [T, hidden] before it. Return the
        projections and the residual stream."""
        embedded = F.embedding(flat.tokens, self._embedding)
        if self._input_layer is not None:
            x = residual = self._input_layer(torch.cat((embedded, states), dim=1))
        else:
            state = self._state_norm(states)
            x = torch.cat((self._token_norm(embedded), state), dim=1)
            residual = state if self.head.normed_residual else states
        return self._layer.mixer.project(x, LayerPass(flat, attention, cos_sin)), residual

    def carried(self, hidden: Hidden, count: int) -> Tensor:
        """Return the states [count, hidden] from which the next drafts continue."""
        residual, last = hidden.residual[:count], hidden.last[:count]
        if self.head.norm_output:
            return self._lm_head.norm(last, residual.clone())
        return (residual + last).to(self.dtype)

    def logits(self, hidden: Hidden, rows: Tensor, out: Tensor) -> None:
        """Write logits, as `Decoder.logits` does."""
        residual = hidden.residual.index_select(0, rows)
        x = hidden.last.index_select(0, rows)
        if self._lm_head.norm is None:
            x = (residual + x).to(self.dtype)
        else:
            x = self._lm_head.norm(x, residual)
        self._put(self._lm_head, x, out)

    def _write_first(self, batch: RaggedBatch, kv: KVCache, states: Tensor, out: Tensor) -> None:
        flat, attention = lay_out(self, batch, kv, first_key=FIRST_KEY)
        hidden = Hidden.allocate(len(states), self)
        self.forward(flat, states, attention, self.cos_sin(len(states)), hidden)
        self.logits(hidden, torch.arange(len(states), device=self.device), out)


class GpuMedusaHead(GpuHead):
    """Medusa heads with the equations of `cbatch.runtime.cpu.drafters.medusa_head.MedusaHead`."""

    def __init__(
        self, head: HeadConfig, weights: HeadWeights, target: Decoder, target_head: Tensor
    ) -> None:
        vocabulary = medusa_vocabulary(head, weights)
        super().__init__(head, target, vocabulary)
        self._norm = target.final_norm
        with torch.inference_mode():
            own = _MedusaProducts(head, weights, target, target.numerics)
            self._blocks = [own.blocks(i) for i in range(head.num_heads)]
            self._heads: list[Any] = own.heads(vocabulary, target_head)
        products = [*self._heads, *(linear for each in self._blocks for linear in each)]
        self.matrix_bytes = sum(each.weight.nbytes for each in products)

    def fuse(self, hidden: Tensor) -> Tensor:
        return norm_rows(hidden[:, 0], self._norm, self.head.eps)

    def logits(self, number: int, states: Tensor, out: Tensor) -> None:
        """Write the logits of head `number` for states [N, hidden] to `out` [N, vocab]."""
        for linear in self._blocks[number]:
            states = states + F.silu(linear(states))
        self._put(self._heads[number % len(self._heads)], states, out)

    def _write_first(self, batch: RaggedBatch, kv: KVCache, states: Tensor, out: Tensor) -> None:
        self.logits(0, states, out)


CLASSES = {"eagle3": GpuEagleHead, "eagle": GpuEagleHead, "medusa": GpuMedusaHead}
