"""Lengths, arrivals and rates have one grammar in all commands."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from bench.load.run.options import LoadOptions, OfferedLoad, Workload
from cbatch.cli.main import make_parser
from cbatch.cli.settings import read_settings
from sim.workload.distributions import parse_arrivals, parse_lengths
from sim.workload.options import warn
from sim.workload.traces.reader import Trace, write_requests
from sim.workload.traces.request import TraceRequest
from tests.cli.conftest import Run

Command = Callable[..., Run]
SMALL = ("--num-blocks", 200, "--max-model-len", 500, "--step-seconds", 0.01)
# -- distributions


@pytest.mark.parametrize(
    ("comma", "colon"),
    [
        ("lognormal:50,0.5", "lognormal:50:0.5"),
        ("lognormal:50,0.5,90", "lognormal:50:0.5:90"),
        ("uniform:3,30", "uniform:3:30"),
        ("zipf:1.2,2,50", "zipf:1.2:2:50"),
        ("fixed:7", "7"),
    ],
)
def test_lengths_have_one_grammar_in_all_commands(
    cbatch: Command, tmp_path: Path, comma: str, colon: str
) -> None:
    drawn, written = [], []
    for text in (comma, colon):
        drawn.append(parse_lengths("--x", text)(np.random.default_rng(3), 40).tolist())
        words = ("URL", "--output-tokens", text, "--prompt-tokens", text, "--turns", text)
        options = read_settings(LoadOptions, make_parser("bench").parse_args(["bench", *words]))
        made = Workload(options.values).requests(OfferedLoad(concurrency=2), seed=3)
        out = tmp_path / "out.jsonl"
        lengths = ("--prompt", text, "--output", text, "--rate", 5, "--requests", 9)
        assert cbatch("trace", "generate", out, *lengths).status == 0
        written.append((made, list(Trace(out))))
    assert drawn[0] == drawn[1] and written[0] == written[1]


@pytest.mark.parametrize(
    ("process", "spellings"),
    [
        ("poisson", ("poisson:5",)),
        ("constant", ("constant:5",)),
        ("gamma:2", ("gamma:5,2", "gamma:5:2")),
        ("onoff:3,9", ("onoff:5,3,9", "onoff:5:3:9")),
        ("onoff:3:9", ("diurnal:5,0.5,60",)),
    ],
)
def test_arrivals_have_one_grammar_with_a_rate_and_without(
    cbatch: Command, tmp_path: Path, process: str, spellings: tuple[str, ...]
) -> None:
    def first(*arguments: Any) -> list[float]:
        times_s = parse_arrivals("--arrivals", *arguments)(np.random.default_rng(4))
        return list(itertools.islice(times_s, 20))

    def written(*more: Any) -> list[TraceRequest]:
        out = tmp_path / "out.jsonl"
        fixed = ("--prompt", 9, "--output", 2, "--requests", 20)
        run = cbatch("trace", "generate", out, *fixed, *more)
        assert run.status == 0, run.err
        return list(Trace(out))

    same = not spellings[0].startswith("diurnal")
    for text in spellings:
        assert (first(text) == first(process, 5.0)) == same
        made = written("--rate", 5, "--arrivals", process)
        assert (written("--arrivals", text) == made) == same
    words = ["bench", "URL", "--rate", "5", "--arrivals", process, "--requests", "20"]
    options = read_settings(LoadOptions, make_parser("bench").parse_args(words))
    times_s = [r.arrival_s for r in Workload(options.values).requests(OfferedLoad(rate_per_s=5), 0)]
    assert times_s == [request.arrival_s for request in made]


# -- rates


@pytest.fixture
def trace(tmp_path: Path) -> Path:
    """Write a trace of four requests a second."""
    path = tmp_path / "trace.jsonl"
    requests = (TraceRequest(arrival_s=i / 4, prompt_tokens=9, output_tokens=2) for i in range(41))
    write_requests(path, requests)
    return path


def arrivals(cbatch: Command, trace: Path, *more: Any) -> tuple[float, Run]:
    """Return the time of the last arrival in seconds, and the run."""
    records = trace.parent / "records.jsonl"
    run = cbatch("sim", trace, *SMALL, "--records", records, *more)
    assert run.status == 0, run.err
    lines = records.read_text().splitlines()
    return max(float(line.partition('"arrival_s":')[2].partition(",")[0]) for line in lines), run


def test_a_rate_is_in_requests_a_second(cbatch: Command, trace: Path) -> None:
    for more, last_s, scale in (
        ((), 10, None),
        (("--rate-scale", 2), 5, 2),
        (("--rate", 8), 5, 2),
        (("--rate", 2), 20, 0.5),
        (("--rate", 8, "--requests", 21), 2.5, 2),
    ):
        warn.cache_clear()
        reached_s, run = arrivals(cbatch, trace, *more)
        assert reached_s == pytest.approx(last_s), more
        assert run.lines[-1]["settings"]["rate_scale"] == scale
        said = "is in requests per second; the trace has 4. To give a multiple of"
        assert (said in run.err) == ("--rate" in more), run.err


@pytest.mark.parametrize(
    ("more", "words"),
    [
        (("--rate", 3, "--rate-scale", 2), "--rate-scale: would be ignored"),
        (("--rate-scale", 2, "--concurrency", 2), "--rate-scale: would be ignored"),
        (("--rate", "nan"), "--rate: nan is not allowed"),
        (("--rate", 0), "--rate: 0.0 is not allowed"),
        (("--rate-scale", 0), "--rate-scale: 0.0 is not allowed"),
        (("--rate", 3, "--requests", 1), "--rate: the trace has no rate of its own"),
    ],
)
def test_bad_rates_are_rejected(
    cbatch: Command, trace: Path, more: tuple[Any, ...], words: str
) -> None:
    run = cbatch("sim", trace, *SMALL, *more)
    assert run.status == 2 and words in run.err, run.err
