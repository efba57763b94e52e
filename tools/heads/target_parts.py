"""The frozen parts of the target that a head in training uses: embedding, last norm, LM head."""

from __future__ import annotations

from pathlib import Path
from typing import NamedTuple

import torch.nn.functional as F
from torch import Tensor

from cbatch.runtime.model.checkpoint import open_checkpoint
from cbatch.runtime.model.config import ModelConfig


class TargetParts(NamedTuple):
    config: ModelConfig
    embedding: Tensor  # bf16 [vocab, hidden]
    norm: Tensor  # bf16 [hidden]
    head: Tensor  # bf16 [vocab, hidden]

    @classmethod
    def of(cls, model: str | Path) -> TargetParts:
        checkpoint = open_checkpoint(model)
        config, weights, _ = checkpoint
        embedding = weights.get(
            "model.embed_tokens.weight", (config.vocab_size, config.hidden_size)
        )
        norm = weights.get("model.norm.weight", (config.hidden_size,))
        return cls(config, embedding.bfloat16(), norm.bfloat16(), checkpoint.head().bfloat16())

    def normed(self, states: Tensor) -> Tensor:
        """Return the input of the target's LM head, from the output of its last layer."""
        eps = self.config.rms_norm_eps
        return F.rms_norm(states.float(), self.norm.shape, self.norm.float(), eps)
