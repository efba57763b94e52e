"""Schedule a step: decoding rows and their drafts, then chunks of prompts, then new requests.

`schedule` is vLLM's `Scheduler.schedule`. Within `max_num_batched_tokens` a step has, in order:

1. Decoding rows: the next token of each, then the drafts that the lookahead policy chooses. Blocks
   are reserved for both. Where the pool is short, drafts are cut and rows are preempted
   (preemption.py); then no request is admitted in this step.
2. Chunks of prompts. The row with the fewest remaining tokens goes first, so that a short prompt
   does not wait for a long one. To bound the delay, a row goes first once the prompts that overtook
   it have computed at least its `tokens_at_admission`. Under the `priority` policy no row overtakes
   a row of higher priority.
3. New requests in service order (queue.py). Requests shorter than the first prompt go before it.
   Admission needs a slot, and blocks for all known tokens and a decode reserve. A request that does
   not fit blocks all later requests. A request whose next prefix block is being computed waits for
   that block, and lets others overtake it.
"""

from __future__ import annotations

from functools import cached_property
from math import ceil
from typing import NamedTuple

import numpy as np

from cbatch.core.prices.step_work import StepWork
from cbatch.core.scheduler.caching_pool import ONE, ZERO
from cbatch.core.scheduler.plan import StepPlan
from cbatch.core.scheduler.preemption import candidate_of, decide_growth, fit_drafts, is_in_flight
from cbatch.core.scheduler.sequence import Sequence
from cbatch.core.scheduler.slot_pages import SlotPages
from cbatch.core.scheduler.slot_table import DecodeBatch, InFlightStep, RowTokens
from cbatch.core.scheduler.state import SchedulerState


def schedule(state: SchedulerState) -> StepPlan | None:
    """Return the next plan and note it as in flight, or return None if no row can run."""
    if state.pages is not None and state.in_flight and state.pages.room(overlaps=True) < 0:
        return None  # a second plan needs more state pages than a first
    num_preemptions = state.stats.preemptions
    batch, tokens = _schedule_decodes(state)
    chunks: list[Chunk] = []
    if state.prefilling or (state.waiting and state.table.num_free):
        # A new request would take the blocks for which sequences were preempted.
        may_admit = state.stats.preemptions == num_preemptions and not state.pending_preemption
        chunks = _schedule_prompts(state, batch, tokens, may_admit=may_admit)
    if not (len(batch.slots) or chunks):
        return None
    return _build_plan(state, batch, tokens, chunks)


# ---- 1. decoding rows ---------------------------------------------------------------------------


def _schedule_decodes(state: SchedulerState) -> tuple[DecodeBatch, RowTokens]:
    table, batch = state.table, state.decode_batch()
    if state.in_flight:  # rows have `num_known` tokens or more, and `max_kv_len` in KV or less
        num_known, max_kv_len = _token_bounds(state)
        batch = _without_finishing(state, batch, num_known)
        num_known, max_kv_len = num_known[batch.rows], max_kv_len[batch.rows]
    else:
        num_known = max_kv_len = table.num_tokens[batch.rows]
    if not len(batch.slots):
        return batch, batch.plain
    tokens = _choose_drafts(state, batch, num_known) if batch.may_draft else batch.plain
    if tokens.total_drafts:
        max_kv_len = max_kv_len + tokens.num_drafts
    if state.in_flight:  # the sum of two upper bounds may exceed the end
        max_kv_len = np.minimum(max_kv_len, table.max_total[batch.rows])
    if _append_blocks(state, batch, max_kv_len):
        return batch, tokens
    return _preempt(state, batch, tokens)


def _token_bounds(state: SchedulerState) -> tuple[np.ndarray, np.ndarray]:
    """Return two bounds that hold after the plans in flight are committed, int32 [slots]: the
    fewest known tokens, and the most KV positions after one more token."""
    table = state.table
    num_known = table.num_tokens.copy()
    max_kv_len = table.num_tokens - table.num_uncomputed_tokens + 1
    for step in state.in_flight:
        num_known[step.rows] += step.plan.wants_logits
        max_kv_len[step.rows] += step.plan.query_lens
    return num_known, max_kv_len


def _without_finishing(
    state: SchedulerState, batch: DecodeBatch, num_known: np.ndarray
) -> DecodeBatch:
    """Return the batch without rows that will be preempted, and rows that reach `max_tokens` in a
    plan in flight."""
    continues = num_known[batch.rows] < state.table.max_total[batch.rows]
    for sequence in state.pending_preemption:
        continues &= batch.slots != sequence.slot
    if False not in continues.tolist():
        return batch
    return state.batch_of(batch.index[continues].tolist())


