"""What a head in training borrows of its target, frozen: embedding, last norm, rows of the head."""

from __future__ import annotations

from pathlib import Path
from typing import NamedTuple

import torch.nn.functional as F
from torch import Tensor

from cbatch.runtime.model.checkpoint import open_checkpoint
from cbatch.runtime.model.config import ModelConfig


class TargetParts(NamedTuple):
    config: ModelConfig
    embedding: Tensor  # bf16 [vocab, hidden], as all of these
    norm: Tensor  # [hidden]
    head: Tensor  # [vocab, hidden]

    @classmethod
    def of(cls, model: str | Path) -> TargetParts:
        config, weights, _ = open_checkpoint(model)
        shape = config.vocab_size, config.hidden_size
        embedding = weights.get("model.embed_tokens.weight", shape).bfloat16()
        head = embedding
        if not config.tie_embeddings:
            head = weights.get("lm_head.weight", shape).bfloat16()
        norm = weights.get("model.norm.weight", (config.hidden_size,)).bfloat16()
        return cls(config, embedding, norm, head)

    def normed(self, states: Tensor) -> Tensor:
        """What the model's head takes, of what its last layer makes."""
        return rms_norm(states.float(), self.norm.float(), self.config.rms_norm_eps)


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    return F.rms_norm(x, (x.shape[-1],), weight, eps)
