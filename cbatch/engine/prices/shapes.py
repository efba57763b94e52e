"""Steps of designed shapes, run and measured on an executor.

Steps run through the real executor, so that drafting, the forward pass and the verification are all
timed. Their sequences are synthetic and need no prefill.
"""

from __future__ import annotations

from typing import NamedTuple

import msgspec
import numpy as np

from cbatch.core.prices.step_work import StepSample
from cbatch.core.request.request import MODEL, SamplingParams
from cbatch.core.scheduler.config import SchedulerConfig
from cbatch.core.scheduler.executor import Executor
from cbatch.core.scheduler.plan import NO_DELTAS, NewSequence, StepPlan, StepResult
from cbatch.core.scheduler.slot_counts import SlotCounts
from cbatch.core.scheduler.slot_pages import pages_per_slot

CONTEXT_TOKENS = 64  # length of a row, drafts not included
LONG_CONTEXT_TOKENS = 512  # length of a row in shapes for the price of a context token
DRAFTS = 3  # drafts per row, in shapes that verify
_DRAFTS_AND_ROWS = ((1, 1), (8, 1), (1, 8), (8, 8))  # for the price of a draft pass
MAX_PROFILED_DRAFTS = max(DRAFTS, *(drafts for drafts, _ in _DRAFTS_AND_ROWS))  # of a row
_ROWS = (1, 2, 4, 8, 16, 32, 64, 128, 256)
_CHUNKS = (32, 128, 512)  # tokens of prefill chunks, alone and with `_MIXED_ROWS` rows
# Chunks at the end of a long prompt: kernels compute a chunk's pairs faster than a row's.
_LATE_CHUNKS, _LATE_CONTEXT_TOKENS = (32, 128), 2048
_MIXED_ROWS = (4, 28)
_HELD_OUT_ROWS, _HELD_OUT_DRAFTS, _HELD_OUT_CHUNKS = (3, 6, 12, 24, 48, 96), 2, (64, 256)
_CATCH_UPS_AND_ROWS = ((63, 1), (63, 4))  # (tokens that the drafter has not seen, rows)
_PERIOD_TOKENS = 16  # period of the repeated text for lookups
# Number of equal steps, the last of which is measured: a small model's first steps take up to a
# third longer, while caches and branch predictors are cold. After `_SETTLING_S` seconds of steps no
# further step runs, because in longer steps the difference is small.
_EQUAL_STEPS = 5
_SETTLING_S = 0.01
_MAX_ROUNDS = 15  # after the warm-up round
_MIN_STEPS = 6  # steps of the warm-up round, whatever the time


class StepShape(NamedTuple):
    """A step of `rows` equal sequences, each of which computes `query_len` tokens, drafts
    included."""

    rows: int
    query_len: int = 1
    num_drafts: int = 0
    context_tokens: int = CONTEXT_TOKENS
    catch_up: int = 0  # tokens per row that the draft model has not seen
    chunk_tokens: int = 0  # of a prompt that begins, in a further row

    @property
    def tokens(self) -> int:
        return self.rows * self.query_len + self.chunk_tokens

    @property
    def all_rows(self) -> int:
        return self.rows + (self.chunk_tokens > 0)

    @property
    def repeats(self) -> bool:
        """True if an equal step can follow: all rows decode, and no drafter has to catch up."""
        decodes = not self.chunk_tokens and self.query_len == 1 + self.num_drafts
        return decodes and not self.catch_up

    @property
    def max_tokens(self) -> int:
        """Maximum length of a row: after `_EQUAL_STEPS` steps that accept all drafts, plus 1."""
        decoded = self.context_tokens + _EQUAL_STEPS * (1 + self.num_drafts)
        return max(decoded, self.chunk_tokens) + 1


def can_profile(config: SchedulerConfig) -> bool:
    """Return whether shapes of two sizes in tokens fit. With a context below 70 they do not."""
    return len({shape.tokens for shape in shapes_for(config) if not shape.catch_up}) > 1


def shapes_for(config: SchedulerConfig) -> list[StepShape]:
    """Return shapes that decode, verify and prefill, and fit slots, context, budget and pool.

    Equal numbers of tokens in different numbers of rows determine the price of a row. Longer
    contexts determine the price of a context token. Chunks determine the price of logits, because
    only the last token of a chunk needs logits.
    """
    drafts = drafts_of(config)
    candidates = [StepShape(rows) for rows in _ROWS]
    candidates += [StepShape(rows, 1 + DRAFTS, drafts) for rows in _ROWS]
    if drafts:
        candidates += [StepShape(rows, 1 + k, k) for k, rows in _DRAFTS_AND_ROWS]
    if drafts and not _drafts_by_lookup(config):
        candidates += [StepShape(rows, 2, 1, catch_up=count) for count, rows in _CATCH_UPS_AND_ROWS]
    added_tokens = StepShape(1, 1 + DRAFTS, DRAFTS, context_tokens=0).max_tokens
    long_tokens = min(LONG_CONTEXT_TOKENS, config.max_sequence_tokens - added_tokens)
    if long_tokens >= 2 * CONTEXT_TOKENS:
        candidates += [StepShape(rows, context_tokens=long_tokens) for rows in (1, 8, 32)]
        candidates += [StepShape(rows, 1 + DRAFTS, drafts, long_tokens) for rows in (1, 8)]
    candidates += [StepShape(1, chunk, context_tokens=chunk) for chunk in _CHUNKS]
    candidates += [StepShape(1, k, context_tokens=_LATE_CONTEXT_TOKENS) for k in _LATE_CHUNKS]
    candidates += [StepShape(rows, chunk_tokens=chunk) for rows in _MIXED_ROWS for chunk in _CHUNKS]
    return [shape for shape in candidates if _fits(shape, config)]


