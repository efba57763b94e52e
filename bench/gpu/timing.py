"""Times of launches: replays of a CUDA graph over inputs that exceed the cache. The kernels of a
step, from torch.profiler. The device's ceilings: the highest rates at which it reads, copies and
multiplies, each the best of several kernels over buffers far larger than any cache. Workloads, and
lower limits of their time: bytes and arithmetic, each counted once, at the device's ceilings.

Names of workloads follow vLLM's batch grammar: `2q2k_32q1s4k` is 2 prefills of 2048 tokens and 32
decodes over 4096.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any, NamedTuple

import torch
import triton.language as tl
from torch.profiler import ProfilerActivity, profile
from triton.testing import do_bench_cudagraph

from bench.gpu.cells import Bench, Cell, Row
from sim.cost.shapes import ModelShape, load_shape
from triton_kernels.attention import Heads
from triton_kernels.build.jit import jit

Call = Callable[[], Any]
CELL_S = 0.2  # sampling time of a cell
_SAMPLES = 10  # taken by Triton
_MAX_SETS = 256  # of inputs, which only small kernels reach
_MAX_KERNELS, _NAME_CHARS = 40, 90
BYTES, EDGE = 4 << 30, 8192  # bytes of a ceiling's buffer; rows of its square matrices
PROGRAMS = 132 * 8  # launched programs: 8 for each multiprocessor of an H100 or H200
_WARM_S = 0.5  # work before the first sample: an idle device has low clocks
_TILES = ((4096, 4), (8192, 8), (16384, 8))  # (words per load, warps)
_PART = re.compile(r"(\d*)q(\d+)(k?)(?:s(\d+)(k?))?")
DECODE, VERIFY = "64q1s4k", "64q8s4k"
FEW_LONG, CHUNK = "q8s32k", "q2k"
# The context lengths of ThunderMLA's benchmark, with 4 new tokens each.
UNEVEN = "q4s4641_q4s45118_q4s1730_q4s1696"
RAGGED = "_".join(f"8q{1 + k}s4k" for k in range(8))
# The most informative workloads first: a time limit cuts off the last ones.
ATTENTION = (
    DECODE, VERIFY, CHUNK, FEW_LONG, "2q2k_32q1s4k", RAGGED, UNEVEN, "q2ks8k",
    "16q4s8k", "8q1s4k", "q1s1k", "q1s4k", "q1s16k", "q1s64k", "q1s128k", "64q1s256", "256q1s1k",
)  # fmt: skip
HEADS = {"llama-8b": Heads(kv_heads=8, group=4, head_dim=128)}
HEADS["llama-1b"] = HEADS["llama-8b"]._replace(head_dim=64)
MODELS = {name: load_shape(name) for name in ("llama-3.1-8b", "llama-3.2-1b")}
MODEL, SMALLER = MODELS  # the first measured model, and one for the remaining time
BATCHES = (64, 8, 1, 128)
PROMPT_TOKENS = 512
# Standard deviation of logits from random weights: a nucleus of top_p holds 1 to some 300 tokens.
LOGIT_STD = 4.0
SAMPLING = {"greedy": {"temperature": 0.0}, "top_p": {"temperature": 0.8, "top_p": 0.9}}


def input_sets(bench: Bench, num_bytes: int) -> int:
    """Return how many input sets of `num_bytes` must take turns so that none stays in the L2
    cache."""
    return max(1, min(_MAX_SETS, -(-4 * bench.l2_bytes // max(num_bytes, 1))))


def time_calls(calls: Sequence[Call], seconds: float = CELL_S) -> list[float]:
    """Return the median, 10th and 90th percentile of the seconds of one call. A sample is the mean
    over `calls`, run in sequence."""

    def run() -> None:
        for call in calls:
            call()

    ms = do_bench_cudagraph(run, rep=1e3 * seconds / _SAMPLES, quantiles=(0.5, 0.1, 0.9))
    return [1e-3 * each / len(calls) for each in ms]


def figures(times: Sequence[float], cost: Cost, ceilings: Ceilings | None) -> Row:
    row: Row = {"mbytes": cost.num_bytes / 1e6, "gflop": cost.flop / 1e9}
    row |= dict(zip(("median_us", "low_us", "high_us"), (1e6 * s for s in times), strict=True))
    row["tflop_per_s"] = cost.flop / times[0] / 1e12
    if ceilings is not None:
        limit_s, row["bound"] = cost.limit(ceilings)
        row |= {"limit_us": limit_s * 1e6, "fraction_of_limit": limit_s / times[0]}
    return row


def step_kernels(step: Call, steps: int) -> Row:
    """Return kernels by total time, longest first, with calls and microseconds per step."""
    with profile(activities=[ProfilerActivity.CUDA]) as profiler:
        for _ in range(steps):
            step()
        torch.cuda.synchronize()
    totals: dict[str, tuple[int, float]] = {}
    for event in profiler.events():
        if event.device_type == torch.autograd.DeviceType.CUDA:
            calls, us = totals.get(name := event.name[:_NAME_CHARS], (0, 0.0))
            totals[name] = calls + 1, us + event.time_range.elapsed_us()
    longest = sorted(totals.items(), key=lambda item: -item[1][1])[:_MAX_KERNELS]
    return {
        "kernels": [
            {"kernel": name, "calls": round(calls / steps, 2), "us": round(us / steps, 2)}
            for name, (calls, us) in longest
        ]
    }


# -- ceilings


@jit
def read_kernel(source_ptr, sums_ptr, num_words, TILE: tl.constexpr):
    """Read all words. Each program xors every `num_programs`-th tile and stores one word."""
    lanes = tl.arange(0, TILE)
    total = tl.zeros([TILE], tl.int32)
    for first in range(tl.program_id(0) * TILE, num_words, tl.num_programs(0) * TILE):
        total ^= tl.load(source_ptr + first + lanes)
    tl.store(sums_ptr + tl.program_id(0), tl.max(total, axis=0))


def cells(bench: Bench) -> Iterator[Cell]:
    for name, run in (("read", _read), ("copy", _copy), ("matmul", _matmul)):
        yield Cell(name, {"ceiling": name}, partial(run, bench))


def load_ceilings(bench: Bench) -> Ceilings | None:
    """Return the rates measured in this run; None if one is missing."""
    rows = bench.of("ceilings")
    rates = [rows.get(name, {}).get("per_s") for name in ("read", "matmul")]
    return Ceilings(*rates) if all(rates) else None


def _read(bench: Bench) -> Row:
    source = torch.empty(BYTES // 4, dtype=torch.int32, device=bench.device).random_()
    launch = partial(read_kernel[(PROGRAMS,)], source, source.new_empty(PROGRAMS), len(source))
    calls: dict[str, Call] = {
        f"Triton, {words} words": partial(launch, TILE=words, num_warps=warps)
        for words, warps in _TILES
    }
    return _best("bytes read", source.nbytes, calls)


def _copy(bench: Bench) -> Row:
    source = torch.empty(BYTES // 4, dtype=torch.int32, device=bench.device).random_()
    copy = partial(torch.empty_like(source).copy_, source)
    return _best("bytes, read and written", 2 * source.nbytes, {"memcpy": copy})


def _matmul(bench: Bench) -> Row:
    a, b = (torch.randn(EDGE, EDGE, device=bench.device, dtype=torch.bfloat16) for _ in range(2))
    # Products of rows of `a`, first with columns of `b`, then with rows of `b`.
    calls = {
        "rows by columns": partial(torch.mm, a, b),
        "rows by rows": partial(torch.mm, a, b.t()),
    }
    return _best(f"flop, bf16 {EDGE}^3, random data", 2 * EDGE**3, calls)


def _best(unit: str, work: int, calls: dict[str, Call]) -> Row:
    time_calls(list(calls.values()), _WARM_S)
    rates = {name: work / time_calls([call])[0] for name, call in calls.items()}
    best = max(rates, key=lambda name: rates[name])
    return {"unit": unit, "per_s": rates[best], "best": best, "rates": rates}


class Query(NamedTuple):
    """A query of `query_tokens` new tokens, the last at position `context_tokens` - 1."""

    query_tokens: int
    context_tokens: int


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


class Ceilings(NamedTuple):
    """Peak rates, measured in the same run as the figures that are compared with them."""

    read_bytes_per_s: float
    matmul_flop_per_s: float  # of an 8192^3 product in bf16


class Cost(NamedTuple):
    """Lower bounds: `num_bytes` of device memory traffic, and `flop` on matrix units."""

    num_bytes: int
    flop: int = 0

    def limit(self, ceilings: Ceilings) -> tuple[float, str]:
        """Return the longer of the two times, with all bytes at the read rate, and its name. No
        kernel is faster."""
        memory_s = self.num_bytes / ceilings.read_bytes_per_s
        matmul_s = self.flop / ceilings.matmul_flop_per_s
        return max((memory_s, "memory"), (matmul_s, "matmul"), key=lambda bound: bound[0])


def attention_cost(queries: Sequence[Query], heads: Heads) -> Cost:
    """Return the cost of reading K, V and queries and writing results in bf16, each once, and of
    the products under a causal mask."""
    width = heads.kv_heads * heads.head_dim
    contexts = sum(q.context_tokens for q in queries)
    tokens = sum(q.query_tokens for q in queries)
    pairs = sum(  # of a token and a key that it sees
        q.query_tokens * (q.context_tokens - q.query_tokens)
        + q.query_tokens * (q.query_tokens + 1) // 2
        for q in queries
    )
    return Cost(4 * width * (contexts + tokens * heads.group), 4 * width * heads.group * pairs)


def product_cost(tokens: int, outs: int, columns: int) -> Cost:
    """Return the cost of reading the weight once, and of reading and writing the rows, in bf16."""
    return Cost(2 * (outs * columns + tokens * (outs + columns)), 2 * tokens * outs * columns)


def decode_cost(shape: ModelShape, rows: int, context_tokens: int) -> Cost:
    """Return the cost of a token of `rows` sequences in bf16: reading all weights (but few rows of
    the embedding) and all KV once, and the arithmetic of both."""
    weights = shape.layer_weights + shape.head_weights
    width = shape.num_hidden_layers * shape.num_attention_heads * shape.head_size
    return Cost(
        2 * weights + rows * context_tokens * shape.kv_token_bytes,
        rows * (2 * weights + 4 * width * context_tokens),
    )
