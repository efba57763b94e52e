"""Batched generation with the training net, for distillation data and for evaluation."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from cbatch.demo.nets import KVCache, Llama


def left_pad(prompts: Sequence[Sequence[int]], device: torch.device) -> tuple[Tensor, Tensor]:
    """Prompts as ids [batch, longest] with zeros in front, and the count of zeros per row."""
    longest = max(len(prompt) for prompt in prompts)
    pad = torch.tensor([longest - len(prompt) for prompt in prompts], device=device)
    rows = [[0] * (longest - len(prompt)) + list(prompt) for prompt in prompts]
    return torch.tensor(rows, device=device), pad


@torch.inference_mode()
def generate(net: Llama, prompts: Sequence[Sequence[int]], new_tokens: int,
             temperature: float = 0.0, seed: int = 0) -> list[list[int]]:
    """Continue every prompt by `new_tokens` tokens (no stop at the end token); greedy at 0."""
    device = net.model.embed_tokens.weight.device
    generator = torch.Generator(device=device).manual_seed(seed)
    ids, pad = left_pad(prompts, device)
    cache = KVCache(net.config, pad, ids.shape[1] + new_tokens)
    logits = net(ids, cache)[:, -1]
    new: list[Tensor] = []
    for index in range(new_tokens):
        if temperature > 0:
            chances = torch.softmax(logits / temperature, dim=-1)
            tokens = torch.multinomial(chances, 1, generator=generator)
        else:
            tokens = logits.argmax(-1, keepdim=True)
        new.append(tokens)
        if index + 1 < new_tokens:
            logits = net(tokens, cache)[:, -1]
    return torch.cat(new, dim=1).tolist()


def cut_at(tokens: Sequence[int], end: int) -> list[int]:
    """The tokens before the first `end`."""
    tokens = list(tokens)
    return tokens[: tokens.index(end)] if end in tokens else tokens
