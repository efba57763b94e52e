"""A policy of lookahead in the simulator, under clients that each wait for their answers."""

from __future__ import annotations

import tempfile
from pathlib import Path
from typing import Any

from sim.cli.scenario import Scenario
from sim.cli.simulation import build
from sim.distributions.arrivals import poisson
from sim.distributions.lengths import lognormal
from sim.traces.reader import write_requests
from sim.workload.generate import generate


def tokens_per_s(policy: str, clients: int, num_requests: int, **fields: Any) -> float:
    """Of output, for requests of some 200 tokens in and out. `fields` are those of the scenario;
    the machine is by default an H100 with Llama-3.1-8B."""
    length = lognormal(200, 0.5)
    requests = generate(
        lambda rng: poisson(1.0, rng), length, length, requests=num_requests, seed=0
    )
    with tempfile.TemporaryDirectory() as folder:
        trace = Path(folder) / "trace.jsonl"
        write_requests(trace, requests)
        scenario = Scenario(
            trace=str(trace),
            concurrency=clients,
            lookahead=policy,
            max_model_tokens=8192,
            step_budget=4096,
            **fields,
        )
        found = build(scenario).run().output_tokens_per_s
    assert found is not None
    return found
