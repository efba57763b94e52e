"""Batched generation with the training net, for distillation data and for evaluation."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

from tools.demo_pair.nets import Llama, PaddedKVCache


def left_pad(prompts: Sequence[Sequence[int]], device: torch.device) -> tuple[Tensor, Tensor]:
    """Return prompts as ids [batch, longest], left-padded with zeros, and the zeros per row."""
    longest = max(len(prompt) for prompt in prompts)
    pad = torch.tensor([longest - len(prompt) for prompt in prompts], device=device)
    rows = [[0] * (longest - len(prompt)) + list(prompt) for prompt in prompts]
    return torch.tensor(rows, device=device), pad


@torch.inference_mode()
def decode(
    net: Llama, ids: Tensor, pad: Tensor, new_tokens: int, temperature: float, seed: int
) -> Iterator[tuple[Tensor, Tensor]]:
    """Yield (logits [batch, input length, vocab], chosen [batch, 1]) per pass; greedy at
    temperature 0.

    The first pass reads the prompts, each later one the token chosen before it.
    """
    generator = torch.Generator(device=ids.device).manual_seed(seed)
    cache = PaddedKVCache(net.config, pad, ids.shape[1] + new_tokens)
    input_ids = ids
    for _ in range(new_tokens):
        logits = net(input_ids, cache)
        if temperature > 0:
            probs = torch.softmax(logits[:, -1] / temperature, dim=-1)
            input_ids = torch.multinomial(probs, 1, generator=generator)
        else:
            input_ids = logits[:, -1].argmax(-1, keepdim=True)
        yield logits, input_ids


def generate(
    net: Llama,
    prompts: Sequence[Sequence[int]],
    new_tokens: int,
    temperature: float = 0.0,
    seed: int = 0,
) -> list[list[int]]:
    """Continue every prompt by `new_tokens` tokens; the end token does not stop a row."""
    ids, pad = left_pad(prompts, net.model.embed_tokens.weight.device)
    steps = decode(net, ids, pad, new_tokens, temperature, seed)
    return torch.cat([chosen for _, chosen in steps], dim=1).tolist()


def cut_at(tokens: Sequence[int], end: int) -> list[int]:
    """Return the tokens before the first `end`."""
    tokens = list(tokens)
    return tokens[: tokens.index(end)] if end in tokens else tokens