def _choose_drafts(state: SchedulerState, batch: DecodeBatch, num_known: np.ndarray) -> RowTokens:
    """Return drafts and catch-up tokens per row within the token budget. Later code decides whether
    the pool has blocks for them."""
    step = DraftableRows(state, batch, num_known)
    num_drafts = state.policy.choose(step)
    if num_drafts is None:
        return batch.plain
    budget, drafts = step.budget_tokens, batch.max_drafts
    if num_drafts is not drafts.num_drafts:
        drafts = RowTokens.of(num_drafts, batch.plain.catch_up, 0)
    if not state.has_draft_kv and drafts.total_drafts <= budget:
        return drafts  # lookups and heads never catch up
    lag = step.draft_kv_lag
    total = int(np.add.reduce(lag))
    if drafts.all_draft and drafts.total_drafts + total <= budget:
        return drafts.with_catch_up(lag.copy(), total)
    first = state.num_plans % step.num_rows
    fitting, catch_up, total = fit_drafts(num_drafts, lag, budget, first)
    if fitting is not num_drafts:
        drafts = RowTokens.of(fitting, lag, 0)
    return drafts.with_catch_up(catch_up, total - drafts.total_drafts)


def _append_blocks(state: SchedulerState, batch: DecodeBatch, max_kv_len: np.ndarray) -> bool:
    """Append blocks until each row has `max_kv_len` positions, int32 [rows]. If the pool has too
    few blocks, do nothing and return False."""
    capacity, size = state.table.capacity[batch.rows], state.pool.block_size
    full = (max_kv_len > capacity).nonzero()[0]
    if not len(full):
        return True
    counts, total = None, len(full)
    if state.in_flight or state.policy.max_depth >= size:  # else each full row lacks one block
        counts = (max_kv_len[full] - capacity[full] + (size - 1)) // size
        total = int(np.add.reduce(counts))
    if total > state.pool.num_available:
        return False
    state.append_blocks(batch.index[full], counts)
    return True


def _preempt(
    state: SchedulerState, batch: DecodeBatch, tokens: RowTokens
) -> tuple[DecodeBatch, RowTokens]:
    """Preempt sequences because the pool has too few blocks, append blocks to the other rows, and
    return these rows with their tokens."""
    pool, max_kv_len = state.pool, _token_bounds(state)[1]
    drafts_by_slot = dict(zip(batch.slots.tolist(), tokens.num_drafts.tolist(), strict=True))
    candidates = [
        candidate_of(state, owner, drafts_by_slot, max_kv_len)
        for owner in state.owners
        if owner is not None and not owner.pending_preemption
    ]
    leaving = [slot for step in state.in_flight for slot in step.slots_to_free]
    leaving += [s.slot for s in state.pending_preemption if s.slot is not None]
    pending = sum(pool.count_unshared(state.block_row(slot)) for slot in leaving)
    growth = decide_growth(candidates, pool.num_available, pending, pool.block_size)
    for sequence in state.owners_of(growth.victims):
        if is_in_flight(state, sequence.slot):
            sequence.pending_preemption = True
            state.pending_preemption.append(sequence)
        else:
            state.preempt(sequence)
    keep = np.array([slot in growth.granted_drafts for slot in drafts_by_slot], dtype=bool)
    batch = state.batch_of(batch.index[keep].tolist())
    granted = [growth.granted_drafts[slot] for slot in batch.slots.tolist()]
    drafts, catch_up = np.array(granted, dtype=np.int32), tokens.catch_up[keep]
    max_kv_len = np.minimum(max_kv_len[batch.rows] + drafts, state.table.max_total[batch.rows])
    _append_blocks(state, batch, max_kv_len)
    return batch, RowTokens.of(drafts, catch_up, int(np.add.reduce(catch_up)))


# ---- 2. and 3. prompts --------------------------------------------------------------------------


class Chunk(NamedTuple):
    """The next `query_len` tokens of a prompt. `last`: whether they complete the prompt."""

    slot: int
    query_len: int
    last: bool


class _Prompt(NamedTuple):
    slot: int
    sequence: Sequence
    remaining_tokens: int

    @property
    def order(self) -> tuple[float, int]:
        """Return the sort key; the smallest is served first. The remaining length counts until the
        prompts that overtook this one have computed as many tokens as it has."""
        is_due = self.sequence.overtaken_tokens >= self.sequence.tokens_at_admission
        return self.sequence.level, 0 if is_due else self.remaining_tokens


