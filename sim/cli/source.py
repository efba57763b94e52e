"""The requests of a `Scenario`: its trace, changed as the options say, at the chosen load."""

from __future__ import annotations

from collections.abc import Iterable
from itertools import islice

from sim.cli.scenario import Scenario
from sim.workload.options import OpenedTrace
from sim.workload.sources import ClosedLoop, OpenLoop, Remote, Source
from sim.workload.traces.changes import endless, sample, scale
from sim.workload.traces.request import TraceRequest


def requests_of(scenario: Scenario, trace: OpenedTrace) -> Iterable[TraceRequest]:
    """Return the requests of the trace, or a sample of `scenario.requests` of them."""
    if scenario.requests is None:
        return trace.requests()
    return sample(trace.requests(), max_requests=scenario.requests)


def source_of(scenario: Scenario, trace: OpenedTrace, rounds: int = 1) -> Source:
    """Return the requests of the trace, `rounds` times in a row."""
    requests = requests_of(scenario, trace)
    if scenario.rate_scale is not None:
        requests = scale(requests, rate=scenario.rate_scale)
    if rounds > 1:
        whole = list(requests)
        requests = islice(endless(whole), rounds * len(whole))
    source: Source = OpenLoop(requests)
    if scenario.concurrency is not None:
        source = ClosedLoop(requests, scenario.concurrency, think_s=scenario.think or 0.0)
    return source if scenario.latency is None else Remote(source, scenario.latency)
