"""Figures recounted from random calls, and read by the simulator's own reader."""

from __future__ import annotations

import json
from typing import Any

import msgspec
import numpy as np
import pytest

from bench.load.cli.report import series_of
from bench.load.client.http import CallError, Failure, TimedCall
from bench.load.run.drive import Part
from bench.load.run.measure import LoadRun, measure
from bench.load.run.report import (
    COUNTERS,
    ServerCounters,
    ServerSample,
    Sweep,
    read_reports,
)
from sim.report.report import Objectives, Report, to_json


def make_calls(seed: int, count: int = 60, *, failing: float = 0.2) -> list[TimedCall]:
    rng = np.random.default_rng(seed)
    calls = []
    for index in range(count):
        call = TimedCall(index, float(rng.random() * 5), int(rng.integers(1, 50)), 20)
        call.sent_s = call.scheduled_s + float(rng.random() * 0.01)
        tokens = rng.integers(1, 5, int(rng.integers(1, 8)))
        stamps_s = call.sent_s + np.cumsum(rng.random(len(tokens)))
        call.chunk_s.extend(stamps_s.tolist())
        call.chunk_tokens.extend(tokens.tolist())
        call.counted_by, call.chunks = "per chunk usage", len(tokens)
        call.output_tokens, call.end_s = int(tokens.sum()), float(stamps_s[-1])
        if rng.random() < failing:
            call.error = CallError(Failure.STATUS, "busy", 503 if rng.random() < 0.5 else 400)
        calls.append(call)
    return calls


def run_of(calls: list[TimedCall], **more: Any) -> LoadRun:
    return LoadRun([Part(calls, 0, False, 0.5, 10.0)], **more)


