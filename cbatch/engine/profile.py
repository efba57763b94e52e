"""What steps cost on this machine: a short measurement before the first request, kept in a file.

Steps of chosen shapes run through the executor itself, so that what is timed is what will be
charged: drafting, one pass, the verdict. Their sequences are made up; the executor is reset after.
"""

from __future__ import annotations

import hashlib
import itertools
import logging
import os
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import NamedTuple

import msgspec
import numpy as np

from cbatch.cache import cache_folder
from cbatch.core.config import SchedulerConfig
from cbatch.core.cost import CostProfile
from cbatch.core.plan import Admission, Deltas, StepPlan, StepResult
from cbatch.core.request import MODEL, SamplingParams
from cbatch.engine.loop import Executor

VERSION = 3  # of what is measured: prices kept by another are measured anew
CONTEXT_TOKENS = 64
LONG_CONTEXT_TOKENS = 512
DRAFTS = 3  # of the shapes that verify: 4 tokens a row
_DEPTHS_ROWS = ((1, 1), (8, 1), (1, 8), (8, 8))  # drafts and rows, for the price of a pass
_ROWS = (1, 2, 4, 8, 16, 32, 64, 128, 256)
_CHUNKS = (32, 128, 512)
_CATCH_UPS_ROWS = ((63, 1), (63, 4))  # tokens that the drafter has not seen, and rows
_PERIOD_TOKENS = 16  # of a text that repeats itself
# What counts is a step like those before it. A small model's first few are up to a third dearer,
# until caches and branches know the shape; where so much time has passed it no longer matters.
_LIKE_STEPS = 5
_SETTLED_S = 0.01
_MOST_ROUNDS = 15
_BUDGET_S = 3.0
_logger = logging.getLogger("cbatch")
_NO_SLOTS = np.zeros(0, dtype=np.int32)


class Shape(NamedTuple):
    """A step of `rows` equal sequences: `query_len` tokens each, the drafts among them."""

    rows: int
    query_len: int = 1
    num_drafts: int = 0
    context_tokens: int = CONTEXT_TOKENS
    catch_up: int = 0  # tokens a row that the draft model has not seen
    read_tokens: int = 0  # tokens a row that a lookup has not read, being new to it

    @property
    def tokens(self) -> int:
        return self.rows * self.query_len

    @property
    def logit_tokens(self) -> int:
        return self.rows * (1 + self.num_drafts)

    @property
    def goes_on(self) -> bool:
        """Whether the same step can follow it: each row decodes, and its drafter has seen all."""
        seen = not self.catch_up and not self.read_tokens
        return seen and self.query_len == 1 + self.num_drafts

    @property
    def most_tokens(self) -> int:
        """Known of a row after `_LIKE_STEPS` such steps and one more token."""
        return self.context_tokens + _LIKE_STEPS * (1 + self.num_drafts) + 1


class Timed(NamedTuple):
    target_s: float
    draft_s: float


def profile_costs(
    executor: Executor, config: SchedulerConfig, *, budget_s: float = _BUDGET_S
) -> CostProfile:
    """Measure for about `budget_s` seconds, at least one step of each shape, and reset the
    executor. Where nobody drafts (`config.default_chain`) its costs are 0."""
    shapes = shapes_for(config)
    times = _Runner(executor, config).time(shapes, budget_s)
    executor.reset()
    return fit_profile(times)


