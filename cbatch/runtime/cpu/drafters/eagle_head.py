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
from cbatch.runtime.cpu.compiled_pass import CompiledDecoder, StateReading
from cbatch.runtime.cpu.decoder import Model
from cbatch.runtime.cpu.drafters.compiled_head import CompiledHead, StateFusing
from cbatch.runtime.cpu.drafters.rounded import RoundedProducts
from cbatch.runtime.cpu.linear import Linear
from cbatch.runtime.drafting.heads.eagle import EagleTensors, eagle_vocabulary
from cbatch.runtime.drafting.heads.head import Head
from cbatch.runtime.kv_cache import KVCache
from cbatch.runtime.model.config import ModelError
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
        c, tensors = head.layer, _Tensors(head, weights, target)
        self.vocabulary = eagle_vocabulary(head, weights)
        norms, fc = tensors.read_norms(target), tensors.state_fusing_layer(target)
        layer, input_layer = tensors.layer(), tensors.input_layer()
        reading = StateReading(input_layer, None, None, None, plain_in=True, plain_out=True)
        if input_layer is None:
            norms_of_pair = tensors.pair_norms()
            reading = StateReading(
                input_layer=None,
                only_kv=tensors.projected("kv"),
                token_norm=norms_of_pair[0],
                state_norm=norms_of_pair[1],
                normed_residual=head.normed_residual,
            )
        lm_head = tensors.lm_head(self.vocabulary, target_head)
        embedding = tensors.embedding(target)
        products = [p for p in (*layer.products(), lm_head, fc, *reading[:2]) if p]
        if any(linear.compiled is None for linear in products):
            raise ModelError("draft: heads need the project's kernels: install a C compiler (gcc)")
        self._decoder = CompiledDecoder(c, embedding, [layer], lm_head, reading)
        size = (c.hidden_size,)
        self._norm = weights.get("norm.weight", size).float() if head.norm_output else None
        self.matrix_bytes = sum(p.compiled.num_bytes for p in products if p.compiled is not None)
        width = target.config.hidden_size
        self.compiled = CompiledHead(
            self._decoder,
            StateFusing(len(head.hidden_layers), width, fc, norms, head.input_norm),
            self.vocabulary,
            carries_normed=head.norm_output,
            carry_norm=self._norm,
        )

    def fuse(self, hidden: Tensor) -> Tensor:
        return self.compiled.fuse(hidden)

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
        logits = self._decoder.run(
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
