"""Options of `cbatch bench`, and the loads that they name."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Annotated, Any

import msgspec
from msgspec import Meta

from cbatch.cli.settings import flag_of
from cbatch.core.request.errors import FieldError
from cbatch.core.request.numbers import MAX_FLOAT
from cbatch.core.request.typed import knob
from sim.workload.distributions import ARRIVALS, LENGTHS, forms
from sim.workload.options import RATE_SCALE_KNOB, SHARE_KNOB, SLO_KNOB, THINK_KNOB, Reading

_load, _run = partial(knob, "load"), partial(knob, "run")
_prompts, _calls = partial(knob, "prompts"), partial(knob, "calls")
_measuring = partial(knob, "measuring")
Count = Annotated[int, Meta(ge=1)]
NotNegative = Annotated[int, Meta(ge=0)]
Positive = Annotated[float, Meta(gt=0, le=1e9)]
Seconds = Annotated[float, Meta(ge=0, le=1e9)]
Share = Annotated[float, Meta(gt=0, le=1)]
CONCURRENCY, GOODPUT_SHARE = 8, 0.99  # defaults of --concurrency and --goodput-share
PROMPT_TOKENS, OUTPUT_TOKENS, ARRIVALS_PROCESS = "128", "64", "poisson"
_NOT_REPORTED = (
    *("url", "model", "api_key", "concurrency", "rate"),
    *("csv", "records", "page", "json", "quiet", "self_test"),
)


class LoadOptions(Reading, frozen=True, kw_only=True):
    """All options of `cbatch bench`. None: the default depends on other options."""

    url: Annotated[str | None, knob("", "http://host:8000", "URL")] = None
    concurrency: Annotated[
        str | None,
        _load("number of clients; several numbers: a sweep", "N[,N...]", default=CONCURRENCY),
    ] = None
    rate: Annotated[str | None, _load("open loop: requests per second", "R[,R...]")] = None
    arrivals: Annotated[
        str | None,
        _load(f"arrival process: {forms(ARRIVALS, 1)}", "DIST", default=ARRIVALS_PROCESS),
    ] = None
    trace: Annotated[str | None, _load("open loop: arrivals of a trace", "FILE")] = None
    rate_scale: Annotated[Positive | None, RATE_SCALE_KNOB] = None

    sweep: Annotated[bool, _run("double the load until throughput no longer grows")] = False
    find_rate: Annotated[
        bool, _run("search the highest rate that meets every --slo, beginning at --rate")
    ] = False
    requests: Annotated[
        Count | None, _run("requests per run (conversations with --turns)", "N")
    ] = None
    duration: Annotated[Positive | None, _run("maximum time to send requests", "S")] = None
    ramp: Annotated[Seconds | None, _run("time in which the load grows to its full size", "S")] = (
        None
    )
    think: Annotated[Seconds | None, THINK_KNOB] = None
    seed: Annotated[int, _run("seed of random draws")] = 0

    prompt_tokens: Annotated[
        str | None, _prompts("prompt length, as in --output-tokens", "DIST", default=PROMPT_TOKENS)
    ] = None
    output_tokens: Annotated[
        str | None, _prompts(f"output length: {forms(LENGTHS)}", "DIST", default=OUTPUT_TOKENS)
    ] = None
    text: Annotated[Path | None, _prompts("text from which prompts are cut", "FILE")] = None
    prompts: Annotated[
        str | None,
        _prompts(
            "demo, a file with one prompt per line, or .jsonl with fields of calls; a --trace then "
            "gives only arrivals and output lengths",
            "FILE",
        ),
    ] = None
    turns: Annotated[str | None, _prompts("turns per conversation", "DIST")] = None
    system_tokens: Annotated[
        NotNegative | None, _prompts("length of the system prompt that conversations share", "N")
    ] = None
    ignore_eos: Annotated[
        bool | None, _prompts("continue after an end token", default="yes, except with --prompts")
    ] = None

    chat: Annotated[bool, _calls("use chat completions")] = False
    no_stream: Annotated[bool, _calls("do not stream")] = False
    model: Annotated[
        str | None, _calls("model name (default: the first that the server lists)", "NAME")
    ] = None
    api_key: Annotated[str | None, _calls("API key (default: $CBATCH_API_KEY)", "KEY")] = None
    temperature: Annotated[float | None, _calls("0: greedy", "X", default=0.0)] = None
    field: Annotated[
        tuple[str, ...], _calls("field to add to every call; repeatable", "NAME=JSON")
    ] = ()
    timeout: Annotated[Positive, _calls("time limit of a call", "S")] = 600.0
    final_usage: Annotated[bool, _calls("do not ask for usage in every chunk")] = False

    slo: Annotated[tuple[str, ...], SLO_KNOB] = ()
    goodput_share: Annotated[Share | None, SHARE_KNOB] = None
    warmup: Annotated[NotNegative, _measuring("requests before the measurement", "N")] = 0
    repeats: Annotated[Count, _measuring("number of runs, for 95 % intervals", "N")] = 1
    max_errors: Annotated[
        float, _measuring("share of errors above which the exit status is 1", "SHARE")
    ] = 0.01
    processes: Annotated[Count, _measuring("number of client processes", "N")] = 1
    csv: Annotated[Path | None, _measuring("write one CSV row per load", "FILE")] = None
    records: Annotated[Path | None, _measuring("write one JSON line per call", "FILE")] = None
    page: Annotated[Path | None, _measuring("write an HTML page of the runs", "FILE")] = None
    quiet: Annotated[bool, _measuring("no progress display")] = False
    self_test: Annotated[bool, _measuring("measure the client itself; needs no URL")] = False
    json: Path | None = None  # set from --json, which `add_json_option` adds

    def require_effect(self) -> None:
        """Raise `FieldError` for an option that other options make ineffective."""
        traced, own = self.trace is not None, self.prompts is not None
        is_open = traced or self.rate is not None
        for name, ignored, why in (
            ("concurrency", is_open, "an open loop has no clients"),
            ("rate", traced, "the trace has its own: give --rate-scale"),
            ("arrivals", self.rate is None, "there are no arrivals: give --rate"),
            ("rate_scale", not traced, "there is no --trace"),
            *((name, not traced, "there is no --trace") for name in Reading.__struct_fields__),
            ("find_rate", not self.slo, "there is not an objective: give --slo"),
            ("find_rate", self.rate is None, "there is no rate to begin with: give --rate"),
            ("sweep", self.find_rate, "--find-rate chooses the loads"),
            ("goodput_share", not self.find_rate, "nothing is searched for: give --find-rate"),
            ("sweep", traced, "a trace has one load: give --rate-scale"),
            ("think", is_open and self.turns is None, "an open loop does not wait for answers"),
            ("prompt_tokens", traced or own, "prompts have their own lengths"),
            ("output_tokens", traced, "the trace has lengths"),
            ("text", own, "--prompts are the text"),
            ("prompts", self.turns is not None, "turns are cut to given lengths"),
            ("turns", traced, "the trace has its sessions"),
            ("system_tokens", self.turns is None, "no conversation shares it: give --turns"),
            ("final_usage", self.no_stream, "whole answers have one usage"),
        ):
            if ignored and getattr(self, name) not in (None, False):
                raise FieldError(flag_of(name), f"would be ignored, since {why}", "leave it out")

    @property
    def loads(self) -> list[OfferedLoad]:
        """The loads to run: rates, numbers of clients, or a trace. Raises `FieldError`."""
        if self.trace is not None:
            return [OfferedLoad()]
        if self.rate is not None:
            rates = [OfferedLoad(rate_per_s=n) for n in _numbers("--rate", self.rate, float)]
            if self.find_rate and len(rates) > 1:
                raise FieldError("--rate", "has several", "give --find-rate one to begin with")
            return rates
        clients = self.concurrency or (str(CONCURRENCY) if not self.sweep else "1")
        counts = [int(n) for n in _numbers("--concurrency", clients, int)]
        if self.requests is not None and self.requests < max(counts):
            problem = f"{self.requests} for {max(counts)} clients"
            raise FieldError("--requests", problem, "give each client one at least")
        return [OfferedLoad(concurrency=count) for count in counts]

    @property
    def reported(self) -> dict[str, Any]:
        """The given options, for the report."""
        given = {n: getattr(self, n) for n in self.__struct_fields__ if n not in _NOT_REPORTED}
        given = {name: str(v) if isinstance(v, Path) else v for name, v in given.items()}
        return {name: value for name, value in given.items() if value not in (None, (), False)}


class OfferedLoad(msgspec.Struct, frozen=True):
    """Number of clients, or requests a second. Neither is set for a trace with its own times."""

    concurrency: int | None = None
    rate_per_s: float | None = None

    @property
    def value(self) -> float:
        return self.rate_per_s or self.concurrency or 0

    @property
    def name(self) -> str:
        if self.rate_per_s is not None:
            return f"{self.rate_per_s:g} requests/s"
        return "trace" if self.concurrency is None else f"{self.concurrency} clients"

    def doubled(self) -> OfferedLoad:
        if self.rate_per_s is not None:
            return OfferedLoad(rate_per_s=2 * self.rate_per_s)
        return OfferedLoad(concurrency=2 * (self.concurrency or 1))

    def as_settings(self) -> dict[str, float | None]:
        return {"concurrency": self.concurrency, "rate_per_s": self.rate_per_s}


def _numbers(option: str, text: str, kind: type[int] | type[float]) -> list[float]:
    try:
        numbers = [kind(each) for each in text.split(",")]
    except ValueError as error:
        raise FieldError(option, f"{text!r} is not a list of numbers", "write 1,2,4") from error
    if not all(0 < each <= MAX_FLOAT for each in numbers):
        raise FieldError(option, f"{text!r} is not allowed", "give positive numbers")
    return numbers