def shapes_for(config: SchedulerConfig) -> list[Shape]:
    """The shapes that fit slots, context, budget and pool: plain rows, verifications, longer
    contexts, chunks of prompts."""
    chain = config.default_chain
    drafts = DRAFTS if chain else 0
    looks_up = bool(chain) and chain[0] != MODEL
    read = CONTEXT_TOKENS if looks_up else 0
    candidates = [Shape(rows) for rows in _ROWS]
    candidates += [Shape(rows, 1 + DRAFTS, drafts, read_tokens=read) for rows in _ROWS]
    if drafts:
        candidates += [Shape(rows, 1 + k, k, read_tokens=read) for k, rows in _DEPTHS_ROWS]
        if not looks_up:
            candidates += [Shape(rows, 2, 1, catch_up=lag) for lag, rows in _CATCH_UPS_ROWS]
    grown_tokens = Shape(1, 1 + DRAFTS, DRAFTS, context_tokens=0).most_tokens
    long_tokens = min(LONG_CONTEXT_TOKENS, config.max_sequence_tokens - grown_tokens)
    if long_tokens >= 2 * CONTEXT_TOKENS:
        candidates += [Shape(rows, context_tokens=long_tokens) for rows in (1, 8)]
        read = long_tokens if looks_up else 0
        candidates += [Shape(rows, 1 + DRAFTS, drafts, long_tokens, 0, read) for rows in (1, 8)]
    candidates += [Shape(1, chunk, context_tokens=chunk) for chunk in _CHUNKS]
    return [shape for shape in candidates if _fits(shape, config)]


