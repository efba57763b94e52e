"""The iteration-level scheduler: `plan`, run elsewhere, `commit`.

Each step packs, within a budget of tokens, one token for every decoding sequence, the drafts that
the lookahead policy asks for, chunks of the prompts that are still prefilling, and new requests.
A plan may be made while one earlier plan is uncommitted (overlap); reservations then cover both.

Admission: requests enter in service order (see queue.py), only if blocks for all known tokens and
a decode reserve are available, preempted ones first; the first that does not fit holds back those
behind it. One whose next prefix block is being computed by a running sequence waits for it, and
lets others pass. Preemption recomputes; the victim rule is in preemption.py.

It has no clock, no randomness and no other input than the calls below, in their order: `log`
receives each as an event, and replaying the events reproduces every decision.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
from msgspec import structs

from cbatch.core.request.errors import FieldError
from cbatch.core.request.request import FinishReason, Request, SamplingParams
from cbatch.core.scheduler.committer import Committer
from cbatch.core.scheduler.config import SchedulerConfig
from cbatch.core.scheduler.events import (
    Added,
    Cancelled,
    Committed,
    Configured,
    Event,
    ExecutorReset,
    Failed,
    Planned,
    TextFinished,
)
from cbatch.core.scheduler.plan import StepPlan, StepResult
from cbatch.core.scheduler.planner import Planner
from cbatch.core.scheduler.recorded_pool import CacheChange, RecordedBlockPool
from cbatch.core.scheduler.sequence import Commit, Finished, SchedulerStats, Sequence
from cbatch.core.scheduler.state import SchedulerState

MAX_IN_FLIGHT = 2  # the plan being run, and one made meanwhile


class Scheduler:
    def __init__(self, config: SchedulerConfig, log: Callable[[Event], None] | None = None) -> None:
        self.config = config
        self._state = SchedulerState(config)
        self._planner = Planner(self._state)
        self._committer = Committer(self._state)
        self._log = log
        self._checked: SamplingParams | None = None  # the last, which a call's choices share
        if log:
            log(Configured(config))

    # ---- requests -----------------------------------------------------------------------------

    def add(self, request: Request, now_s: float, output: tuple[int, ...] = ()) -> None:
        """Accept a request. `output` are the tokens that it was given elsewhere (an engine that is
        no more): it goes on after them, at the head of the queue as if it had been preempted.
        Raises `FieldError` or `RefusedError`; then nothing was added."""
        if request.request_id in self._state.sequences:
            raise FieldError("request_id", f"{request.request_id!r} is running", "use a new one")
        if request.params is not self._checked:
            self.config.check_params(request.params)
            self._checked = request.params
        tokens = self.config.check_tokens(request, output)
        if self._log:
            self._log(Added(request, now_s, output))
        if not self._state.sequences:
            self._state.last_commit_s = None  # the time since then was no step's
        self._state.enqueue(request, tokens, now_s)

    def cancel(self, request_id: str, now_s: float) -> bool:
        """End it as CANCELLED, waiting or running; False if it is unknown or has ended."""
        if self._log:
            self._log(Cancelled(request_id, now_s))
        return self._end(request_id, FinishReason.CANCELLED)

    def finish(self, request_id: str, keep_tokens: int, now_s: float) -> bool:
        """The text side found a stop string: the output is its first `keep_tokens` tokens."""
        if self._log:
            self._log(TextFinished(request_id, keep_tokens, now_s))
        return self._end(request_id, FinishReason.STOP, keep_tokens=keep_tokens)

    def fail(self, request_id: str, message: str, now_s: float) -> bool:
        """End it as ERROR; the message is for its client."""
        if self._log:
            self._log(Failed(request_id, message, now_s))
        return self._end(request_id, FinishReason.ERROR, message=message)

    # ---- steps --------------------------------------------------------------------------------

    def plan(self, now_s: float) -> StepPlan | None:
        """The next step, or None if nothing can run now."""
        if len(self._state.flights) >= MAX_IN_FLIGHT:
            raise RuntimeError("two plans are uncommitted; commit the older one first")
        if self._log:
            self._log(Planned(now_s))
        plan = self._planner.plan()
        if plan is None:
            self._state.last_commit_s = None
        return plan

    def commit(self, result: StepResult, now_s: float) -> Commit:
        """Take in the result of the oldest plan in flight. Raises ValueError if it is not its."""
        if self._log:
            # Log probabilities pass through and decide nothing: the log does without them.
            logged = structs.replace(result, logprobs=()) if result.logprobs else result
            self._log(Committed(logged, now_s))
        commit = self._committer.commit(result, now_s)
        if self.config.kv_events:  # those who follow the cache do not wait for a lookup
            self._state.cache_completed_blocks()
        return commit

    def executor_reset(self, now_s: float) -> None:
        """The executor lost its state: plans in flight are void, running requests go back to the
        head of the queue with their tokens, the prefix cache is empty, and the next plan's deltas
        are the full snapshot."""
        if self._log:
            self._log(ExecutorReset(now_s))
        self._state.reset_executor()
        self._state.stats.executor_resets += 1

    def take_finished(self) -> tuple[Finished, ...]:
        """Endings that no commit has delivered yet."""
        finished = tuple(self._state.finished)
        self._state.finished = []
        return finished

    def take_cache_changes(self) -> list[CacheChange]:
        """What has entered and left the prefix cache since the last call, in order, if the
        configuration has it recorded (`kv_events`)."""
        pool = self._state.pool
        return pool.take_changes() if isinstance(pool, RecordedBlockPool) else []

    # ---- what can be seen ---------------------------------------------------------------------

    @property
    def has_work(self) -> bool:
        return bool(self._state.sequences)

    @property
    def num_waiting(self) -> int:
        return len(self._state.waiting)

    @property
    def num_running(self) -> int:
        return len(self._state.sequences) - len(self._state.waiting)

    @property
    def num_in_flight(self) -> int:
        return len(self._state.flights)

    @property
    def prompt_token_s(self) -> float:
        """The estimated seconds per prompt token at the present load; 0: not known yet."""
        state = self._state
        return state.step_costs.prompt_token_s(len(state.decoding), self.config.step_budget_tokens)

    @property
    def remaining_prompt_tokens(self) -> int:
        """Tokens of prefilling rows that no committed step has computed."""
        state = self._state
        return int(state.table.num_uncomputed_tokens[state.prefilling].sum())

    @property
    def stats(self) -> SchedulerStats:
        return self._state.stats

    @property
    def state(self) -> SchedulerState:
        """For reading only: tests, metrics and pages look at it."""
        return self._state

    # ---- inside -------------------------------------------------------------------------------

    def _end(
        self,
        request_id: str,
        reason: FinishReason,
        *,
        keep_tokens: int | None = None,
        message: str | None = None,
    ) -> bool:
        sequence = self._state.sequences.get(request_id)
        if sequence is None:
            return False
        self._state.end(sequence, reason, keep_tokens=keep_tokens, message=message)
        return True

    def check(self) -> None:
        """Every invariant between the calls above; raises AssertionError."""
        state, table = self._state, self._state.table
        state.pool.check()
        references = np.zeros(state.pool.num_blocks, dtype=np.int32)
        held = [slot for flight in state.flights for slot in flight.held_slots]
        running = [owner for owner in state.owners if owner is not None]
        for slot in [*held, *(owner.slot for owner in running if owner.slot is not None)]:
            references[state.block_row(slot)] += 1
        assert (references == state.pool.ref_counts).all(), "references and tables disagree"
        slots = sorted([*state.prefilling, *state.decoding])
        assert slots == sorted(owner.slot for owner in running if owner.slot is not None)
        assert len(slots) + len(held) + table.num_free == self.config.max_slots
        assert len(running) + len(state.waiting) == len(state.sequences)
        for owner in running:
            self._check_row(owner)
        if state.cached_batch is not None:
            state.cached_batch.check(table, state.owners_of(state.decoding))

    def _check_row(self, owner: Sequence) -> None:
        state, table, slot = self._state, self._state.table, owner.slot
        assert slot is not None
        tokens, kv_len = int(table.num_tokens[slot]), table.kv_len(slot)
        assert owner.num_prompt_tokens <= tokens < owner.max_total_tokens
        assert 0 <= table.draft_kv[slot] <= kv_len <= tokens - 1
        flights = [flight.plan for flight in state.flights]
        flying = [plan.query_lens[plan.slots == slot].sum() for plan in flights]
        used_tokens = min(kv_len + int(sum(flying)), owner.max_total_tokens)
        assert used_tokens <= table.capacity[slot], "computes beyond its blocks"
        if slot in state.decoding and not any(flying):
            assert kv_len == tokens - 1, f"kv_len {kv_len}, but {tokens} tokens are known"
        kept_tokens = max(used_tokens, int(table.reserved_tokens[slot]))
        spare_tokens = int(table.capacity[slot]) - kept_tokens
        assert spare_tokens < state.pool.block_size, f"{spare_tokens} reserved and not given back"
