"""Microseconds per step that the scheduler itself takes: `python -m bench.scheduler`.

Steady-state decode: every prompt is in KV, and every request drafts `k` tokens a step (`fixed`),
each accepted with probability 0.7. `schedule` and `update_from_output` are timed; results are built
outside the timer.
"""

from __future__ import annotations

import gc
import time
from typing import Any

import numpy as np

from bench.report import print_report, rounded
from cbatch.cli.parser import CommandParser
from cbatch.core.request.request import Request, SamplingParams
from cbatch.core.scheduler.config import SchedulerConfig
from cbatch.core.scheduler.plan import StepPlan
from cbatch.core.scheduler.scheduler import Scheduler
from cbatch.core.speculation.config import LookaheadConfig
from sim.cost.base import constant_cost
from sim.executor.acceptance import PositionAcceptance
from sim.executor.fake import FakeExecutor

BLOCK_SIZE_TOKENS = 16
PROMPT_TOKENS = 128
CONTEXT_TOKENS = 4096
VOCAB_SIZE = 32_000
ACCEPTANCE = 0.7  # probability that a draft is accepted
WARM_UP_STEPS = 50  # untimed steps in steady state
# Limits in microseconds per step, by (running, k, prefix cache) or the first members of it.
LIMITS_US = {(8, 0): 20.0, (32, 4, True): 60.0, 256: 256.0, 1024: 1024.0}
PEER = "vLLM 0.33, published by others on machines of this class: 8 to 16 us per running request"


def build_scheduler(running: int, k: int, enable_prefix_caching: bool) -> Scheduler:
    """Return a scheduler with `running` waiting requests whose prompts share no block."""
    config = SchedulerConfig(
        num_blocks=running * CONTEXT_TOKENS // BLOCK_SIZE_TOKENS,
        block_size=BLOCK_SIZE_TOKENS,
        max_num_seqs=running,
        max_model_len=CONTEXT_TOKENS,
        max_num_batched_tokens=max(2048, 8 * running),
        prompt_share=1.0,  # so that all rows finish their prompts at the same time
        vocab_size=VOCAB_SIZE,
        enable_prefix_caching=enable_prefix_caching,
        draft_context_tokens=CONTEXT_TOKENS if k else None,
        lookahead=LookaheadConfig(policy="fixed", k=k) if k else LookaheadConfig(),
    )
    scheduler = Scheduler(config)
    rng = np.random.default_rng(0)
    params = SamplingParams(max_tokens=CONTEXT_TOKENS - PROMPT_TOKENS, temperature=0.0)
    for i in range(running):
        prompt = tuple(rng.integers(0, VOCAB_SIZE, PROMPT_TOKENS).tolist())
        scheduler.add(Request(request_id=f"r{i}", prompt=prompt, params=params, seed=i), 0.0)
    return scheduler


def step(scheduler: Scheduler, executor: FakeExecutor) -> tuple[int, StepPlan]:
    """Run one step. Return the nanoseconds of scheduling and updating, and the plan."""
    started_ns = time.perf_counter_ns()
    plan = scheduler.schedule(0.0)
    planned_ns = time.perf_counter_ns()
    if plan is None:
        raise RuntimeError("the scheduler has nothing to run; the pool is too small")
    result = executor.run(plan)
    built_ns = time.perf_counter_ns()
    scheduler.update_from_output(result, 0.0)
    return planned_ns - started_ns + time.perf_counter_ns() - built_ns, plan


def steady_state(
    running: int, k: int, enable_prefix_caching: bool
) -> tuple[Scheduler, FakeExecutor]:
    """Return a scheduler whose requests all decode with k drafts each, and its executor."""
    scheduler = build_scheduler(running, k, enable_prefix_caching)
    acceptance = PositionAcceptance([ACCEPTANCE], max_num_seqs=running)
    executor = FakeExecutor(max_num_seqs=running, cost=constant_cost(), acceptance=acceptance)
    warm_steps = 0
    while warm_steps < WARM_UP_STEPS:
        _, plan = step(scheduler, executor)
        steady = plan.num_rows == running and bool((plan.query_lens == 1 + k).all())
        warm_steps += steady
    return scheduler, executor


def measure(
    running: int, k: int, enable_prefix_caching: bool, steps: int, repeats: int
) -> dict[str, Any]:
    samples_us = []
    for _ in range(repeats):
        scheduler, executor = steady_state(running, k, enable_prefix_caching)
        gc.collect()
        gc.freeze()
        samples_us.append(np.array([step(scheduler, executor)[0] / 1e3 for _ in range(steps)]))
        gc.unfreeze()
    best_us = min(samples_us, key=np.median)
    median_us = float(np.median(best_us))
    cell = (running, k, enable_prefix_caching)
    limit_us = next((LIMITS_US[key] for key in (running, cell[:2], cell) if key in LIMITS_US), None)
    return {
        "running": running,
        "k": k,
        "enable_prefix_caching": enable_prefix_caching,
        "us_per_step_p50": round(median_us, 2),
        "us_per_step_p99": round(float(np.percentile(best_us, 99)), 2),
        "us_per_request": round(median_us / running, 3),
        "limit_us": limit_us,
        "of_limit": rounded(limit_us and median_us / limit_us),
    }


def main() -> None:
    parser = CommandParser(description=__doc__)
    parser.add_argument("--running", type=int, nargs="+", default=[8, 32, 256, 1024])
    parser.add_argument("--steps", type=int, default=400, help="timed steps of a repeat")
    parser.add_argument("--repeats", type=int, default=5)
    arguments = parser.parse_args()
    steps, repeats = arguments.steps, arguments.repeats
    print_report(
        "scheduler: schedule + update_from_output, steady-state decode",
        [
            measure(running, k, enable_prefix_caching, steps, repeats)
            for running in arguments.running
            for k in (0, 4)
            for enable_prefix_caching in (False, True)
        ],
        notes=(
            f"acceptance {ACCEPTANCE}, prompts of {PROMPT_TOKENS} tokens, blocks of "
            f"{BLOCK_SIZE_TOKENS}; {steps} steps, best median of {repeats} repeats; garbage "
            "collector on, start-up objects frozen",
            PEER,
        ),
    )


if __name__ == "__main__":
    main()
