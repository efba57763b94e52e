"""What a watcher sees of the engine: a bounded summary, a few times a second, while one looks."""

from __future__ import annotations

from collections import deque
from typing import NamedTuple

import numpy as np

from cbatch.core.scheduler.plan import StepPlan, StepResult
from cbatch.core.scheduler.scheduler import Scheduler
from cbatch.core.scheduler.sequence import Commit
from cbatch.process.messages import BlockMap, SeenRow, SeenStep

PERIOD_S, LONGEST_PERIOD_S = 0.1, 1.0
MOST_SHARE = 0.005  # of the engine's time, in summaries: where one takes longer they come seldomer
MOST_STEPS = 4  # of a period: the latest
MOST_ROWS = 256
MOST_CELLS = 512


class _StepArrays(NamedTuple):
    """Int32 [rows] each. Copies: an executor may fill the same arrays again."""

    plan: StepPlan
    drafted: np.ndarray
    accepted: np.ndarray


class Monitor:
    """`note` every step; what it keeps of them is made into lists only when it is asked for."""

    def __init__(self, scheduler: Scheduler) -> None:
        self._scheduler = scheduler
        self._steps: deque[_StepArrays] = deque(maxlen=MOST_STEPS)
        self._num_steps = 0
        self._due_s = 0.0

    def note(self, plan: StepPlan, result: StepResult, commit: Commit) -> None:
        self._num_steps += 1
        if len(commit.owners) != plan.num_rows:
            return  # some rows had ended before: their drafts were neither accepted nor refused
        self._steps.append(_StepArrays(plan, result.num_drafted.copy(), result.num_accepted.copy()))

    def due(self, now_s: float) -> bool:
        """Whether it is time for a summary."""
        return now_s >= self._due_s

    def looked(self, now_s: float, took_s: float) -> None:
        """A summary was made and sent, for so much of the processor's time: by the wall it would
        seem dear whenever something else was running."""
        self._due_s = now_s + min(max(PERIOD_S, took_s / MOST_SHARE), LONGEST_PERIOD_S)

    def take_steps(self) -> tuple[tuple[SeenStep, ...], int]:
        """Some of the steps since the last time, oldest first, and how many there were."""
        num_steps, rows = self._num_steps, slice(MOST_ROWS)
        seen = tuple(
            SeenStep(
                plan.slots[rows].tolist(),
                drafted[rows].tolist(),
                accepted[rows].tolist(),
                (plan.query_lens[rows] - plan.num_drafts[rows]).tolist(),
            )
            for plan, drafted, accepted in self._steps
        )
        self._steps.clear()
        self._num_steps = 0
        return seen, num_steps

    def rows(self) -> tuple[SeenRow, ...]:
        """Who holds the slots, lowest first, at most `MOST_ROWS`."""
        state = self._scheduler.state
        table = state.table
        owners = [owner for owner in state.owners if owner is not None][:MOST_ROWS]
        slots = np.array([owner.slot for owner in owners], dtype=np.intp)
        beliefs = state.policy.estimated_acceptance(slots)
        columns = zip(
            owners,
            slots.tolist(),
            table.num_tokens[slots].tolist(),
            table.num_uncomputed_tokens[slots].tolist(),
            [None] * len(owners) if beliefs is None else beliefs,
            strict=True,
        )
        return tuple(
            SeenRow(slot, owner.request.request_id, owner.num_prompt_tokens, tokens, todo, belief)
            for owner, slot, tokens, todo, belief in columns
        )

    def blocks(self) -> BlockMap:
        size, used, cached = self._scheduler.state.pool.occupancy(MOST_CELLS)
        return BlockMap(size, used.tolist(), cached.tolist())
