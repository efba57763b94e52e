"""What steps cost on this machine: a short measurement before the first request, kept in a file.

Steps of chosen shapes run through the executor itself, so that what is timed is what will be
charged: drafting, one pass, the verdict. Their sequences are made up; the executor is reset after.
"""

from __future__ import annotations

from collections.abc import Mapping
from operator import attrgetter
from typing import NamedTuple

import numpy as np

from cbatch.core.prices.cost_profile import CostProfile
from cbatch.core.prices.step_work import StepSample
from cbatch.core.request.request import MODEL, SamplingParams
from cbatch.core.scheduler.config import SchedulerConfig
from cbatch.core.scheduler.plan import Deltas, NewSequence, StepPlan, StepResult
from cbatch.engine.loop import Executor
from cbatch.engine.price_fit import Features, fit_curves, fit_drafting
from cbatch.engine.step_meter import StepMeter

CONTEXT_TOKENS = 64
LONG_CONTEXT_TOKENS = 512
DRAFTS = 3  # of the shapes that verify: 4 tokens a row
_DEPTHS_ROWS = ((1, 1), (8, 1), (1, 8), (8, 8))  # drafts and rows, for the price of a pass
MOST_DRAFTS = max(DRAFTS, *(drafts for drafts, _ in _DEPTHS_ROWS))  # that any shape verifies
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
_NO_SLOTS = np.zeros(0, dtype=np.int32)
_TARGET: Features = {
    "logits_token_s": attrgetter("logit_tokens"),
    "context_token_s": attrgetter("context_tokens"),
    "verify_context_token_s": lambda work: work.context_tokens * (work.draft_tokens > 0),
    "row_s": attrgetter("rows"),
}
_DRAFT: Features = {
    "draft_setup_s": lambda work: 1,
    "draft_pass_s": attrgetter("draft_depth"),
    "draft_token_s": attrgetter("draft_tokens"),
    "draft_ingest_s": attrgetter("ingested_tokens"),
}
_LEAST_SHARE = 0.01  # of the shortest step, that any point of T is at least


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
    def goes_on(self) -> bool:
        """Whether the same step can follow it: each row decodes, and its draft has seen all."""
        return not self.catch_up and self.query_len == 1 + self.num_drafts

    @property
    def most_tokens(self) -> int:
        """Known of a row after `_LIKE_STEPS` such steps and one more token."""
        return self.context_tokens + _LIKE_STEPS * (1 + self.num_drafts) + 1


def profile_costs(
    executor: Executor, config: SchedulerConfig, *, budget_s: float = _BUDGET_S
) -> CostProfile:
    """Measure for about `budget_s` seconds, at least one step of each shape, and reset the
    executor. Where nobody drafts (`config.default_chain`) its costs are 0."""
    shapes = shapes_for(config)
    samples = _Runner(executor, config).measure(shapes, budget_s)
    executor.reset()
    return fit_profile(samples)


def can_profile(config: SchedulerConfig) -> bool:
    """Whether steps of two sizes fit: of contexts below some hundred tokens none does."""
    return len({shape.tokens for shape in shapes_for(config) if not shape.catch_up}) > 1


def shapes_for(config: SchedulerConfig) -> list[StepShape]:
    """The shapes that fit slots, context, budget and pool: plain rows, verifications, longer
    contexts, chunks of prompts."""
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


class _Runner:
    """Runs made-up steps. They start from a full snapshot, whose rows are admitted by a step that
    does not count where others can follow: of a small model it would be a third of the price."""

    def __init__(self, executor: Executor, config: SchedulerConfig) -> None:
        self._meter, self._config = StepMeter(executor, config.max_slots), config
        self._looks_up = _looks_up(config)
        self._steps, self._spent_s = 0, 0.0

    def measure(self, shapes: list[StepShape], budget_s: float) -> dict[StepShape, StepSample]:
        """Medians over a few rounds; the first one is for warm-up unless it has used the budget up.
        A machine that is slow for a second is so to all shapes of a round; the dear ones drop out
        once two of them are measured and their share of the budget is spent."""
        share_s = budget_s / len(shapes)
        found: dict[StepShape, list[StepSample]] = {shape: [] for shape in shapes}
        spent_s = dict.fromkeys(shapes, 0.0)
        for number in range(1 + _MOST_ROUNDS):
            for shape, samples in found.items():
                another_s = spent_s[shape] / max(number, 1)
                wanted = number == 0 or (number == 1 and self._spent_s <= budget_s)
                if wanted or spent_s[shape] + another_s <= share_s:
                    before_s = self._spent_s
                    samples.append(self._run(shape))
                    spent_s[shape] += self._spent_s - before_s
        return {shape: _median(samples[1:] or samples) for shape, samples in found.items()}

    def _run(self, shape: StepShape) -> StepSample:
        """Of the last of the steps."""
        generation = self._steps + 1
        admitted = tuple(self._admission(shape, slot, generation) for slot in range(shape.rows))
        lag = np.full(shape.rows, shape.catch_up, dtype=np.int32)
        result = self._step(shape, generation, lag, admitted)
        settled_s = self._spent_s + _SETTLED_S
        # A lookup first reads all that its sequence has, which is part of what it costs.
        reads = self._looks_up and shape.num_drafts > 0
        for _ in range(1, _LIKE_STEPS if shape.goes_on and not reads else 1):
            if self._spent_s >= settled_s:
                break
            if shape.num_drafts:  # of those all accepted, a draft model has not seen the last
                lag = (result.num_accepted == shape.num_drafts).astype(np.int32)
            result = self._step(shape, generation, lag, ())
        self._meter.last.work.ingested_tokens += reads * shape.rows * shape.context_tokens
        return self._meter.last

    def _step(
        self, shape: StepShape, generation: int, lag: np.ndarray, admitted: tuple[NewSequence, ...]
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
                new_sequences=admitted,
                append_slots=_NO_SLOTS,
                append_indices=_NO_SLOTS,
                append_blocks=_NO_SLOTS,
            ),
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
        """Made-up tokens, int32 [count]. Lookups by themselves find a text that repeats; before a
        model they find nothing, so that the price of a chain is that of its dearest."""
        rng = np.random.default_rng(slot)
        distinct = count if MODEL in self._config.default_chain else min(count, _PERIOD_TOKENS)
        tokens = rng.integers(0, self._config.vocab_size, distinct, dtype=np.int32)
        return np.resize(tokens, count)


def fit_profile(samples: Mapping[StepShape, StepSample]) -> CostProfile:
    """Prices of a machine on which steps of these shapes took so long.

    Shapes that bring equally many tokens in different numbers of rows tell the price of a row; rows
    with a longer context that of a context token, decoding and verifying; and by as much as a chunk
    of a prompt is cheaper than as many verified tokens, wanting logits costs. The rest is T's.
    """
    # Who catches up was admitted in the same step, and is for the price of the drafter's alone.
    known = [sample for shape, sample in samples.items() if not shape.catch_up]
    tokens = np.array([sample.work.target_tokens for sample in known])
    points = np.unique(tokens).tolist()
    (seconds,), prices = fit_curves([(tokens, points)], _TARGET, known)
    floor_s = _LEAST_SHARE * min(sample.target_s for sample in known)
    return CostProfile(
        tokens=tuple(points),
        target_s=tuple(max(s, floor_s) for s in seconds),
        **prices,
        **fit_drafting(_DRAFT, list(samples.values())),
    )


def _median(samples: list[StepSample]) -> StepSample:
    draft_s, target_s = np.median([(s.draft_s, s.target_s) for s in samples], axis=0).tolist()
    return StepSample(samples[-1].work, draft_s, target_s)
