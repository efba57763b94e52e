"""The prompt tokens of a step while rows decode.

A chunk is the smallest that keeps a share of the best prompt throughput, so that decoding rows wait
no longer than necessary for their next tokens. Best chunks of about the same length are averaged,
so that equal runs have equal chunks. Prompts with a slot count as decoding rows. Otherwise small
chunks would leave few rows that decode, and these would ask for small chunks. The step takes at
most 1 / (1 - share) times as long as without the chunk. That keeps the share if all prompt tokens
cost the same. The limit is not kept if prompts would lose a further 1 - share significantly.
Targets for the gap between tokens limit chunks further.
"""

from __future__ import annotations

import numpy as np
from msgspec import structs

from cbatch.core.prices.step_costs import StepCosts
from cbatch.core.prices.step_work import StepSample, StepWork

# Share of the best prompt throughput that steps keep while rows decode.
PROMPT_SHARE = 0.8
# The first chunks have at most `_FIRST_TOKENS`, later ones `_GROWTH` times those of the largest.
_FIRST_TOKENS, _GROWTH = 64, 2
_MIN_TOKENS = 8  # prompt tokens of a step whatever its target, so that prompts progress
_NEAR = 1.25  # ratio of best chunks that are averaged
_BEST_EVERY = 8  # chunks after which the best is found again, or once the number of rows changes
_MEMORY = 32  # chunks, or searches, over which a mean is taken: of the context, or of the best
# A step is planned to take this share (margin) of the target time between two tokens. The share
# falls after a step longer than the target, and rises after a shorter one: in equilibrium one step
# in two hundred is too long. Each target has its own, so that clients with short ones change no
# other.
_FIRST_MARGIN, _MARGIN_FALL, _MARGIN_RISE = 0.7, 0.04, 0.0002
_MIN_MARGIN = 0.4
_MAX_TARGETS = 16  # targets that have margins of their own


