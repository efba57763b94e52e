"""Reader of layer profiles: kernels of one transformer layer timed inside vLLM, in the format of
LLMServingSim's profiler (Cho et al. 2025). A folder holds

- `dense.csv`: layer, tokens, time_us. Layers are `embedding`, `final_layernorm` and the kernels of
  a Llama block.
- `per_sequence.csv`: layer, sequences, time_us, for `lm_head` and `sampler`.
- `attention.csv`: prefill_chunk, kv_prefill, n_decode, kv_decode, time_us. Each line is one launch
  over a chunk with `kv_prefill` tokens of context, and `n_decode` rows with `kv_decode` each.
- `skew_fit.csv` (optional), for rows of unequal context: the share `alpha`, by bucket, in time =
  time(mean context) + alpha * (time(longest context) - time(mean context)).
"""

from __future__ import annotations

import itertools
import math
import re
from bisect import bisect_left, bisect_right
from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

import numpy as np

from cbatch.core.prices.step_work import StepWork
from cbatch.core.request.errors import FieldError
from sim.cost.curve import Curve
from sim.workload.traces.files import TraceRow, csv_rows, read_lines

# Launches of each kernel per transformer block. The kernels of `_ONCE` run once per pass.
_PER_BLOCK = {
    "layernorm": 2,
    "qkv_proj": 1,
    "rotary_emb": 1,
    "o_proj": 1,
    "gate_up_proj": 1,
    "act_fn": 1,
    "down_proj": 1,
}
_ONCE = ("embedding", "final_layernorm")
_PER_SEQUENCE = ("lm_head", "sampler")
_POINT = ("prefill_chunk", "kv_prefill", "n_decode", "kv_decode")
_BUCKETS = ("n_label", "skew_rate_label", "kv_big_label", "kp_label")
_LABEL = re.compile(r"[a-zA-Z]+(<=|>|=)(\d+)(k|%|)")


class LayerProfile:
    """The cost model (see `sim.cost.base`) of a target without drafts. A profile has no times for
    drafters or for rows that verify, so steps with drafts are refused. Contexts longer than the
    measured ones are extrapolated linearly."""

    def __init__(self, folder: Path, *, layers: int) -> None:
        """Read the profile of a model with `layers` layers. Raises `FieldError` naming file and
        line."""
        dense = _curves(folder / "dense.csv", "tokens", (*_PER_BLOCK, *_ONCE))
        heads = _curves(folder / "per_sequence.csv", "sequences", _PER_SEQUENCE)
        per_block = [(times * layers, dense[name]) for name, times in _PER_BLOCK.items()]
        self._tokens = Curve.total([*per_block, *((1, dense[name]) for name in _ONCE)])
        self._logits = Curve.total([(1, heads[name]) for name in _PER_SEQUENCE])
        self._attention, self._layers = ProfiledAttention(folder), layers
        self.max_step_tokens = self._tokens.max_count
        self.max_rows = min(self._attention.max_rows, self._logits.max_count)

    def step_s(self, work: StepWork) -> tuple[float, float, float]:
        if work.draft_depth or work.ingested_tokens:
            raise FieldError("--cost-table", "has no prices of drafts", "use --lookahead off")
        seconds = self._tokens(work.target_tokens)
        if work.logit_tokens:
            seconds += self._logits(work.logit_tokens)
        seconds += self._layers * self._attention.layer_s(work)
        return 0.0, seconds, 0.0


