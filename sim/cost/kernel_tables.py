"""Step times from tables of single kernels in the format of AIConfigurator (NVIDIA 2025): parquet
files anywhere below a folder, latencies in milliseconds, each file for one system and framework.

- `gemm_perf.parquet`: the product [m, k] x [k, n], by m, n and k. Other n and k are interpolated; a
  size beyond the last one is computed as several products of equal size.
- `generation_attention_perf.parquet`: a batch of rows with one query each over a context of `isl +
  step` tokens. Rows that verify drafts read the same KV and take the same time, or their
  arithmetic's roofline time if that is longer.
- `context_attention_perf.parquet`: a batch of whole prompts. A chunk with context before it is
  looked up as the prompt with the same number of query-key pairs.

The roofline supplies what no table holds: norms and other small kernels, launches, all-reduces and
host time. It also supplies attention for head counts that were not measured. `from_roofline` lists
these parts. Weights and KV are 16-bit only.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import product
from math import ceil
from pathlib import Path
from typing import Any, NamedTuple

import msgspec
import numpy as np

from cbatch.core.prices.curve import Curve
from cbatch.core.prices.step_work import StepWork
from cbatch.core.request.errors import FieldError
from sim.cost.roofline import ModelShape, Rates, RooflineConfig
from sim.cost.tables import Lines

PRODUCTS, DECODES, PREFILLS = (
    f"{name}_perf.parquet" for name in ("gemm", "generation_attention", "context_attention")
)
_BF16 = "bfloat16"
_FULL_ATTENTION = {"attn_dtype": _BF16, "kv_cache_dtype": _BF16, "window_size": 0}

Heads = tuple[int, int, int]  # query heads, KV heads, head size


class KernelTables(msgspec.Struct, frozen=True):
    """Measured seconds: `products` by (n, k), then m; `decodes` and `prefills` by heads, then
    (batch, tokens per row)."""

    device: str
    framework: str
    products: Mapping[tuple[int, int], Mapping[int, float]]
    decodes: Mapping[Heads, Mapping[tuple[int, int], float]]
    prefills: Mapping[Heads, Mapping[tuple[int, int], float]]


def holds_kernel_tables(folder: str | Path) -> bool:
    return next(Path(folder).rglob(PRODUCTS), None) is not None


def read_kernel_tables(folder: str | Path) -> KernelTables:
    """Read the tables below `folder`. Raises `FieldError` that names the file at fault."""
    products, decodes, prefills = (_find(Path(folder), n) for n in (PRODUCTS, DECODES, PREFILLS))
    if products is None:
        raise FieldError("--cost-table", f"{folder} holds no {PRODUCTS}", "name one that does")
    gemm = _read(products, ("m", "n", "k"), {"gemm_dtype": _BF16})
    by_shape: dict[tuple[int, int], dict[int, float]] = {}
    for (m, n, k), seconds in gemm.seconds.items():
        by_shape.setdefault((n, k), {})[m] = seconds
    return KernelTables(
        device=gemm.device,
        framework=gemm.framework,
        products=by_shape,
        decodes=_attention(decodes),
        prefills=_attention(prefills),
    )


class KernelCost:
    """The cost model (see `sim.cost.base`) of the target in `config`, and of its draft model if
    any."""

    def __init__(self, tables: KernelTables, config: RooflineConfig) -> None:
        self._config = config
        self._target = _Passes.of(tables, config, config.shape)
        self._draft = None if config.draft is None else _Passes.of(tables, config, config.draft)
        self.max_step_tokens = self._target.tokens.max_count
        decodes = self._target.decodes
        self.max_rows = None if decodes is None else int(decodes.firsts[-1])

    @property
    def from_roofline(self) -> list[str]:
        """Return the names of the parts that the roofline supplies, not the tables."""
        parts = ["small kernels", "launches", "host"]
        parts += ["all-reduces"] if self._config.tensor_parallel_size > 1 else []
        for name, passes in (("", self._target), ("draft's ", self._draft)):
            if passes is not None and passes.decodes is None:
                parts.append(f"{name}attention of decodes")
        return parts + (["attention of prompts"] if self._target.prefills is None else [])

    def step_s(self, work: StepWork) -> tuple[float, float, float]:
        target = self._target
        seconds = target.products_s(work.target_tokens, work.logit_tokens)
        if work.decode_rows:
            context_tokens, pairs = work.decode_context_tokens, work.decode_pairs
            seconds += target.decodes_s(work.decode_rows, context_tokens, pairs)
        if work.prefill_tokens:
            chunks = work.rows - work.decode_rows
            seconds += target.prefills_s(chunks, work.prefill_context_tokens, work.prefill_pairs)
        host_s = self._config.step_host_s + self._config.request_host_s * work.admitted
        if self._draft is not None and (work.draft_depth or work.ingested_tokens):
            return self._draft_s(self._draft, work), seconds, host_s
        return 0.0, seconds, host_s

    def _draft_s(self, draft: _Passes, work: StepWork) -> float:
        """Return the seconds of all draft passes. As in the roofline, the first pass also ingests
        tokens that the draft has not read, and rows with few drafts leave early."""
        depth = max(work.draft_depth, 1)
        rows, read_tokens = ceil(work.draft_tokens / depth), work.draft_context_tokens
        attention_s = draft.decodes_s(rows, read_tokens, read_tokens) if rows else 0.0
        first_s = draft.products_s(rows + work.ingested_tokens, rows)
        later_s = draft.products_s(rows, rows) if depth > 1 else 0.0
        return first_s + (depth - 1) * later_s + depth * attention_s


class _Passes(NamedTuple):
    """Times of one model on its devices: `tokens` for the products of all layers, `logits` for the
    LM head's. `decodes` and `prefills` are one layer's attention, None if the roofline supplies
    it."""

    tokens: Curve
    logits: Curve
    decodes: Lines | None
    prefills: Lines | None
    layers: int
    rates: Rates

    @classmethod
    def of(cls, tables: KernelTables, config: RooflineConfig, shape: ModelShape) -> _Passes:
        parts, layers, size = config.tensor_parallel_size, shape.num_hidden_layers, shape.head_size
        heads = shape.num_attention_heads // parts
        kv_heads = max(shape.num_key_value_heads // parts, 1)
        hidden, inner = shape.hidden_size, shape.intermediate_size / parts
        block = (
            ((heads + 2 * kv_heads) * size, hidden),
            (hidden, heads * size),
            (2 * inner, hidden),
            (hidden, inner),
        )
        curves = [(layers, _product(tables.products, n, k)) for n, k in block]
        head_counts = heads, kv_heads, size
        return cls(
            tokens=Curve.total(curves),
            logits=_product(tables.products, shape.vocab_size / parts, hidden),
            decodes=Lines.of(tables.decodes.get(head_counts)),
            prefills=Lines.of(tables.prefills.get(head_counts)),
            layers=layers,
            rates=config.rates(shape),
        )

    def products_s(self, tokens: int, logit_tokens: int) -> float:
        seconds = self.tokens(tokens) + self.rates.fixed_s + self.rates.exchange_token_s * tokens
        return seconds + self.logits(logit_tokens) if logit_tokens else seconds

    def decodes_s(self, rows: int, context_tokens: int, pairs: int) -> float:
        if self.decodes is None:
            return self.rates.attention_s(pairs, context_tokens)
        read_s = self.layers * self.decodes(rows, context_tokens / rows)
        return max(read_s, self.rates.pair_s * pairs)

    def prefills_s(self, chunks: int, context_tokens: int, pairs: int) -> float:
        if self.prefills is None:
            return self.rates.attention_s(pairs, context_tokens)
        return self.layers * self.prefills(chunks, (2 * pairs / chunks) ** 0.5)


# -- inside


def _product(products: Mapping[tuple[int, int], Mapping[int, float]], n: float, k: float) -> Curve:
    """Return the product's seconds by m, interpolated bilinearly in n and k."""
    near = [
        _neighbours(sorted({shape[axis] for shape in products}), target)
        for axis, target in enumerate((n, k))
    ]
    corners = []
    for (n_at, n_share), (k_at, k_share) in product(*near):
        if (n_at, k_at) not in products:
            problem = f"{PRODUCTS} lacks n {n_at}, k {k_at}"
            raise FieldError("--cost-table", problem, "measure that product too")
        corners.append((n_share * k_share, products[n_at, k_at]))
    counts = sorted(set.intersection(*(set(by_m) for _, by_m in corners)))
    if len(counts) < 2:
        raise FieldError("--cost-table", f"{PRODUCTS}: too few m", "measure two or more")
    return Curve(counts, [sum(share * by_m[m] for share, by_m in corners) for m in counts])