def held_out_shapes(config: SchedulerConfig) -> list[StepShape]:
    """Return shapes of other sizes, to which no prices are fitted."""
    k = min(drafts_of(config), _HELD_OUT_DRAFTS)
    candidates = [StepShape(rows) for rows in _HELD_OUT_ROWS]
    candidates += [StepShape(rows, 1 + k, k) for rows in _HELD_OUT_ROWS if k]
    candidates += [StepShape(1, chunk, context_tokens=chunk) for chunk in _HELD_OUT_CHUNKS]
    candidates += [StepShape(8, chunk_tokens=chunk) for chunk in _HELD_OUT_CHUNKS]
    return [shape for shape in candidates if _fits(shape, config)]


def drafts_of(config: SchedulerConfig) -> int:
    return DRAFTS if config.default_chain else 0


def _drafts_by_lookup(config: SchedulerConfig) -> bool:
    return bool(config.default_chain) and config.default_chain[0] != MODEL


def _fits(shape: StepShape, config: SchedulerConfig) -> bool:
    needed_tokens = shape.max_tokens
    blocks = shape.all_rows * -(-needed_tokens // config.block_size)
    pages = shape.all_rows * pages_per_slot(shape.num_drafts, config.block_size)
    return (
        shape.all_rows <= config.max_num_seqs
        and shape.tokens + shape.rows * shape.catch_up <= config.max_num_batched_tokens
        and needed_tokens <= config.max_sequence_tokens
        and blocks <= config.num_blocks
        and (not config.num_state_pages or pages <= config.num_state_pages)
    )


class StepRunner:
    """Runs and measures synthetic steps. The first step of a shape admits its rows, which takes a
    third of a small model's step, so a later step is measured if equal steps can follow."""

    def __init__(
        self,
        executor: Executor,
        config: SchedulerConfig,
        *,
        max_rounds: int = _MAX_ROUNDS,
    ) -> None:
        self._max_rounds = max_rounds
        self._executor, self._config = executor, config
        self._counts = SlotCounts(config.max_num_seqs)
        self._drafts_by_lookup = _drafts_by_lookup(config)
        self._steps, self._spent_s = 0, 0.0

    def measure(self, shapes: list[StepShape], budget_s: float) -> list[StepSample]:
        """Return the median sample of each shape over several rounds.

        A round measures all shapes, so that a second in which the machine is slow affects all of
        them. The first round is warm-up, unless it spends the whole budget. It begins with the
        fewest tokens and ends early if a large model has spent the budget. A shape that has spent
        its share of the budget is skipped from the third round on.
        """
        share_s = budget_s / len(shapes)
        by_tokens = sorted(shapes, key=lambda shape: (shape.tokens, shape.context_tokens))
        samples: dict[StepShape, list[StepSample]] = {shape: [] for shape in by_tokens}
        spent_s = dict.fromkeys(shapes, 0.0)
        first, end_s = self._steps, self._spent_s + budget_s
        for number in range(1 + self._max_rounds):
            for shape, measured in samples.items():
                in_time = self._spent_s <= end_s
                if number == 0:
                    runs = in_time or self._steps - first < _MIN_STEPS
                else:
                    fits = spent_s[shape] * (1 + 1 / number) <= share_s
                    runs = bool(measured) and (fits or (number == 1 and in_time))
                if runs:
                    before_s = self._spent_s
                    measured.append(self._run_shape(shape))
                    spent_s[shape] += self._spent_s - before_s
        return [_median(samples[each][1:] or samples[each]) for each in shapes if samples[each]]

    def _run_shape(self, shape: StepShape) -> StepSample:
        """Run up to `_EQUAL_STEPS` steps of a shape, and return the sample of the last step."""
        generation = self._steps + 1
        slots = range(shape.all_rows)
        admitted = tuple(self._new_sequence(shape, slot, generation) for slot in slots)
        lag = np.full(shape.all_rows, shape.catch_up, dtype=np.int32)
        lag[shape.rows :] = 0
        result = self._step(shape, generation, lag, admitted)
        settled_s = self._spent_s + _SETTLING_S
        # A lookup reads the whole sequence in its first step: only this step has its full cost.
        reads = self._drafts_by_lookup and shape.num_drafts > 0
        for _ in range(1, _EQUAL_STEPS if shape.repeats and not reads else 1):
            if self._spent_s >= settled_s:
                break
            # After a full acceptance a draft model has not seen the last draft.
            if shape.num_drafts:
                lag = (result.num_accepted == shape.num_drafts).astype(np.int32)
            result = self._step(shape, generation, lag, ())
        sample = self._last
        sample.work.ingested_tokens += reads * shape.rows * shape.context_tokens
        # A row catches up in the step that admits it, so that only the drafter's time is valid.
        return msgspec.structs.replace(sample, target_s=0.0) if shape.catch_up else sample

    def _step(
        self, shape: StepShape, generation: int, lag: np.ndarray, admitted: tuple[NewSequence, ...]
    ) -> StepResult:
        self._steps += 1
        ones = np.ones(shape.all_rows, dtype=np.int32)
        query_lens, num_drafts = ones * shape.query_len, ones * shape.num_drafts
        query_lens[shape.rows :], num_drafts[shape.rows :] = shape.chunk_tokens, 0
        plan = StepPlan(
            step_id=self._steps,
            slots=np.arange(shape.all_rows, dtype=np.int32),
            generations=ones * generation,
            query_lens=query_lens,
            num_drafts=num_drafts,
            catch_up=lag,
            wants_logits=np.ones(shape.all_rows, dtype=np.bool_),
            deltas=msgspec.structs.replace(
                NO_DELTAS,
                reset=bool(admitted),
                new_sequences=admitted,
                state_pages=self._state_pages(shape, admitted),
            ),
        )
        result, counts = self._executor.run(plan), self._counts
        for new in admitted:
            counts.admit(new)
        work = counts.work(plan, result.num_drafted)
        counts.advance(plan, result.num_accepted, np.diff(result.row_splits))
        self._last = StepSample(work, result.draft_s, result.target_s)
        self._spent_s += result.target_s + result.draft_s
        return result

    def _new_sequence(self, shape: StepShape, slot: int, generation: int) -> NewSequence:
        num_tokens, max_tokens = shape.context_tokens, shape.max_tokens
        kv_len = num_tokens - shape.query_len + shape.num_drafts
        if slot == shape.rows:  # the prompt
            num_tokens, kv_len = shape.chunk_tokens, 0
        num_blocks = -(-max_tokens // self._config.block_size)
        return NewSequence(
            slot=slot,
            generation=generation,
            request_id=f"profile-{generation}-{slot}",
            seed=0,
            choice=0,
            params=SamplingParams(temperature=0.0, max_tokens=max_tokens - num_tokens),
            stop_ids=(),
            tokens=self._tokens(slot, num_tokens),
            num_prompt_tokens=num_tokens,
            max_total_tokens=max_tokens,
            kv_len_tokens=kv_len,
            draft_kv_len_tokens=max(kv_len - shape.catch_up, 0),
            blocks=np.arange(slot * num_blocks, (slot + 1) * num_blocks, dtype=np.int32),
            state_page=self._page(shape, slot, kv_len // self._config.block_size),
        )

    def _page(self, shape: StepShape, slot: int, boundary: int) -> int | None:
        if not (self._config.num_state_pages and boundary):
            return None
        count = pages_per_slot(shape.num_drafts, self._config.block_size)
        return slot * count + boundary % count

    def _state_pages(self, shape: StepShape, admitted: tuple[NewSequence, ...]) -> np.ndarray:
        """Return pages for the boundaries that new rows reach from the end of their first step."""
        pages, size = [], self._config.block_size
        for new in admitted if self._config.num_state_pages else ():
            begin, end = new.kv_len_tokens // size + 1, new.max_total_tokens // size
            if new.slot == shape.rows or not shape.num_drafts:
                begin = max(begin, len(new.tokens) // size)
            pages += [(new.slot, b, self._page(shape, new.slot, b)) for b in range(begin, end + 1)]
        return np.array(pages, dtype=np.int32).reshape(-1, 3).T

    def _tokens(self, slot: int, count: int) -> np.ndarray:
        """Return synthetic tokens, int32 [count]. If only lookups draft, the tokens repeat, so that
        lookups have matches. With a draft model they do not repeat: the draft model, the most
        expensive drafter, then drafts."""
        rng = np.random.default_rng(slot)
        distinct = count if MODEL in self._config.default_chain else min(count, _PERIOD_TOKENS)
        tokens = rng.integers(0, self._config.vocab_size, distinct, dtype=np.int32)
        return np.resize(tokens, count)


def _median(samples: list[StepSample]) -> StepSample:
    draft_s, target_s = np.median([(s.draft_s, s.target_s) for s in samples], axis=0).tolist()
    return StepSample(samples[-1].work, draft_s, target_s)
