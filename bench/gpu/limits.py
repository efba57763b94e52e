"""What is measured, and how fast it could be: bytes that must move and products that must be made,
each counted once, over what the device was measured to do. Pure arithmetic.

Names of workloads follow vLLM's grammar of batches: `2q2k_32q1s4k` is 2 prefills of 2048 tokens and
32 decodes over 4096."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import NamedTuple

from msgspec.structs import replace

from sim.cost.roofline import ModelShape, load_shape

_PART = re.compile(r"(\d*)q(\d+)(k?)(?:s(\d+)(k?))?")


class Query(NamedTuple):
    """`query_tokens` new tokens, the last at position `context_tokens` - 1."""

    query_tokens: int
    context_tokens: int


class GridHeads(NamedTuple):
    """Attention heads; the fields of `triton_kernels.attention.Heads`."""

    kv_heads: int
    group: int
    head_dim: int


def heads_of(shape: ModelShape) -> GridHeads:
    kv_heads = shape.num_key_value_heads
    return GridHeads(kv_heads, shape.num_attention_heads // kv_heads, shape.head_size)


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

LLAMA_8B_HEADS = GridHeads(kv_heads=8, group=4, head_dim=128)
HEADS = {
    "llama-8b": LLAMA_8B_HEADS,
    "llama-1b": GridHeads(kv_heads=8, group=4, head_dim=64),
    "qwen3-0.6b": GridHeads(kv_heads=8, group=2, head_dim=128),
    "qwen2-7b": GridHeads(kv_heads=4, group=7, head_dim=128),
}
TINY_HEADS = GridHeads(kv_heads=1, group=2, head_dim=16)

MODELS = {name: load_shape(name) for name in ("llama-3.1-8b", "llama-3.2-1b")}
MODELS["qwen3-0.6b"] = ModelShape(
    hidden_size=1024,
    intermediate_size=3072,
    num_hidden_layers=28,
    num_attention_heads=16,
    num_key_value_heads=8,
    head_dim=128,
    vocab_size=151_936,
    tie_word_embeddings=True,
)
# Drafts have two layers of the target's own width, as trained draft heads do.
DRAFTS = {name: replace(shape, num_hidden_layers=2) for name, shape in MODELS.items()}
BATCHES = (64, 8, 256, 1)
VOCAB = 151_936


class Ceilings(NamedTuple):
    """Measured in the same run as whatever is held against them."""

    copy_bytes_per_s: float  # read and written bytes of a large device-to-device copy
    matmul_flop_per_s: float  # of an 8192^3 product in bf16


class Cost(NamedTuple):
    """`num_bytes` of device memory traffic and `flop` on matrix units, both at the least."""

    num_bytes: int
    flop: int = 0

    def limit_s(self, ceilings: Ceilings) -> float:
        """The longer of the two times; no version runs much faster."""
        return max(
            self.num_bytes / ceilings.copy_bytes_per_s, self.flop / ceilings.matmul_flop_per_s
        )

    def bound(self, ceilings: Ceilings) -> str:
        memory_s = self.num_bytes / ceilings.copy_bytes_per_s
        return "memory" if memory_s >= self.flop / ceilings.matmul_flop_per_s else "matmul"

    def plus(self, other: Cost) -> Cost:
        return Cost(self.num_bytes + other.num_bytes, self.flop + other.flop)


def attention_cost(
    queries: Sequence[Query], shape: GridHeads, *, element_bytes: int = 2, kv_bytes: int = 2
) -> Cost:
    """K and V of every context once, queries read and results written; causal products only."""
    contexts = sum(q.context_tokens for q in queries)
    tokens = sum(q.query_tokens for q in queries)
    heads = shape.kv_heads * shape.group
    kv = contexts * shape.kv_heads * shape.head_dim * 2 * kv_bytes
    return Cost(
        kv + 2 * tokens * heads * shape.head_dim * element_bytes,
        4 * shape.head_dim * heads * visible_pairs(queries),
    )


def visible_pairs(queries: Sequence[Query]) -> int:
    """(token, key) pairs that a causal mask leaves."""
    return sum(
        q.query_tokens * (q.context_tokens - q.query_tokens)
        + q.query_tokens * (q.query_tokens + 1) // 2
        for q in queries
    )


def kv_write_cost(tokens: int, shape: GridHeads, *, element_bytes: int = 2) -> Cost:
    """Queries, K and V of the fused projection, read and written."""
    roles = shape.kv_heads * (shape.group + 2)
    return Cost(2 * tokens * roles * shape.head_dim * element_bytes)


def rms_norm_cost(tokens: int, width: int, *, adds: bool, element_bytes: int = 2) -> Cost:
    """x read, y written; with an addition the residual too."""
    return Cost((4 if adds else 2) * tokens * width * element_bytes)


def silu_mul_cost(tokens: int, width: int, *, element_bytes: int = 2) -> Cost:
    return Cost(3 * tokens * width * element_bytes)


def product_cost(tokens: int, outs: int, columns: int, *, element_bytes: int = 2) -> Cost:
    """The weight read once, rows read and written."""
    num_bytes = (outs * columns + tokens * (outs + columns)) * element_bytes
    return Cost(num_bytes, 2 * tokens * outs * columns)


def sampling_cost(target_rows: int, draft_rows: int, vocab: int, *, element_bytes: int = 2) -> Cost:
    """One read of the target's logits, and of the draft's where drafts were drawn from a law."""
    return Cost((target_rows + draft_rows) * vocab * element_bytes)


def step_cost(
    queries: Sequence[Query], shape: ModelShape, *, logits_rows: int, element_bytes: int = 2
) -> Cost:
    """A forward pass: the weights once (of the embedding only some rows are looked up), K and V of
    every context in every layer, and the products of both. The head multiplies only the rows whose
    logits are wanted."""
    tokens = sum(q.query_tokens for q in queries)
    inner, head, layers = shape.layer_weights, shape.head_weights, shape.num_hidden_layers
    attention = attention_cost(queries, heads_of(shape), element_bytes=0, kv_bytes=element_bytes)
    return Cost(
        (inner + head) * element_bytes + layers * attention.num_bytes,
        2 * inner * tokens + 2 * head * logits_rows + layers * attention.flop,
    )
