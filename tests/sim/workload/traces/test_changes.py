"""Statistics against brute force, changes to traces, and requests drawn from ServeGen's windows."""

from __future__ import annotations

import itertools
import json
import math
from pathlib import Path

import numpy as np
import pytest

from cbatch.core.request.errors import FieldError
from sim.workload.traces.changes import sample, scale, spread
from sim.workload.traces.reader import Trace
from sim.workload.traces.request import TraceError, TraceRequest
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


def test_statistics_of_one_request_say_what_is_not_known() -> None:
    statistics = summarise([request(0.0)]).statistics
    assert (statistics.rate_per_s, statistics.gap_cv, statistics.peak_minute_ratio) == (
        None,
        None,
        None,
    )
    assert statistics.prompt_tokens.p99 == 5


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


@pytest.mark.parametrize("gap_s", [2.999, 3.0, 3.001, 3.057, 2.975])
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


WINDOWS = """0,2.0,0.5,Gamma,4.0,0.125
600,0,0,,0,0
1200,1.0,2.0,Weibull,0.5427,0.575
21600,1.0,1.0,Exponential,0,1
"""


def write_windows(folder: Path, windows: str = WINDOWS, client: int = 1) -> Path:
    folder.mkdir(exist_ok=True)
    (folder / f"chunk-{client}-trace.csv").write_text(windows)
    dataset = {
        "0": {"input_tokens": "{10: 0.25, 20: 0.75}", "output_tokens": "{3: 1.0}"},
        "21600": {"input_tokens": "{50: 1.0}", "output_tokens": "{4: 1.0}"},
    }
    (folder / f"chunk-{client}-dataset.json").write_text(json.dumps(dataset))
    return folder


def test_windows_have_their_rates_and_lengths(tmp_path: Path) -> None:
    """Counts agree at 5 standard errors, which grow with the CV; lengths by chi-square."""
    folder = write_windows(tmp_path / "w")
    write_windows(folder, "0,0.5,1.0,Gamma,1.0,2.0\n", client=12)
    trace = Trace(folder, seed=7)
    requests = list(trace)
    assert trace.format == "servegen" and requests == list(Trace(folder, seed=7))
    assert requests != list(Trace(folder, seed=8))
    times_s = np.asarray([r.arrival_s for r in requests])
    assert (np.diff(times_s) >= 0).all()
    of_one = [r for r in requests if r.session == "1"]
    counts = np.bincount([int(r.arrival_s // 600) for r in of_one], minlength=37)
    for window, rate, cv in ((0, 2.0, 0.5), (2, 1.0, 2.0), (36, 1.0, 1.0)):
        assert abs(counts[window] - 600 * rate) < 5 * cv * math.sqrt(600 * rate)
    # Time counts from the first request, a second or so after the first window begins.
    assert not any(610 < r.arrival_s < 1190 or 1810 < r.arrival_s < 21590 for r in of_one)
    early = [r.prompt_tokens for r in requests if r.arrival_s < 21000]
    assert chi_square_z([early.count(10), early.count(20)], [0.25, 0.75]) < 5
    assert {r.prompt_tokens for r in requests if r.arrival_s > 21000} == {50}
    clients = [r for r in requests if r.session == "12"]
    assert abs(len(clients) - 300) < 5 * math.sqrt(300)


@pytest.mark.parametrize(
    ("windows", "field"),
    [
        ("0,1,1,Gamma,1\n", "columns"),
        ("0,1,1,Pareto,1,1\n", "law"),
        ("0,nan,1,Gamma,1,1\n", "rate"),
        ("0,-1,1,Gamma,1,1\n", "rate"),
        ("0,1,1,Gamma,0,1\n", "shape"),
    ],
)
def test_bad_windows_name_their_field(tmp_path: Path, windows: str, field: str) -> None:
    folder = write_windows(tmp_path / "w", windows)
    with pytest.raises(TraceError, match="chunk-1-trace.csv, line 1") as caught:
        list(Trace(folder))
    assert caught.value.field == field


def test_bad_histograms_and_folders(tmp_path: Path) -> None:
    with pytest.raises(TraceError, match=r"no chunk-\*-trace.csv"):
        list(Trace(tmp_path))
    folder = write_windows(tmp_path / "w")
    for histogram, word in (
        ("{3: -1.0}", "shares"),
        ("[3]", "histogram"),
        ("open(1)", "histogram"),
    ):
        dataset = {"0": {"input_tokens": histogram, "output_tokens": "{3: 1.0}"}}
        (folder / "chunk-1-dataset.json").write_text(json.dumps(dataset))
        with pytest.raises(TraceError, match=word):
            list(Trace(folder))
    (folder / "chunk-1-dataset.json").unlink()
    with pytest.raises(TraceError, match="cannot be read"):
        list(Trace(folder))


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