class ProfiledAttention:
    """Attention time of one layer. One lattice is for decoding rows alone, another for rows and a
    chunk: both are one launch, which takes longer than two separate launches."""

    def __init__(self, folder: Path) -> None:
        seconds_at = _points(folder / "attention.csv")
        decode: dict[tuple[int, ...], float] = {
            (n, kv): s for (chunk, _, n, kv), s in seconds_at.items() if not chunk and n
        }
        rows, contexts = (sorted({point[i] for point in decode}) for i in (0, 1))
        where = str(folder / "attention.csv")
        self._decode = _lattice(where, {"n_decode": rows, "kv_decode": contexts}, decode)
        self._mixed = _lattice(where, *_mixed(seconds_at))
        mixed_rows = self._mixed.axes[2]
        self.max_rows = int(min(rows[-1], mixed_rows[-1]))
        skew_file = folder / "skew_fit.csv"
        self._skew = Skew(skew_file) if skew_file.is_file() else None

    def layer_s(self, work: StepWork) -> float:
        rows = work.decode_rows
        mean_tokens = work.decode_context_tokens / rows if rows else 0.0
        chunk_tokens, history_tokens = 0.0, 0.0
        if work.prefill_tokens:
            chunk_tokens, history_tokens = equivalent_chunk(work)

        def uniform_s(context_tokens: float) -> float:
            if work.prefill_tokens:
                return self._mixed(chunk_tokens, history_tokens, rows, context_tokens)
            return self._decode(rows, context_tokens)

        seconds = uniform_s(mean_tokens)
        longest, shortest = work.decode_longest_tokens, work.decode_shortest_tokens
        if self._skew is not None and longest > shortest:
            share = self._skew.share(
                work.prefill_tokens,
                rows,
                (mean_tokens - shortest) / (longest - shortest),
                longest,
                history_tokens,
            )
            seconds += share * (uniform_s(longest) - seconds)
        return max(seconds, 0.0)


def equivalent_chunk(work: StepWork) -> tuple[float, float]:
    """Return the tokens of a single chunk, and of the context before it, with the same number of
    query-key pairs as a step's chunks. Several prompts have fewer pairs than one prompt of their
    total length, so their chunk is shorter."""
    tokens, pairs = work.prefill_tokens, work.prefill_pairs
    history_tokens = (pairs - tokens * (tokens + 1) / 2) / tokens
    if history_tokens >= 0:
        return tokens, history_tokens
    return (2.0 * pairs) ** 0.5, 0.0


class Skew:
    """Skew shares (`alpha`) by bucket. A step uses the buckets of the nearest profiled chunk size.
    An unmeasured bucket has the mean of all buckets of its chunk size, weighted by samples."""

    def __init__(self, path: Path) -> None:
        self._shares: dict[tuple[float, ...], float] = {}
        totals: defaultdict[int, float] = defaultdict(float)
        samples: Counter[int] = Counter()
        for row in _rows(path, ("pc", *_BUCKETS, "alpha", "n_samples")):
            chunk, share, count = row.count("pc"), row.number("alpha"), row.count("n_samples")
            self._shares[(chunk, *(_bound(row, name) for name in _BUCKETS))] = share
            totals[chunk] += share * count
            samples[chunk] += count
        self._chunks = sorted(samples)
        self._mean_shares = {chunk: totals[chunk] / samples[chunk] for chunk in samples}
        self._bounds = [sorted({key[i] for key in self._shares}) for i in range(1, 5)]

    def share(
        self,
        chunk_tokens: float,
        rows: float,
        heavy_share: float,
        longest_tokens: float,
        history_tokens: float,
    ) -> float:
        """Return `alpha` for a step. `heavy_share` is (mean - shortest) / (longest - shortest), of
        the context lengths of decoding rows."""
        chunk = min(self._chunks, key=lambda profiled: abs(profiled - chunk_tokens))
        values = (rows, 100 * heavy_share, longest_tokens, history_tokens)
        bounds = zip(self._bounds, values, strict=True)
        key = (chunk, *(axis[min(bisect_left(axis, x), len(axis) - 1)] for axis, x in bounds))
        return self._shares.get(key, self._mean_shares[chunk])


class Grid:
    """Multilinear interpolation in a full lattice: `values[i, j, ...]` at `axes[0][i], ...`. Every
    axis ascends and has at least two points. Beyond the last point the last line continues: times
    grow linearly once a device is full."""

    def __init__(self, axes: Sequence[Sequence[float]], values: np.ndarray) -> None:
        self.axes = [list(axis) for axis in axes]
        self._values = values

    def __call__(self, *point: float) -> float:
        slices, shares = [], []
        for axis, x in zip(self.axes, point, strict=True):
            low = min(max(bisect_right(axis, x) - 1, 0), len(axis) - 2)
            slices.append(slice(low, low + 2))
            shares.append((x - axis[low]) / (axis[low + 1] - axis[low]))
        cell = self._values[tuple(slices)]
        for share in shares:
            cell = cell[0] + share * (cell[1] - cell[0])
        return float(cell)


