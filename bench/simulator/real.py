"""Runs of the demo pair in real time: an engine of this process, or `cbatch serve` replicas."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import time
from collections.abc import Iterator, Sequence

from bench.load.client.answer import AnswerReader
from bench.load.client.bodies import Bodies, BodySettings, Item
from bench.load.client.call import CallError, LiveTally, TimedCall
from bench.load.client.http import Endpoint, HttpClient
from bench.load.run.scrape import difference, scrape
from bench.server.started import started
from bench.simulator.simulated import Probes, ReplayedRun
from bench.simulator.workloads import Prompt, probe_runs, prompts_of
from cbatch import EngineOptions, SamplingParams, load_engine
from cbatch.demo import demo_paths
from cbatch.engine.engine import Engine
from cbatch.engine.info import EngineInfo
from cbatch.text.outputs import Output
from sim.replay.routers import ReplicaLoad, Router, make_router
from sim.report.report import Record
from sim.workload.traces.request import TraceRequest

ACCEPTANCE_TOKENS, ACCEPTANCE_K = 72, 8  # output tokens per prompt, and drafts per step
_HEADSTART_S = 0.1  # time from the scrape of counters to the start of a run
_MAX_QUEUED = 100_000  # so that requests wait at a load beyond capacity, as in the simulator


# -- an engine of this process


def load_policy(policy: str, max_num_seqs: int) -> tuple[Engine, EngineInfo]:
    options = EngineOptions(
        lookahead=policy,
        max_num_seqs=max_num_seqs,
        enable_prefix_caching=False,
        tokenizer="none",
        seed=0,
    )
    return load_engine(*demo_paths(), options)


def _greedy(tokens: int) -> SamplingParams:
    return SamplingParams(temperature=0.0, max_tokens=tokens, seed=0, ignore_eos=True)


def acceptances_of(outputs: Sequence[Output]) -> list[int]:
    """Return, for each output token of one request, 1 if a draft of the token is accepted, else 0.
    The first token, and the bonus token of a step that accepts all drafts, have no draft and count
    as accepted."""
    acceptances: list[int] = []
    for output in outputs:
        accepted = min(output.num_accepted, len(output.token_ids))
        counts = not acceptances or 0 < output.num_drafted == output.num_accepted
        acceptances += [1] * accepted + [int(counts)] * (len(output.token_ids) - accepted)
    return acceptances


def record_acceptances(engine: Engine, texts: Sequence[list[int]]) -> list[list[int]]:
    """Return `acceptances_of` every prompt's output, generated greedily with `ACCEPTANCE_K` drafts
    per step."""
    outputs_of: dict[str, list[Output]] = {
        engine.add(text, _greedy(ACCEPTANCE_TOKENS)).request_id: [] for text in texts
    }
    while engine.has_work:
        for output in engine.step():
            outputs_of[output.request_id].append(output)
    return [acceptances_of(outputs) for outputs in outputs_of.values()]


def serve_in_process(
    engine: Engine, requests: Sequence[TraceRequest], texts: Sequence[list[int]]
) -> ReplayedRun:
    """Serve the requests at their arrival times from now on, with `texts` as prompts in turn."""
    times_s: dict[int, list[float]] = {}  # by request: times of its first and its last token
    gc.collect()
    started_s, next_index = time.perf_counter(), 0
    while next_index < len(requests) or engine.has_work:
        now_s = time.perf_counter() - started_s
        while next_index < len(requests) and requests[next_index].arrival_s <= now_s:
            params = _greedy(requests[next_index].output_tokens)
            engine.add(texts[next_index % len(texts)], params, request_id=str(next_index))
            next_index += 1
        if not engine.has_work:
            time.sleep(max(requests[next_index].arrival_s - (time.perf_counter() - started_s), 0.0))
            continue
        outputs = engine.step()
        now_s = time.perf_counter() - started_s
        for output in outputs:
            times_s.setdefault(int(output.request_id), [now_s, now_s])[1] = now_s
    records = []
    for index, request in enumerate(requests):
        first_s, last_s = (at_s - request.arrival_s for at_s in times_s[index])
        tokens = request.output_tokens
        tpot_s = (last_s - first_s) / (tokens - 1) if tokens > 1 else None
        records.append(_record(index, request, first_s, tpot_s, last_s))
    return ReplayedRun(records)


def _record(
    index: int,
    request: TraceRequest,
    ttft_s: float,
    tpot_s: float | None,
    e2e_s: float,
    replica: int | None = None,
) -> Record:
    return Record(
        index=index,
        arrival_s=request.arrival_s,
        prompt_tokens=request.prompt_tokens,
        output_tokens=request.output_tokens,
        queue_s=0.0,
        ttft_s=ttft_s,
        tpot_s=tpot_s,
        e2e_s=e2e_s,
        prefix_hit_tokens=0,
        preemptions=0,
        replica=replica,
    )


# -- replicas


@contextlib.contextmanager
def replicas_of(
    policy: str, count: int, max_num_seqs: int, num_blocks: int | None
) -> Iterator[list[int]]:
    """Start `cbatch serve` of the demo pair `count` times, one thread each; yields the ports.
    Without `num_blocks` there is no prefix cache."""
    model, draft = demo_paths()
    words = [str(model), "--draft", str(draft), "--lookahead", policy]
    words += ["--max-num-seqs", str(max_num_seqs), "--max-queued-requests", str(_MAX_QUEUED)]
    words += (
        ["--no-enable-prefix-caching"] if num_blocks is None else ["--num-blocks", str(num_blocks)]
    )
    with contextlib.ExitStack() as stack:
        servers = [started(words, {"OMP_NUM_THREADS": "1"}) for _ in range(count)]
        yield [stack.enter_context(server) for server in servers]


class FleetClient:
    """Sends each request at its time to the replica that `router` names."""

    def __init__(self, ports: Sequence[int], router: Router) -> None:
        self._start_s = time.monotonic()
        endpoints = [Endpoint("127.0.0.1", port, False, "") for port in ports]
        self._clients = [HttpClient(endpoint, clock=self._now_s) for endpoint in endpoints]
        self._router, self._load = router, ReplicaLoad(len(ports))
        self._records: list[Record] = []
        self.cpu_s = 0.0  # processor seconds of this process during the run

    async def replay(
        self, requests: Sequence[TraceRequest], prompts: Sequence[Prompt]
    ) -> ReplayedRun:
        """Send the requests and return the run. Raises RuntimeError if a call fails."""
        bodies = Bodies(
            BodySettings(
                model=demo_paths()[0].name,
                chat=False,
                streamed=True,
                fields={"temperature": 0},
                ignore_eos=True,
                items=tuple(Item(prompt=ids) for _, ids in prompts),
            )
        )
        before = [await scrape(client) for client in self._clients]
        self._start_s, cpu_s = time.monotonic() + _HEADSTART_S, time.process_time()
        calls = []
        try:
            for index, request in enumerate(requests):
                await asyncio.sleep(max(request.arrival_s - self._now_s(), 0.0))
                replica = self._router.route(prompts[index][0], self._load)
                self._load.add(replica, request.prompt_tokens)
                calls.append(asyncio.create_task(self._call(bodies, index, request, replica)))
            await asyncio.gather(*calls)
            self.cpu_s = time.process_time() - cpu_s
            after = [await scrape(client) for client in self._clients]
        except CallError as error:
            raise RuntimeError(f"a call failed: {error}") from error
        finally:
            for client in self._clients:
                client.close()
        counted = [difference(*scrapes) for scrapes in zip(before, after, strict=True)]
        hits = sum(counts.prefix_hit_tokens or 0 for counts in counted if counts is not None)
        return ReplayedRun(sorted(self._records, key=lambda record: record.index), hits)

    async def _call(self, bodies: Bodies, index: int, request: TraceRequest, replica: int) -> None:
        prepared = bodies.prepare(index, request)
        call: TimedCall = prepared.call
        call.sent_s = self._now_s()
        reader = AnswerReader(call, LiveTally(), streamed=True)
        await self._clients[replica].call("POST", bodies.path, prepared.body, reader)
        self._load.remove(replica, request.prompt_tokens)
        times_s = call.ttft_s, call.tpot_s, call.e2e_s
        self._records.append(_record(index, request, *times_s, replica))

    def _now_s(self) -> float:
        return time.monotonic() - self._start_s


def serve_replicas(
    ports: Sequence[int],
    requests: Sequence[TraceRequest],
    router: str = "round-robin",
    texts: Sequence[list[int]] = (),
) -> tuple[ReplayedRun, float]:
    """Send the requests. Return the run, and the processor seconds of this process."""

    async def replay() -> tuple[ReplayedRun, float]:
        client = FleetClient(ports, make_router(router))
        return await client.replay(requests, prompts_of(requests, texts)), client.cpu_s

    return asyncio.run(replay())


def probe(ports: Sequence[int], shared: bool) -> Probes:
    runs = probe_runs(len(ports), shared)
    return Probes.of(*(serve_replicas(ports[:count], some)[0].records for count, some in runs))
