"""Row-invariant arithmetic: what it costs here, and whether a model has it.

A model is row-invariant if the bits of a row's logits do not depend on which rows, or how many,
share the step, on how a prompt was cut into chunks, or on the blocks its KV lies in.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
import torch
from torch import Tensor

from cbatch.runtime.config import ModelConfig
from cbatch.runtime.kv import KVCache
from cbatch.runtime.linear import (
    TIMED_ROWS,
    Linear,
    Plan,
    find_padding,
    is_compiled,
    make_plan,
)

if TYPE_CHECKING:
    from cbatch.runtime.model import Model

COST_LIMIT = 0.10  # `auto` is invariant below this share of a step
_OPS_PER_LAYER = 20  # small operations beside the products
_PACK_BYTES_SHARE = 0.5  # of free memory, for packed fp32 copies
_BLOCK_SIZE_TOKENS = 16
_PROBE_TOKENS = 40


class Numerics(NamedTuple):
    """How a model computes: `mode` is "invariant" or "fast".

    `cost` is the share of a step's time that invariance costs (or would), by number of rows; empty
    where nothing was measured. `may_pack`: memory allows packed fp32 weights.
    """

    mode: str
    may_pack: bool
    cost: dict[int, float]


def resolve_numerics(
    requested: str, config: ModelConfig, dtype: torch.dtype, device: torch.device
) -> Numerics:
    """Turn "auto" into "invariant" where our own kernels take the whole pass, or it costs less than
    `COST_LIMIT` at every measured row count, else into "fast". Products are timed on random weights
    of the model's shapes."""
    may_pack = device.type == "cpu" and _memory_allows(config)
    if requested != "fast" and all(is_compiled(s, dtype, device) for s in weight_shapes(config)):
        return Numerics("invariant", may_pack, {})
    cost: dict[int, float] = {}
    if device.type == "cpu":
        cost = _invariance_cost(config, dtype, device, may_pack)
    if requested == "auto":
        cheap = bool(cost) and max(cost.values()) < COST_LIMIT
        requested = "invariant" if cheap else "fast"
    return Numerics(requested, may_pack, cost)


def weight_shapes(config: ModelConfig) -> Counter[tuple[int, int]]:
    """[out, in] of the fused products, and how many of each a forward pass runs."""
    c, hidden = config, config.hidden_size
    queries = c.num_heads * c.head_dim
    shapes: Counter[tuple[int, int]] = Counter()
    shapes[queries + 2 * c.num_kv_heads * c.head_dim, hidden] += c.num_layers
    shapes[hidden, queries] += c.num_layers
    shapes[2 * c.intermediate_size, hidden] += c.num_layers
    shapes[hidden, c.intermediate_size] += c.num_layers
    shapes[c.vocab_size, hidden] += 1
    return shapes


def _invariance_cost(
    config: ModelConfig, dtype: torch.dtype, device: torch.device, may_pack: bool
) -> dict[int, float]:
    extra, fastest = np.zeros(len(TIMED_ROWS)), np.zeros(len(TIMED_ROWS))
    for shape, count in weight_shapes(config).items():
        plans = [
            make_plan(shape, dtype, device, invariant=i, may_pack=may_pack, count=count)
            for i in (True, False)
        ]
        if not plans[1].times_s:
            continue
        best = np.array(plans[1].times_s)
        extra += count * (_padded_times(plans[0]) - best)
        fastest += count * best
    if not fastest.any():
        return {}
    share = extra / (fastest + _OPS_PER_LAYER * config.num_layers * _op_seconds())
    return {rows: float(s) for rows, s in zip(TIMED_ROWS, share, strict=True)}


def _padded_times(plan: Plan) -> np.ndarray:
    """Seconds at `TIMED_ROWS` with the plan's padding: of the first timed count that is as large;
    beyond the last, in proportion."""
    found = []
    for rows in TIMED_ROWS:
        padded = plan.padding.rows(rows)
        at = min(int(np.searchsorted(TIMED_ROWS, padded)), len(TIMED_ROWS) - 1)
        found.append(plan.times_s[at] * max(1.0, padded / TIMED_ROWS[at]))
    return np.array(found)


def _op_seconds() -> float:
    """Time of one small operation."""
    x = torch.zeros(8, 64)
    best = float("inf")
    for _ in range(20):
        started = time.perf_counter()
        x.add_(1.0)
        best = min(best, time.perf_counter() - started)
    return best


