"""The calibrated engine in the simulator, and the requests of the comparison."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import NamedTuple

import msgspec

from cbatch.core.prices.calibration import Calibration
from cbatch.core.scheduler.config import SchedulerConfig
from cbatch.core.speculation.build import parse_lookahead
from sim.executor.acceptance import RecordedAcceptance
from sim.executor.fake import FakeExecutor
from sim.replay.replay import replay
from sim.report.report import Record
from sim.workload.arrivals import poisson
from sim.workload.generate import generate
from sim.workload.lengths import uniform
from sim.workload.sources import Source
from sim.workload.traces.request import TraceRequest

_OUTPUT_TOKENS = (8, 64)  # range of a request
Prompts = Sequence[Sequence[int]]


class SimulatedEngine(NamedTuple):
    """The calibrated engine, simulated. `acceptances` has, for each prompt, which drafts are
    accepted."""

    calibration: Calibration
    acceptances: Sequence[Sequence[int]]

    def replay(self, source: Source, policy: str) -> list[Record]:
        lookahead, engine = parse_lookahead(policy), {**self.calibration.engine}
        if lookahead.policy == "off":
            engine["draft_context_tokens"] = None
        config = SchedulerConfig(
            **engine,
            enable_prefix_caching=False,
            lookahead=lookahead,
            cost_profile=self.calibration.profile,
        )
        slots, records = config.max_num_seqs, list[Record]()
        executor = FakeExecutor(
            max_num_seqs=slots,
            cost=self.calibration.prices,
            acceptance=RecordedAcceptance(self.acceptances, max_num_seqs=slots),
        )
        replay(source, config, executor, on_record=records.append)
        return records


def make_requests(texts: Prompts, rate_per_s: float, count: int, seed: int) -> list[TraceRequest]:
    """Return a Poisson process of requests; their prompts have the lengths of `texts` in turn."""
    lengths = uniform(*_OUTPUT_TOKENS)
    requests = generate(
        lambda rng: poisson(rate_per_s, rng), lengths, lengths, requests=count, seed=seed
    )
    return [
        msgspec.structs.replace(request, prompt_tokens=len(text))
        for request, text in zip(requests, itertools.cycle(texts), strict=False)
    ]
