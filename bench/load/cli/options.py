"""Options of `cbatch bench`."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Annotated

from msgspec import Meta

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
