"""A replay on a machine whose processors are shared: see `sim.replay.host`."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from functools import partial

from sim.replay.host import Host, Processors, SerialWorker
from sim.replay.intake import Arrival, Intake
from sim.replay.replica import EndedStep, Progress, ReplayedEngine, ReplayLoop
from sim.replay.routers import Router
from sim.workload.sources import Source


class HostedLoop(ReplayLoop):
    """A replay loop. Events at the same time have this order: work ends, requests arrive, idle
    replicas begin a step. Routers and records see the end of a request when its last token has
    reached the client."""

    def __init__(
        self,
        source: Source,
        intake: Intake,
        replicas: Sequence[ReplayedEngine],
        router: Router,
        on_progress: Callable[[Progress], None] | None,
        host: Host,
    ) -> None:
        super().__init__(source, intake, replicas, router, on_progress)
        self._host = host
        self._processors = Processors(host)
        self._servers = [SerialWorker(self._processors) for _ in replicas]
        self._client = SerialWorker(self._processors)
        self._free: set[int] = set()  # replicas that may begin a step

    def run(self) -> None:
        now_s = 0.0
        while (next_s := min(self._processors.next_s(), self._arrival_s())) < math.inf:
            now_s = max(now_s, next_s)
            for ended in self._processors.take_ended(now_s):
                ended(now_s)
            while self._arrival_s() <= now_s:
                self._client.do(
                    self._host.client.request_s, partial(self._send, self._intake.take()), now_s
                )
            self._begin(now_s)
            self._report(now_s)
        self._finish(now_s)

    def _arrival_s(self) -> float:
        arrival_s = self._source.next_arrival_s()
        return math.inf if arrival_s is None else arrival_s

    def _send(self, arrival: Arrival, now_s: float) -> None:
        i = self._router.route(arrival.request.prompt_array(), self._load)
        self._load.add(i, arrival.traced.prompt_tokens)
        self._servers[i].do(
            self._host.server.request_s, partial(self._hand_over, i, arrival), now_s
        )

    def _hand_over(self, i: int, arrival: Arrival, now_s: float) -> None:
        """Put an arrival into its replica's inbox, which the engine reads once no step runs."""
        self._replicas[i].inbox.append(arrival)
        self._free.add(i)

    def _begin(self, now_s: float) -> None:
        free, self._free = sorted(self._free), set()
        for i in free:
            replica = self._replicas[i]
            if not replica.is_idle:
                continue
            self._deliver(i, now_s)
            end_s = replica.begin(now_s)
            if end_s is not None:
                self._processors.start(end_s - now_s, partial(self._step_ended, i), now_s)

    def _step_ended(self, i: int, now_s: float) -> None:
        step = self._replicas[i].end(now_s)
        self._free.add(i)
        work_s = self._host.server.of_step(len(step.commit.tokens))
        self._servers[i].do(work_s, partial(self._give, i, step), now_s)

    def _give(self, i: int, step: EndedStep, now_s: float) -> None:
        work_s = self._host.client.of_step(len(step.commit.tokens))
        self._client.do(work_s, partial(self._reached_client, i, step), now_s)