def _memory_allows(config: ModelConfig) -> bool:
    """Whether fp32 copies of all products fit in a fair share of free memory."""
    wanted = 4 * sum(out * width * n for (out, width), n in weight_shapes(config).items())
    try:
        lines = Path("/proc/meminfo").read_text().splitlines()
        free_kib = next(int(line.split()[1]) for line in lines if line.startswith("MemAvailable"))
    except (OSError, StopIteration):
        return True  # not Linux: as for any other allocation, the system decides
    return wanted < _PACK_BYTES_SHARE * free_kib * 1024


class InvarianceReport(NamedTuple):
    """What `probe_row_invariance` found. `shapes`: per product [out, in]; `forward`: logits of a
    whole pass under several compositions."""

    mode: str
    shapes: dict[tuple[int, int], bool]
    forward: bool
    cost: dict[int, float]

    @property
    def row_invariant(self) -> bool:
        return self.forward and all(self.shapes.values())

    def __str__(self) -> str:
        found = f"row_invariant: {'yes' if self.row_invariant else 'no'}"
        detail = [f"numerics={self.mode}"]
        if self.cost:
            rows, worst = max(self.cost.items(), key=lambda item: item[1])
            detail.append(f"invariance costs at most {worst:.0%}, at {rows} rows")
        failing = [f"{out}x{width}" for (out, width), good in self.shapes.items() if not good]
        if failing:
            detail.append(f"products that differ by row count: {', '.join(failing)}")
        return f"{found} ({'; '.join(detail)})"


@torch.inference_mode()
def probe_row_invariance(model: Model) -> InvarianceReport:
    """Compare bits: each product of the model at several row counts, and logits of whole passes.

    A fraction of a second for a small model. Says what is, whatever was asked for.
    """
    shapes: dict[tuple[int, int], bool] = {}
    for linear in _linears(model):
        if linear.shape not in shapes:
            padding = find_padding(linear, linear.shape, model.device)
            shapes[linear.shape] = padding is not None and padding.rows(1) == 1
    return InvarianceReport(
        model.numerics, shapes, _forward_invariant(model), dict(model.invariance_cost)
    )


def _linears(model: Model) -> Iterator[Linear]:
    for layer in model.layers:
        yield from layer.products()
    yield model.head


def _forward_invariant(model: Model) -> bool:
    """The same sequences token by token, in one chunk, and side by side in other blocks."""
    length = min(_PROBE_TOKENS, model.config.max_position_tokens)
    rng = np.random.default_rng(0)
    tokens = rng.integers(0, model.config.vocab_size, (3, length))
    whole = _Probe(model, tokens, reverse=False).run([length])
    cut = [1, 1, 5, length]
    single = [_Probe(model, tokens[i : i + 1], reverse=True).run(cut)[0] for i in range(3)]
    mixed = _Probe(model, tokens, reverse=True).run([length // 2, 1, 3, length])
    return all(
        torch.equal(a, b) and torch.equal(a, c)
        for a, b, c in zip(whole, single, mixed, strict=True)
    )


class _Probe:
    """Sequences of equal length in a small cache of their own."""

    def __init__(self, model: Model, tokens: np.ndarray, *, reverse: bool) -> None:
        self.model, self.tokens = model, tokens
        count, length = tokens.shape
        width = -(-length // _BLOCK_SIZE_TOKENS)
        blocks = np.arange(count * width, dtype=np.int32).reshape(count, width)
        self.tables = blocks[::-1, ::-1].copy() if reverse else blocks
        self.kv = KVCache(model.config, blocks.size, _BLOCK_SIZE_TOKENS, model.dtype, model.device)

    def run(self, chunks: list[int]) -> list[Tensor]:
        """Logits [length, vocab] of each sequence, `chunks` tokens a step until they end."""
        from cbatch.runtime.model import RaggedBatch

        count, length = self.tokens.shape
        found: list[list[Tensor]] = [[] for _ in range(count)]
        at = 0
        for chunk in chunks:
            n = min(chunk, length - at)
            if n < 1:
                break
            flat = self.tokens[:, at : at + n].reshape(-1)
            batch = RaggedBatch(
                tokens=torch.from_numpy(flat).to(self.model.device),
                positions=torch.arange(at, at + n, device=self.model.device).repeat(count),
                query_lens=np.full(count, n, dtype=np.int32),
                context_lens=np.full(count, at + n, dtype=np.int32),
                block_tables=self.tables,
                logits_index=torch.arange(count * n, device=self.model.device),
            )
            for parts, rows in zip(found, self.model.forward(batch, self.kv).split(n), strict=True):
                parts.append(rows)
            at += n
        return [torch.cat(parts) for parts in found]
