"""The price of a step is its wall time, limited by the host or by the device.

At depth 1 the host plans and launches a step while the device runs another: a step takes whichever
is longer. An executor measures the device alone. With drafts the host has more to do, so that small
models on a fast device are better served without them.
"""

from __future__ import annotations

from collections import deque

import msgspec
import numpy as np
import pytest
from msgspec import structs

from cbatch.core.prices.step_work import StepSample, StepWork
from cbatch.core.scheduler.plan import StepPlan, StepResult
from cbatch.core.scheduler.scheduler import Scheduler
from cbatch.core.scheduler.update_from_output import CommittedStep
from cbatch.engine.loop import StepLoop
from sim.executor.acceptance import PositionAcceptance
from sim.executor.fake import FakeExecutor
from tests.checking.clock import VirtualClock
from tests.checking.cost import LinearCost
from tests.helpers import World, make_config, make_request

DEPTH, ROWS = 4, 16


class Machine(msgspec.Struct, frozen=True, kw_only=True):
    """Seconds of a host and of a device. It is a cost model of the device."""

    host_s: float = 1e-4
    host_drafts_s: float = 0.0  # in addition: in a step with drafts
    host_enters_s: float = 1e-5  # for each request that enters
    base_s: float = 5e-4
    token_s: float = 2e-6
    tile: int = 1  # tokens are computed in multiples of it
    free: int = 0  # tokens that cost nothing
    pass_s: float = 5e-5
    ingest_s: float = 1e-7

    def step_s(self, work: StepWork) -> tuple[float, float, float]:
        tokens = -(-work.target_tokens // self.tile) * self.tile
        draft_tokens = work.draft_tokens + work.ingested_tokens
        draft_s = self.pass_s * work.draft_depth + self.ingest_s * draft_tokens
        return draft_s, self.base_s + self.token_s * max(tokens - self.free, 0), 0.0


class VirtualExecutor(FakeExecutor):
    """At depth 1 it runs a step while the host launches the next. All times vary."""

    def __init__(self, clock: VirtualClock, machine: Machine, accepted: float) -> None:
        acceptance = PositionAcceptance([accepted], max_num_seqs=ROWS)
        super().__init__(max_num_seqs=ROWS, cost=machine, acceptance=acceptance)
        self._clock, self._machine, self._free_s = clock, machine, 0.0
        self._rng = np.random.default_rng(0)
        self._queued: deque[tuple[StepResult, float]] = deque()

    @property
    def num_pending(self) -> int:
        return len(self._queued)

    def submit(self, plan: StepPlan) -> None:
        machine = self._machine
        host_s = machine.host_s + machine.host_drafts_s * bool(plan.num_drafts.any())
        host_s += machine.host_enters_s * len(plan.deltas.new_sequences)
        varied = np.exp(self._rng.normal(0.0, 0.1, 2))
        self._clock.advance(host_s * varied[0])
        result = super().run(plan)
        times = {name: getattr(result, name) * varied[1] for name in ("draft_s", "target_s")}
        self._free_s = max(self._clock(), self._free_s) + sum(times.values())
        self._queued.append((structs.replace(result, **times), self._free_s))

    def wait(self) -> StepResult:
        result, end_s = self._queued.popleft()
        self._clock.advance(max(end_s - self._clock(), 0.0))
        return result

    def run(self, plan: StepPlan) -> StepResult:
        self.submit(plan)
        return self.wait()

    def reset(self) -> None:
        raise AssertionError("a step failed")


class Load(msgspec.Struct, frozen=True, kw_only=True):
    """Requests that wait in a queue, so that one enters whenever another ends."""

    prompt: int = 60
    answer: int = 48
    requests: int = 300
    accepted: float = 0.6
    budget: int = 512
    seeds: tuple[int, ...] = (0, 1, 2)  # of runs, of which the mean counts


def served_per_s(lookahead: str, depth: int, machine: Machine, load: Load, seed: int) -> float:
    """Return answer tokens a second, after a third of the requests."""
    config = make_config(
        lookahead=lookahead,
        num_blocks=ROWS * 2 * (load.prompt + load.answer) // 64 + 64,
        block_size=64,
        max_num_seqs=ROWS,
        max_model_len=2 * (load.prompt + load.answer),
        draft_context_tokens=2 * (load.prompt + load.answer),
        max_num_batched_tokens=load.budget,
    )
    clock, scheduler, rng = VirtualClock(), Scheduler(config), np.random.default_rng(seed)
    executor = VirtualExecutor(clock, machine, load.accepted)
    loop = StepLoop(scheduler, executor, clock=clock, depth=depth)
    added = ended = tokens = 0
    start_s = 0.0
    while ended < load.requests:
        while added < ended + 2 * ROWS:
            lengths = (rng.uniform(0.5, 1.5, 2) * (load.prompt, load.answer)).astype(int).tolist()
            request = make_request(f"{added}", lengths[0], max_tokens=lengths[1], seed=added)
            scheduler.add(request, clock())
            added += 1
        commit = loop.step()
        assert commit is not None
        before, ended = ended, ended + len(commit.finished)
        if 3 * before < load.requests <= 3 * ended:
            start_s = clock()
        tokens += (start_s > 0) * sum(len(row.tokens) for row in commit.updates())
    return tokens / (clock() - start_s)


SLOW_HOST = Machine(host_s=1e-3, host_drafts_s=2e-4)
SLOWER_DRAFTING = structs.replace(SLOW_HOST, host_drafts_s=2.2e-3)
CORNER = Machine(base_s=3e-3, token_s=4e-5, free=64)
PROMPTS = Load(prompt=600, answer=60, requests=150)


@pytest.mark.parametrize(
    ("depth", "machine", "load"),
    [
        pytest.param(0, Machine(), Load(), id="device"),
        pytest.param(1, Machine(), Load(), id="device, overlap"),
        pytest.param(0, SLOW_HOST, Load(), id="host"),
        pytest.param(1, SLOW_HOST, Load(), id="host, overlap"),
        pytest.param(0, SLOWER_DRAFTING, Load(), id="host, drafts do not pay"),
        pytest.param(1, SLOWER_DRAFTING, Load(), id="host, drafts do not pay, overlap"),
        pytest.param(1, Machine(token_s=3e-5), Load(), id="device, drafts do not pay"),
        pytest.param(0, Machine(base_s=3e-3, token_s=4e-5, tile=32), Load(), id="tiles"),
        pytest.param(1, CORNER, Load(), id="corner"),
        pytest.param(0, Machine(base_s=3e-3, token_s=1e-5), PROMPTS, id="device, prompts"),
        pytest.param(1, SLOW_HOST, PROMPTS, id="host, prompts, overlap"),
        pytest.param(0, Machine(base_s=3e-3), Load(answer=800, requests=32), id="no churn"),
    ],
)
def test_the_fastest_way_is_found(depth: int, machine: Machine, load: Load) -> None:
    """The ratio of two runs varies by 1 % with the lengths of the requests."""
    off, fixed, adaptive = (
        sum(served_per_s(each, depth, machine, load, seed) for seed in load.seeds)
        for each in ("off", f"fixed:{DEPTH}", "adaptive")
    )
    assert adaptive >= 0.98 * max(off, fixed), (off, fixed, adaptive)


def test_time_without_work_is_no_step_s(monkeypatch: pytest.MonkeyPatch) -> None:
    durations_s: list[float] = []

    def recorded(step: CommittedStep) -> StepSample:
        sample = of_wall(step)
        durations_s.append(sample.target_s)
        return sample

    of_wall = CommittedStep.sample
    monkeypatch.setattr(CommittedStep, "sample", recorded)
    world = World(make_config(), cost=LinearCost())
    for name in ("a", "b"):
        world.add(make_request(name, 8, max_tokens=4))
        world.run()
        world.clock.advance(10.0)
    assert len(durations_s) >= 2 and max(durations_s) < 0.1
