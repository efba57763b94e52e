"""How fast a kernel could be: bytes that must move and products that must be made, each counted
once, over what the device was measured to do. Pure arithmetic."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from bench.gpu.grid import ModelShape, Query, Shape

FP32_BYTES = 4
TOKEN_BYTES = 4


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
    queries: Sequence[Query], shape: Shape, *, element_bytes: int = 2, kv_bytes: int = 2
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


def kv_write_cost(tokens: int, shape: Shape, *, element_bytes: int = 2) -> Cost:
    """Queries, K and V of the fused projection, read and written."""
    roles = shape.kv_heads * (shape.group + 2)
    return Cost(2 * tokens * roles * shape.head_dim * element_bytes)


def rms_norm_cost(tokens: int, width: int, *, adds: bool, element_bytes: int = 2) -> Cost:
    """x read, y written; with an addition the residual too."""
    return Cost((4 if adds else 2) * tokens * width * element_bytes)


def silu_mul_cost(tokens: int, width: int, *, element_bytes: int = 2) -> Cost:
    return Cost(3 * tokens * width * element_bytes)


def sampling_cost(target_rows: int, draft_rows: int, vocab: int, *, element_bytes: int = 2) -> Cost:
    """One read of the target's logits, and of the draft's where drafts were drawn from a law."""
    return Cost((target_rows + draft_rows) * vocab * element_bytes)


def model_weights(shape: ModelShape) -> int:
    """Elements that a step multiplies with: all but the rows of the embedding that it looks up."""
    heads = shape.heads
    attention = shape.hidden * (heads.group + 2) * heads.kv_heads * heads.head_dim
    attention += heads.group * heads.kv_heads * heads.head_dim * shape.hidden
    return (
        shape.layers * (attention + 3 * shape.hidden * shape.intermediate)
        + shape.vocab * shape.hidden
    )


def step_cost(
    queries: Sequence[Query], shape: ModelShape, *, logits_rows: int, element_bytes: int = 2
) -> Cost:
    """A forward pass: the weights once, K and V of every context in every layer, and the products
    of both. The head multiplies only the rows whose logits are wanted."""
    tokens = sum(q.query_tokens for q in queries)
    weights, head = model_weights(shape), shape.vocab * shape.hidden
    attention = attention_cost(queries, shape.heads, element_bytes=0, kv_bytes=element_bytes)
    return Cost(
        weights * element_bytes + shape.layers * attention.num_bytes,
        2 * (weights - head) * tokens + 2 * head * logits_rows + shape.layers * attention.flop,
    )


def fraction(cost: Cost, ceilings: Ceilings, seconds: float) -> float:
    """Of the limit that was reached: 1 is as fast as the device can be."""
    return cost.limit_s(ceilings) / seconds
