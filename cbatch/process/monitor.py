"""Snapshots of the engine for the live page: bounded in size, and made only while a page is
open."""

from __future__ import annotations

import itertools
from collections import deque
from typing import NamedTuple

import numpy as np

from cbatch.core.scheduler.plan import StepPlan, StepResult
from cbatch.core.scheduler.scheduler import Scheduler
from cbatch.core.scheduler.sequence import Commit
from cbatch.process.messages import BlockMap, SlotSnapshot, StepSnapshot

MIN_PERIOD_S, MAX_PERIOD_S = 0.1, 1.0  # shortest and longest interval of snapshots
# Largest share of the engine's time for snapshots. If they are slow, the interval grows.
MAX_SHARE = 0.005
MAX_STEPS = 4  # maximum number of steps in a snapshot, the latest
MAX_ROWS = 256  # maximum number of rows of a step, and of requests, in a snapshot
MAX_CELLS = 512  # maximum number of cells of the page's map of KV blocks


class _StepArrays(NamedTuple):
    """A step's plan, and copies of int32 [rows] arrays that the executor may reuse."""

    plan: StepPlan
    drafted: np.ndarray
    accepted: np.ndarray


class Monitor:
    """Keeps the latest steps, for snapshots. Arrays are converted to lists only for a snapshot."""

    def __init__(self, scheduler: Scheduler) -> None:
        self._scheduler = scheduler
        self._steps: deque[_StepArrays] = deque(maxlen=MAX_STEPS)
        self._num_steps = 0
        self._due_s = 0.0

    def on_commit(self, plan: StepPlan, result: StepResult, commit: Commit) -> None:
        self._num_steps += 1
        if len(commit.owners) != plan.num_rows:
            return  # the page shows no step with rows that ended before the commit
        self._steps.append(_StepArrays(plan, result.num_drafted.copy(), result.num_accepted.copy()))

    def due(self, now_s: float) -> bool:
        return now_s >= self._due_s

    def on_sent(self, now_s: float, cpu_s: float) -> None:
        """Schedule the next snapshot. `cpu_s` is the processor time of the last snapshot: wall
        time includes waiting for other processes."""
        self._due_s = now_s + min(max(MIN_PERIOD_S, cpu_s / MAX_SHARE), MAX_PERIOD_S)

    def take_steps(self) -> tuple[tuple[StepSnapshot, ...], int]:
        """Return the latest steps since the last call (at most `MAX_STEPS`, oldest first), and the
        number of steps since then."""
        num_steps, rows = self._num_steps, slice(MAX_ROWS)
        steps = tuple(
            StepSnapshot(
                plan.slots[rows].tolist(),
                drafted[rows].tolist(),
                accepted[rows].tolist(),
                (plan.query_lens[rows] - plan.num_drafts[rows]).tolist(),
            )
            for plan, drafted, accepted in self._steps
        )
        self._steps.clear()
        self._num_steps = 0
        return steps, num_steps

    def rows(self) -> tuple[SlotSnapshot, ...]:
        state = self._scheduler.state
        table = state.table
        owners = [owner for owner in state.owners if owner is not None][:MAX_ROWS]
        slots = np.array([owner.slot for owner in owners], dtype=np.intp)
        estimates = state.policy.estimated_acceptance(slots)
        columns = zip(
            slots.tolist(),
            (owner.request.request_id for owner in owners),
            (owner.num_prompt_tokens for owner in owners),
            table.num_tokens[slots].tolist(),
            table.num_uncomputed_tokens[slots].tolist(),
            [None] * len(owners) if estimates is None else [round(each, 3) for each in estimates],
            strict=True,
        )
        return tuple(itertools.starmap(SlotSnapshot, columns))

    def blocks(self) -> BlockMap:
        size, used, cached = self._scheduler.state.pool.occupancy(MAX_CELLS)
        return BlockMap(size, used.tolist(), cached.tolist())