class ChunkSizes:
    """Chooses chunks by the prices of steps."""

    def __init__(self, costs: StepCosts, max_tokens: int, prompt_share: float) -> None:
        """`max_tokens`: most tokens of a step. `prompt_share`: share of the best prompt throughput
        that a chunk keeps; 1: chunks take the whole budget."""
        self._costs, self._share = costs, prompt_share
        sizes = _MIN_TOKENS * 2 ** (np.arange(160) / 8)  # eight sizes per doubling
        self._sizes = np.unique(np.append(sizes[sizes < max_tokens].astype(np.int64), max_tokens))
        self._max_tokens = max_tokens
        # Tokens of the last chosen chunk, and of the largest that was measured.
        self.last, self._max_measured = max_tokens if prompt_share >= 1 else 0, 0
        self._best_for = self.num_chunks = 0  # rows at the last search; measured steps with chunks
        self._mean = 0.0  # of the best chunks near the last
        self._history = 0.0  # mean context before a chunk, of recent chunks
        self._margins: dict[float, float] = {}  # by target, last observed last

    def observe(self, sample: StepSample, target_s: float | None) -> None:
        """Observe a committed step, whose rows have this target."""
        work, seconds = sample.work, sample.draft_s + sample.rest_s
        if work.prefill_tokens:
            self.num_chunks += 1
            self._max_measured = max(self._max_measured, work.prefill_tokens)
            # A token of a chunk attends to half of the chunk, too.
            chunk_tokens = work.prefill_tokens / max(work.rows - work.decode_rows, 1)
            history = max(work.prefill_pairs / work.prefill_tokens - chunk_tokens / 2, 0.0)
            self._history += (history - self._history) / _MEMORY
        if target_s is None or seconds <= 0:
            return
        # A miss teaches nothing if even the shortest step of these rows would have missed.
        missed = seconds > target_s
        if missed and self._costs.is_known and not self._within(target_s, work.plain):
            return
        change = -_MARGIN_FALL if missed else _MARGIN_RISE
        margin = min(max(self._margin(target_s) + change, _MIN_MARGIN), 1.0)
        self._margins.pop(target_s, None)
        self._margins[target_s] = margin
        if len(self._margins) > _MAX_TARGETS:
            del self._margins[next(iter(self._margins))]

    def _margin(self, target_s: float) -> float:
        return self._margins.get(target_s, _FIRST_MARGIN)

    def _within(self, limit_s: float, work: StepWork, history: int = 0) -> int:
        """Return the largest chunk with which the step `work` takes at most `limit_s`, or 0."""
        seconds = self._costs.with_chunks(work, self._sizes, history)
        return int(self._sizes[seconds <= limit_s].max(initial=0))

    def drafts_within(self, target_s: float, work: StepWork, depth: int, chunk: int) -> int:
        """Return the drafts, in up to `depth` passes, that fit into `target_s` with the decoding
        rows `work` and a chunk. Before prices are known, return the most tokens of a step."""
        if not self._costs.is_known:
            return self._max_tokens
        counts = np.append(np.arange(_MIN_TOKENS), self._sizes)
        prices = self._costs.prices(work.rows, work.context_tokens, counts)
        seconds = prices.step_s + prices.ingest_s * counts + prices.pass_s * counts.clip(0, depth)
        if chunk:
            seconds += self._costs.with_chunks(work, np.array([chunk]), 0) - seconds[0]
        return int(counts[seconds <= self._margin(target_s) * target_s].max(initial=0))

    def chunk(self, work: StepWork, history: int, num_prompts: int, target_s: float | None) -> int:
        """Return the prompt tokens to be added to `work`, a step of decoding rows, after `history`
        tokens of the prompt; at least `_MIN_TOKENS`. `num_prompts`: rows that will decode next."""
        chosen = self._chosen(work, work.rows + num_prompts)
        if target_s is None or not self._costs.is_known:
            return chosen
        limit_s = self._margin(target_s) * target_s - self._costs.draft_s(work)
        return min(chosen, max(self._within(limit_s, work, history), _MIN_TOKENS))

    def _chosen(self, work: StepWork, rows: int) -> int:
        """Return the chunk for `rows` decoding rows with contexts like those of `work`."""
        if self._share >= 1:
            return self.last
        max_chunk = min(max(_GROWTH * self._max_measured, _FIRST_TOKENS), self._max_tokens)
        if not self._costs.is_known:
            return max_chunk
        if rows != self._best_for or self.num_chunks % _BEST_EVERY == 0:
            context_tokens = work.decode_context_tokens * rows // work.rows
            self._best_for, best = rows, self._best(StepWork.decoding(rows, context_tokens))
            is_near = self._mean / _NEAR <= best <= self._mean * _NEAR
            self._mean += (best - self._mean) / (_MEMORY if is_near else 1)
            self.last = round(self._mean)
        return min(self.last, max_chunk)

    def _best(self, work: StepWork) -> int:
        """Return the chunk that keeps the share of the best prompt throughput in `work`."""
        sizes, history = self._sizes, int(self._history)
        seconds = self._costs.with_chunks(work, sizes, history)
        speeds = sizes / seconds
        smallest = int(np.argmax(speeds >= self._share * np.maximum.reduce(speeds)))
        alone_s = self._costs.gradient(work)[0]
        capped = max(int(np.count_nonzero(seconds <= alone_s / (1 - self._share))) - 1, 0)
        if capped < smallest:
            steps = [_with_chunk(work, int(sizes[i]), history) for i in (capped, smallest)]
            error = self._costs.variance_of_ratio(*steps) ** 0.5
            loss = np.log(speeds[smallest] / speeds[capped])
            smallest = smallest if loss > error - np.log(self._share) else capped
        return int(sizes[smallest])

    def prompt_token_s(self, work: StepWork, budget_tokens: int) -> float:
        """Return the estimated seconds per prompt token with the decoding rows `work`, at recent
        context lengths; 0 before prompts were observed."""
        if not (self._max_measured and self._costs.is_known):
            return 0.0
        chunk = (self.last or _FIRST_TOKENS) if work.rows else budget_tokens
        sizes = np.array([min(chunk, budget_tokens)])
        return float((self._costs.with_chunks(work, sizes, int(self._history)) / sizes)[0])


def _with_chunk(work: StepWork, tokens: int, history: int) -> StepWork:
    pairs, context = int(tokens * (history + tokens / 2)), work.context_tokens + history + tokens
    return structs.replace(
        work,
        target_tokens=work.target_tokens + tokens,
        context_tokens=context,
        prefill_tokens=tokens,
        prefill_pairs=pairs,
    )
