"""Lookahead policies on a simulated H100, no model needed: `python examples/simulate_policy.py`."""

from cbatch.core.scheduler.config import SchedulerConfig
from cbatch.core.speculation.build import parse_lookahead
from sim.cost.pool import pool_blocks
from sim.cost.roofline import Roofline, RooflineConfig, load_gpu
from sim.cost.shapes import load_shape
from sim.executor.acceptance import parse_acceptance
from sim.executor.fake import FakeExecutor
from sim.replay.replay import replay
from sim.workload.arrivals import poisson
from sim.workload.generate import generate
from sim.workload.lengths import lognormal
from sim.workload.sources import ClosedLoop

CLIENTS, REQUESTS = 16, 48


def main() -> None:
    hardware = RooflineConfig(
        gpu=load_gpu("H100"), shape=load_shape("llama-3.1-8b"), draft=load_shape("llama-3.2-1b")
    )
    for policy in ("off", "fixed:4", "adaptive"):
        requests = generate(
            lambda rng: poisson(1.0, rng), lognormal(500, 1), lognormal(200, 1),
            requests=REQUESTS, seed=0,
        )  # fmt: skip
        config = SchedulerConfig(
            num_blocks=pool_blocks(hardware), max_model_len=8192, max_num_seqs=64,
            draft_context_tokens=8192, lookahead=parse_lookahead(policy),
        )  # fmt: skip
        acceptance = parse_acceptance("beta:0.7,8", max_num_seqs=64)
        executor = FakeExecutor(max_num_seqs=64, cost=Roofline(hardware), acceptance=acceptance)
        report = replay(ClosedLoop(requests, CLIENTS), config, executor)
        print(f"{policy:8} {report.output_tokens_per_s:7.0f} tokens/s")


if __name__ == "__main__":
    main()
