"""Replicas of the demo pair behind a router, in real time and in the simulator.

The router is the simulator's own object, and so are the prompts it looks at; before the real
replicas it runs in their client, as a gateway would. Requests share prefixes, in groups that are
drawn at random, and end in tokens of their own.
"""

from __future__ import annotations

import asyncio
import statistics
import time
from collections.abc import Sequence

import msgspec
import numpy as np

from bench.load.client.answer import AnswerReader
from bench.load.client.bodies import Bodies, BodySettings, Item
from bench.load.client.call import CallError, LiveTally, TimedCall
from bench.load.client.http import Endpoint, HttpClient
from bench.load.run.drive import Part
from bench.load.run.measure import LoadRun, added
from bench.load.run.scrape import difference, scrape
from bench.simulator.pair import PROBE_TOKENS, PROBES, PROBES_PER_S
from cbatch.core.scheduler.config import SchedulerConfig
from cbatch.demo import demo_paths
from sim.cost.calibrated import CalibratedCost, Calibration
from sim.distributions.arrivals import poisson
from sim.executor.modelled import ModelledExecutor
from sim.replay.host import Host
from sim.replay.replay import replay
from sim.replay.routers import ReplicaLoad, Router, make_router
from sim.report.report import Record, Report
from sim.traces.prompts import TracePrompts
from sim.traces.request import TraceRequest
from sim.workload.sources import ClosedLoop, OpenLoop, Remote, Source

BLOCK_TOKENS = 16
OUTSIDE_ROUNDS = 12
PROBE_GROUP = 10**6  # no run's
GROUPS, GROUP_BLOCKS = 24, 32  # prefixes, and the blocks of each
OWN_TOKENS, OUTPUT_TOKENS = (16, 96), (8, 48)
PROBE_OUTPUT_TOKENS = 24
FULL_ROWS, FULL_OUTPUT_TOKENS = 16, 96
BESIDE, BESIDE_S, BESIDE_OUTPUT_TOKENS = 8, 0.3, 128
HEADSTART_S = 0.1
VOCAB_SIZE = 4096  # of the demo pair


# -- the trace


def shared_prefixes(rate_per_s: float, count: int, seed: int) -> list[TraceRequest]:
    """A Poisson process. The blocks of another seed have other names."""
    rng = np.random.default_rng(seed)
    times_s = poisson(rate_per_s, rng)
    arrivals_s = [next(times_s) for _ in range(count)]
    groups = seed * GROUPS + rng.integers(0, GROUPS, count)
    own = rng.integers(*OWN_TOKENS, count, endpoint=True)
    outputs = rng.integers(*OUTPUT_TOKENS, count, endpoint=True)
    return [
        TraceRequest(
            arrival_s=arrivals_s[i] - arrivals_s[0],
            prompt_tokens=GROUP_BLOCKS * BLOCK_TOKENS + int(own[i]),
            output_tokens=int(outputs[i]),
            hash_ids=tuple(range(first, first + GROUP_BLOCKS)),
            hash_block_tokens=BLOCK_TOKENS,
        )
        for i, first in enumerate((groups * GROUP_BLOCKS).tolist())
    ]


def spoken(prompt: np.ndarray) -> list[int]:
    """The ids of a simulated prompt as the model has some; 0 ends a sequence."""
    return (1 + prompt.astype(np.int64) % (VOCAB_SIZE - 1)).tolist()


# -- the real replicas


class RoutedCalls(msgspec.Struct):
    """What the client of a fleet saw: its calls, and the replica of each by index."""

    run: LoadRun
    replicas: dict[int, int]


