"""Matrices of a decoder in blocks of 4 and 8 bits, in the format of GGUF files."""

from __future__ import annotations

import torch

from cbatch.runtime.model.config import ModelConfig
from cbatch.runtime.model.gguf_file import TYPES, GgufTensor

KINDS = {each.name: each for each in TYPES.values()}


def stored(kind: str, out: int, columns: int, seed: int = 0) -> GgufTensor:
    """Return a stored matrix of random values with small scales."""
    generator = torch.Generator().manual_seed(seed)
    size, count = KINDS[kind].bytes, columns // 32
    raw = torch.randint(0, 256, (out, count, size), generator=generator).to(torch.uint8)
    if kind == "MXFP4":
        raw[..., 0] = torch.randint(117, 123, (out, count), generator=generator)
        return GgufTensor(kind, KINDS[kind], (out, columns), raw.flatten().numpy())
    heads = 2 if kind == "Q4_1" else 1
    halves = (torch.rand(out, count, heads, generator=generator) * 0.02 + 0.002).half()
    raw[..., : 2 * heads] = halves.view(torch.uint8).view(out, count, -1)
    return GgufTensor(kind, KINDS[kind], (out, columns), raw.flatten().numpy())


def stored_matrix(config: ModelConfig, name: str) -> GgufTensor | None:
    """Return a matrix of a layer in a type that a GPU multiplies with directly, or None for other
    tensors.

    Queries have a type with offsets; keys and values of the same layer have one without.
    """
    if not name.endswith("proj.weight"):
        return None
    c, m, place = config, config.attention, name.split(".")[-2]
    width = m.heads * m.key_dim
    sizes = {"q_proj": (width, c.hidden_size), "o_proj": (c.hidden_size, width)}
    sizes |= dict.fromkeys(("k_proj", "v_proj"), (m.kv_heads * m.key_dim, c.hidden_size))
    sizes |= dict.fromkeys(("gate_proj", "up_proj"), (c.widest_inner, c.hidden_size))
    sizes["down_proj"] = (c.hidden_size, c.widest_inner)
    kind = {"q_proj": "Q4_1", "o_proj": "Q8_0"}.get(place, "Q4_0")
    return stored(kind, *sizes[place], seed=len(name) + ord(place[0]))
