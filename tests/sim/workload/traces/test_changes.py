"""Statistics against brute force and changes to traces."""

from __future__ import annotations

import itertools
import math
from pathlib import Path

import numpy as np
import pytest

from cbatch.core.request.errors import FieldError
from sim.workload.traces.changes import sample, scale, spread
from sim.workload.traces.reader import Trace
from sim.workload.traces.request import TraceRequest
from sim.workload.traces.statistics import summarise
from tests.chi_square import chi_square_z

SHARED = Path(__file__).parents[3].parent / "shared" / "data"


def request(arrival_s: float, prompt: int = 5, output: int = 2, **more) -> TraceRequest:
    return TraceRequest(arrival_s=arrival_s, prompt_tokens=prompt, output_tokens=output, **more)


def named(arrival_s: float, prompt: int, *names: int) -> TraceRequest:
    return request(arrival_s, prompt, hash_ids=names, hash_block_tokens=4)


def test_statistics_are_those_of_numpy() -> None:
    rng = np.random.default_rng(3)
    times_s = np.cumsum(rng.gamma(0.5, 2.0, 800))
    times_s[100:103] = times_s[100]
    times_s -= times_s[0]
    prompts, outputs = rng.integers(1, 90, 800), rng.integers(1, 2000, 800)
    columns = times_s.tolist(), prompts.tolist(), outputs.tolist()
    statistics = summarise(itertools.starmap(request, zip(*columns, strict=True))).statistics
    gaps = np.diff(times_s)
    assert statistics.requests == 800 and statistics.span_s == times_s[-1]
    assert statistics.rate_per_s == pytest.approx(1 / gaps.mean())
    assert statistics.gap_cv == pytest.approx(gaps.std() / gaps.mean())
    assert statistics.same_stamp_share == 2 / 800
    for lengths, values in (
        (statistics.prompt_tokens, prompts),
        (statistics.output_tokens, outputs),
    ):
        cuts = np.percentile(values, (50, 90, 99)).tolist()
        assert [lengths.p50, lengths.p90, lengths.p99] == pytest.approx(cuts)
        assert (lengths.mean, lengths.max) == (pytest.approx(values.mean()), values.max())
    minutes = np.bincount((times_s // 60).astype(int))
    assert statistics.peak_minute_ratio == pytest.approx(minutes.max() / minutes.mean())
    assert statistics.empty_minutes == (minutes == 0).sum()
    assert statistics.sessions is None and statistics.shared_prefix_share is None


def test_shared_prefixes_are_counted_along_the_whole_prefix() -> None:
    trace = [
        named(0, 10, 1, 2, 3),
        named(1, 10, 1, 2, 4),  # 8 tokens of it
        named(2, 8, 9, 2),  # a known name after another block
        named(3, 10, 1, 2, 3),  # all 10: the last block is not full
        request(4, 12),
    ]
    statistics = summarise(trace).statistics
    assert statistics.shared_prefix_share == pytest.approx((8 + 10) / (10 + 10 + 8 + 10 + 12))


def test_spreading_keeps_order_bins_and_law() -> None:
    """Offsets in the bin are uniform: chi-square over ten cells, z < 5 (once in 3.5 million)."""
    stamps = np.repeat(np.arange(400) * 3.0, np.random.default_rng(0).integers(0, 20, 400))
    trace = [request(t, prompt=i + 1) for i, t in enumerate(stamps.tolist())]
    spread_trace = list(spread(trace, 3.0, seed=1))
    times_s = np.asarray([r.arrival_s for r in spread_trace])
    assert (np.diff(times_s) >= 0).all() and len(spread_trace) == len(trace)
    assert [r.prompt_tokens for r in spread_trace] == [r.prompt_tokens for r in trace]
    assert (times_s // 3 == stamps // 3).all()
    assert chi_square_z(np.bincount((times_s % 3 / 0.3).astype(int), minlength=10), [0.1] * 10) < 5
    assert spread_trace == list(spread(trace, 3.0, seed=1)) != list(spread(trace, 3.0, seed=2))
    before, after = (summarise(t).statistics.gap_cv for t in (trace, spread_trace))
    assert before is not None and after is not None and after < 0.5 * before
    with pytest.raises(FieldError, match="rounded to less than that"):
        list(spread(trace, 3.5, seed=1))
    with pytest.raises(FieldError, match="spread"):
        list(spread(trace, math.nan, seed=1))


@pytest.mark.parametrize("gap_s", [2.999, 3.057, 2.975])
def test_timestamps_nearly_a_bin_apart_are_spread(gap_s: float) -> None:
    """Mooncake's conversations are 2.999 s apart at least."""
    trace = [request(gap_s * (i // 5), prompt=i + 1) for i in range(1000)]
    times_s = np.asarray([each.arrival_s for each in spread(trace, 3.0, seed=1)])
    offsets_s = times_s - np.asarray([each.arrival_s for each in trace])
    assert (np.diff(times_s) >= 0).all() and (offsets_s >= 0).all()
    assert 2.9 < offsets_s.max() <= 3.0


def test_scaling() -> None:
    trace = [request(i * 2.0, 10, 3, session="s") for i in range(4)]
    scaled = list(scale(trace, rate=4, prompt=1.26, output=0.01))
    assert [r.arrival_s for r in scaled] == [0, 0.5, 1, 1.5]
    assert {(r.prompt_tokens, r.output_tokens, r.session) for r in scaled} == {(13, 1, "s")}
    with pytest.raises(FieldError, match="prompts with hash_ids"):
        list(scale([named(0, 8, 1, 2)], prompt=2))
    assert list(scale([named(2, 8, 1, 2)], rate=2)) == [named(1, 8, 1, 2)]
    for field in ("rate", "prompt", "output"):
        with pytest.raises(FieldError, match=field):
            list(scale(trace, **{field: 0.0}))
        with pytest.raises(FieldError, match=rf"--{field}(-scale)?: (scales|1e)"):
            list(scale(trace, **{field: 1e8 if field != "rate" else 1e300}))


def test_samples_are_windows_shares_and_heads() -> None:
    trace = [request(float(i), prompt=i + 1) for i in range(2000)]
    window = list(sample(trace, start_s=10, end_s=20))
    assert [(r.arrival_s, r.prompt_tokens) for r in window] == [(i, i + 11) for i in range(10)]
    assert list(sample(trace, max_requests=3)) == trace[:3]
    kept = [r.prompt_tokens for r in sample(trace, share=0.3, seed=5)]
    assert abs(len(kept) - 600) < 5 * math.sqrt(2000 * 0.3 * 0.7)  # once in 1.7 million seeds
    assert kept == [r.prompt_tokens for r in sample(trace, share=0.3, seed=5)]
    assert kept != [r.prompt_tokens for r in sample(trace, share=0.3, seed=6)]
    for bad in (
        {"share": 0.0},
        {"share": 1.5},
        {"max_requests": 0},
        {"start_s": 5.0, "end_s": 5.0},
    ):
        with pytest.raises(FieldError):
            list(sample(trace, **bad))


def test_samples_keep_sessions_whole() -> None:
    trace = [request(float(i), session=f"s{i % 50}") for i in range(500)]
    kept = list(sample(trace, share=0.5))
    sizes = {s: sum(r.session == s for r in kept) for s in {r.session for r in kept}}
    assert set(sizes.values()) == {10} and 10 < len(sizes) < 40


@pytest.mark.shared_data
def test_published_figures_are_found_again() -> None:
    """Rate, CV and reuse agree with published analyses (a cache without limits)."""
    if not SHARED.is_dir():
        pytest.skip(f"{SHARED} is absent")
    azure = summarise(Trace(SHARED / "traces/azure2023/AzureLLMInferenceTrace_conv.csv")).statistics
    assert azure.rate_per_s == pytest.approx(5.53, abs=0.005)
    assert azure.gap_cv == pytest.approx(1.09, abs=0.005)
    assert (azure.output_tokens.p50, azure.output_tokens.max) == (129, 1000)
    mooncake = summarise(Trace(SHARED / "traces/mooncake/synthetic_trace.jsonl")).statistics
    assert mooncake.gap_cv == pytest.approx(1.01, abs=0.005)
    assert mooncake.shared_prefix_share == pytest.approx(0.64, abs=0.02)
