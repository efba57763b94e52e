"""The engine without text: token ids in, tokens out. It runs the scheduler's step loop."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from typing import TYPE_CHECKING, Any

import msgspec
from msgspec import structs

from cbatch.core.request.errors import FieldError
from cbatch.core.request.logprobs import TokenLogprobs
from cbatch.core.request.output import OutputRow
from cbatch.core.request.request import FinishReason, Request, SamplingParams
from cbatch.core.scheduler.executor import Executor, OverlappedExecutor
from cbatch.core.scheduler.scheduler import Scheduler
from cbatch.core.scheduler.sequence import Finished, SchedulerStats
from cbatch.core.speculation.policy import PolicyStats
from cbatch.engine.loop import StepLoop

if TYPE_CHECKING:
    from cbatch.grammars import Grammars

COMPILING_TICK_S = 0.05  # interval at which an idle engine checks whether its kernels are compiled


class StepTimes(msgspec.Struct, frozen=True, array_like=True):
    """Durations in seconds: of drafting and the target model, measured by the executor, and of the
    whole step, planning and committing included."""

    draft_s: float
    target_s: float
    total_s: float


class StepOutput(msgspec.Struct, frozen=True, array_like=True):
    """The new tokens of a step, and the requests that ended since the previous step."""

    admitted: dict[str, int] = {}  # cached prompt tokens, by request that entered a slot
    rows: tuple[OutputRow, ...] = ()
    logprobs: tuple[tuple[str, TokenLogprobs], ...] = ()
    times: StepTimes | None = None  # None: no step was committed


class EngineMetrics(msgspec.Struct, frozen=True, array_like=True):
    """The scheduler's present state, and its totals since the process started."""

    num_running: int
    num_waiting: int
    num_blocks: int
    free_blocks: int
    cached_blocks: int  # unreferenced, kept for prefix hits
    remaining_prompt_tokens: int  # not computed yet, of requests in slots
    prompt_token_s: float  # estimated seconds per prompt token at this load; 0: unknown
    step_s: float  # seconds in all steps, planning and committing included
    plan_s: float  # part of `step_s`; with overlap the previous step runs meanwhile
    commit_s: float
    totals: SchedulerStats
    policy: PolicyStats | None  # None: the policy is not `adaptive`
    compiling: tuple[str, ...] = ()  # names of kernels that some requests wait for
    state_pages: int | None = None  # of recurrent layers
    used_state_pages: int | None = None

    @property
    def kv_usage(self) -> float:
        return 1 - (self.free_blocks + self.cached_blocks) / self.num_blocks


class BackgroundKernels:
    """Kernels that are compiled in the background while the engine serves. An executor with such
    kernels has an object of this interface in its attribute `background_kernels`. This default has
    no kernels."""

    pending: tuple[str, ...] = ()  # descriptions of kernels that are not compiled yet

    def start(self) -> None: ...

    def needs_pending_kernels(self, params: SamplingParams) -> bool:
        return False


