"""Workloads of the measurements, and lower limits of their time: the bytes that must move and the
arithmetic, each counted once, divided by the device's measured rates.

Names of workloads follow vLLM's batch grammar: `2q2k_32q1s4k` is 2 prefills of 2048 tokens and 32
decodes over 4096."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any, NamedTuple

from msgspec import to_builtins

from sim.cost.shapes import ModelShape, load_shape
from triton_kernels.attention import Heads

_PART = re.compile(r"(\d*)q(\d+)(k?)(?:s(\d+)(k?))?")


class Query(NamedTuple):
    """A query of `query_tokens` new tokens, the last at position `context_tokens` - 1."""

    query_tokens: int
    context_tokens: int


def heads_of(shape: ModelShape) -> Heads:
    kv_heads = shape.num_key_value_heads
    return Heads(kv_heads, shape.num_attention_heads // kv_heads, shape.head_size)


def workload(name: str) -> list[Query]:
    """Return the sequences of a batch. Its name consists of parts joined by `_`, each
    `[count]q<tokens>[k][s<context>[k]]`. Without `s` the context is the query itself."""
    queries = []
    for part in name.split("_"):
        match = _PART.fullmatch(part)
        if match is None:
            raise ValueError(f"workload: {part!r} is not [count]q<tokens>[k][s<context>[k]]")
        count, query, query_k, context, context_k = match.groups()
        tokens = int(query) << (10 if query_k else 0)
        context_tokens = tokens if context is None else int(context) << (10 if context_k else 0)
        if not 0 < tokens <= context_tokens:
            raise ValueError(f"workload: {part!r} has a query longer than its context, or none")
        queries += [Query(tokens, context_tokens)] * int(count or 1)
    return queries


DECODE, VERIFY = "64q1s4k", "64q8s4k"
FEW_LONG, CHUNK = "q8s32k", "q2k"
# The context lengths of ThunderMLA's benchmark, with 4 new tokens each.
UNEVEN = "q4s4641_q4s45118_q4s1730_q4s1696"
RAGGED = "_".join(f"8q{1 + k}s4k" for k in range(8))
MIXED = "2q2k_32q1s4k"
# The most informative workloads first: a time limit cuts off the last ones.
ATTENTION = (
    DECODE, VERIFY, CHUNK, FEW_LONG, MIXED, RAGGED, UNEVEN, "q2ks8k",
    "16q4s8k", "8q1s4k", "q1s1k", "q1s4k", "q1s16k", "q1s64k", "q1s128k", "64q1s256", "256q1s1k",
)  # fmt: skip

LLAMA_8B_HEADS = Heads(kv_heads=8, group=4, head_dim=128)
HEADS = {"llama-8b": LLAMA_8B_HEADS, "llama-1b": LLAMA_8B_HEADS._replace(head_dim=64)}

MODELS = {name: load_shape(name) for name in ("llama-3.1-8b", "llama-3.2-1b")}
MODEL, SMALLER = MODELS  # the first measured model, and one for the remaining time
BATCHES = (64, 8, 1, 128)
PROMPT_TOKENS = 512
# Standard deviation of logits from random weights: a nucleus of top_p holds 1 to some 300 tokens.
LOGIT_STD = 4.0
SAMPLING = {"greedy": {"temperature": 0.0}, "top_p": {"temperature": 0.8, "top_p": 0.9}}
VOCAB = 128_256


def config_of(shape: ModelShape) -> dict[str, Any]:
    """Return the fields of a config.json."""
    return to_builtins(shape) | {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "head_dim": shape.head_size,
        "max_position_embeddings": 8192,
        "rms_norm_eps": 1e-5,
        "rope_theta": 500000.0,
        "hidden_act": "silu",
        "torch_dtype": "bfloat16",
        "bos_token_id": 1,
        "eos_token_id": shape.vocab_size - 1,
    }


class Ceilings(NamedTuple):
    """Peak rates, measured in the same run as the figures that are compared with them."""

    read_bytes_per_s: float
    matmul_flop_per_s: float  # of an 8192^3 product in bf16


class Cost(NamedTuple):
    """Lower bounds: `num_bytes` of device memory traffic, and `flop` on matrix units."""

    num_bytes: int
    flop: int = 0

    def limit_s(self, ceilings: Ceilings) -> float:
        """Return the longer of the two times, with all bytes at the read rate. No kernel is
        faster."""
        return max(
            self.num_bytes / ceilings.read_bytes_per_s, self.flop / ceilings.matmul_flop_per_s
        )

    def bound(self, ceilings: Ceilings) -> str:
        memory_s = self.num_bytes / ceilings.read_bytes_per_s
        return "memory" if memory_s >= self.flop / ceilings.matmul_flop_per_s else "matmul"


def attention_cost(queries: Sequence[Query], heads: Heads, element_bytes: int = 2) -> Cost:
    """Return the cost of reading K and V in bf16, of reading queries and writing results of
    `element_bytes`, each once, and of the products under a causal mask."""
    contexts = sum(q.context_tokens for q in queries)
    tokens = sum(q.query_tokens for q in queries)
    width = heads.kv_heads * heads.head_dim
    num_bytes = 4 * contexts * width + 2 * element_bytes * tokens * width * heads.group
    return Cost(num_bytes, 4 * width * heads.group * visible_pairs(queries))


def visible_pairs(queries: Sequence[Query]) -> int:
    """Return the number of (token, key) pairs under a causal mask."""
    return sum(
        q.query_tokens * (q.context_tokens - q.query_tokens)
        + q.query_tokens * (q.query_tokens + 1) // 2
        for q in queries
    )


def product_cost(tokens: int, outs: int, columns: int) -> Cost:
    """Return the cost of reading the weight once, and of reading and writing the rows, in bf16."""
    return Cost(2 * (outs * columns + tokens * (outs + columns)), 2 * tokens * outs * columns)


def sampling_cost(rows: int, vocab: int) -> Cost:
    """Return the cost of one read of the target's logits, in bf16."""
    return Cost(2 * rows * vocab)


def step_cost(queries: Sequence[Query], shape: ModelShape, *, logits_rows: int) -> Cost:
    """Return the cost of a forward pass in bf16: reading all weights once (but few rows of the
    embedding) and K and V of every context in every layer, and the arithmetic of both. The LM head
    multiplies `logits_rows` rows."""
    tokens = sum(q.query_tokens for q in queries)
    inner, head, layers = shape.layer_weights, shape.head_weights, shape.num_hidden_layers
    attention = attention_cost(queries, heads_of(shape), element_bytes=0)
    return Cost(
        2 * (inner + head) + layers * attention.num_bytes,
        2 * inner * tokens + 2 * head * logits_rows + layers * attention.flop,
    )
