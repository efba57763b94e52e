"""Replicas that share a machine's processors with their servers and client."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

import msgspec
import pytest

from cbatch.core.request.errors import FieldError
from sim.cost.base import constant_cost
from sim.replay.host import Host, Processors, SerialWorker, Work, read_host
from sim.replay.replay import replay
from sim.replay.routers import ROUTERS, make_router
from sim.report.report import Record, Report
from sim.workload.sources import ClosedLoop, OpenLoop, Source
from sim.workload.traces.request import TraceRequest
from tests.sim.replays import config_for, executor_for, speculating
from tests.sim.test_fleet import too_long, workload

STEP_S = 0.01


def served(
    source: Source, host: Host | None, replicas: int = 2, router: str = "round-robin", **more: Any
) -> tuple[Report, list[Record]]:
    config, records = config_for(**more.pop("config", {})), list[Record]()
    cost = more.pop("cost", None)
    executors = [executor_for(config, cost) for _ in range(replicas)]
    routed = make_router(router) if replicas > 1 else None
    report = replay(source, config, *executors, router=routed, on_record=records.append, host=host)
    return report, sorted(records, key=lambda record: record.index)


def times(records: list[Record]) -> list[tuple[float, ...]]:
    return [(r.ttft_s, r.tpot_s or 0.0, r.e2e_s, r.queue_s) for r in records]


@pytest.mark.parametrize("router", ROUTERS)
@pytest.mark.parametrize("config", [{}, {"num_blocks": 22}, speculating(3)])
def test_without_waiting_for_processors_it_equals_the_replay_without_a_host(
    router: str, config: dict[str, Any]
) -> None:
    """Servers and client take no time; there are refusals, and preemptions."""
    plain, expected = served(
        OpenLoop(too_long(workload(80, 150.0))), None, 2, router, config=config
    )
    report, records = served(
        OpenLoop(too_long(workload(80, 150.0))), Host(cores=2), 2, router, config=config
    )
    assert (report.steps, report.preemptions) == (plain.steps, plain.preemptions)
    assert len(report.refused) == len(plain.refused)
    assert [r.replica for r in records] == [r.replica for r in expected]
    for mine, own in zip(times(records), times(expected), strict=True):
        assert mine == pytest.approx(own, rel=1e-9, abs=1e-9)
    assert report.mean_running == pytest.approx(plain.mean_running)
    if config == {"num_blocks": 22}:
        assert report.preemptions > 0 and report.refused
    other = served(
        OpenLoop(too_long(workload(80, 150.0))), Host(cores=1), 2, router, config=config
    )[0]
    assert other.ttft_s.mean > 1.2 * plain.ttft_s.mean


def test_processors_are_shared_equally() -> None:
    """The work is 2 s from 0 s on, 1 s from 1 s on and 1 s from 1.5 s on. It runs on three
    processors, on one, and on two that share a core. Each of the two is at two thirds of its pace
    while both are busy."""
    third_s = (1 - 0.5 * 2 / 3) / (4 / 9)  # three on two: the remaining work of a and b at 1.5 s
    last_s = 1.5 + third_s + (1 - third_s * 4 / 9)
    for cores, crowded, expected in (
        (3, 1.0, {"a": 2.0, "b": 2.0, "c": 2.5}),
        (1, 1.0, {"a": 3.75, "b": 3.75, "c": 4.0}),
        (2, 1.5, {"a": 1.5 + third_s, "b": 1.5 + third_s, "c": last_s}),
    ):
        processors = Processors(Host(cores=cores, crowded=crowded))
        ended: dict[str, float] = {}
        starts = [(0.0, "a", 2.0), (1.0, "b", 1.0), (1.5, "c", 1.0)]
        while starts or processors.next_s() < 1e9:
            now_s = min(processors.next_s(), starts[0][0] if starts else 1e9)
            for callback in processors.take_ended(now_s):
                callback(now_s)
            if starts and starts[0][0] == now_s:
                _, name, work_s = starts.pop(0)
                processors.start(work_s, partial(_note, ended, name), now_s)
        assert ended == pytest.approx(expected)


def _note(ended: dict[str, float], name: str, now_s: float) -> None:
    ended[name] = now_s


def test_a_clerk_does_one_thing_after_another() -> None:
    processors, done = Processors(Host(cores=4)), list[tuple[str, float]]()
    clerk = SerialWorker(processors)
    for name, work_s in (("a", 1.0), ("b", 0.0), ("c", 2.0)):
        clerk.do(work_s, lambda at_s, n=name: done.append((n, at_s)), 0.0)
    while (now_s := processors.next_s()) < 1e9:
        for ended in processors.take_ended(now_s):
            ended(now_s)
    assert done == [("a", 1.0), ("b", 1.0), ("c", 3.0)]


def test_what_servers_and_client_compute_is_waited_for() -> None:
    """A request alone waits before its step for the client's and the server's part of it. The
    parts of its tokens run after each step, during the next one."""
    host = Host(4, server=Work(0.001, 0.002, 0.0005), client=Work(0.003, 0.001, 0.0002))
    one = [TraceRequest(arrival_s=1.0, prompt_tokens=8, output_tokens=5)]
    _, (record,) = served(OpenLoop(one), host, 1, cost=constant_cost(step_s=STEP_S))
    behind_s = 0.0025 + 0.0012
    assert record.ttft_s == pytest.approx(0.004 + STEP_S + behind_s)
    assert record.tpot_s == pytest.approx(STEP_S)
    assert record.e2e_s == pytest.approx(0.004 + 5 * STEP_S + behind_s)


def test_work_without_a_free_processor_interrupts_an_engine_at_a_cost() -> None:
    """The work runs during an engine's step on one processor; if another is free it costs
    nothing."""
    for cores, taken_s in ((1, 0.005), (2, 0.0)):
        processors, done = Processors(Host(cores=cores, switch_s=0.005)), dict[str, float]()
        processors.start(0.1, partial(_note, done, "step"), 0.0)
        SerialWorker(processors).do(0.01, partial(_note, done, "server"), 0.0)
        while (now_s := processors.next_s()) < 1e9:
            for ended in processors.take_ended(now_s):
                ended(now_s)
        both = 0.1 + 0.01 + taken_s
        expected = {"server": 2 * (0.01 + taken_s), "step": both}
        assert done == pytest.approx(expected if cores == 1 else {"server": 0.01, "step": 0.1})


def test_two_replicas_on_one_processor_are_no_faster_than_one() -> None:
    requests = [TraceRequest(arrival_s=0.0, prompt_tokens=8, output_tokens=40) for _ in range(64)]
    cost = constant_cost(step_s=STEP_S)

    def seconds(replicas: int, host: Host) -> float:
        return served(ClosedLoop(requests, 32), host, replicas, cost=cost)[0].duration_s

    one = seconds(1, Host(cores=1))
    assert seconds(2, Host(cores=2)) == pytest.approx(one / 2, rel=0.05)
    assert seconds(2, Host(cores=2, crowded=1.6)) == pytest.approx(one * 0.8, rel=0.05)
    assert seconds(2, Host(cores=1)) == pytest.approx(one, rel=0.05)
    slow_client = Host(cores=4, client=Work(token_s=STEP_S / 16))
    assert seconds(2, slow_client) == pytest.approx(one, rel=0.1), "it is one for both"


@pytest.mark.parametrize(
    "text, problem",
    [
        ("{", "--host: .* does not describe a host"),
        ('{"crowded": 1.2}', "--host: .* does not describe a host .*cores"),
        ('{"cores": 0}', "--host: .* does not describe a host .*cores: 0 is not allowed; give 1"),
        ('{"cores": 2, "crowded": 0.9}', "host.crowded: 0.9 is not allowed; give 1"),
        ('{"cores": 2, "switch_s": -1}', "host.switch_s: -1.0 is not allowed"),
        ('{"cores": 2, "server": {"token_s": -1}}', "host.token_s: -1.0 is not allowed"),
        ('{"cores": 2, "threads": 1}', "--host: .* does not describe a host .*threads"),
    ],
)
def test_a_file_that_says_no_host_is_refused(text: str, problem: str, tmp_path: Path) -> None:
    path = tmp_path / "host.json"
    path.write_text(text)
    with pytest.raises(FieldError, match=problem):
        read_host(path)


def test_the_command_reads_one(tmp_path: Path) -> None:
    from sim.cli.scenario import Scenario
    from sim.cli.simulation import build
    from sim.workload.traces.reader import write_requests

    host = Host(cores=1, server=Work(token_s=1e-4))
    (tmp_path / "host.json").write_bytes(msgspec.json.encode(host))
    write_requests(tmp_path / "trace.jsonl", workload())
    given = {"step_seconds": 0.01, "num_blocks": 400, "max_model_len": 2000, "replicas": 2}
    plain = Scenario(trace=str(tmp_path / "trace.jsonl"), **given)  # type: ignore[arg-type]
    hosted = msgspec.structs.replace(plain, host=str(tmp_path / "host.json"))
    one, other = build(plain).run(), build(hosted).run()
    assert other.settings["host"]["cores"] == 1
    assert other.tpot_s.mean > 1.2 * one.tpot_s.mean
