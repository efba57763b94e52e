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
_prompts, _calls = partial(knob, "what is asked"), partial(knob, "calls")
_measuring = partial(knob, "measuring")
Count = Annotated[int, Meta(ge=1)]
Whole = Annotated[int, Meta(ge=0)]
Positive = Annotated[float, Meta(gt=0, le=1e9)]
Seconds = Annotated[float, Meta(ge=0, le=1e9)]
Share = Annotated[float, Meta(gt=0, le=1)]
CONCURRENCY, GOODPUT_SHARE = 8, 0.99
PROMPT_TOKENS, OUTPUT_TOKENS, ARRIVALS_PROCESS = "128", "64", "poisson"


class LoadOptions(Reading, frozen=True, kw_only=True):
    """All options of `cbatch bench`. None is a default that depends on other options."""

    url: Annotated[str | None, knob("", "http://host:8000", "URL")] = None
    concurrency: Annotated[
        str | None, _load("clients; several: a sweep", "N[,N...]", default=CONCURRENCY)
    ] = None
    rate: Annotated[str | None, _load("open loop: requests a second", "R[,R...]")] = None
    arrivals: Annotated[
        str | None, _load(f"how they come: {forms(ARRIVALS, 1)}", "LAW", default=ARRIVALS_PROCESS)
    ] = None
    trace: Annotated[str | None, _load("open loop: the arrivals of a trace", "FILE")] = None
    rate_scale: Annotated[Positive | None, RATE_SCALE_KNOB] = None

    sweep: Annotated[bool, _run("double the load until nothing is won")] = False
    find_rate: Annotated[
        bool, _run("go on from --rate to the highest at which every --slo is kept")
    ] = False
    requests: Annotated[Count | None, _run("of each run (conversations with --turns)", "N")] = None
    duration: Annotated[Positive | None, _run("send for so long at most", "S")] = None
    ramp: Annotated[Seconds | None, _run("reach the load in so long", "S")] = None
    think: Annotated[Seconds | None, THINK_KNOB] = None
    seed: Annotated[int, _run("of everything that is drawn")] = 0

    prompt_tokens: Annotated[
        str | None, _prompts("length, as of --output-tokens", "LAW", default=PROMPT_TOKENS)
    ] = None
    output_tokens: Annotated[
        str | None, _prompts(f"length: {forms(LENGTHS)}", "LAW", default=OUTPUT_TOKENS)
    ] = None
    text: Annotated[Path | None, _prompts("what prompts are cut from", "FILE")] = None
    prompts: Annotated[
        str | None,
        _prompts(
            "demo, a prompt a line, or .jsonl with fields of calls; of a --trace its arrivals and "
            "output lengths count then",
            "FILE",
        ),
    ] = None
    turns: Annotated[str | None, _prompts("conversations of so many turns", "LAW")] = None
    system_tokens: Annotated[Whole | None, _prompts("that they share", "N")] = None
    ignore_eos: Annotated[
        bool | None, _prompts("go on after the token that ends a text", default="but for --prompts")
    ] = None

    chat: Annotated[bool, _calls("chat instead of completions")] = False
    no_stream: Annotated[bool, _calls("whole answers")] = False
    model: Annotated[str | None, _calls("default: the first the server names", "NAME")] = None
    api_key: Annotated[str | None, _calls("also: $CBATCH_API_KEY", "KEY")] = None
    temperature: Annotated[float | None, _calls("0: greedy", "X", default=0.0)] = None
    field: Annotated[tuple[str, ...], _calls("of every call; repeatable", "NAME=JSON")] = ()
    timeout: Annotated[Positive, _calls("of a call", "S")] = 600.0
    final_usage: Annotated[bool, _calls("do not ask for the usage of every chunk")] = False

    slo: Annotated[tuple[str, ...], SLO_KNOB] = ()
    goodput_share: Annotated[Share | None, SHARE_KNOB] = None
    warmup: Annotated[Whole, _measuring("requests before, uncounted", "N")] = 0
    repeats: Annotated[Count, _measuring("for 95 % intervals", "N")] = 1
    max_errors: Annotated[float, _measuring("beyond it the exit is 1", "SHARE")] = 0.01
    processes: Annotated[Count, _measuring("of the client", "N")] = 1
    csv: Annotated[Path | None, _measuring("write a row of figures a load", "FILE")] = None
    records: Annotated[Path | None, _measuring("write a JSON line a call", "FILE")] = None
    page: Annotated[Path | None, _measuring("write an HTML page of the runs", "FILE")] = None
    quiet: Annotated[bool, _measuring("nothing while it runs")] = False
    self_test: Annotated[bool, _measuring("no URL: what the client itself can take")] = False
    json: Path | None = None  # set from --json, which `add_json_option` adds
