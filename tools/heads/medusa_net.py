"""Medusa heads in training (Cai et al. 2024, arXiv 2401.10774, Medusa-1): blocks between the frozen
target's last hidden state and its LM head."""

from __future__ import annotations

import torch.nn.functional as F
from torch import Tensor, nn

from tools.heads.target_parts import TargetParts


class _Block(nn.Module):
    def __init__(self, size: int, count: int) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(size, size) for _ in range(count))

    def forward(self, z: Tensor) -> Tensor:
        for linear in self.layers:
            z = z + F.silu(linear(z))
        return z


class MedusaNet(nn.Module):
    """The net, with parameters named like vLLM's tensors. It drafts ids of `draft_ids`, which
    ascend."""

    is_sequential = False
    slow_weights = ()

    def __init__(
        self, parts: TargetParts, draft_ids: Tensor, *, heads: int, num_blocks: int = 1
    ) -> None:
        super().__init__()
        self.parts, self.draft_ids, self.num_blocks = parts, draft_ids, num_blocks
        self.head_rows = parts.head[draft_ids]
        size = parts.config.hidden_size
        self.blocks = nn.ModuleList(_Block(size, num_blocks) for _ in range(heads))
        for weight in self.parameters():
            nn.init.zeros_(weight)  # each head starts with the target's own prediction

    def draft(self, tokens: Tensor, states: Tensor, steps: int) -> list[Tensor]:
        """Return logits [B, L - 1, draft ids] of each head j: at t for the token t + 2 + j, from
        the state at t. tokens [B, L], states [B, L - 1, layers, hidden], of which the last layer is
        read."""
        return [self.logits(state) for state in self.output_states(tokens, states, steps)]

    def output_states(self, tokens: Tensor, states: Tensor, steps: int) -> list[Tensor]:
        """Return the hidden states from which the logits follow, [B, L - 1, hidden] for each
        head."""
        last = self.parts.normed(states[:, :, -1])
        return [block(last) for block in self.blocks[:steps]]

    def logits(self, state: Tensor) -> Tensor:
        return F.linear(state.float(), self.head_rows.float())
