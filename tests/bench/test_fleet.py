"""The comparison of a simulated fleet with real replicas, here with scripted replicas."""

from __future__ import annotations

import asyncio
import json
import threading
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import msgspec
import pytest
from sim.replay.host import Host, Work

from bench.simulator import compare, real, workloads
from bench.simulator import host as bench_host
from bench.simulator.simulated import Probes, ReplayedRun, ServerOverhead, SimulatedReplicas
from cbatch.demo import demo_paths
from sim.replay.routers import ReplicaLoad
from sim.workload.sources import OpenLoop
from sim.workload.tokens import TracePrompts
from sim.workload.traces.request import TraceRequest
from tests.bench.load.scripted import Exchange, answer_well, scripted
from tests.bench.test_simulator import rows_of, slower
from tests.sim.test_calibrated import calibration

SIZES = {
    "num_blocks": 999,
    "block_size": 16,
    "max_num_seqs": 16,
    "max_model_len": 1024,
    "max_num_batched_tokens": 2048,
    "draft_context_tokens": 1024,
}
COST: Any = calibration(engine=SIZES)


def test_requests_share_whole_prefixes_and_nothing_else() -> None:
    requests = workloads.shared_prefixes(10.0, 200, seed=3)
    made = TracePrompts()
    said = [workloads.to_model_ids(made.prompt(request)) for request in requests]
    assert requests == workloads.shared_prefixes(10.0, 200, seed=3)
    assert [len(each) for each in said] == [request.prompt_tokens for request in requests]
    vocab = json.loads((demo_paths()[0] / "config.json").read_text())["vocab_size"]
    assert min(map(min, said)) >= 1 and max(map(max, said)) < vocab == workloads.VOCAB_SIZE
    shared = workloads.GROUP_BLOCKS * workloads.BLOCK_TOKENS
    groups: dict[Any, set[tuple[int, ...]]] = {}
    for request, prompt in zip(requests, said, strict=True):
        groups.setdefault(request.hash_ids, set()).add(tuple(prompt[:shared]))
    assert len(groups) == workloads.GROUPS and all(len(prompts) == 1 for prompts in groups.values())
    heads = {tuple(each[: workloads.BLOCK_TOKENS]) for each in said}
    assert len(heads) == workloads.GROUPS, "no two groups begin with the same block"
    assert max(request.prompt_tokens + request.output_tokens for request in requests) <= 1024
    others = {request.hash_ids for request in workloads.shared_prefixes(10.0, 200, seed=4)}
    assert not others & set(groups), "a later run finds nothing of an earlier one"


class LessFirst:
    """A router to the replica with fewer open requests, of equals to the first, whatever the
    prompt."""

    def __init__(self) -> None:
        self.loads: list[list[int]] = []

    def route(self, prompt: Any, load: ReplicaLoad) -> int:
        self.loads.append(list(load.requests))
        return load.requests.index(min(load.requests))


def test_real_requests_go_where_the_router_says() -> None:
    """The router sees which requests were sent and have not ended. One replica does not answer
    before the last request has come, so the other one gets all that come meanwhile."""
    requests = [
        TraceRequest(arrival_s=0.1 * i, prompt_tokens=20 + i, output_tokens=3) for i in range(4)
    ]
    last_has_come = threading.Event()

    async def slow(exchange: Exchange) -> None:
        while exchange.body and not last_has_come.is_set():
            await asyncio.sleep(0.01)
        await answer_well(exchange)

    async def quick(exchange: Exchange) -> None:
        if len(exchange.body.get("prompt", ())) == 23:
            last_has_come.set()
        await answer_well(exchange)

    router = LessFirst()
    with scripted(slow) as first, scripted(quick) as second:
        ports = [first.endpoint.port, second.endpoint.port]

        async def run() -> ReplayedRun:
            prompts = workloads.prompts_of(requests, ())
            return await real.FleetClient(ports, router).replay(requests, prompts)

        seen = asyncio.run(run())
    assert router.loads == [[0, 0], [1, 0], [1, 0], [1, 0]]
    assert [record.replica for record in seen.records] == [0, 1, 1, 1]
    sent = [[len(body["prompt"]) for body in each.bodies if body] for each in (first, second)]
    assert sent == [[20], [21, 22, 23]]
    assert all(body["ignore_eos"] and body["temperature"] == 0 for body in second.bodies if body)
    assert seen.records[0].ttft_s > 0.25
    assert seen.measures(2)["busiest"] == 0.75


def test_a_failed_call_ends_the_comparison() -> None:
    async def refuse(exchange: Exchange) -> None:
        await exchange.whole(b'{"error": "no"}', "500 Internal Server Error")

    one = [TraceRequest(arrival_s=0.0, prompt_tokens=5, output_tokens=2)]
    with scripted(refuse) as server, pytest.raises(RuntimeError, match="a call failed: status 500"):
        real.serve_replicas([server.endpoint.port], one)


# -- predictions of measured values


HOST = Host(cores=2, switch_s=2e-4, server=Work(2e-3, 1e-4, 3e-5), client=Work(5e-4, 3e-5, 1e-5))
REPLICAS = SimulatedReplicas(COST, 2, 300, host=msgspec.structs.replace(HOST, switch_s=0.0))


