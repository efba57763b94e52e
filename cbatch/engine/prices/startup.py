"""Prices for the lookahead policy, measured before the first request and kept on disk.

Steps of chosen shapes run through the executor itself, so that all that will be charged is timed:
drafting, one pass, the verification. Their sequences are made up and need no prefill.
"""

from __future__ import annotations

import hashlib
import logging
import os
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import NamedTuple

import msgspec
import numpy as np

from cbatch.core.prices.cost_profile import CostProfile
from cbatch.core.prices.fit import fit_profile
from cbatch.core.prices.step_work import StepSample
from cbatch.core.request.request import MODEL, SamplingParams
from cbatch.core.scheduler.config import SchedulerConfig
from cbatch.core.scheduler.plan import NewSequence, StepPlan, StepResult
from cbatch.core.scheduler.state import NO_DELTAS
from cbatch.engine.loop import Executor
from cbatch.engine.prices.meter import StepMeter
from cbatch.system.cache import cache_folder

VERSION = 4  # of what is measured and fitted; prices of another version are measured again
CONTEXT_TOKENS = 64
LONG_CONTEXT_TOKENS = 512
DRAFTS = 3  # of the shapes that verify: 4 tokens a row
_DEPTHS_ROWS = ((1, 1), (8, 1), (1, 8), (8, 8))  # drafts and rows, for the price of a pass
MOST_DRAFTS = max(DRAFTS, *(drafts for drafts, _ in _DEPTHS_ROWS))  # that any shape verifies
_ROWS = (1, 2, 4, 8, 16, 32, 64, 128, 256)
_CHUNKS = (32, 128, 512)
_CATCH_UPS_ROWS = ((63, 1), (63, 4))  # tokens that the drafter has not seen, and rows
_PERIOD_TOKENS = 16  # of a text that repeats itself
# A step counts after others of its shape. A small model's first few take up to a third longer,
# until caches and branches know the shape; where they take this long it no longer matters.
_LIKE_STEPS = 5
_SETTLED_S = 0.01
_MOST_ROUNDS = 15
_BUDGET_S = 3.0
_logger = logging.getLogger("cbatch")


class StepShape(NamedTuple):
    """A step of `rows` equal sequences: `query_len` tokens each, the drafts among them."""

    rows: int
    query_len: int = 1
    num_drafts: int = 0
    context_tokens: int = CONTEXT_TOKENS
    catch_up: int = 0  # tokens a row that the draft model has not seen

    @property
    def tokens(self) -> int:
        return self.rows * self.query_len

    @property
    def repeats(self) -> bool:
        """Whether an equal step can follow: each row decodes, and its drafter has seen it all."""
        return not self.catch_up and self.query_len == 1 + self.num_drafts

    @property
    def most_tokens(self) -> int:
        """Known tokens of a row after `_LIKE_STEPS` such steps and one more token."""
        return self.context_tokens + _LIKE_STEPS * (1 + self.num_drafts) + 1


def profile_costs(
    executor: Executor, config: SchedulerConfig, *, budget_s: float = _BUDGET_S
) -> CostProfile:
    """Measure for about `budget_s` seconds, at least one step of each shape, and reset the
    executor. Without a drafter (`config.default_chain`) the prices of drafting are 0."""
    samples = _Probes(executor, config).measure(shapes_for(config), budget_s)
    executor.reset()
    return fit_profile(samples, start=True)


def cached_profile(
    key: Mapping[str, object], measure: Callable[[], CostProfile], folder: Path | None = None
) -> CostProfile:
    """Return the profile stored for `key` (all that prices depend on), or measure and store one.
    Without a cache, or with a file that cannot be read or written, it measures; nothing fails."""
    folder = folder or cache_folder("costs")
    if folder is None:
        _logger.warning("no home for a cache (HOME, XDG_CACHE_HOME): measuring step costs")
        return measure()
    digest = hashlib.sha256(msgspec.json.encode(dict(sorted(key.items())))).hexdigest()[:24]
    path = folder / f"{digest}.json"
    try:
        return msgspec.json.decode(path.read_bytes(), type=CostProfile)
    except FileNotFoundError:
        _logger.info("measuring step costs, to be kept in %s", path)
    except (OSError, msgspec.MsgspecError, ValueError) as error:
        _logger.warning("step costs in %s cannot be used (%s): measuring again", path, error)
    profile = measure()
    try:
        folder.mkdir(parents=True, exist_ok=True)
        part = path.with_suffix(f".{os.getpid()}.part")
        part.write_bytes(msgspec.json.format(msgspec.json.encode(profile)))
        part.replace(path)
    except OSError as error:
        _logger.warning("step costs could not be kept in %s: %s", path, error)
    return profile


def can_profile(config: SchedulerConfig) -> bool:
    """Whether steps of two sizes fit: of contexts below some hundred tokens none does."""
    return len({shape.tokens for shape in shapes_for(config) if not shape.catch_up}) > 1


