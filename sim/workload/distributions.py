"""The grammar of arrival processes and length distributions: a name and its numbers, `gamma:2` or
`lognormal:500,1`. Colons may take the place of commas, and a number alone is a fixed length.

The rate of arrivals is given apart from the process; without one it is the first number.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from typing import Any, NamedTuple, TypeVar

import numpy as np

from cbatch.core.request.errors import FieldError
from sim.distributions import arrivals, lengths
from sim.distributions.lengths import Lengths
from sim.traces.reader import Trace
from sim.workload.generate import Arrivals

T = TypeVar("T")


class Law(NamedTuple):
    make: Callable[..., Any]
    names: tuple[str, ...]  # of its numbers
    num_optional: int = 0  # of them, at the end


ARRIVALS = {
    "constant": Law(arrivals.constant, ("RATE",)),
    "poisson": Law(arrivals.poisson, ("RATE",)),
    "gamma": Law(arrivals.gamma, ("RATE", "CV")),
    "weibull": Law(arrivals.weibull, ("RATE", "CV")),
    "onoff": Law(arrivals.on_off, ("RATE", "ON_S", "OFF_S")),
    "diurnal": Law(arrivals.diurnal, ("RATE", "SWING", "PERIOD_S")),
}
LENGTHS = {
    "fixed": Law(lengths.fixed, ("TOKENS",)),
    "uniform": Law(lengths.uniform, ("LOW", "HIGH")),
    "lognormal": Law(
        lambda mean, cv, high=None: lengths.lognormal(mean, cv, high=high),
        ("MEAN", "CV", "MOST"),
        num_optional=1,
    ),
    "zipf": Law(lengths.zipf, ("EXPONENT", "LOW", "HIGH")),
}
_WHOLE = {"TOKENS", "LOW", "HIGH", "MOST"}
_EMPIRICAL = "empirical"  # of a trace
_CERTAIN = {"constant", "fixed"}


def forms(laws: Mapping[str, Law], num_given: int = 0) -> str:
    """Return how they are written, for help and for errors, without the numbers given apart."""
    written = ["N"] if laws is LENGTHS else []
    for name, law in laws.items():
        least = len(law.names) - law.num_optional
        numbers = ",".join(law.names[num_given:least])
        optional = "".join(f"[,{number}]" for number in law.names[least:])
        written.append(f"{name}:{numbers}{optional}" if numbers else name)
    return ", ".join([*written, f"{_EMPIRICAL}:TRACE"] if laws is LENGTHS else written)


def is_drawn(text: str) -> bool:
    """Return whether the law, well formed, draws random numbers."""
    return text.partition(":")[0] not in _CERTAIN and not text[:1].isdecimal()


def parse_arrivals(option: str, text: str, rate_per_s: float | None = None) -> Arrivals:
    """Raises `FieldError` naming `option`."""
    law, values = _parse(option, text, ARRIVALS, () if rate_per_s is None else (rate_per_s,))
    drawn = is_drawn(text)

    def make(rng: np.random.Generator) -> Iterator[float]:
        times_s: Iterator[float] = law.make(*values, rng) if drawn else law.make(*values)
        return times_s

    # A process checks its numbers when its first time is asked for.
    _checked(option, text, lambda: next(make(np.random.default_rng(0))))
    return make


def parse_lengths(option: str, text: str, column: str = "prompt_tokens") -> Lengths:
    """`column` is the field of a trace's requests that `empirical:FILE` draws from. Raises
    `FieldError` naming `option`, or the trace's own error."""
    name, _, path = text.partition(":")
    if name == _EMPIRICAL and path:
        return lengths.empirical([getattr(request, column) for request in Trace(path)])
    law, values = _parse(option, text, LENGTHS)
    drawn: Lengths = _checked(option, text, partial(law.make, *values))
    return drawn


# -- inside


def _parse(
    option: str, text: str, laws: Mapping[str, Law], given: tuple[float, ...] = ()
) -> tuple[Law, list[float]]:
    name, *numbers = re.split("[:,]", text)
    if laws is LENGTHS and name[:1].isdecimal() and not numbers:
        name, numbers = "fixed", [name]
    law = laws.get(name)
    try:
        values = [*given, *map(float, numbers)]
    except ValueError:
        values = []
    least = 0 if law is None else len(law.names) - law.num_optional
    if law is None or not least <= len(values) <= len(law.names):
        raise FieldError(
            option, f"{text!r} is not known", f"write one of {forms(laws, len(given))}"
        )
    for number, value in zip(law.names, values, strict=False):
        if number in _WHOLE and not value.is_integer():
            raise FieldError(option, f"{text!r}: {number} is not whole", "give a number of tokens")
    whole = [n in _WHOLE for n in law.names]
    return law, [int(v) if is_whole else v for v, is_whole in zip(values, whole, strict=False)]


def _checked(option: str, text: str, make: Callable[[], T]) -> T:
    try:
        return make()
    except FieldError as error:
        problem = f"{text!r}: {error.field} {error.problem}"
        raise FieldError(option, problem, error.remedy) from error
