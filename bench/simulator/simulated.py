"""Simulated replicas of the demo pair, their runs, and their simulated probes."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Sequence

import msgspec
import numpy as np
from sim.replay.host import Host

from bench.simulator.workloads import FULL_ROWS, probe_runs
from cbatch.core.prices.calibration import Calibration
from cbatch.core.prices.terms import ProfiledCost
from cbatch.core.scheduler.config import SchedulerConfig
from cbatch.core.speculation.build import parse_lookahead
from sim.executor.acceptance import RecordedAcceptance
from sim.executor.fake import FakeExecutor
from sim.replay.replay import replay
from sim.replay.routers import make_router
from sim.report.report import Record, Report
from sim.workload.sources import ClosedLoop, OpenLoop, Remote, Source
from sim.workload.traces.request import TraceRequest

_FIT_ROUNDS = 12  # iterations of the fit in `fitted_to`
_MIN_STEP_S = 1e-9  # smallest duration of a step


class ReplayedRun(msgspec.Struct):
    """One run, real or simulated: a record for each request."""

    records: list[Record]
    prefix_hit_tokens: int = 0

    def measures(self, replicas: int) -> dict[str, float]:
        """Return tokens per second and percentiles. Several replicas also have the share of prompt
        tokens found in prefix caches, and the busiest replica's share of the requests."""
        records = self.records
        end_s = max(record.arrival_s + record.e2e_s for record in records)
        duration_s = end_s - min(record.arrival_s for record in records)
        measures = {"tokens_per_s": sum(record.output_tokens for record in records) / duration_s}
        series = {
            "ttft": [record.ttft_s for record in records],
            "tpot": [record.tpot_s for record in records if record.tpot_s is not None],
        }
        for name, values in series.items():
            for percent in (50, 99):
                measures[f"{name}_p{percent}_ms"] = float(np.percentile(values, percent)) * 1e3
        if replicas > 1:
            prompt_tokens = sum(record.prompt_tokens for record in records)
            counts = [sum(record.replica == i for record in records) for i in range(replicas)]
            measures["prefix_hits"] = self.prefix_hit_tokens / prompt_tokens
            measures["busiest"] = max(counts) / len(records)
        return measures


class Probes(msgspec.Struct, frozen=True, rename={"all_busy_tpot_s": "beside_tpot_s"}):
    """Medians of `probe_runs`: of requests to an idle replica, of requests to one full replica, and
    of requests to all replicas at once."""

    ttft_s: float
    tpot_s: float
    full_tpot_s: float
    all_busy_tpot_s: float

    @classmethod
    def of(cls, *runs: Sequence[Record]) -> Probes:
        tpot_s = (
            statistics.median(each.tpot_s for each in run if each.tpot_s is not None)
            for run in runs
        )
        return cls(statistics.median(each.ttft_s for each in runs[0]), *tpot_s)

    @classmethod
    def median(cls, probes: Sequence[Probes]) -> Probes:
        columns = zip(*map(msgspec.structs.astuple, probes), strict=True)
        return cls(*map(statistics.median, columns))


class ServerOverhead(msgspec.Struct, frozen=True):
    """Seconds of a server that the prices of an in-process engine do not include: the transport of
    a request, and the extra time of a step and of a row (which may be negative)."""

    request_s: float = 0.0
    step_s: float = 0.0
    row_s: float = 0.0

    def priced(self, calibration: Calibration) -> Calibration:
        replace, prices = msgspec.structs.replace, calibration.prices
        target_s = tuple(max(step_s + self.step_s, _MIN_STEP_S) for step_s in prices.target_s)
        row_s = max(prices.price("host_row_s") + self.row_s, 0.0)
        further = prices.further | {"host_row_s": row_s}
        return replace(calibration, prices=replace(prices, target_s=target_s, further=further))


class SimulatedReplicas(msgspec.Struct, frozen=True):
    """Simulated replicas, as in `cbatch sim --replicas N --cost FILE --host FILE`.

    `num_blocks` is each replica's pool with a prefix cache; None: the calibrated engine's pool
    without one. `acceptances` has, for each prompt, which drafts are accepted."""

    calibration: Calibration
    replicas: int = 1
    num_blocks: int | None = None
    acceptances: Sequence[Sequence[int]] = ((0,),)
    host: Host | None = None
    overhead: ServerOverhead = ServerOverhead()

    def config(self, policy: str) -> SchedulerConfig:
        lookahead, engine = parse_lookahead(policy), {**self.calibration.engine}
        if lookahead.policy == "off":
            engine["draft_context_tokens"] = None
        if self.num_blocks is not None:
            engine["num_blocks"] = self.num_blocks
        return SchedulerConfig(
            **engine,
            enable_prefix_caching=self.num_blocks is not None,
            lookahead=lookahead,
            cost_profile=self.calibration.profile,
        )

    def replay(
        self, source: Source, policy: str = "off", router: str = "round-robin"
    ) -> tuple[Report, ReplayedRun]:
        config, records = self.config(policy), list[Record]()
        prices = self.overhead.priced(self.calibration).prices
        cost = ProfiledCost(prices, adaptive=config.lookahead.policy == "adaptive")
        executors = [
            FakeExecutor(
                max_num_seqs=config.max_num_seqs,
                cost=cost,
                acceptance=RecordedAcceptance(self.acceptances, max_num_seqs=config.max_num_seqs),
            )
            for _ in range(self.replicas)
        ]
        report = replay(
            Remote(source, self.overhead.request_s),
            config,
            *executors,
            router=make_router(router),
            on_record=records.append,
            host=self.host,
        )
        return report, ReplayedRun(records, report.prefix_hit_tokens or 0)

    def capacity_per_s(self, policy: str, make: Callable[..., list[TraceRequest]]) -> float:
        """Return the requests per second that all replicas serve with a client per slot."""
        clients = self.replicas * self.calibration.engine["max_num_seqs"]
        return self.replay(ClosedLoop(make(1.0, 500, 0), clients), policy)[0].requests_per_s or 1.0

    def probes(self) -> Probes:
        runs = probe_runs(self.replicas, shared=self.num_blocks is not None)
        replace = msgspec.structs.replace
        parts = ((replace(self, replicas=count), requests) for count, requests in runs)
        return Probes.of(*(part.replay(OpenLoop(some))[1].records for part, some in parts))

    def fitted_to(self, real: Probes) -> SimulatedReplicas:
        """Return these replicas with `overhead` and `host.switch_s` fitted, so that simulated
        probes take the same times as `real` ones."""
        replicas, replace = self, msgspec.structs.replace
        for _ in range(_FIT_ROUNDS):
            overhead, simulated, host = replicas.overhead, replicas.probes(), replicas.host
            one_s, full_s = real.tpot_s - simulated.tpot_s, real.full_tpot_s - simulated.full_tpot_s
            row_s = (full_s - one_s) / (FULL_ROWS - 1)
            overhead = ServerOverhead(
                max(overhead.request_s + real.ttft_s - simulated.ttft_s, 0.0),
                overhead.step_s + one_s - row_s,
                overhead.row_s + row_s,
            )
            if host is not None:
                # Each step has two pieces of work that may have to take a processor from an
                # engine: the server's and the client's.
                more_s = (real.all_busy_tpot_s - simulated.all_busy_tpot_s - one_s) / 2
                host = replace(host, switch_s=max(host.switch_s + more_s, 0.0))
            replicas = replace(replicas, overhead=overhead, host=host)
        return replicas