def shapes_for(config: SchedulerConfig) -> list[StepShape]:
    """The shapes that fit slots, context, budget and pool: plain rows, verifications, longer
    contexts, chunks of prompts.

    Shapes with equally many tokens in different numbers of rows show the price of a row; longer
    contexts that of a context token, in decoding and in verifying; and chunks that of logits, which
    they want of their last token alone.
    """
    drafts = DRAFTS if config.default_chain else 0
    candidates = [StepShape(rows) for rows in _ROWS]
    candidates += [StepShape(rows, 1 + DRAFTS, drafts) for rows in _ROWS]
    if drafts:
        candidates += [StepShape(rows, 1 + k, k) for k, rows in _DEPTHS_ROWS]
    if drafts and not _looks_up(config):
        candidates += [StepShape(rows, 2, 1, catch_up=lag) for lag, rows in _CATCH_UPS_ROWS]
    grown_tokens = StepShape(1, 1 + DRAFTS, DRAFTS, context_tokens=0).most_tokens
    long_tokens = min(LONG_CONTEXT_TOKENS, config.max_sequence_tokens - grown_tokens)
    if long_tokens >= 2 * CONTEXT_TOKENS:
        candidates += [StepShape(rows, context_tokens=long_tokens) for rows in (1, 8)]
        candidates += [StepShape(rows, 1 + DRAFTS, drafts, long_tokens) for rows in (1, 8)]
    candidates += [StepShape(1, chunk, context_tokens=chunk) for chunk in _CHUNKS]
    return [shape for shape in candidates if _fits(shape, config)]


def _looks_up(config: SchedulerConfig) -> bool:
    return bool(config.default_chain) and config.default_chain[0] != MODEL


def _fits(shape: StepShape, config: SchedulerConfig) -> bool:
    needed_tokens = shape.most_tokens
    blocks = shape.rows * -(-needed_tokens // config.block_size_tokens)
    return (
        shape.rows <= config.max_slots
        and shape.tokens + shape.rows * shape.catch_up <= config.step_budget_tokens
        and needed_tokens <= config.max_sequence_tokens
        and blocks <= config.num_blocks
    )


class _Probes:
    """Runs made-up steps. Each shape begins with a full snapshot: the step that admits its rows
    does not count where others can follow, for admission is a third of a small model's step."""

    def __init__(self, executor: Executor, config: SchedulerConfig) -> None:
        self._meter, self._config = StepMeter(executor, config.max_slots), config
        self._looks_up = _looks_up(config)
        self._steps, self._spent_s = 0, 0.0

    def measure(self, shapes: list[StepShape], budget_s: float) -> list[StepSample]:
        """Return the medians of a few rounds; the first round is for warm-up unless it has used the
        budget up. A machine that is slow for a second is so to all shapes of a round. A shape drops
        out once two of its steps are measured and its share of the budget is spent."""
        share_s = budget_s / len(shapes)
        samples: dict[StepShape, list[StepSample]] = {shape: [] for shape in shapes}
        spent_s = dict.fromkeys(shapes, 0.0)
        for number in range(1 + _MOST_ROUNDS):
            for shape, measured in samples.items():
                another_s = spent_s[shape] / max(number, 1)
                needed = number == 0 or (number == 1 and self._spent_s <= budget_s)
                if needed or spent_s[shape] + another_s <= share_s:
                    before_s = self._spent_s
                    measured.append(self._probe(shape))
                    spent_s[shape] += self._spent_s - before_s
        return [_median(measured[1:] or measured) for measured in samples.values()]

    def _probe(self, shape: StepShape) -> StepSample:
        """Run like steps and return the sample of the last."""
        generation = self._steps + 1
        admitted = tuple(self._admission(shape, slot, generation) for slot in range(shape.rows))
        lag = np.full(shape.rows, shape.catch_up, dtype=np.int32)
        result = self._step(shape, generation, lag, admitted)
        settled_s = self._spent_s + _SETTLED_S
        # A lookup first reads all that its sequence has, which is part of what it costs.
        reads = self._looks_up and shape.num_drafts > 0
        for _ in range(1, _LIKE_STEPS if shape.repeats and not reads else 1):
            if self._spent_s >= settled_s:
                break
            if shape.num_drafts:  # where all were accepted, a draft model has not seen the last
                lag = (result.num_accepted == shape.num_drafts).astype(np.int32)
            result = self._step(shape, generation, lag, ())
        sample = self._meter.last
        sample.work.ingested_tokens += reads * shape.rows * shape.context_tokens
        # Rows that catch up were admitted in the same step, which only the drafter's price ignores.
        return msgspec.structs.replace(sample, target_s=0.0) if shape.catch_up else sample

    def _step(
        self, shape: StepShape, generation: int, lag: np.ndarray, admitted: tuple[NewSequence, ...]
    ) -> StepResult:
        self._steps += 1
        each = np.ones(shape.rows, dtype=np.int32)
        plan = StepPlan(
            step_id=self._steps,
            slots=np.arange(shape.rows, dtype=np.int32),
            generations=each * generation,
            query_lens=each * shape.query_len,
            num_drafts=each * shape.num_drafts,
            catch_up=lag,
            wants_logits=np.ones(shape.rows, dtype=np.bool_),
            deltas=msgspec.structs.replace(NO_DELTAS, reset=bool(admitted), new_sequences=admitted),
        )
        result = self._meter.run(plan)
        self._spent_s += result.target_s + result.draft_s
        return result

    def _admission(self, shape: StepShape, slot: int, generation: int) -> NewSequence:
        known, most = shape.context_tokens, shape.most_tokens
        in_kv = known - shape.query_len + shape.num_drafts
        width = -(-most // self._config.block_size_tokens)
        return NewSequence(
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
        """Return made-up tokens, int32 [count]. Lookups alone get a text that repeats and find it;
        before a model they find nothing, so that a chain costs what its dearest drafter does."""
        rng = np.random.default_rng(slot)
        distinct = count if MODEL in self._config.default_chain else min(count, _PERIOD_TOKENS)
        tokens = rng.integers(0, self._config.vocab_size, distinct, dtype=np.int32)
        return np.resize(tokens, count)


def _median(samples: list[StepSample]) -> StepSample:
    draft_s, target_s = np.median([(s.draft_s, s.target_s) for s in samples], axis=0).tolist()
    return StepSample(samples[-1].work, draft_s, target_s)