def _neighbours(axis: Sequence[int], target: float) -> list[tuple[int, float]]:
    """Return the points of an ascending axis next to `target`, each with its weight. A target
    beyond the last point is split into equal pieces, whose number multiplies the weights. A target
    below the first point is raised to it."""
    pieces = ceil(target / axis[-1])
    at = max(target / pieces, axis[0])
    high = next(i for i, point in enumerate(axis) if point >= at)
    if axis[high] == at:
        return [(axis[high], float(pieces))]
    low = high - 1
    share = (at - axis[low]) / (axis[high] - axis[low])
    return [(axis[low], pieces * (1 - share)), (axis[high], pieces * share)]


class _Table(NamedTuple):
    device: str
    framework: str
    seconds: dict[tuple[int, ...], float]


def _find(folder: Path, name: str) -> Path | None:
    matches = sorted(folder.rglob(name))
    if len(matches) > 1:
        problem = f"{folder} holds {len(matches)} of {name}, {matches[0]} among them"
        raise FieldError("--cost-table", problem, "name a folder with one")
    return matches[0] if matches else None


def _attention(path: Path | None) -> dict[Heads, dict[tuple[int, int], float]]:
    if path is None:
        return {}
    columns = ("num_heads", "num_key_value_heads", "head_dim", "batch_size", "isl", "step")
    by_heads: dict[Heads, dict[tuple[int, int], float]] = {}
    for (heads, kv_heads, size, batch, isl, step), s in _read(
        path, columns, _FULL_ATTENTION
    ).seconds.items():
        by_heads.setdefault((heads, kv_heads, size), {})[batch, isl + step] = s
    return by_heads