class FleetClient:
    """Sends each request at its time to the replica that `router` names."""

    def __init__(self, ports: Sequence[int], router: Router) -> None:
        self._start_s = time.monotonic() + HEADSTART_S
        endpoints = [Endpoint("127.0.0.1", port, False, "") for port in ports]
        self._clients = [HttpClient(endpoint, clock=self._now_s) for endpoint in endpoints]
        self._router, self._load = router, ReplicaLoad(len(ports))
        self._calls: list[TimedCall] = []
        self._replicas: dict[int, int] = {}

    async def replay(self, requests: Sequence[TraceRequest]) -> RoutedCalls:
        """Raises RuntimeError if a call failed."""
        made = TracePrompts()
        prompts = [made.prompt(request) for request in requests]
        bodies = Bodies(
            BodySettings(
                model=demo_paths()[0].name,
                chat=False,
                streamed=True,
                fields={"temperature": 0},
                ignore_eos=True,
                items=tuple(Item(prompt=spoken(prompt)) for prompt in prompts),
            )
        )
        before = [await scrape(client) for client in self._clients]
        self._start_s, cpu_s = time.monotonic() + HEADSTART_S, time.process_time()
        tasks = []
        for index, request in enumerate(requests):
            await asyncio.sleep(max(request.arrival_s - self._now_s(), 0.0))
            replica = self._router.route(prompts[index], self._load)
            self._load.add(replica, request.prompt_tokens)
            self._replicas[index] = replica
            tasks.append(asyncio.create_task(self._call(bodies, index, request, replica)))
        await asyncio.gather(*tasks)
        cpu_s, elapsed_s = time.process_time() - cpu_s, self._now_s()
        after = [await scrape(client) for client in self._clients]
        for client in self._clients:
            client.close()
        failed = next((call.error for call in self._calls if call.error is not None), None)
        if failed is not None:
            raise RuntimeError(f"a call failed: {failed}")
        part = Part(self._calls, 0, False, cpu_s, elapsed_s, [], self._start_s)
        run = LoadRun([part], open_loop=True)
        counted = [difference(*looks) for looks in zip(before, after, strict=True)]
        run.server = added(counted)
        return RoutedCalls(run, self._replicas)

    async def _call(self, bodies: Bodies, index: int, request: TraceRequest, replica: int) -> None:
        prepared = bodies.prepare(index, request)
        call = prepared.call
        reader = AnswerReader(call, LiveTally(), streamed=True)
        call.sent_s = self._now_s()
        try:
            await self._clients[replica].call("POST", bodies.path, prepared.body, reader)
        except CallError as error:
            call.error, call.end_s = error, self._now_s()
        self._load.remove(replica, request.prompt_tokens)
        self._calls.append(call)

    def _now_s(self) -> float:
        return time.monotonic() - self._start_s


def replay_real(ports: Sequence[int], router: str, requests: Sequence[TraceRequest]) -> RoutedCalls:
    return asyncio.run(_replay_real(ports, router, requests))


async def _replay_real(
    ports: Sequence[int], router: str, requests: Sequence[TraceRequest]
) -> RoutedCalls:
    return await FleetClient(ports, make_router(router)).replay(requests)


class Probes(msgspec.Struct, frozen=True):
    """Medians of short requests that find their replica idle, of many that one serves at a time,
    and of one that each replica serves while the others do."""

    ttft_s: float
    tpot_s: float
    full_tpot_s: float
    beside_tpot_s: float

    @classmethod
    def of(cls, *seen: Sequence[TimedCall | Record]) -> Probes:
        ttft_s = statistics.median(each.ttft_s for each in seen[0])
        return cls(ttft_s, *map(_median_tpot_s, seen))

    @classmethod
    def middle(cls, several: Sequence[Probes]) -> Probes:
        columns = zip(*map(msgspec.structs.astuple, several), strict=True)
        return cls(*map(statistics.median, columns))


def _median_tpot_s(seen: Sequence[TimedCall | Record]) -> float:
    return statistics.median(each.tpot_s for each in seen if each.tpot_s is not None)


def probe_request(arrival_s: float, output_tokens: int) -> TraceRequest:
    """All of them share a prefix, which a replica has after the first."""
    first = PROBE_GROUP * GROUP_BLOCKS
    return TraceRequest(
        arrival_s=arrival_s,
        prompt_tokens=GROUP_BLOCKS * BLOCK_TOKENS + PROBE_TOKENS,
        output_tokens=output_tokens,
        hash_ids=tuple(range(first, first + GROUP_BLOCKS)),
        hash_block_tokens=BLOCK_TOKENS,
    )


def probe_requests() -> list[TraceRequest]:
    return [probe_request(i / PROBES_PER_S, PROBE_OUTPUT_TOKENS) for i in range(PROBES)]


def full_requests() -> list[TraceRequest]:
    """As many as one replica has slots for, at once."""
    return [probe_request(0.0, FULL_OUTPUT_TOKENS) for _ in range(FULL_ROWS)]


def beside_requests(replicas: int) -> list[TraceRequest]:
    """One for each replica at once, some times."""
    times_s = [BESIDE_S * i for i in range(BESIDE) for _ in range(replicas)]
    return [probe_request(at_s, BESIDE_OUTPUT_TOKENS) for at_s in times_s]