def _fits(shape: Shape, config: SchedulerConfig) -> bool:
    needed_tokens = shape.most_tokens
    blocks = shape.rows * -(-needed_tokens // config.block_size_tokens)
    return (
        shape.rows <= config.max_slots
        and shape.tokens + shape.rows * shape.catch_up <= config.step_budget_tokens
        and needed_tokens <= config.max_sequence_tokens
        and blocks <= config.num_blocks
    )


class _Runner:
    """Runs made-up steps. They start from a full snapshot, whose rows are admitted by a step that
    does not count where others can follow: of a small model it would be a third of the price."""

    def __init__(self, executor: Executor, config: SchedulerConfig) -> None:
        self._executor, self._config = executor, config
        self._steps, self._spent_s = 0, 0.0

    def time(self, shapes: list[Shape], budget_s: float) -> dict[Shape, Timed]:
        """Medians over a few rounds; the first one is for warm-up unless it has used the budget up.
        A machine that is slow for a second is so to all shapes of a round; the dear ones drop out
        once two of them are measured and their share of the budget is spent."""
        share_s = budget_s / len(shapes)
        found: dict[Shape, list[Timed]] = {shape: [] for shape in shapes}
        spent_s = dict.fromkeys(shapes, 0.0)
        for number in range(1 + _MOST_ROUNDS):
            for shape, times in found.items():
                another_s = spent_s[shape] / max(number, 1)
                wanted = number == 0 or (number == 1 and self._spent_s <= budget_s)
                if wanted or spent_s[shape] + another_s <= share_s:
                    before_s = self._spent_s
                    times.append(self._run(shape))
                    spent_s[shape] += self._spent_s - before_s
        medians = {shape: np.median(times[1:] or times, axis=0) for shape, times in found.items()}
        return {shape: Timed(*pair.tolist()) for shape, pair in medians.items()}

    def _run(self, shape: Shape) -> Timed:
        """Of the last of the steps."""
        generation = self._steps + 1
        admitted = tuple(self._admission(shape, slot, generation) for slot in range(shape.rows))
        lag = np.full(shape.rows, shape.catch_up, dtype=np.int32)
        result = self._step(shape, generation, lag, admitted)
        settled_s = self._spent_s + _SETTLED_S
        for _ in range(1, _LIKE_STEPS if shape.goes_on else 1):
            if self._spent_s >= settled_s:
                break
            if shape.num_drafts:  # of those all accepted, a draft model has not seen the last
                lag = (result.num_accepted == shape.num_drafts).astype(np.int32)
            result = self._step(shape, generation, lag, ())
        return Timed(result.target_s, result.draft_s)

    def _step(
        self, shape: Shape, generation: int, lag: np.ndarray, admitted: tuple[Admission, ...]
    ) -> StepResult:
        self._steps += 1
        slots = np.arange(shape.rows, dtype=np.int32)
        each = np.ones(shape.rows, dtype=np.int32)
        plan = StepPlan(
            step_id=self._steps,
            slots=slots,
            generations=each * generation,
            query_lens=each * shape.query_len,
            num_drafts=each * shape.num_drafts,
            catch_up=lag,
            wants_logits=np.ones(shape.rows, dtype=np.bool_),
            deltas=Deltas(
                reset=bool(admitted),
                released=_NO_SLOTS,
                zeroed_blocks=_NO_SLOTS,
                admitted=admitted,
                append_slots=_NO_SLOTS,
                append_indices=_NO_SLOTS,
                append_blocks=_NO_SLOTS,
            ),
        )
        result = self._executor.run(plan)
        self._spent_s += result.target_s + result.draft_s
        return result

    def _admission(self, shape: Shape, slot: int, generation: int) -> Admission:
        known, most = shape.context_tokens, shape.most_tokens
        in_kv = known - shape.query_len + shape.num_drafts
        width = -(-most // self._config.block_size_tokens)
        return Admission(
            slot=slot,
            generation=generation,
            request_id=f"profile-{generation}-{slot}",
            seed=0,
            choice=0,
            params=SamplingParams(temperature=0.0, max_tokens=most - known),
            stop_ids=(),
            tokens=self._tokens(slot, known),
            num_prompt_tokens=known,
            max_total_tokens=most,
            kv_len_tokens=in_kv,
            draft_kv_len_tokens=in_kv - shape.catch_up,
            blocks=np.arange(slot * width, (slot + 1) * width, dtype=np.int32),
        )

    def _tokens(self, slot: int, count: int) -> np.ndarray:
        """Made-up tokens, int32 [count]. Lookups by themselves find a text that repeats; before a
        model they find nothing, so that the price of a chain is that of its dearest."""
        rng = np.random.default_rng(slot)
        distinct = count if MODEL in self._config.default_chain else min(count, _PERIOD_TOKENS)
        tokens = rng.integers(0, self._config.vocab_size, distinct, dtype=np.int32)
        return np.resize(tokens, count)


def fit_profile(times: Mapping[Shape, Timed]) -> CostProfile:
    """Prices from timed shapes.

    Where two shapes bring equally many tokens in different numbers of rows, the difference is the
    price of a row; rows with a longer context give that of a context token, decoding and verifying;
    and by as much as a chunk of a prompt is cheaper than as many verified tokens, wanting logits
    costs. What is left of every shape goes into the table.
    """
    short = {
        shape: t
        for shape, t in times.items()
        if shape.context_tokens == CONTEXT_TOKENS and not shape.catch_up
    }
    plain = {shape.tokens: (shape, t) for shape, t in short.items() if shape.query_len == 1}
    wide = {s.tokens: (s, t) for s, t in short.items() if s.query_len == 1 + DRAFTS}
    context_s = _median(
        (t.target_s - plain[shape.tokens][1].target_s)
        / (shape.rows * (shape.context_tokens - CONTEXT_TOKENS))
        for shape, t in times.items()
        if shape.query_len == 1 and shape not in short and shape.tokens in plain
    )
    verify_s = _median(
        (t.target_s - wide[shape.tokens][1].target_s)
        / (shape.rows * (shape.context_tokens - CONTEXT_TOKENS))
        - context_s
        for shape, t in times.items()
        if shape.query_len == 1 + DRAFTS and shape not in short and shape.tokens in wide
    )
    row_s = _median(
        (plain[n][1].target_s - wide[n][1].target_s + wide[n][0].rows * verify_s * CONTEXT_TOKENS)
        / (plain[n][0].rows - wide[n][0].rows)
        - context_s * CONTEXT_TOKENS
        for n in plain.keys() & wide.keys()
    )
    fixed_s = {
        s: s.rows * (row_s + (context_s + verify_s * (s.num_drafts > 0)) * s.context_tokens)
        for s in times
    }
    logits_s = _logits_price({s: t.target_s - fixed_s[s] for s, t in times.items()}, wide)
    points: dict[int, list[float]] = {}
    for shape, t in times.items():
        if shape.catch_up:
            continue  # admitted in the same step, and for the price of the drafter's alone
        besides_s = fixed_s[shape] + logits_s * shape.logit_tokens
        points.setdefault(shape.tokens, []).append(t.target_s - besides_s)
    tokens = sorted(points)
    floor_s = 0.01 * min(t.target_s for t in times.values())
    target_s = [max(float(np.mean(points[n])), floor_s) for n in tokens]
    setup_s, pass_s, token_s, ingest_s = _fit_drafting(
        {s: t for s, t in times.items() if s.num_drafts}
    )
    return CostProfile(
        tokens=tuple(tokens),
        target_s=tuple(np.maximum.accumulate(target_s).tolist()),
        logits_token_s=logits_s,
        context_token_s=context_s,
        verify_context_token_s=verify_s,
        row_s=row_s,
        draft_setup_s=setup_s,
        draft_pass_s=pass_s,
        draft_token_s=token_s,
        draft_ingest_s=ingest_s,
    )


def _logits_price(left_s: Mapping[Shape, float], wide: Mapping[int, tuple[Shape, Timed]]) -> float:
    """By token; `left_s` are durations without the price of rows and context."""
    counts = sorted(wide)
    return _median(
        (float(np.interp(s.tokens, counts, [left_s[wide[n][0]] for n in counts])) - chunk_s)
        / (s.tokens - s.logit_tokens)
        for s, chunk_s in left_s.items()
        if s.tokens > s.logit_tokens and counts and counts[0] <= s.tokens <= counts[-1]
    )


def _fit_drafting(times: Mapping[Shape, Timed]) -> tuple[float, float, float, float]:
    """Set-up, pass, token, and token caught up with (or read): least squares of relative errors. A
    price that comes out negative was not seen: the best fit without it counts."""
    if not times:
        return 0.0, 0.0, 0.0, 0.0
    draft_s = np.array([max(t.draft_s, 1e-9) for t in times.values()])
    counts = [
        (1, s.num_drafts, s.num_drafts * s.rows, (s.catch_up + s.read_tokens) * s.rows)
        for s in times
    ]
    features = np.array(counts, dtype=np.float64)
    features /= draft_s[:, None]
    best, least_error = np.zeros(4), np.inf
    for kept in itertools.product((True, False), repeat=4):
        columns = np.flatnonzero(kept)
        found = np.linalg.lstsq(features[:, columns], np.ones(len(draft_s)), rcond=None)[0]
        error = float(np.square(features[:, columns] @ found - 1).sum())
        if (found >= 0).all() and error < least_error - 1e-12:
            best, least_error = np.zeros(4), error
            best[columns] = found
    setup_s, pass_s, token_s, ingest_s = best.tolist()
    return setup_s, pass_s, token_s, ingest_s


def _median(values: Iterable[float]) -> float:
    """Never negative; 0 where nothing was measured."""
    found = list(values)
    return max(float(np.median(found)), 0.0) if found else 0.0


def cached_profile(
    key: Mapping[str, object], measure: Callable[[], CostProfile], folder: Path | None = None
) -> CostProfile:
    """The profile stored for `key` (whatever prices depend on), or a new one, stored. A file that
    cannot be read or written costs a measurement, never a failure."""
    folder = folder or cache_folder("costs")
    digest = hashlib.sha256(msgspec.json.encode(dict(sorted(key.items())))).hexdigest()[:24]
    path = folder / f"{digest}.json"
    try:
        return msgspec.json.decode(path.read_bytes(), type=CostProfile)
    except FileNotFoundError:
        pass
    except (OSError, msgspec.MsgspecError, ValueError) as error:
        _logger.warning("step costs in %s cannot be used (%s): measuring anew", path, error)
    profile = measure()
    try:
        folder.mkdir(parents=True, exist_ok=True)
        part = path.with_suffix(f".{os.getpid()}.part")
        part.write_bytes(msgspec.json.format(msgspec.json.encode(profile)))
        part.replace(path)
    except OSError as error:
        _logger.warning("step costs could not be kept in %s: %s", path, error)
    return profile
