"""The comparison of a simulated fleet with real replicas, on replicas that are scripts."""

from __future__ import annotations

import asyncio
import json
import threading
from pathlib import Path
from typing import Any

import msgspec
import pytest

from bench.simulator import against_fleet as against
from bench.simulator import fleet
from cbatch.demo import demo_paths
from sim.replay.routers import ReplicaLoad
from sim.traces.prompts import TracePrompts
from sim.traces.request import TraceRequest
from sim.workload.sources import OpenLoop, Remote
from tests.bench.load.scripted import Exchange, answer_well, scripted
from tests.sim.test_calibrated import calibration

SIZES = {
    "num_blocks": 999,
    "block_size_tokens": 16,
    "max_slots": 8,
    "max_model_tokens": 1024,
    "step_budget_tokens": 2048,
    "draft_context_tokens": 1024,
}
COST: Any = calibration(engine=SIZES)


def test_requests_share_whole_prefixes_and_nothing_else() -> None:
    requests = fleet.shared_prefixes(10.0, 200, seed=3)
    made = TracePrompts()
    said = [fleet.spoken(made.prompt(request)) for request in requests]
    assert requests == fleet.shared_prefixes(10.0, 200, seed=3)
    assert [len(each) for each in said] == [request.prompt_tokens for request in requests]
    vocab = json.loads((demo_paths()[0] / "config.json").read_text())["vocab_size"]
    assert min(map(min, said)) >= 1 and max(map(max, said)) < vocab == fleet.VOCAB_SIZE
    shared = fleet.GROUP_BLOCKS * fleet.BLOCK_TOKENS
    groups: dict[Any, set[tuple[int, ...]]] = {}
    for request, each in zip(requests, said, strict=True):
        groups.setdefault(request.hash_ids, set()).add(tuple(each[:shared]))
    assert len(groups) == fleet.GROUPS and all(len(found) == 1 for found in groups.values())
    heads = {tuple(each[: fleet.BLOCK_TOKENS]) for each in said}
    assert len(heads) == fleet.GROUPS, "no two groups begin with the same block"
    assert max(request.prompt_tokens + request.output_tokens for request in requests) <= 1024
    others = {request.hash_ids for request in fleet.shared_prefixes(10.0, 200, seed=4)}
    assert not others & set(groups), "a later run finds nothing of an earlier one"


class LessFirst:
    """To the replica with fewer open requests, of equals the first, whatever the prompt."""

    def __init__(self) -> None:
        self.loads: list[list[int]] = []

    def route(self, prompt: Any, load: ReplicaLoad) -> int:
        self.loads.append(list(load.requests))
        return load.requests.index(min(load.requests))


def test_real_requests_go_where_the_router_says() -> None:
    """It sees what was sent where and has not ended: one replica does not answer before the last
    request has come, so that the other one gets all that comes meanwhile."""
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

        async def run() -> fleet.RoutedCalls:
            return await fleet.FleetClient(ports, router).replay(requests)

        seen = asyncio.run(run())
    assert router.loads == [[0, 0], [1, 0], [1, 0], [1, 0]]
    assert seen.replicas == {0: 0, 1: 1, 2: 1, 3: 1}
    sent = [[len(body["prompt"]) for body in each.bodies if body] for each in (first, second)]
    assert sent == [[20], [21, 22, 23]]
    assert all(body["ignore_eos"] and body["temperature"] == 0 for body in second.bodies if body)
    case = against.case_of("least-loaded", requests, seen)
    assert [record.replica for record in case.records] == [0, 1, 1, 1]
    assert case.records[0].ttft_s > 0.25 and case.report.output_tokens == 12


def test_a_failed_call_ends_the_comparison() -> None:
    async def refuse(exchange: Exchange) -> None:
        await exchange.whole(b'{"error": "no"}', "500 Internal Server Error")

    one = [TraceRequest(arrival_s=0.0, prompt_tokens=5, output_tokens=2)]
    with scripted(refuse) as server, pytest.raises(RuntimeError, match="a call failed: status 500"):
        fleet.replay_real([server.endpoint.port], "round-robin", one)


