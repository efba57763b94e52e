"""What is measured: ragged workloads, shapes of heads, shapes of models. Names follow vLLM's
grammar of batches: `2q2k_32q1s4k` is 2 prefills of 2048 tokens and 32 decodes over 4096."""

from __future__ import annotations

import re
from typing import NamedTuple

_PART = re.compile(r"(\d*)q(\d+)(k?)(?:s(\d+)(k?))?")


class Query(NamedTuple):
    """`query_tokens` new tokens, the last at position `context_tokens` - 1."""

    query_tokens: int
    context_tokens: int


class Shape(NamedTuple):
    """Attention heads; the fields of `triton_kernels.attention.Heads`."""

    kv_heads: int
    group: int
    head_dim: int


class ModelShape(NamedTuple):
    layers: int
    hidden: int
    intermediate: int
    heads: Shape
    vocab: int
    family: str  # "llama" or "qwen3"
    tied: bool  # the head is the embedding


def workload(name: str) -> list[Query]:
    """The sequences of a batch: parts joined by `_`, each `[count]q<tokens>[k][s<context>[k]]`.

    Without `s` the context is the query. Raises ValueError for anything else."""
    queries = []
    for part in name.split("_"):
        found = _PART.fullmatch(part)
        if found is None:
            raise ValueError(f"workload: {part!r} is not [count]q<tokens>[k][s<context>[k]]")
        count, query, query_k, context, context_k = found.groups()
        tokens = int(query) << (10 if query_k else 0)
        seen = tokens if context is None else int(context) << (10 if context_k else 0)
        if not 0 < tokens <= seen:
            raise ValueError(f"workload: {part!r} has a query longer than its context, or none")
        queries += [Query(tokens, seen)] * int(count or 1)
    return queries


DECODE, VERIFY = "64q1s4k", "64q8s4k"
FEW_LONG, CHUNK = "q8s32k", "q2k"
# The lengths of ThunderMLA's benchmark, 4 new tokens each.
UNEVEN = "q4s4641_q4s45118_q4s1730_q4s1696"
RAGGED = "_".join(f"8q{1 + k}s4k" for k in range(8))
MIXED = "2q2k_32q1s4k"
# The most telling first: what a budget cuts off is the tail.
ATTENTION = (
    DECODE, VERIFY, CHUNK, FEW_LONG, MIXED, RAGGED, UNEVEN, "q2ks8k",
    "16q4s8k", "8q1s4k", "q1s1k", "q1s4k", "q1s16k", "q1s64k", "q1s128k", "64q1s256", "256q1s1k",
)  # fmt: skip
TINY = ("3q1s20", "q5_2q1s33")  # where kernels are interpreted

LLAMA_8B_HEADS = Shape(kv_heads=8, group=4, head_dim=128)
HEADS = {
    "llama-8b": LLAMA_8B_HEADS,
    "llama-1b": Shape(kv_heads=8, group=4, head_dim=64),
    "qwen3-0.6b": Shape(kv_heads=8, group=2, head_dim=128),
    "qwen2-7b": Shape(kv_heads=4, group=7, head_dim=128),
}
TINY_HEADS = Shape(kv_heads=1, group=2, head_dim=16)

MODELS = {
    "llama-3.1-8b": ModelShape(32, 4096, 14336, LLAMA_8B_HEADS, 128_256, "llama", False),
    "llama-3.2-1b": ModelShape(16, 2048, 8192, HEADS["llama-1b"], 128_256, "llama", True),
    "qwen3-0.6b": ModelShape(28, 1024, 3072, HEADS["qwen3-0.6b"], 151_936, "qwen3", True),
}
# Drafts have two layers of the target's own width, as trained draft heads do.
DRAFTS = {name: shape._replace(layers=2) for name, shape in MODELS.items()}
TINY_MODEL = ModelShape(2, 32, 64, TINY_HEADS, 128, "llama", True)
BATCHES = (64, 8, 256, 1)
VOCAB = 151_936
