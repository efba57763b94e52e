"""A run over time, in at most `INTERVALS` intervals of equal length.

Whenever the run outgrows the intervals, pairs of intervals are merged and their length doubles. So
memory, the cost of a step and the size of the page do not depend on the length of the run.
"""

from __future__ import annotations

from typing import Any, Protocol

import msgspec
import numpy as np

from cbatch.core.scheduler.plan import StepPlan, StepResult
from cbatch.core.scheduler.scheduler import Scheduler
from cbatch.core.scheduler.sequence import Commit

INTERVALS = 240
_FIRST_LENGTH_S = 1 / 16  # initial length of an interval


class Observer(Protocol):
    """Receiver of every committed step of a replay."""

    def step(self, step: TimelineStep) -> None: ...


class TimelineStep(msgspec.Struct, frozen=True, eq=False):
    started_s: float
    ended_s: float
    plan: StepPlan
    result: StepResult
    commit: Commit
    scheduler: Scheduler  # its state after the commit; read only

    @property
    def chunk_tokens(self) -> int:
        """Return the prompt tokens of the step. A chunk of one token counts as a decoded token."""
        plan = self.plan
        return int(plan.query_lens[plan.query_lens > 1 + plan.num_drafts].sum())

    @property
    def blocks_used(self) -> int:
        pool = self.scheduler.state.pool
        return pool.num_blocks - pool.num_available


class Series(msgspec.Struct, frozen=True, kw_only=True):
    """One value for each interval of `length_s` since `first_s`; None if nothing ran in it."""

    first_s: float
    length_s: float
    running: list[float | None]
    waiting: list[float | None]
    kv_share: list[float | None]
    output_tokens_per_s: list[float | None]
    prompt_tokens_per_s: list[float | None]
    step_s: list[float | None]
    drafted_per_row: list[float | None]  # mean number of drafts of the rows that emitted
    acceptance: list[float | None]


_SUMS = (
    "steps",
    "busy_s",
    "running",  # multiplied by the step's seconds, like the next two
    "waiting",
    "blocks",
    "output_tokens",
    "prompt_tokens",
    "rows",
    "drafted",
    "accepted",
)


class Timeline:
    """An `Observer` that sums steps by interval. A step counts in the interval in which it
    ended."""

    def __init__(self, intervals: int = INTERVALS) -> None:
        self._sums = np.zeros((intervals, len(_SUMS)))
        self._first_s: float | None = None
        self._length_s = _FIRST_LENGTH_S
        self._num_blocks = 1

    def step(self, step: TimelineStep) -> None:
        if self._first_s is None:
            self._first_s, self._num_blocks = step.started_s, step.scheduler.state.pool.num_blocks
        at = int((step.ended_s - self._first_s) / self._length_s)
        while at >= len(self._sums):
            self._merge()
            at = int((step.ended_s - self._first_s) / self._length_s)
        seconds = step.ended_s - step.started_s
        result, scheduler = step.result, step.scheduler
        self._sums[at] += (
            1,
            seconds,
            len(step.plan.slots) * seconds,
            scheduler.num_waiting * seconds,
            step.blocks_used * seconds,
            step.commit.counts.sum(),
            step.chunk_tokens,
            np.count_nonzero(step.commit.counts),
            result.num_drafted.sum(),
            result.num_accepted.sum(),
        )

    def series(self) -> Series:
        used = self._sums[:, 0].nonzero()[0]
        sums = dict(zip(_SUMS, self._sums[: used[-1] + 1 if len(used) else 0].T, strict=True))
        length_s, busy_s = self._length_s, sums["busy_s"]
        return Series(
            first_s=self._first_s or 0.0,
            length_s=length_s,
            running=_over(sums["running"], busy_s),
            waiting=_over(sums["waiting"], busy_s),
            kv_share=_over(sums["blocks"], busy_s * self._num_blocks),
            output_tokens_per_s=_over(sums["output_tokens"], length_s * (busy_s > 0)),
            prompt_tokens_per_s=_over(sums["prompt_tokens"], length_s * (busy_s > 0)),
            step_s=_over(busy_s, sums["steps"]),
            drafted_per_row=_over(sums["drafted"], sums["rows"]),
            acceptance=_over(sums["accepted"], sums["drafted"]),
        )

    def _merge(self) -> None:
        half = len(self._sums) // 2  # the number of intervals is even
        self._sums[:half] = self._sums[0::2] + self._sums[1::2]
        self._sums[half:] = 0.0
        self._length_s *= 2


def _over(sums: np.ndarray, by: Any) -> list[float | None]:
    values = np.divide(sums, by, out=np.full(len(sums), np.nan), where=by > 0)
    return [None if np.isnan(value) else float(f"{value:.5g}") for value in values.tolist()]