# -- what was measured, foretold


def as_measured(router: str, factor: float) -> against.RouterCase:
    """By a fleet that is the simulated one, but for this factor of all times."""
    requests = fleet.shared_prefixes(20.0, 60, seed=2)
    report, found = fleet.foretell_fleet(COST, 300, 2, router, requests, fleet.Outside())
    replace = msgspec.structs.replace
    slower = [
        replace(r, ttft_s=r.ttft_s * factor, tpot_s=r.tpot_s * factor)
        for r in found
        if r.tpot_s is not None
    ]
    report = replace(report, duration_s=report.duration_s * factor)
    return against.RouterCase(router, requests, report, slower)


def probes_of(more: fleet.Outside) -> fleet.Probes:
    """Of replicas that are the simulated ones, and that far away."""
    source = Remote(OpenLoop(fleet.probe_requests()), more.request_s)
    return fleet.Probes.of(
        fleet.simulate_fleet(more.priced(COST), 300, 2, "round-robin", source)[1]
    )


def test_what_lies_outside_of_the_engine_is_found_by_probes() -> None:
    for more in (fleet.Outside(), fleet.Outside(0.004, 0.0), fleet.Outside(0.003, 0.002)):
        found = fleet.outside(COST, 300, 2, probes_of(more))
        assert found.request_s == pytest.approx(more.request_s, abs=1e-4)
        assert found.step_s == pytest.approx(more.step_s, abs=1e-4)
    several = [fleet.Probes(0.1, 3.0), fleet.Probes(0.3, 1.0), fleet.Probes(0.2, 2.0)]
    assert fleet.Probes.middle(several) == fleet.Probes(0.2, 2.0)


def test_what_was_measured_is_foretold_again(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """A fleet that served as the simulator says has no error; one twice as slow is out of bounds.
    The page shows both of each."""
    cases = [as_measured("round-robin", 1.0), as_measured("prefix-affine", 2.0)]
    runs = against.FleetRuns(2, 300, COST, probes_of(fleet.Outside()), cases)
    kept, page = tmp_path / "runs.json", tmp_path / "page.html"
    kept.write_bytes(msgspec.json.encode(runs))
    against.main(["--runs", str(kept), "--page", str(page)])
    rows = json.loads(capsys.readouterr().out.splitlines()[-1])["results"]
    assert len(rows) == 2 * 7
    for row in rows:
        if row["bound"] is None:
            assert row["ratio"] == 1 and row["within"] is None
        elif row["router"] == "round-robin":
            assert row["within"] and row["ratio"] == 1
        else:
            half = 2.0 if row["measure"] == "tokens_per_s" else 0.5
            assert not row["within"] and row["ratio"] == half
    hits = {row["router"]: row["simulated"] for row in rows if row["measure"] == "prefix_hits"}
    assert hits["prefix-affine"] > 1.2 * hits["round-robin"] > 0
    text = page.read_text(encoding="utf-8")
    for name in ("round-robin: replicas", "prefix-affine: simulated"):
        assert name in text


def test_a_fleet_is_what_the_command_simulates() -> None:
    """Each replica has its own pool and slots, and what lies outside of it takes its time."""
    requests = fleet.shared_prefixes(20.0, 60, seed=2)
    near, found = fleet.foretell_fleet(COST, 300, 2, "least-loaded", requests, fleet.Outside())
    assert near.replicas is not None and {record.replica for record in found} == {0, 1}
    config = fleet.fleet_config(COST, 300)
    assert (config.num_blocks, config.prefix_cache, config.lookahead.policy) == (300, True, "off")
    far, _ = fleet.simulate_fleet(COST, 300, 2, "least-loaded", Remote(OpenLoop(requests), 0.01))
    assert far.ttft_s.mean == pytest.approx((near.ttft_s.mean or 0.0) + 0.01, rel=0.05)
    assert fleet.fleet_capacity_per_s(COST, 300, 2) > 1.5 * fleet.fleet_capacity_per_s(COST, 300, 1)