def _schedule_prompts(
    state: SchedulerState, batch: DecodeBatch, tokens: RowTokens, *, may_admit: bool
) -> list[Chunk]:
    running = state.owners_of(state.prefilling)
    prompts = [_prompt_of(state, owner) for owner in running if not owner.pending_preemption]
    prompts.sort(key=lambda prompt: prompt.order)
    budget_tokens = _prompt_budget(state, batch, tokens, prompts)
    chunks: list[Chunk] = []
    if may_admit and prompts:
        budget_tokens = _admit(state, budget_tokens, chunks, before=prompts[0])
    for prompt in prompts:
        if budget_tokens <= 0:
            return chunks
        budget_tokens = _serve(state, prompt, budget_tokens, chunks)
    if may_admit:
        _admit(state, budget_tokens, chunks)
    return chunks


def _prompt_of(state: SchedulerState, sequence: Sequence) -> _Prompt:
    """Return the prompt, with the tokens that no committed step or plan in flight computes."""
    slot = sequence.slot
    assert slot is not None
    remaining = int(state.table.num_uncomputed_tokens[slot])
    for step in state.in_flight:  # exact, since a prefilling row drafts nothing
        remaining -= int(step.plan.query_lens @ (step.plan.slots == slot))
    return _Prompt(slot, sequence, remaining)


def _prompt_budget(
    state: SchedulerState, batch: DecodeBatch, tokens: RowTokens, prompts: list[_Prompt]
) -> int:
    """Return the most prompt tokens of the step: the budget that decoding rows leave, limited by
    the delay that these rows accept (see chunk_sizes.py)."""
    config, num_rows = state.config, len(batch.slots)
    budget = config.max_num_batched_tokens - num_rows - tokens.total_drafts
    budget -= ceil(tokens.total_catch_up * config.catch_up_price)
    if not num_rows:
        return budget
    known = state.table.num_tokens[batch.rows].astype(np.int64)
    work = StepWork.decoding(num_rows, int(np.add.reduce(known)))
    work.draft_tokens, work.ingested_tokens = tokens.total_drafts, tokens.total_catch_up
    if tokens.total_drafts:
        work.decode_pairs = int(known @ tokens.query_lens)
        work.draft_depth = int(np.maximum.reduce(tokens.num_drafts))
        work.target_tokens = work.logit_tokens = num_rows + tokens.total_drafts
    history = state.table.kv_len(prompts[0].slot) if prompts else 0
    target_s = batch.itl_target_s
    return min(budget, state.chunk_sizes.chunk(work, history, state.num_prompts, target_s))


def _serve(state: SchedulerState, prompt: _Prompt, budget_tokens: int, chunks: list[Chunk]) -> int:
    """Append the next chunk of a prompt, count its tokens for the prompts that it overtakes, and
    return the remaining budget."""
    query_len = min(prompt.remaining_tokens, budget_tokens)
    chunks.append(Chunk(prompt.slot, query_len, last=prompt.remaining_tokens <= budget_tokens))
    earlier = state.prefilling[: state.prefilling.index(prompt.slot)]  # in order of admission
    for sequence in state.owners_of(earlier):
        sequence.overtaken_tokens += query_len
    return budget_tokens - query_len


def _admit(
    state: SchedulerState, budget_tokens: int, chunks: list[Chunk], before: _Prompt | None = None
) -> int:
    """Admit waiting sequences in service order, append their chunks, and return the remaining
    budget. With `before`, admit only sequences that overtake this prompt."""
    pool = state.pool
    cached = False  # the completed blocks of running sequences are in the prefix cache
    for sequence in list(state.waiting) if budget_tokens > 0 else ():
        if budget_tokens <= 0 or not state.has_free_slot:
            break
        if before is not None and (sequence.level, len(sequence.tokens)) >= before.order:
            break
        # The last known token is always computed, because its logits are needed.
        may_hit = state.config.enable_prefix_caching and not sequence.computes_prompt
        max_hits = (len(sequence.tokens) - 1) // pool.block_size if may_hit else 0
        match = pool.match(sequence.tokens, max_hits, sequence.root)
        if may_hit and not cached and state.may_match_more(match, sequence.root):
            cached = True
            state.cache_completed_blocks()
            match = pool.match(sequence.tokens, max_hits, sequence.root)
        if match.promised:
            continue
        fresh = state.blocks_to_admit(sequence) - len(match.blocks)
        if fresh + pool.count_unreferenced(match.blocks) > pool.num_available:
            break
        state.admit(sequence, match)
        budget_tokens = _serve(state, _prompt_of(state, sequence), budget_tokens, chunks)
    return budget_tokens


