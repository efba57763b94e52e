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
from sim.replay.replay import replay
from sim.replay.routers import ReplicaLoad, Router, make_router
from sim.report.report import Record, Report
from sim.traces.prompts import TracePrompts
from sim.traces.request import TraceRequest
from sim.workload.sources import ClosedLoop, OpenLoop, Remote, Source

BLOCK_TOKENS = 16
GROUPS, GROUP_BLOCKS = 24, 32  # prefixes, and the blocks of each
OWN_TOKENS, OUTPUT_TOKENS = (16, 96), (8, 48)
PROBE_OUTPUT_TOKENS = 24
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
    """Medians of short requests that find their replica idle."""

    ttft_s: float
    tpot_s: float

    @classmethod
    def of(cls, seen: Sequence[TimedCall | Record]) -> Probes:
        tpot_s = [each.tpot_s for each in seen if each.tpot_s is not None]
        return cls(statistics.median(each.ttft_s for each in seen), statistics.median(tpot_s))

    @classmethod
    def middle(cls, several: Sequence[Probes]) -> Probes:
        ttft_s = statistics.median(each.ttft_s for each in several)
        return cls(ttft_s, statistics.median(each.tpot_s for each in several))


def probe_requests() -> list[TraceRequest]:
    return [
        TraceRequest(
            arrival_s=i / PROBES_PER_S,
            prompt_tokens=PROBE_TOKENS,
            output_tokens=PROBE_OUTPUT_TOKENS,
        )
        for i in range(PROBES)
    ]


def probe(ports: Sequence[int]) -> Probes:
    return Probes.of(replay_real(ports, "round-robin", probe_requests()).run.calls)


# -- the simulator


def fleet_config(calibration: Calibration, num_blocks: int) -> SchedulerConfig:
    engine = calibration.engine | {"num_blocks": num_blocks, "draft_context_tokens": None}
    return SchedulerConfig(**engine, prefix_cache=True)


def simulate_fleet(
    calibration: Calibration, num_blocks: int, replicas: int, router: str, source: Source
) -> tuple[Report, list[Record]]:
    """As `cbatch sim --replicas N --router NAME --cost FILE` would."""
    config, found = fleet_config(calibration, num_blocks), list[Record]()
    executors = [
        ModelledExecutor(max_slots=config.max_slots, cost=CalibratedCost(calibration.prices))
        for _ in range(replicas)
    ]
    settings = {"replicas": replicas, "router": router, "num_blocks": num_blocks}
    report = replay(
        source,
        config,
        *executors,
        router=make_router(router),
        settings=settings,
        on_record=found.append,
    )
    return report, found


class Outside(msgspec.Struct, frozen=True):
    """What the prices of an engine of this process do not hold: seconds that a request spends on
    its way, and that a step takes more in a server."""

    request_s: float = 0.0
    step_s: float = 0.0

    def priced(self, calibration: Calibration) -> Calibration:
        replace, prices = msgspec.structs.replace, calibration.prices
        host_s = prices.host_s | {"step": prices.host_s["step"] + self.step_s}
        return replace(calibration, prices=replace(prices, host_s=host_s))


def outside(calibration: Calibration, num_blocks: int, replicas: int, found: Probes) -> Outside:
    """Of the probes' times what the simulator does not explain: first between tokens, then, with
    that, before the first."""
    made = Outside()
    for _ in range(2):
        source = OpenLoop(probe_requests())
        priced = made.priced(calibration)
        _, records = simulate_fleet(priced, num_blocks, replicas, "round-robin", source)
        ours = Probes.of(records)
        step_s = made.step_s or max(found.tpot_s - ours.tpot_s, 0.0)
        made = Outside(max(found.ttft_s - ours.ttft_s, 0.0), step_s)
    return made


def foretell_fleet(
    calibration: Calibration,
    num_blocks: int,
    replicas: int,
    router: str,
    requests: Sequence[TraceRequest],
    more: Outside,
) -> tuple[Report, list[Record]]:
    source = Remote(OpenLoop(requests), more.request_s)
    return simulate_fleet(more.priced(calibration), num_blocks, replicas, router, source)


def fleet_capacity_per_s(calibration: Calibration, num_blocks: int, replicas: int) -> float:
    """Requests that the fleet serves at most in turns, as the simulator says."""
    clients = replicas * calibration.engine["max_slots"]
    source = ClosedLoop(shared_prefixes(1.0, 600, 0), clients)
    report, _ = simulate_fleet(calibration, num_blocks, replicas, "round-robin", source)
    return report.requests_per_s or 1.0
