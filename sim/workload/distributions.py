"""Parser of arrival processes and length distributions, written as a name and its parameters:
`gamma:2` or `lognormal:500,1`. Colons may replace commas; a single number is a fixed length.

The first parameter of an arrival process is its rate, unless the rate is given separately.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from typing import Any, NamedTuple, TypeVar

import numpy as np

from cbatch.core.request.errors import FieldError
from cbatch.core.request.numbers import number_problem
from sim.workload import arrivals, lengths
from sim.workload.generate import Arrivals
from sim.workload.lengths import Lengths
from sim.workload.traces.reader import Trace

T = TypeVar("T")


class Distribution(NamedTuple):
    make: Callable[..., Any]
    parameters: tuple[str, ...]  # their names, as help shows them
    num_optional: int = 0  # number of trailing parameters that can be left out


ARRIVALS = {
    "constant": Distribution(arrivals.constant, ("RATE",)),
    "poisson": Distribution(arrivals.poisson, ("RATE",)),
    "gamma": Distribution(arrivals.gamma, ("RATE", "CV")),
    "weibull": Distribution(arrivals.weibull, ("RATE", "CV")),
    "onoff": Distribution(arrivals.on_off, ("RATE", "ON_S", "OFF_S")),
    "diurnal": Distribution(arrivals.diurnal, ("RATE", "SWING", "PERIOD_S")),
}
LENGTHS = {
    "fixed": Distribution(lengths.fixed, ("TOKENS",)),
    "uniform": Distribution(lengths.uniform, ("LOW", "HIGH")),
    "lognormal": Distribution(
        lambda mean, cv, high=None: lengths.lognormal(mean, cv, high=high),
        ("MEAN", "CV", "MOST"),
        num_optional=1,
    ),
    "zipf": Distribution(lengths.zipf, ("EXPONENT", "LOW", "HIGH")),
}
_INTEGERS = {"TOKENS", "LOW", "HIGH", "MOST"}  # parameters that are whole numbers of tokens
_EMPIRICAL = "empirical"  # `empirical:TRACE`: lengths of the requests in that file
_DETERMINISTIC = {"constant", "fixed"}  # distributions without random draws


def forms(distributions: Mapping[str, Distribution], num_fixed: int = 0) -> str:
    """Return the syntax of all `distributions` for help and errors, without the first `num_fixed`
    parameters, which other options set."""
    written = ["N"] if distributions is LENGTHS else []
    for name, distribution in distributions.items():
        num_required = len(distribution.parameters) - distribution.num_optional
        required = ",".join(distribution.parameters[num_fixed:num_required])
        optional = "".join(f"[,{each}]" for each in distribution.parameters[num_required:])
        written.append(f"{name}:{required}{optional}" if required else name)
    return ", ".join([*written, f"{_EMPIRICAL}:TRACE"] if distributions is LENGTHS else written)


def is_drawn(text: str) -> bool:
    """Return True if a valid distribution draws random numbers."""
    return text.partition(":")[0] not in _DETERMINISTIC and not text[:1].isdecimal()


def parse_arrivals(option: str, text: str, rate_per_s: float | None = None) -> Arrivals:
    """Return a function from a random generator to arrival times in seconds. Raises `FieldError`
    naming `option`."""
    process, values = _parse(option, text, ARRIVALS, () if rate_per_s is None else (rate_per_s,))
    drawn = is_drawn(text)

    def make(rng: np.random.Generator) -> Iterator[float]:
        times_s: Iterator[float] = process.make(*values, rng) if drawn else process.make(*values)
        return times_s

    # A process checks its parameters when its first time is drawn.
    _checked(option, text, lambda: next(make(np.random.default_rng(0))))
    return make


def parse_lengths(option: str, text: str, column: str = "prompt_tokens") -> Lengths:
    """Return a function that draws lengths. `empirical:FILE` draws from the field `column` of a
    trace's requests. Raises `FieldError` naming `option`, or the trace's own error."""
    name, _, path = text.partition(":")
    if name == _EMPIRICAL and path:
        return lengths.empirical([getattr(request, column) for request in Trace(path)])
    distribution, values = _parse(option, text, LENGTHS)
    draw: Lengths = _checked(option, text, partial(distribution.make, *values))
    return draw


def _parse(
    option: str, text: str, known: Mapping[str, Distribution], fixed_values: tuple[float, ...] = ()
) -> tuple[Distribution, list[float]]:
    name, *numbers = re.split("[:,]", text)
    if known is LENGTHS and name[:1].isdecimal() and not numbers:
        name, numbers = "fixed", [name]
    distribution = known.get(name)
    try:
        values = [*fixed_values, *map(float, numbers)]
    except ValueError:
        values = []
    names = () if distribution is None else distribution.parameters
    num_optional = 0 if distribution is None else distribution.num_optional
    if distribution is None or not len(names) - num_optional <= len(values) <= len(names):
        remedy = f"write one of {forms(known, len(fixed_values))}"
        raise FieldError(option, f"{text!r} is not known", remedy)
    for parameter, value in zip(names, values, strict=False):
        if remedy := number_problem(value):
            raise FieldError(option, f"{text!r}: {parameter} {value} is not allowed", remedy)
        if parameter in _INTEGERS and not value.is_integer():
            problem = f"{text!r}: {parameter} is not a whole number"
            raise FieldError(option, problem, "give a number of tokens")
    whole = [parameter in _INTEGERS for parameter in names]
    return distribution, [
        int(v) if is_whole else v for v, is_whole in zip(values, whole, strict=False)
    ]


def _checked(option: str, text: str, make: Callable[[], T]) -> T:
    try:
        return make()
    except FieldError as error:
        problem = f"{text!r}: {error.field} {error.problem}"
        raise FieldError(option, problem, error.remedy) from error