def _mixed(
    seconds_at: dict[tuple[int, ...], float],
) -> tuple[dict[str, list[int]], dict[tuple[int, ...], float]]:
    """Return the axes and values of the lattice for chunks together with decoding rows. A profile
    may contain lattices of several spacings. The returned lattice has the chunk sizes measured at
    the shortest context, and on the other axes the values measured with all these chunk sizes.
    Without rows the context has no effect, without a chunk the history has none."""
    with_rows = {key for key in seconds_at if key[0] and key[2]}
    shortest = min(key[3] for key in with_rows)
    chunks = sorted({key[0] for key in with_rows if key[3] == shortest})
    histories, rows, contexts = (
        sorted(set.intersection(*({k[i] for k in with_rows if k[0] == c} for c in chunks)))
        for i in (1, 2, 3)
    )
    axes = {
        "prefill_chunk": [0, *chunks],
        "kv_prefill": histories,
        "n_decode": [0, *rows],
        "kv_decode": contexts,
    }
    values: dict[tuple[int, ...], float] = {
        (chunk, history, n, kv): seconds_at[key]
        for chunk, history, n, kv in itertools.product(*axes.values())
        if (key := (chunk, history if chunk else 0, n, kv if n else 0)) in seconds_at
    }
    values |= {(0, history, 0, kv): 0.0 for history in histories for kv in contexts}
    return axes, values


def _lattice(
    where: str, axes: Mapping[str, Sequence[int]], seconds_at: Mapping[tuple[int, ...], float]
) -> Grid:
    """Return a grid over all combinations. Raises `FieldError` naming the first unmeasured one."""
    values = np.zeros([len(axis) for axis in axes.values()])
    for index, point in zip(
        np.ndindex(values.shape), itertools.product(*axes.values()), strict=True
    ):
        if point not in seconds_at:
            words = ", ".join(f"{name} {x}" for name, x in zip(axes, point, strict=True))
            raise FieldError("--cost-table", f"{where} lacks {words}", "measure that point too")
        values[index] = seconds_at[point]
    for name, axis in axes.items():
        if len(axis) < 2:
            raise FieldError("--cost-table", f"{where}: {name} has one value", "measure two")
    return Grid(list(axes.values()), values)


def _curves(path: Path, by: str, names: tuple[str, ...]) -> dict[str, Curve]:
    """Return a curve for each of `names`. Raises `FieldError` unless the file has exactly these
    layers, with at least two points each."""
    points: dict[str, dict[int, float]] = {}
    for row in _rows(path, ("layer", by, "time_us")):
        name = row.text("layer")
        if name not in names:
            raise row.fail("layer", f"{name!r} is unknown", f"known are {', '.join(names)}")
        points.setdefault(name, {})[row.count(by)] = _seconds(row)
    for name in names:
        if len(points.get(name, ())) < 2:
            raise FieldError(
                "--cost-table", f"{path}: too few points of {name}", "measure two points"
            )
    return {name: Curve(list(line), list(line.values())) for name, line in points.items()}


def _points(path: Path) -> dict[tuple[int, ...], float]:
    return {
        tuple(row.count(name) for name in _POINT): _seconds(row)
        for row in _rows(path, (*_POINT, "time_us"))
    }


def _seconds(row: TraceRow) -> float:
    microseconds = row.number("time_us")
    if microseconds <= 0:
        raise row.fail("time_us", f"{microseconds} is not positive", "measure it again")
    return microseconds * 1e-6


def _bound(row: TraceRow, name: str) -> float:
    """Return the upper end of a bucket: 4096 for `kvB<=4k`, 15 for `sr<=15%`, infinity if open."""
    text = row.text(name)
    match = _LABEL.fullmatch(text)
    if match is None:
        raise row.fail(name, f"{text!r} is not a bucket", "write kvB<=4k, sr<=15%, n>256 or kp=0")
    sign, number, unit = match.groups()
    return math.inf if sign == ">" else float(number) * (1024 if unit == "k" else 1)


def _rows(path: Path, columns: tuple[str, ...]) -> Iterator[TraceRow]:
    return csv_rows(path, read_lines(path), frozenset(columns), frozenset())
