"""An EAGLE head: one transformer layer over a ragged batch, with a paged KV cache of its own.

The head's input at a position is the token there and the hidden state of the previous position.
That state is the target's, or for later drafts the head's own. So K and V of a position depend only
on the tokens up to it, and prefix blocks can be shared as with any model. Position 0 has no
previous state; no query attends to it.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from cbatch.runtime.batch import RaggedBatch
from cbatch.runtime.cpu.compiled_pass import CompiledDecoder
from cbatch.runtime.cpu.decoder import Model
from cbatch.runtime.cpu.drafters.rounded import RoundedProducts
from cbatch.runtime.cpu.linear import Linear
from cbatch.runtime.cpu.torch_pass import TorchPass
from cbatch.runtime.drafting.heads.eagle import EagleTensors, eagle_vocabulary
from cbatch.runtime.drafting.heads.head import Head
from cbatch.runtime.kv_cache import KVCache
from cbatch.runtime.layers import PairWeights
from cbatch.runtime.model.head_config import HeadConfig
from cbatch.runtime.model.head_weights import HeadWeights


class _Tensors(RoundedProducts, EagleTensors[Linear]):
    pass


class EagleHead(Head):
    """An EAGLE head; it may share weights with the target. The ids of `vocabulary` ascend."""

    def __init__(
        self, head: HeadConfig, weights: HeadWeights, target: Model, target_head: Tensor
    ) -> None:
        """`target_head` [vocab, hidden]: the target's output matrix, for a head without its own."""
        super().__init__(head, target)
        with torch.inference_mode():
            self._build(head, weights, target, target_head)

    def _build(
        self, head: HeadConfig, weights: HeadWeights, target: Model, target_head: Tensor
    ) -> None:
        tensors = _Tensors(head, weights, target)
        self.vocabulary = eagle_vocabulary(head, weights)
        self._norms, self._fc = tensors.read_norms(target), tensors.state_fusing_layer(target)
        layer, input_layer = tensors.layer(), tensors.input_layer()
        only_kv = tensors.projected("kv") if input_layer is None else None
        pair = PairWeights(input_layer, only_kv, *tensors.pair_norms())
        lm_head = tensors.lm_head(self.vocabulary, target_head)
        run_layers = CompiledDecoder if tensors.compiled else TorchPass
        parts = self.config, tensors.embedding(target), [layer], lm_head
        self._pass: CompiledDecoder | TorchPass = run_layers(*parts, pair=pair)
        self._norm = tensors.final_norm() if head.norm_output else None
        products = *layer.products(), lm_head, self._fc, input_layer, only_kv
        self.matrix_bytes = sum(each.num_bytes for each in products if each is not None)

    def fuse(self, hidden: Tensor) -> Tensor:
        states = hidden.flatten(1) if self.head.input_norm else hidden
        if self._norms is not None:
            states = F.rms_norm(states, states.shape[-1:], eps=self.head.eps) * self._norms
        states = states.flatten(1)
        return states if self._fc is None else self._fc(states.contiguous())

    def first_logits(self, batch: RaggedBatch, kv: KVCache, hidden: Tensor) -> Tensor:
        return self.forward(batch, kv, self.fuse(hidden).roll(1, 0))[0]

    def forward(self, batch: RaggedBatch, kv: KVCache, states: Tensor) -> tuple[Tensor, Tensor]:
        """Return the logits [N, vocab] of the rows `batch.logits_index`, -inf for tokens that the
        head cannot draft, and the states [N, hidden] that the next drafts continue from."""
        logits, states_out = self.choices(batch, kv, states)
        return self.over_vocabulary(logits), states_out

    def choices(self, batch: RaggedBatch, kv: KVCache, states: Tensor) -> tuple[Tensor, Tensor]:
        """Return the same as `forward`, but logits [N, ids] only of the ids in `vocabulary`."""
        size = (self.config.hidden_size,)
        states_out = torch.empty(len(batch.logits_index), 1, *size)
        logits = self._pass.run(
            batch.tokens,
            batch.query_lens,
            batch.context_lens,
            batch.block_tables,
            batch.logits_index,
            kv,
            None,
            states=states.contiguous(),
            hidden=states_out,
        )
        states_out = states_out[:, 0]
        if self.head.norm_output:
            states_out = F.rms_norm(states_out, size, self._norm, self.head.eps)
        return logits, states_out
