"""A distribution parsed from its name is the distribution itself."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from cbatch.core.request.errors import FieldError
from sim.workload import arrivals, lengths
from sim.workload.distributions import is_drawn, parse_arrivals, parse_lengths
from sim.workload.traces.reader import write_requests
from sim.workload.traces.request import TraceRequest


def rng() -> np.random.Generator:
    return np.random.default_rng(7)


@pytest.mark.parametrize(
    ("text", "process"),
    [
        ("constant:4", arrivals.constant(4.0)),
        ("poisson:0.5", arrivals.poisson(0.5, rng())),
        ("gamma:5,2", arrivals.gamma(5.0, 2.0, rng())),
        ("weibull:5,0.5", arrivals.weibull(5.0, 0.5, rng())),
        ("onoff:5,3,9", arrivals.on_off(5.0, 3.0, 9.0, rng())),
        ("diurnal:5,0.5,60", arrivals.diurnal(5.0, 0.5, 60.0, rng())),
    ],
)
def test_arrivals_by_name(text: str, process: Iterator[float]) -> None:
    process_by_name = parse_arrivals("--arrivals", text)(rng())
    assert list(islice(process_by_name, 50)) == list(islice(process, 50))
    assert is_drawn(text) == (not text.startswith("constant"))


@pytest.mark.parametrize(
    ("text", "law"),
    [
        ("fixed:9", lengths.fixed(9)),
        ("uniform:3,30", lengths.uniform(3, 30)),
        ("lognormal:100,0.5", lengths.lognormal(100.0, 0.5)),
        ("lognormal:100,2,150", lengths.lognormal(100.0, 2.0, high=150)),
        ("zipf:1.2,2,50", lengths.zipf(1.2, 2, 50)),
    ],
)
def test_lengths_by_name(text: str, law: lengths.Lengths) -> None:
    law_by_name = parse_lengths("--prompt", text, "prompt_tokens")
    assert law_by_name(rng(), 50).tolist() == law(rng(), 50).tolist()
    assert is_drawn(text) == (not text.startswith("fixed"))


def test_lengths_of_a_trace(tmp_path: Path) -> None:
    path = tmp_path / "trace.jsonl"
    requests = (
        TraceRequest(arrival_s=float(i), prompt_tokens=10 + i, output_tokens=100 + i)
        for i in range(3)
    )
    write_requests(path, requests)
    for column, least in (("prompt_tokens", 10), ("output_tokens", 100)):
        sampled = parse_lengths("--prompt", f"empirical:{path}", column)(rng(), 200)
        assert set(sampled.tolist()) == {least, least + 1, least + 2}


@pytest.mark.parametrize(
    ("parse", "text", "words"),
    [
        (parse_arrivals, "poison:5", "is not known; write one of constant:RATE, poisson:RATE"),
        (parse_arrivals, "poisson", "is not known"),
        (parse_arrivals, "poisson:", "is not known"),
        (parse_arrivals, "poisson:a", "is not known"),
        (parse_arrivals, "poisson:1,2", "is not known"),
        (parse_arrivals, "gamma:5", "is not known"),
        (parse_arrivals, "poisson:-1", "rate_per_s -1.0 is not allowed"),
        (parse_arrivals, "poisson:nan", "RATE nan is not allowed"),
        (parse_arrivals, "constant:0", "rate_per_s 0.0 is not allowed"),
        (parse_arrivals, "gamma:5,0", "cv 0.0 is not allowed"),
        (parse_arrivals, "gamma:1,1e300", "CV 1e+300 is not allowed"),
        (parse_arrivals, "onoff:1000,1e9,1", "on_s makes more than 1e7 requests"),
        (parse_lengths, "lognormal:5,1e300", "CV 1e+300 is not allowed"),
        (parse_arrivals, "gamma:1,-1", "cv -1.0 is not allowed"),
        (parse_arrivals, "weibull:1,1e9", "cv 1000000000.0 is not allowed"),
        (parse_arrivals, "onoff:1,0,1", "on_s 0.0 is not allowed"),
        (parse_arrivals, "diurnal:5,2,60", "swing 2.0 is not allowed"),
        (parse_arrivals, "diurnal:5,0.5,inf", "PERIOD_S inf is not allowed"),
        (parse_lengths, "fixed:0", "tokens 0 is not allowed"),
        (parse_lengths, "fixed:1.5", "TOKENS is not a whole number"),
        (parse_lengths, "uniform:5,2", "high 2 is below low"),
        (parse_lengths, "uniform:nan,2", "LOW nan is not allowed"),
        (parse_lengths, "lognormal:nan,1", "MEAN nan is not allowed"),
        (parse_lengths, "lognormal:9,-1", "cv -1.0 is not allowed"),
        (parse_lengths, "zipf:-1,1,2", "exponent -1.0 is not allowed"),
        (parse_lengths, "lognormal:9,1,inf", "MOST inf is not allowed"),
        (parse_lengths, "empirical:", "is not known; write one of N, fixed:TOKENS"),
        (parse_lengths, "empirical:/no/such/trace", "/no/such/trace: file: cannot be read"),
    ],
)
def test_bad_laws_name_their_option(parse: Any, text: str, words: str) -> None:
    more = ("prompt_tokens",) if parse is parse_lengths else ()
    with pytest.raises(FieldError) as caught:
        parse("--law", text, *more)
    assert words in str(caught.value)
    assert str(caught.value).startswith("--law: ") or "/no/such" in text