def _read(path: Path, columns: tuple[str, ...], only: Mapping[str, Any]) -> _Table:
    """Return seconds by the values of `columns`, from the rows that match all of `only`. Among rows
    with equal values the shortest time counts, since an engine uses its fastest kernel."""
    try:
        from pyarrow import ArrowException, parquet
    except ImportError as error:
        raise FieldError(
            "--cost-table", f"{path} needs pyarrow", "pip install 'cbatch[tables]'"
        ) from error
    names = ("device", "framework", "version", *columns, "latency")
    try:
        table = parquet.read_table(
            path, columns=list(names), filters=[(c, "=", v) for c, v in only.items()]
        )
        values = {name: table.column(name).to_pylist() for name in names}
        latency_s = np.asarray(values["latency"], np.float64) * 1e-3
        rows = list(zip(*(map(int, values[name]) for name in columns), strict=True))
    except (ArrowException, OSError, KeyError, ValueError, TypeError) as error:
        problem = f"{path} is not a table of kernels ({error})"
        raise FieldError("--cost-table", problem, f"give {', '.join(names)}") from error
    if not rows or not (np.isfinite(latency_s).all() and (latency_s > 0).all()):
        problem = (
            f"{path}: no positive latencies for {only}" if rows else f"{path}: none for {only}"
        )
        raise FieldError("--cost-table", problem, "measure 16-bit kernels again")
    seconds: dict[tuple[int, ...], float] = {}
    for row, s in zip(rows, latency_s.tolist(), strict=True):
        seconds[row] = min(s, seconds.get(row, s))
    framework = f"{values['framework'][0]} {values['version'][0]}"
    return _Table(values["device"][0], framework, seconds)