class EngineCore:
    """Serves requests of token ids: each step returns a `StepOutput`. `Engine` adds text,
    `EngineServer` a socket. Not thread-safe.

    `drafters` are the names that requests may choose; `grammars` compiles structured outputs;
    `info` describes the engine. The owner closes `resources` after the last step.
    """

    def __init__(
        self,
        scheduler: Scheduler,
        executor: Executor | OverlappedExecutor,
        *,
        clock: Callable[[], float] = time.monotonic,
        depth: int = 0,
        drafters: Sequence[str] = (),
        grammars: Grammars | None = None,
        info: dict[str, Any] | None = None,
        resources: ExitStack | None = None,
    ) -> None:
        self.scheduler = scheduler
        self.loop = StepLoop(scheduler, executor, clock=clock, depth=depth)
        self.executor = getattr(executor, "executor", executor)  # without its `ThreadedExecutor`
        self.drafters = tuple(drafters)
        self.grammars = grammars
        self.info = info or {}
        self.resources = resources or ExitStack()
        self.on_ready: Callable[[], None] = lambda: None  # runs in a thread once requests come
        kernels = getattr(executor, "background_kernels", BackgroundKernels())
        self.background_kernels: BackgroundKernels = kernels
        kernels.start()
        self.waiting_for_kernels: dict[str, tuple[Request, tuple[int, ...]]] = {}
        self._clock = clock
        self._rejected: list[OutputRow] = []
        self._step_s = 0.0

    @property
    def busy(self) -> bool:
        """Return whether `step` has work now. Requests that wait for kernels do not count."""
        scheduler = self.scheduler
        return bool(scheduler.has_work or scheduler.num_in_flight or self._rejected)

    def add(self, request: Request, output: tuple[int, ...] = ()) -> None:
        """Add a request to the scheduler once the kernels that it needs are compiled. `output`: the
        tokens that a resumed request has already emitted. Raises `FieldError`; then nothing was
        added."""
        self.scheduler.check(request, output)
        self.executor.check(request)
        if self.background_kernels.needs_pending_kernels(request.params):
            self.waiting_for_kernels[request.request_id] = request, output
        else:
            self.scheduler.add(request, self._clock(), output)

    def reject(self, request_id: str, error: BaseException) -> None:
        row = OutputRow(request_id, finish_reason=FinishReason.ERROR, message=str(error))
        self._rejected.append(structs.replace(row, is_refused=isinstance(error, FieldError)))

    def cancel(self, request_id: str) -> None:
        self.waiting_for_kernels.pop(request_id, None)
        self.scheduler.cancel(request_id, self._clock())

    def finish(self, request_id: str, keep_tokens: int) -> None:
        self.waiting_for_kernels.pop(request_id, None)
        self.scheduler.finish(request_id, keep_tokens, self._clock())

    def step(self) -> StepOutput:
        """Run a step if there is work. `StepLoop` handles faults of the executor. Raises
        `RuntimeError` if requests can neither run nor end."""
        start_s = self._clock()
        self._admit_waiting()
        scheduler, commit = self.scheduler, None
        if scheduler.has_work or scheduler.num_in_flight:
            commit = self.loop.step()
        ended = (*(commit.finished if commit else ()), *scheduler.take_finished())
        rows = _with_finish_reasons([] if commit is None else commit.updates(), ended)
        rows += self._rejected
        self._rejected = []
        if commit is None:
            if scheduler.has_work and not rows:
                raise RuntimeError("the scheduler has requests that it cannot plan")
            return StepOutput(rows=tuple(rows))
        assert self.loop.last is not None
        plan, result, _ = self.loop.last
        total_s = self._clock() - start_s
        self._step_s += total_s
        return StepOutput(
            admitted={new.request_id: new.kv_len_tokens for new in plan.deltas.new_sequences},
            rows=tuple(rows),
            logprobs=commit.logprobs,
            times=StepTimes(result.draft_s, result.target_s, total_s),
        )

    def metrics(self) -> EngineMetrics:
        scheduler, pool = self.scheduler, self.scheduler.state.pool
        pages = pool.pages
        return EngineMetrics(
            num_running=scheduler.num_running,
            num_waiting=scheduler.num_waiting,
            num_blocks=pool.num_blocks,
            free_blocks=pool.num_free,
            cached_blocks=pool.num_cached,
            remaining_prompt_tokens=scheduler.remaining_prompt_tokens,
            prompt_token_s=scheduler.prompt_token_s,
            step_s=self._step_s,
            plan_s=self.loop.plan_s,
            commit_s=self.loop.commit_s,
            totals=scheduler.stats,
            policy=scheduler.state.policy.stats,
            compiling=self.background_kernels.pending,
            state_pages=None if pages is None else pages.size,
            used_state_pages=None if pages is None else pages.size - pages.num_available,
        )

    def _admit_waiting(self) -> None:
        for request, output in list(self.waiting_for_kernels.values()):
            if not self.background_kernels.needs_pending_kernels(request.params):
                del self.waiting_for_kernels[request.request_id]
                self.scheduler.add(request, self._clock(), output)


def _with_finish_reasons(rows: list[OutputRow], ended: Sequence[Finished]) -> list[OutputRow]:
    """Return `rows` with finish reasons. A request that ended without tokens gets its own row."""
    if not ended:
        return rows
    ends = {end.request_id: end for end in ended}
    rows = [
        row
        if (end := ends.pop(row.request_id, None)) is None
        else structs.replace(row, finish_reason=end.reason, message=end.message)
        for row in rows
    ]
    without_row = ends.items()
    return rows + [OutputRow(i, [], 0, 0, end.reason, end.message) for i, end in without_row]