def test_the_prompt_rate_counts_tokens_that_were_computed() -> None:
    calls = make_calls(1)
    good = [call for call in calls if call.error is None]
    prompts = sum(call.prompt_tokens for call in good)

    def computed(**more: Any) -> float:
        report = measure([run_of(calls, **more)], settings={})
        assert report.prompt_tokens_per_s is not None and report.prompt_tokens == prompts
        return report.prompt_tokens_per_s * report.duration_s

    assert computed() == pytest.approx(prompts)
    counts = dict.fromkeys(COUNTERS.values(), None) | {"prefix_hit_tokens": 7}
    server = ServerCounters.of(counts, ())
    assert computed(server=server) == pytest.approx(prompts - 7), "by the server's metrics"
    for call in calls:
        call.cached_tokens = call.prompt_tokens // 2
    by_usage = sum(-(-call.prompt_tokens // 2) for call in good)
    assert computed(server=server) == pytest.approx(by_usage), "by the usage of calls"


def test_figures_are_those_of_their_definitions() -> None:
    """They are recounted naively, from random calls."""
    calls = make_calls(0)
    report = measure([run_of(calls)], settings={}, objectives=Objectives(ttft_s=0.6, tpot_s=0.2))
    good = [call for call in calls if call.error is None]
    end_s = max(call.chunk_s[-1] for call in good)
    duration_s = end_s - min(call.scheduled_s for call in calls)
    tokens = sum(sum(call.chunk_tokens) for call in good)
    ttft, tpot, itl, gaps = [], [], [], []
    met = 0
    for call in good:
        count = sum(call.chunk_tokens)
        ttft.append(call.chunk_s[0] - call.scheduled_s)
        mean_gap_s = None
        if count > 1:
            mean_gap_s = (call.chunk_s[-1] - call.chunk_s[0]) / (count - 1)
            tpot.append(mean_gap_s)
        for at in range(1, len(call.chunk_s)):
            gap_s, came = call.chunk_s[at] - call.chunk_s[at - 1], call.chunk_tokens[at]
            gaps.append(gap_s)
            itl += [gap_s / came] * came
        met += ttft[-1] <= 0.6 and (mean_gap_s is None or mean_gap_s <= 0.2)
    assert report.requests == len(good) and report.sent == len(calls)
    assert report.duration_s == pytest.approx(duration_s)
    assert report.output_tokens_per_s == pytest.approx(tokens / duration_s)
    for name, values in (("ttft_s", ttft), ("tpot_s", tpot), ("itl_s", itl), ("chunk_gap_s", gaps)):
        spread = getattr(report, name)
        assert spread.count == len(values), name
        actual = [spread.mean, spread.p50, spread.p90, spread.p99]
        expected = [np.mean(values), *np.percentile(values, (50, 90, 99))]
        assert actual == pytest.approx(expected), name
    assert report.goodput is not None
    assert (report.goodput.requests, report.goodput.share) == (met, met / len(calls))


def test_the_simulator_reads_it() -> None:
    calls = make_calls(9)
    report = measure(
        [run_of(calls)], settings={"a": 1}, objectives=Objectives(ttft_s=0.6, tpot_s=0.2)
    )
    document = to_json(report)
    read = msgspec.json.decode(document, type=Report)
    assert type(read) is Report and read.kind == "measured"
    for name in Report.__struct_fields__:
        assert getattr(read, name) == getattr(report, name), name
    assert read_reports(document) == ([report], [""])
    sweep = Sweep(over="concurrency", loads=(1, 2), reports=(report, report), knee=None)
    reports, names = read_reports(to_json(sweep))
    assert reports == [report, report] and names == ["concurrency 1", "concurrency 2"]
    for wrong in (b'{"schema": "x", "version": 1}', b"[]", document.replace(b": 1,", b": 2,")):
        with pytest.raises(ValueError):
            read_reports(wrong)


def test_repeats_are_pooled_and_have_an_interval() -> None:
    runs = [run_of(make_calls(seed, failing=0)) for seed in range(5)]
    report = measure(runs, settings={})
    reports = [measure([run], settings={}) for run in runs]
    rates = np.array([one.output_tokens_per_s for one in reports])
    interval = report.confidence["output_tokens_per_s"]
    half = 2.776 * rates.std(ddof=1) / 5**0.5
    assert (interval.mean, interval.low, interval.high) == pytest.approx(
        (rates.mean(), rates.mean() - half, rates.mean() + half)
    )
    assert report.duration_s == pytest.approx(sum(one.duration_s for one in reports))
    assert report.ttft_s.count == sum(one.ttft_s.count for one in reports)


def steady_calls(
    rate_per_s: float, served_per_s: float, *, span_s: float = 20.0
) -> list[TimedCall]:
    """Return calls of a queue with one server, deterministic."""
    calls, free_s = [], 0.0
    for index in range(int(rate_per_s * span_s)):
        call = TimedCall(index, index / rate_per_s, 5, 10)
        free_s = max(free_s, call.scheduled_s) + 1 / served_per_s
        call.chunk_s.extend([free_s - 0.5 / served_per_s, free_s])
        call.chunk_tokens.extend([1, 9])
        call.counted_by, call.chunks, call.output_tokens = "per chunk usage", 2, 10
        call.end_s = free_s
        calls.append(call)
    return calls


def test_a_steady_load_and_one_that_piles_up() -> None:
    fine = measure([run_of(steady_calls(20, 40), open_loop=True)], settings={})
    assert fine.steady is not None and fine.saturated is False
    assert fine.steady.output_tokens_per_s == pytest.approx(200, rel=0.01)
    over = measure([run_of(steady_calls(20, 15), open_loop=True)], settings={})
    assert over.saturated is True and any("queue up" in warning for warning in over.warnings)
    assert over.steady is not None
    assert over.steady.output_tokens_per_s == pytest.approx(150, rel=0.02)


def test_the_drain_of_a_closed_loop_is_not_steady() -> None:
    """There are eight clients, one with a last answer that takes as long as all others together."""
    calls = []
    for index in range(80):
        start_s = float(index // 8)
        call = TimedCall(index, start_s, 5, 10)
        call.end_s = start_s + (10.0 if index == 79 else 1.0)
        call.chunk_s.extend(np.linspace(start_s, call.end_s, 10).tolist())
        call.chunk_tokens.extend([1] * 10)
        call.counted_by, call.output_tokens = "per chunk usage", 10
        calls.append(call)
    report = measure([run_of(calls)], settings={})
    assert report.output_tokens_per_s == pytest.approx(800 / 19)
    assert report.steady is not None
    assert report.steady.output_tokens_per_s == pytest.approx(80, rel=0.02)


def test_a_busy_client_and_counts_that_disagree_are_reported() -> None:
    calls = make_calls(2, failing=0)
    quiet = measure([run_of(calls)], settings={})
    assert not quiet.warnings
    busy = LoadRun([Part(calls, 0, False, 9.0, 10.0)])
    assert "90% of a core" in measure([busy], settings={}).warnings[0]
    assert json.loads(to_json(quiet))["client"]["cpu_share"] == 0.05


# ---- curves over time ----


def read_call(sent_s: float, reads: list[tuple[float, int]]) -> TimedCall:
    made = TimedCall(0, sent_s, 4, 8)
    made.output_tokens, made.counted_by = sum(n for _, n in reads), "per chunk usage"
    for at_s, tokens in reads:
        made.chunk_s.append(at_s)
        made.chunk_tokens.append(tokens)
    made.end_s = reads[-1][0]
    return made


def test_tokens_and_calls_under_way_add_up() -> None:
    """A pause of the server from 2 s to 6 s is visible."""
    calls = [read_call(0.0, [(1.0, 3), (2.0, 2), (6.0, 1)]), read_call(1.0, [(1.5, 1), (8.0, 4)])]
    whole = TimedCall(2, 3.0, 4, 8)  # it was not streamed
    whole.end_s, whole.output_tokens = 7.0, 5
    failed = TimedCall(3, 2.0, 4, 8)
    failed.end_s, failed.error = 4.0, CallError(Failure.CUT, "")
    series = series_of([*calls, whole, failed])
    assert series is not None and series.first_s == 0.0
    assert series.length_s == pytest.approx(8 / 240)
    tokens, running = (
        np.array(values, dtype=float) for values in (series.output_tokens_per_s, series.running)
    )
    assert tokens.sum() * series.length_s == pytest.approx(3 + 2 + 1 + 1 + 4 + 5, rel=1e-3)
    assert not tokens[61:179].any() and tokens[60] > 0 and tokens[-1] > 0
    assert running.sum() * series.length_s == pytest.approx(6 + 7 + 4 + 2, rel=1e-3)
    assert running[100] == pytest.approx(4) and running[-1] == pytest.approx(1)


def test_nothing_that_came_is_nothing_drawn() -> None:
    failed = TimedCall(0, 0.0, 4, 8)
    failed.error = CallError(Failure.EMPTY, "")
    assert series_of([failed]) is None and series_of([]) is None


def look(at_s: float, waiting: float, drafted: int, accepted: int | None) -> ServerSample:
    values = {"running": 1.0, "kv_share": 0.5, "output_tokens": None, "steps": None}
    values |= {"waiting": waiting, "prompt_tokens": round(10 * at_s)}
    values |= {"prefix_hit_tokens": round(4 * at_s)}
    return ServerSample(at_s=at_s, drafted_tokens=drafted, accepted_tokens=accepted, **values)


def test_values_of_the_server_are_drawn_too() -> None:
    calls = [read_call(0.0, [(1.0, 3), (8.0, 1)])]
    looks = [look(0.0, 0, 0, 0), look(2.0, 8, 0, 0), look(6.0, 0, 40, 10), look(8.0, 0, 60, 30)]
    series = series_of(calls, looks)
    assert series is not None
    waiting = np.array(series.waiting, dtype=float)
    assert waiting.max() == pytest.approx(8, rel=0.02) == waiting[60]
    assert waiting.sum() * series.length_s == pytest.approx(8 + 16, rel=1e-3)  # two triangles
    prompts = np.array(series.prompt_tokens_per_s, dtype=float)
    assert prompts == pytest.approx(np.full(240, 6.0), rel=1e-3)
    assert set(series.acceptance[:59]) == {None}, "nothing was drafted"
    assert series.acceptance[61:179] == pytest.approx([0.25] * 118, rel=1e-3)
    assert series.acceptance[181:] == pytest.approx([1.0] * 59, rel=1e-3)
    assert set(series.kv_share) == {0.5}
    half = series_of(calls, [look(0.0, 0, 0, None), look(8.0, 0, 60, None)])
    assert half is not None and set(half.acceptance) == {None} != set(half.waiting)
    assert set(series_of(calls).waiting) == {None}  # type: ignore[union-attr]