def _build_plan(
    state: SchedulerState, batch: DecodeBatch, tokens: RowTokens, chunks: list[Chunk]
) -> StepPlan:
    table = state.table
    if state.pages is not None:
        _reserve_pages(state, state.pages, batch, tokens.num_drafts, chunks)
    slots, generations, wants_logits = batch.slots, batch.generations, batch.wants_logits
    rows, owners = batch.rows, batch.owners
    if chunks:
        prefills = [(c.slot, table.generation.item(c.slot), c.query_len, 0, 0) for c in chunks]
        # One array for all columns: separate arrays would take three times as long.
        columns = np.empty((5, len(slots) + len(chunks)), dtype=np.int32)
        decodes = slots, generations, tokens.query_lens, tokens.num_drafts, tokens.catch_up
        columns[:, : len(slots)] = decodes
        columns.T[len(slots) :] = prefills
        slots, generations, query_lens, num_drafts, catch_up = columns
        totals = tokens.total_drafts, tokens.total_catch_up
        tokens = RowTokens(num_drafts, query_lens, catch_up, *totals, num_chunks=len(chunks))
        rows = slots.astype(np.intp)
        owners = owners + state.owners_of([chunk.slot for chunk in chunks])
        wants_logits = table.trues[: len(slots)].copy()
        wants_logits[-len(chunks) :] = [chunk.last for chunk in chunks]
        for chunk in chunks:
            if chunk.last:
                state.start_decoding(chunk.slot)
    plan = StepPlan(
        step_id=state.num_plans,
        slots=slots,
        generations=generations,
        query_lens=tokens.query_lens,
        num_drafts=tokens.num_drafts,
        catch_up=tokens.catch_up,
        wants_logits=wants_logits,
        deltas=state.deltas.take(state.pool.take_to_zero()),
        keep_states=state.policy.keeps_states,
    )
    state.num_plans += 1
    step = InFlightStep(plan, rows, owners, tokens, bool(state.in_flight), batch.itl_target_s)
    state.in_flight.append(step)
    return plan


def _reserve_pages(
    state: SchedulerState,
    pages: SlotPages,
    batch: DecodeBatch,
    num_drafts: np.ndarray,
    chunks: list[Chunk],
) -> None:
    """Give the rows of a plan the state pages that it may write."""
    max_kv_len, rows = _token_bounds(state)[1], batch.index
    pages.reserve(rows, np.minimum(max_kv_len[rows] + num_drafts, state.table.max_total[rows]))
    for chunk in chunks:
        pages.reserve_chunk(chunk.slot, max_kv_len.item(chunk.slot) - 1 + chunk.query_len)


class DraftableRows:
    """The decoding rows as a lookahead policy sees them (`policy.PlannedRows`), computed late."""

    def __init__(self, state: SchedulerState, batch: DecodeBatch, num_known: np.ndarray) -> None:
        self._state, self._batch, self._num_known = state, batch, num_known
        self.rows, self.num_rows = batch.rows, len(batch.slots)

    @cached_property
    def max_drafts(self) -> np.ndarray:
        state, batch = self._state, self._batch
        max_drafts = batch.max_drafts.num_drafts
        if state.in_flight or batch.tokens_until_end < state.policy.max_depth:
            max_drafts = np.minimum(max_drafts, np.maximum(self.remaining_tokens, ZERO))
        return max_drafts

    @cached_property
    def draft_kv_lag(self) -> np.ndarray:
        """Known tokens but the last that each row's draft KV lacks, int32 [rows]."""
        table, rows, num_known = self._state.table, self.rows, self._num_known
        if not self._state.has_draft_kv:
            return table.zeros[: self.num_rows]
        lag: np.ndarray = num_known - ONE - table.draft_kv[rows]
        if not self._state.decode_batch().all_catch_up:
            lag = lag * (num_known <= table.catch_up_end[rows])
        return lag

    @cached_property
    def budget_tokens(self) -> int:
        """Most drafts and catch-up tokens of all rows together. While prompts wait, it is at most
        half of the step's budget, and leaves time for a chunk within the target gap. A catch-up
        token counts as a draft."""
        state, target_s = self._state, self._batch.itl_target_s
        has_prompts = bool(state.prefilling or state.waiting)
        budget = (state.config.max_num_batched_tokens - self.num_rows) >> has_prompts
        if target_s is not None:
            sizes, work = state.chunk_sizes, StepWork.decoding(self.num_rows, self.context_tokens)
            chunk = sizes.chunk(work, 0, state.num_prompts, target_s) if has_prompts else 0
            budget = min(budget, sizes.drafts_within(target_s, work, state.policy.max_depth, chunk))
        return budget

    @property
    def context_tokens(self) -> int:
        return int(np.add.reduce(self._num_known))

    @property
    def num_prompts(self) -> int:
        return self._state.num_prompts

    @property
    def remaining_tokens(self) -> np.ndarray:
        remaining: np.ndarray = self._state.table.lookahead_end[self.rows] - self._num_known
        return remaining
