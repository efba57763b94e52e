"""The iteration-level scheduler: `schedule` a step, run it elsewhere, `update_from_output`.

The two methods have vLLM's names; they call the functions of the same names in `schedule.py` and
`update_from_output.py`, which are the algorithm. `schedule` returns a `StepPlan` (in vLLM
`SchedulerOutput`). `update_from_output` commits the `StepResult` of the executor (in vLLM
`ModelRunnerOutput`), and returns a `Commit`. A step may be scheduled while one earlier plan is
uncommitted (overlap); then the reserved blocks suffice for both. A preempted sequence goes back to
the queue and is recomputed.

The scheduler has no clock, no randomness and no input but the calls of its methods. `log` receives
each call as an event, and replaying the events reproduces every decision.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
from msgspec import structs

from cbatch.core.prices.step_work import StepWork
from cbatch.core.request.errors import FieldError
from cbatch.core.request.request import FinishReason, Request, SamplingParams
from cbatch.core.scheduler import events
from cbatch.core.scheduler.config import SchedulerConfig
from cbatch.core.scheduler.events import Event
from cbatch.core.scheduler.plan import StepPlan, StepResult
from cbatch.core.scheduler.recorded_pool import CacheChange, RecordedBlockPool
from cbatch.core.scheduler.schedule import schedule
from cbatch.core.scheduler.sequence import Commit, Finished, SchedulerStats
from cbatch.core.scheduler.state import SchedulerState
from cbatch.core.scheduler.update_from_output import update_from_output

MAX_IN_FLIGHT = 2  # plans: one runs while the next is made


class Scheduler:
    """Schedules steps and commits their results. `log` receives every input as an event."""

    def __init__(self, config: SchedulerConfig, log: Callable[[Event], None] | None = None) -> None:
        self.config = config
        self._state = SchedulerState(config)
        self._log = log
        self._prompt_token_s = 0.0
        self._prompts_priced_at = 0, 0  # decoding rows and measured chunks
        # The last valid parameters, which are not checked again for a request's other choices.
        self._checked: SamplingParams | None = None
        if log:
            log(events.Configured(config))

    # ---- requests -----------------------------------------------------------------------------

    def add(self, request: Request, now_s: float, output: tuple[int, ...] = ()) -> None:
        """Accept a request. A resumed request has `output`, the tokens from an engine that died; it
        continues after them, and goes to the head of the queue like a preempted one. Raises
        `FieldError` or `RefusedError`; then nothing was added."""
        tokens = self.check(request, output)
        if self._log:
            self._log(events.Added(request, now_s, output))
        if not self._state.sequences:
            self._state.last_commit_s = None  # the engine was idle since
        self._state.enqueue(request, tokens, now_s)

    def check(self, request: Request, output: tuple[int, ...] = ()) -> np.ndarray:
        """Raise what `add` raises; return the tokens, int32."""
        if request.request_id in self._state.sequences:
            raise FieldError("request_id", f"{request.request_id!r} is running", "use a new one")
        if request.params is not self._checked:
            self.config.check_params(request.params)
            self._checked = request.params
        return self.config.check_tokens(request, output)

    def cancel(self, request_id: str, now_s: float) -> bool:
        """End a waiting or running request as CANCELLED. Return False if it is unknown or ended."""
        if self._log:
            self._log(events.Cancelled(request_id, now_s))
        return self._end(request_id, FinishReason.CANCELLED)

    def finish(self, request_id: str, keep_tokens: int, now_s: float) -> bool:
        """End a request as STOP, because its text has a stop string. Its output is cut to
        `keep_tokens` tokens. Return False if it is unknown or ended."""
        if self._log:
            self._log(events.TextFinished(request_id, keep_tokens, now_s))
        return self._end(request_id, FinishReason.STOP, keep_tokens=keep_tokens)

    def fail(self, request_id: str, message: str, now_s: float) -> bool:
        """End a request as ERROR, with a message for its client. Return False as `cancel` does."""
        if self._log:
            self._log(events.Failed(request_id, message, now_s))
        return self._end(request_id, FinishReason.ERROR, message=message)

    # ---- steps --------------------------------------------------------------------------------

    def schedule(self, now_s: float) -> StepPlan | None:
        """Return the next step, or None if nothing can run now. Raises `RuntimeError` if
        `MAX_IN_FLIGHT` plans are uncommitted."""
        if len(self._state.in_flight) >= MAX_IN_FLIGHT:
            raise RuntimeError("two plans are uncommitted; commit the older one first")
        if self._log:
            self._log(events.Planned(now_s))
        plan = schedule(self._state)
        if plan is None:
            self._state.last_commit_s = None
        return plan

    def update_from_output(self, result: StepResult, now_s: float) -> Commit:
        """Apply the result of the oldest plan in flight, and return what it added. Raises
        `ValueError` for the result of another plan."""
        if self._log:
            # Log probabilities do not affect decisions, so the log has none.
            logged = structs.replace(result, logprobs=()) if result.logprobs else result
            self._log(events.Committed(logged, now_s))
        commit = update_from_output(self._state, result, now_s)
        if self.config.kv_events:  # events report blocks at once, not only at the next lookup
            self._state.cache_completed_blocks()
        return commit

    def executor_reset(self, now_s: float) -> None:
        """Restart after the executor lost its state. Plans in flight and the prefix cache are
        dropped. Running requests return to the head of the queue with their tokens. The next plan
        is a full snapshot."""
        if self._log:
            self._log(events.ExecutorReset(now_s))
        self._state.reset_executor()
        self._state.stats.executor_resets += 1

    def take_finished(self) -> tuple[Finished, ...]:
        """Return the endings that no commit has reported yet."""
        return self._state.take_finished()

    def take_cache_changes(self) -> list[CacheChange]:
        """Return what entered and left the prefix cache since the last call, in order; nothing
        without `kv_events` in the configuration."""
        pool = self._state.pool
        return pool.take_changes() if isinstance(pool, RecordedBlockPool) else []

    # ---- observation --------------------------------------------------------------------------

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
        return len(self._state.in_flight)

    @property
    def prompt_token_s(self) -> float:
        """Return the estimated seconds per prompt token at the present load; 0 if unknown."""
        state = self._state
        num_rows, chunks = len(state.decoding), state.chunk_sizes
        # The sum over many rows takes longer than all other metrics of a step.
        if not self._prompt_token_s or self._prompts_priced_at != (num_rows, chunks.num_chunks):
            work = StepWork.decoding(num_rows, int(state.table.num_tokens[state.decoding].sum()))
            self._prompt_token_s = chunks.prompt_token_s(work, self.config.max_num_batched_tokens)
            self._prompts_priced_at = num_rows, chunks.num_chunks
        return self._prompt_token_s

    @property
    def remaining_prompt_tokens(self) -> int:
        """Return the tokens of prefilling rows that no committed step has computed."""
        state = self._state
        return int(state.table.num_uncomputed_tokens[state.prefilling].sum())

    @property
    def stats(self) -> SchedulerStats:
        return self._state.stats

    @property
    def state(self) -> SchedulerState:
        """Return the state, read-only, for tests, metrics and the live page."""
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
        if sequence is not None:
            self._state.end(sequence, reason, keep_tokens=keep_tokens, message=message)
        return sequence is not None