def probe(ports: Sequence[int]) -> Probes:
    runs = (
        (ports, probe_requests()),
        (ports[:1], full_requests()),
        (ports, beside_requests(len(ports))),
    )
    return Probes.of(*(replay_real(at, "round-robin", some).run.calls for at, some in runs))


# -- the simulator


def fleet_config(calibration: Calibration, num_blocks: int) -> SchedulerConfig:
    engine = calibration.engine | {"num_blocks": num_blocks, "draft_context_tokens": None}
    return SchedulerConfig(**engine, prefix_cache=True)


class Outside(msgspec.Struct, frozen=True):
    """What the prices of an engine of this process do not hold: seconds that a request spends on
    its way, and that a step, and a row of one, take more in a server (or, below 0, less)."""

    request_s: float = 0.0
    step_s: float = 0.0
    row_s: float = 0.0

    def priced(self, calibration: Calibration) -> Calibration:
        replace, prices = msgspec.structs.replace, calibration.prices
        line = prices.tokens
        seconds = tuple(max(each + self.step_s, 0.0) for each in line.seconds)
        host_s = prices.host_s | {"row": max(prices.host_s["row"] + self.row_s, 0.0)}
        priced = replace(prices, tokens=replace(line, seconds=seconds), host_s=host_s)
        return replace(calibration, prices=priced)


class Fleet(msgspec.Struct, frozen=True):
    """Simulated replicas, as `cbatch sim --replicas N --cost FILE --host FILE` would have them."""

    calibration: Calibration
    num_blocks: int
    replicas: int
    host: Host | None = None
    outside: Outside = Outside()

    def simulate(self, router: str, source: Source) -> tuple[Report, list[Record]]:
        calibration = self.outside.priced(self.calibration)
        config, found = fleet_config(calibration, self.num_blocks), list[Record]()
        cost = CalibratedCost(calibration.prices)
        executors = [
            ModelledExecutor(max_slots=config.max_slots, cost=cost) for _ in range(self.replicas)
        ]
        settings = {"replicas": self.replicas, "router": router, "num_blocks": self.num_blocks}
        report = replay(
            Remote(source, self.outside.request_s),
            config,
            *executors,
            router=make_router(router),
            settings=settings,
            on_record=found.append,
            host=self.host,
        )
        return report, found

    def probes(self) -> Probes:
        """What probes of these replicas say."""
        one = msgspec.structs.replace(self, replicas=1)
        runs = (
            (self, probe_requests()),
            (one, full_requests()),
            (self, beside_requests(self.replicas)),
        )
        return Probes.of(*(at.simulate("round-robin", OpenLoop(some))[1] for at, some in runs))

    def explaining(self, found: Probes) -> Fleet:
        """With what probes took and the simulator did not: between tokens of one request and of
        many, of those beside others, and before the first."""
        fleet, replace = self, msgspec.structs.replace
        for _ in range(OUTSIDE_ROUNDS):
            made, ours, host = fleet.outside, fleet.probes(), fleet.host
            one_s, full_s = (found.tpot_s - ours.tpot_s, found.full_tpot_s - ours.full_tpot_s)
            row_s = (full_s - one_s) / (FULL_ROWS - 1)
            made = Outside(
                max(made.request_s + found.ttft_s - ours.ttft_s, 0.0),
                made.step_s + one_s - row_s,
                made.row_s + row_s,
            )
            if host is not None:
                # Of each step its server's work and the client's, by two processors or more.
                more_s = (found.beside_tpot_s - ours.beside_tpot_s - one_s) / 2
                host = replace(host, switch_s=max(host.switch_s + more_s, 0.0))
            fleet = replace(fleet, outside=made, host=host)
        return fleet

    def capacity_per_s(self) -> float:
        """Requests that are served at most in turns."""
        clients = self.replicas * self.calibration.engine["max_slots"]
        source = ClosedLoop(shared_prefixes(1.0, 600, 0), clients)
        report, _ = self.simulate("round-robin", source)
        return report.requests_per_s or 1.0


def fleet_steps(calibration: Calibration, requests: Sequence[TraceRequest]) -> int:
    """Of one replica with room for all of them."""
    return Fleet(calibration, 4096, 1).simulate("round-robin", OpenLoop(requests))[0].steps
