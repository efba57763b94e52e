"""A fleet consists of its replicas: each is the replay of its requests."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from sim.replay import routers
from sim.replay.replay import replay
from sim.replay.routers import PrefixAffine, ReplicaLoad, make_router
from sim.report.report import Record, Report
from sim.workload.arrivals import poisson
from sim.workload.generate import Conversations, converse, generate
from sim.workload.lengths import fixed, uniform
from sim.workload.sources import OpenLoop, Source
from sim.workload.traces.request import TraceRequest
from tests.sim.replays import config_for, executor_for


def fleet(
    source: Source, replicas: int, router: str = "round-robin", config: Any = None, **more: Any
) -> Report:
    config = config or config_for()
    executors = [executor_for(config) for _ in range(replicas)]
    return replay(source, config, *executors, router=make_router(router, 2), **more)


def workload(count: int = 80, rate: float = 25.0) -> list[TraceRequest]:
    lengths = uniform(1, 300), uniform(1, 40)
    return list(generate(lambda rng: poisson(rate, rng), *lengths, requests=count, seed=1))


def sessions(count: int = 12, turns: int = 5, rate: float = 5.0) -> list[TraceRequest]:
    made = Conversations(
        turns=fixed(turns), messages=fixed(100), outputs=uniform(20, 60), think_s=0.3
    )
    return list(converse(lambda rng: poisson(rate, rng), made, sessions=count, seed=2))


def test_every_replica_is_the_replay_of_what_it_was_sent(replicas: int = 3) -> None:
    """Requests are distributed in turn: replica i has every n-th request from the i-th on, at its
    own pace."""
    requests = workload(90, 60.0)
    records: list[Record] = []
    report = fleet(OpenLoop(requests), replicas, on_record=records.append)
    assert report.replicas is not None and report.requests == len(records) == 90
    for i, part in enumerate(report.replicas):
        alone: list[Record] = []
        config = config_for()
        single = replay(
            OpenLoop(requests[i::replicas]), config, executor_for(config), on_record=alone.append
        )
        own = [record for record in records if record.replica == i]
        times = [(r.ttft_s, r.tpot_s, r.e2e_s, r.queue_s) for r in own]
        assert times == [(r.ttft_s, r.tpot_s, r.e2e_s, r.queue_s) for r in alone]
        assert [r.index for r in own] == [i + replicas * r.index for r in alone]
        assert (part.requests, part.steps) == (single.requests, single.steps)
        assert part.output_tokens == single.output_tokens
        assert part.ttft_s == single.ttft_s
    assert report.output_tokens == sum(r.output_tokens for r in requests)
    assert report.steps == sum(part.steps for part in report.replicas)
    ttft_s = [record.ttft_s for record in records]
    assert report.ttft_s.p99 == pytest.approx(np.percentile(ttft_s, 99), rel=1e-12)
    running = sum(part.mean_running or 0.0 for part in report.replicas)
    assert report.mean_running == pytest.approx(running, rel=1e-12)


def test_least_loaded_beats_taking_turns_on_a_skewed_load() -> None:
    """Every other request is long: with two replicas in turn, one of them gets all the work."""
    requests = [
        TraceRequest(arrival_s=i * 0.02, prompt_tokens=20, output_tokens=150 if i % 2 else 5)
        for i in range(120)
    ]
    p99_s = {}
    for router in ("round-robin", "least-loaded"):
        report = fleet(OpenLoop(requests), 2, router, config_for(max_num_seqs=8))
        assert report.replicas is not None
        p99_s[router] = report.e2e_s.p99
    assert p99_s["least-loaded"] < 0.7 * p99_s["round-robin"]


def test_prefix_affine_finds_more_in_the_cache() -> None:
    hits, max_requests = {}, {}
    for router in routers.ROUTERS:
        report = fleet(OpenLoop(sessions()), 3, router, config_for(num_blocks=4000))
        assert report.replicas is not None
        hits[router] = report.prefix_hit_tokens or 0
        max_requests[router] = max(part.requests for part in report.replicas)
        assert hits[router] == sum(part.prefix_hit_tokens for part in report.replicas)
    alone = fleet(OpenLoop(sessions()), 1, config=config_for(num_blocks=4000)).prefix_hit_tokens
    assert hits["prefix-affine"] == alone, "every turn found all that one engine would have kept"
    assert hits["prefix-affine"] > 1.5 * max(hits["round-robin"], hits["least-loaded"])
    assert max_requests["prefix-affine"] < 60, "and yet all replicas had work"


def test_a_short_prefix_of_all_prompts_does_not_gather_them() -> None:
    """All prompts share one block of twenty, as in Mooncake's traces."""
    load, router = ReplicaLoad(3), PrefixAffine()
    for number in range(9):
        ids = prompt(1, *range(100 * number + 10, 100 * number + 29))
        load.add(router.route(ids, load), len(ids))
    assert load.requests == [3, 3, 3]
    own = prompt(1, *range(10, 29), 7)
    assert router.route(own, load) == 0, "but the next turn of the first one finds its blocks"


# -- routers alone


def prompt(*blocks: int, more: int = 5) -> np.ndarray:
    size = routers.BLOCK_TOKENS
    named = [np.arange(size) + block * size for block in blocks]
    return np.concatenate([*named, np.arange(more) + 10**6]).astype(np.int32)


def test_the_longest_known_prefix_wins_unless_it_is_overloaded(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    load, router = ReplicaLoad(3), PrefixAffine()
    assert [router.route(prompt(*b), load) for b in ((1,), (2, 3), (4,))] == [0, 1, 2]
    assert router.route(prompt(2, 3, 5), load) == 1
    assert router.route(prompt(2, 9), load) == 1
    assert router.route(prompt(3), load) == 2, "a block counts after the same blocks alone"
    for _ in range(routers.MAX_EXCESS_REQUESTS):
        load.add(1, 10)
    assert router.route(prompt(2, 3, 5), load) == 1
    load.add(1, 10)
    elsewhere = router.route(prompt(2, 3, 5), load)
    assert elsewhere != 1
    assert router.route(prompt(2, 3, 5), load) == elsewhere, "now it knows the prefix as well"
    monkeypatch.setattr(routers, "MAX_PREFIXES", 2)
    router.route(prompt(6, 7), load)
    assert router.route(prompt(1), ReplicaLoad(3)) != 0, "the oldest are forgotten"
