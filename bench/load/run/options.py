"""Options of `cbatch bench`, the loads that they name, and the workload: requests and prompts."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator
from functools import partial
from itertools import islice, takewhile
from pathlib import Path
from typing import Annotated, Any, Literal

import msgspec
from msgspec import Meta

from bench.load.client.bodies import BodySettings, Item, Messages, load_text, open_corpus
from bench.load.client.http import HttpClient
from cbatch.cli.settings import flag_of
from cbatch.core.request.errors import FieldError
from cbatch.core.request.numbers import MAX_FLOAT
from cbatch.core.request.typed import knob
from cbatch.demo import demo_prompts, edit_prompts
from sim.workload.distributions import ARRIVALS, LENGTHS, forms, parse_arrivals, parse_lengths
from sim.workload.generate import Arrivals, Conversations, converse, generate
from sim.workload.options import (
    RATE_SCALE_KNOB,
    SHARE_KNOB,
    SLO_KNOB,
    THINK_KNOB,
    OpenedTrace,
    Reading,
)
from sim.workload.traces.changes import scale
from sim.workload.traces.files import read_whole
from sim.workload.traces.request import TraceRequest

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

# Default number of requests: at least 64, and at least 8 per client of a closed loop.
MIN_REQUESTS, ROUNDS = 64, 8
ENDLESS = 10**9  # more requests than a run can send
DEMO = "demo"


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
        given = {n: getattr(self, n) for n in self.__struct_fields__ if n not in _NOT_REPORTED}
        given = {name: str(v) if isinstance(v, Path) else v for name, v in given.items()}
        return {name: value for name, value in given.items() if value not in (None, (), False)}


class OfferedLoad(msgspec.Struct, frozen=True):
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


class Workload:
    """Requests and their prompts. The constructor raises `FieldError` for options that conflict."""

    def __init__(self, options: LoadOptions) -> None:
        options.require_effect()
        self._options = options
        self._trace = (
            None if options.trace is None else OpenedTrace(options.trace, options, options.seed)
        )
        self._items = _items(options)
        self._prompts = parse_lengths("--prompt-tokens", options.prompt_tokens or PROMPT_TOKENS)
        outputs = options.output_tokens or OUTPUT_TOKENS
        self._outputs = parse_lengths("--output-tokens", outputs, "output_tokens")
        self._turns = None if options.turns is None else parse_lengths("--turns", options.turns)
        self._fields = {"temperature": 0.0} | dict(_field(text) for text in options.field)
        if options.temperature is not None:
            self._fields["temperature"] = options.temperature
        self._text = "" if self._items else load_text(options.text)
        if options.rate is not None:
            self._arrivals(float(options.rate.split(",")[0]))

    def requests(self, load: OfferedLoad, seed: int) -> list[TraceRequest]:
        """Return the requests of a run. Requests of a trace are the same for every `seed`."""
        options = self._options
        limit = options.requests
        if self._trace is not None:
            requests: Iterable[TraceRequest] = self._trace.requests()
            if options.rate_scale is not None:
                requests = scale(requests, rate=options.rate_scale)
        else:
            requests, limit = self._generate(load, seed), None
        if (end_s := options.duration) is not None and load.concurrency is None:
            requests = takewhile(lambda request: request.arrival_s < end_s, requests)
        return list(islice(requests, limit))

    async def bodies(self, client: HttpClient, model: str) -> BodySettings:
        options = self._options
        corpus = None
        if not self._items:
            corpus = await open_corpus(client, model, self._text, chat=options.chat)
        # Outputs have the given lengths only if the model cannot end them earlier.
        ignore_eos = not self._items if options.ignore_eos is None else options.ignore_eos
        return BodySettings(
            model=model,
            chat=options.chat,
            streamed=not options.no_stream,
            fields=self._fields,
            chunk_usage=not options.final_usage,
            ignore_eos=ignore_eos,
            items=self._items,
            corpus=corpus,
        )

    # -- inside

    def _generate(self, load: OfferedLoad, seed: int) -> Iterator[TraceRequest]:
        options = self._options
        if options.requests is not None:  # a sweep may have more clients
            count = max(options.requests, load.concurrency or 0)
        elif load.rate_per_s is not None and options.duration is not None:
            count = ENDLESS  # `requests` stops at the duration
        else:
            count = max(MIN_REQUESTS, ROUNDS * (load.concurrency or 0))
        arrivals = self._arrivals(load.rate_per_s or 1.0)
        if self._turns is None:
            return generate(arrivals, self._prompts, self._outputs, requests=count, seed=seed)
        conversations = Conversations(
            turns=self._turns,
            messages=self._prompts,
            outputs=self._outputs,
            system_prompt_tokens=options.system_tokens or 0,
            think_s=options.think or 0.0,
        )
        return converse(arrivals, conversations, sessions=count, seed=seed)

    def _arrivals(self, rate_per_s: float) -> Arrivals:
        return parse_arrivals("--arrivals", self._options.arrivals or ARRIVALS_PROCESS, rate_per_s)


def _items(options: LoadOptions) -> tuple[Item, ...]:
    if options.prompts is None:
        return ()
    if options.prompts == DEMO:
        return tuple(Item(prompt=prompt) for prompt in (*demo_prompts(), *edit_prompts()))
    return read_items(Path(options.prompts), chat=options.chat)


def _field(text: str) -> tuple[str, Any]:
    name, _, value = text.partition("=")
    try:
        return name, json.loads(value)
    except ValueError as error:
        raise FieldError("--field", f"{text!r} is not NAME=JSON", "write top_k=20") from error


def read_items(path: Path, *, chat: bool) -> tuple[Item, ...]:
    """Read the user's prompts. A line of a `.jsonl` or `.ndjson` file is an object: `prompt` (text
    or token ids) or `messages`, and any fields of the call. In any other file a line is a prompt.
    Raises `FieldError`."""
    try:
        text = read_whole(path).decode()
    except (OSError, UnicodeDecodeError) as error:
        raise FieldError("--prompts", f"{path}: {error}", "name a UTF-8 file") from error
    lines = [(number, line) for number, line in enumerate(text.split("\n"), 1) if line.strip()]
    if not lines:
        raise FieldError("--prompts", f"{path} has none", "give at least one")
    if path.suffix not in (".jsonl", ".ndjson"):
        return tuple(Item(prompt=line.rstrip("\r")) for _, line in lines)
    return tuple(_item(f"{path}, line {number}", line, chat) for number, line in lines)


class _PromptLine(msgspec.Struct):
    """Fields of a line that need a check: times are measured for one choice."""

    prompt: str | list[int] | None = None
    messages: Messages | None = None
    n: Literal[1] = 1
    best_of: Literal[1] = 1
    max_tokens: Count = 1
    max_completion_tokens: Count = 1


def _item(where: str, line: str, chat: bool) -> Item:
    try:
        known = msgspec.json.decode(line, type=_PromptLine)
        fields = msgspec.json.decode(line, type=dict[str, Any])
    except (ValueError, RecursionError) as error:  # msgspec's errors are ValueErrors
        raise FieldError("--prompts", f"{where}: {error}", "fix it") from error
    problem, prompt, messages = None, fields.pop("prompt", None), fields.pop("messages", None)
    if (prompt is None) == (messages is None) or (messages is not None and not chat):
        problem = "has no prompt of this kind: give a prompt, or messages with --chat"
    elif chat and not isinstance(prompt, str | None):
        problem = "has ids, but a chat takes text"
    elif given := {"stream", "stream_options", "model"} & fields.keys():
        problem = f"has {min(given)}, which is set for the whole run"
    if problem is not None:
        raise FieldError("--prompts", f"{where} {problem}", "fix it")
    return Item(prompt=known.prompt, messages=known.messages, fields=fields)
