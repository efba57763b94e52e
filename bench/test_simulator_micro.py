"""Micro-benchmark (`pytest bench --benchmark-enable`) of a replay with the options of `cbatch sim`:
requests with the lengths and the rate of Azure's conversation trace of 2023."""

from __future__ import annotations

from sim.cli.scenario import Scenario
from sim.cli.simulation import build
from sim.workload.arrivals import poisson
from sim.workload.generate import generate
from sim.workload.lengths import lognormal
from sim.workload.traces.reader import write_requests


def test_replay(benchmark, tmp_path):
    lengths = lognormal(1155, 0.96, high=14_050), lognormal(211, 0.77, high=1_000)
    requests = generate(lambda rng: poisson(5.53, rng), *lengths, requests=50, seed=0)
    write_requests(tmp_path / "trace.jsonl", requests)
    scenario = Scenario(trace=str(tmp_path / "trace.jsonl"))
    assert benchmark(lambda: build(scenario).run()).requests == 50