@pytest.mark.parametrize(
    "overhead, switch_s",
    [
        (ServerOverhead(), 0.0),
        (ServerOverhead(0.004), 0.0),
        (ServerOverhead(0.003, 5e-4, 1e-4), 0.0),
        (ServerOverhead(0.003, -2e-4, 0.0), 0.0),
        (ServerOverhead(0.003, 5e-4, 5e-5), 2e-4),
    ],
)
def test_time_outside_the_prices_is_measured_by_probes(
    overhead: ServerOverhead, switch_s: float
) -> None:
    """The replicas are simulated ones with known differences."""
    host = msgspec.structs.replace(HOST, switch_s=switch_s)
    probes = SimulatedReplicas(COST, 2, 300, host=host, overhead=overhead).probes()
    explained = REPLICAS.fitted_to(probes)
    assert explained.host is not None and explained.host.switch_s == pytest.approx(
        switch_s, abs=3e-5
    )
    assert explained.overhead.request_s == pytest.approx(overhead.request_s, abs=2e-4)
    assert explained.overhead.step_s == pytest.approx(overhead.step_s, abs=5e-5)
    assert explained.overhead.row_s == pytest.approx(overhead.row_s, abs=1e-5)


def test_probes_have_a_middle() -> None:
    several = [Probes(0.1, 3.0, 1.0, 1.0), Probes(0.3, 1.0, 2.0, 1.0)]
    assert Probes.median(several) == Probes(0.2, 2.0, 1.5, 1.0)


def test_processor_time_of_servers_and_client_is_measured_from_runs(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The processor seconds of a run are explained by its requests, steps and tokens. Those of a
    server without clients do not count."""
    idle_share, clock = 0.01, [0.0, 0.0]  # seconds, and the servers' share of them
    server, client = Work(2e-3, 1e-4, 3e-5), Work(5e-4, 3e-5, 1e-5)

    def seconds(work: Work, requests: list[TraceRequest]) -> float:
        tokens = sum(r.output_tokens for r in requests)
        steps = bench_host.steps_of(COST, requests)
        return work.request_s * len(requests) + work.step_s * steps + work.token_s * tokens

    def served(ports: Any, requests: list[TraceRequest]) -> tuple[ReplayedRun, float]:
        last_s = requests[-1].arrival_s + 1
        clock[0] += last_s
        clock[1] += seconds(server, requests) + last_s * idle_share
        return ReplayedRun([]), seconds(client, requests)

    def sleep(seconds: float) -> None:
        clock[0] += seconds
        clock[1] += seconds * idle_share

    monkeypatch.setattr(bench_host, "serve_replicas", served)
    monkeypatch.setattr(bench_host, "server_cpu_s", lambda: clock[1])
    monkeypatch.setattr(
        bench_host, "time", SimpleNamespace(monotonic=lambda: clock[0], sleep=sleep)
    )
    measured = bench_host.measure_host([1, 2], COST)
    for mine, true in ((measured.server, server), (measured.client, client)):
        assert msgspec.structs.astuple(mine) == pytest.approx(msgspec.structs.astuple(true))


def test_what_was_measured_is_predicted_again(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """A fleet that served as the simulator predicts has no error; one twice as slow is out of
    bounds."""
    comparison = compare.Comparison("fleet", 2, COST, [[0]], REPLICAS.host, [])
    for router, factor in (("round-robin", 1.0), ("prefix-affine", 2.0)):
        case = compare.Case("off", router, 0.4, workloads.shared_prefixes(20.0, 60, seed=2))
        blocks = compare.KINDS["fleet"].num_blocks
        world = msgspec.structs.replace(REPLICAS, num_blocks=blocks)
        _, run = world.replay(OpenLoop(case.requests), "off", router)
        case.runs, case.probes = [slower(run, factor)], [world.probes()]
        comparison.cases.append(case)
    rows = rows_of(comparison, tmp_path, capsys)
    assert len(rows) == 2 * 7
    for row in rows:
        if row["bound"] is None:
            assert row["error"] == pytest.approx(0, abs=0.01) and row["within"] is None
        elif row["router"] == "round-robin":
            assert row["within"] and row["error"] == pytest.approx(0, abs=0.01)
        else:
            half = 1.0 if row["measure"] == "tokens_per_s" else -0.5
            assert not row["within"] and row["error"] == pytest.approx(half, rel=0.03)
    hits = {row["router"]: row["simulated"] for row in rows if row["measure"] == "prefix_hits"}
    assert hits["prefix-affine"] > hits["round-robin"] > 0


def test_a_fleet_is_what_the_command_simulates() -> None:
    """Each replica has its own pool and slots, and work outside it takes time."""
    requests = workloads.shared_prefixes(20.0, 60, seed=2)
    plain = SimulatedReplicas(COST, 2, 300)
    near, run = plain.replay(OpenLoop(requests), router="least-loaded")
    assert near.replicas is not None and {record.replica for record in run.records} == {0, 1}
    config = plain.config("off")
    assert (config.num_blocks, config.enable_prefix_caching, config.lookahead.policy) == (
        300,
        True,
        "off",
    )
    away = msgspec.structs.replace(plain, overhead=ServerOverhead(0.01))
    far, _ = away.replay(OpenLoop(requests), router="least-loaded")
    assert far.ttft_s.mean == pytest.approx((near.ttft_s.mean or 0.0) + 0.01, rel=0.05)
    capacity = partial(
        SimulatedReplicas.capacity_per_s, policy="off", make=workloads.shared_prefixes
    )
    assert capacity(plain) > 1.5 * capacity(SimulatedReplicas(COST, 1, 300))
    assert capacity(SimulatedReplicas(COST, 2, 300, host=Host(cores=1))) < 0.6 * capacity(plain)
