"""Many steps at once against the same steps one by one: all that can be seen is the same."""

from __future__ import annotations

import numpy as np
import pytest

from cbatch.core.scheduler.config import SchedulerConfig
from cbatch.core.scheduler.plan import StepPlan, StepResult
from cbatch.core.scheduler.scheduler import Scheduler
from cbatch.core.scheduler.sequence import SchedulerStats
from tests.helpers import make_config, make_request


def answer(plan: StepPlan) -> StepResult:
    """Every row that may emit does."""
    rows, emitted = len(plan.slots), plan.wants_logits
    splits = np.concatenate([[0], np.cumsum(emitted)]).astype(np.int32)
    tokens = (plan.slots + 7)[emitted].astype(np.int32)
    none = np.zeros(rows, np.int32)
    status = np.zeros(rows, np.uint8)
    return StepResult(plan.step_id, plan.generations, tokens, splits, none, none, status, 0.0, 0.5)


def serve(
    config: SchedulerConfig, seed: int, *, skipping: bool
) -> tuple[list[tuple[float, str, list[int]]], SchedulerStats, int]:
    """What ended when, with its tokens; the statistics; and how many steps were skipped."""
    rng = np.random.default_rng(seed)
    scheduler, now_s, skipped = Scheduler(config), 0.0, 0
    ended: list[tuple[float, str, list[int]]] = []
    arrivals = np.sort(rng.integers(0, 120, 30)).tolist()
    shared = rng.integers(1, 20, 40).tolist()
    for i in range(30):
        length, most = int(rng.integers(1, 40)), int(rng.integers(1, 50))
        prompt = shared[:length] if rng.random() < 0.5 else [i + 1] * length
        request = make_request(f"r{i}", prompt, max_tokens=most, ignore_eos=True)
        while now_s < arrivals[i] and scheduler.has_work:
            now_s, count = step(scheduler, now_s, arrivals[i], ended, skipping=skipping)
            skipped += count
        now_s = max(now_s, float(arrivals[i]))
        scheduler.add(request, now_s)
    while scheduler.has_work:
        now_s, count = step(scheduler, now_s, 1e9, ended, skipping=skipping)
        skipped += count
    return ended, scheduler.stats, skipped


def step(
    scheduler: Scheduler,
    now_s: float,
    until_s: float,
    ended: list[tuple[float, str, list[int]]],
    *,
    skipping: bool,
) -> tuple[float, int]:
    slots, most = scheduler.steps_ahead() if skipping else (np.zeros(0, np.int32), 0)
    count = min(most, int(np.ceil(until_s - now_s)))
    if count:
        now_s += count
        tokens = np.tile(slots + 7, (count, 1)).astype(np.int32)
        scheduler.skip_steps(tokens, 0.5 * count, now_s)
        finished = scheduler.take_finished()
    else:
        plan = scheduler.plan(now_s)
        assert plan is not None
        now_s += 1
        finished = scheduler.commit(answer(plan), now_s).finished
    scheduler.check()
    ended += [(now_s, end.request_id, end.output.tolist()) for end in finished]
    return now_s, count


@pytest.mark.parametrize("seed", range(12))
@pytest.mark.parametrize("num_blocks", [24, 40, 200])
def test_nobody_sees_the_difference(num_blocks: int, seed: int) -> None:
    """Few blocks: rows are preempted, and cached blocks evicted."""
    config = make_config(num_blocks=num_blocks, block_size_tokens=4, max_slots=6)
    ended, stats, skipped = serve(config, seed, skipping=True)
    expected, stats_of_steps, none = serve(config, seed, skipping=False)
    assert ended == expected and stats == stats_of_steps
    assert skipped > 20 and none == 0
    assert (stats.preemptions > 0) == (num_blocks < 200)


def test_nothing_is_ahead_of_rows_that_may_stop_or_draft_or_are_logged() -> None:
    def ahead(scheduler: Scheduler, **params: object) -> int:
        scheduler.add(make_request("r", max_tokens=9, **params), 0.0)
        assert scheduler.steps_ahead()[1] == 0  # its prompt is to be computed
        plan = scheduler.plan(0.0)
        assert plan is not None
        scheduler.commit(answer(plan), 1.0)
        return scheduler.steps_ahead()[1]

    assert ahead(Scheduler(make_config()), ignore_eos=True) == 8
    assert ahead(Scheduler(make_config(), log=lambda event: None), ignore_eos=True) == 0
    assert ahead(Scheduler(make_config()), stop_token_ids=(5,)) == 0
    assert ahead(Scheduler(make_config(lookahead="fixed:2")), ignore_eos=True) == 0
