"""The workload of `cbatch bench` from its options: loads, requests and prompts."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator
from itertools import islice, takewhile
from pathlib import Path
from typing import Any

from bench.load.cli.options import (
    ARRIVALS_PROCESS,
    CONCURRENCY,
    OUTPUT_TOKENS,
    PROMPT_TOKENS,
    LoadOptions,
)
from bench.load.client.bodies import MAX_COMPLETION_TOKENS, MAX_TOKENS, BodySettings, Item
from bench.load.client.http import HttpClient
from bench.load.client.text import load_text, open_corpus
from bench.load.run.runner import OfferedLoad
from cbatch.cli.settings import flag_of
from cbatch.core.request.errors import FieldError
from cbatch.core.request.numbers import MAX_FLOAT
from cbatch.demo import demo_prompts, edit_prompts
from sim.workload.distributions import parse_arrivals, parse_lengths
from sim.workload.generate import Arrivals, Conversations, converse, generate
from sim.workload.options import OpenedTrace, Reading
from sim.workload.traces.changes import scale
from sim.workload.traces.files import read_whole
from sim.workload.traces.request import TraceRequest

# Default number of requests: at least 64, and at least 8 per client of a closed loop.
MIN_REQUESTS, ROUNDS = 64, 8
ENDLESS = 10**9  # more requests than a run can send
DEMO = "demo"
_REPORTED = (  # options that the report lists under `settings`
    *("trace", "rate_scale", "spread", "arrivals", "ramp", "think", "duration", "prompt_tokens"),
    *("output_tokens", "prompts", "text", "turns", "system_tokens", "chat", "no_stream"),
    *("field", "warmup", "repeats", "processes", "seed", "final_usage"),
)


def parse_loads(options: LoadOptions) -> list[OfferedLoad]:
    """Return the loads to run: rates, numbers of clients, or a trace. Raises `FieldError`."""
    if options.trace is not None:
        return [OfferedLoad()]
    if options.rate is not None:
        rates = [OfferedLoad(rate_per_s=each) for each in _numbers("--rate", options.rate, float)]
        if options.find_rate and len(rates) > 1:
            raise FieldError("--rate", "has several", "give --find-rate one to begin with")
        return rates
    clients = options.concurrency or (str(CONCURRENCY) if not options.sweep else "1")
    loads = [OfferedLoad(concurrency=int(each)) for each in _numbers("--concurrency", clients, int)]
    clients_at_once = max(load.concurrency or 0 for load in loads)
    if options.requests is not None and options.requests < clients_at_once:
        problem = f"{options.requests} for {clients_at_once} clients"
        raise FieldError("--requests", problem, "give each client one at least")
    return loads


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
        _refuse_ignored(options)
        self._options = options
        self._trace = (
            None if options.trace is None else OpenedTrace(options.trace, options, options.seed)
        )
        self._items = _items(options)
        self._prompts = parse_lengths("--prompt-tokens", options.prompt_tokens or PROMPT_TOKENS)
        outputs = options.output_tokens or OUTPUT_TOKENS
        self._outputs = parse_lengths("--output-tokens", outputs, "output_tokens")
        self._turns = None if options.turns is None else parse_lengths("--turns", options.turns)
        self._own_fields = dict(_field(text) for text in options.field)
        if options.temperature is not None:
            self._own_fields["temperature"] = options.temperature
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
        corpus = None if self._items else await open_corpus(client, model, self._text)
        # Outputs have the given lengths only if the model cannot end them earlier.
        ignore_eos = not self._items if options.ignore_eos is None else options.ignore_eos
        return BodySettings(
            model=model,
            chat=options.chat,
            streamed=not options.no_stream,
            fields={"temperature": 0.0} | self._own_fields,
            chunk_usage=not options.final_usage,
            ignore_eos=ignore_eos,
            items=self._items,
            corpus=corpus,
        )

    @property
    def user_fields(self) -> set[str]:
        """The fields of a call's body that the user gave; these are never left out."""
        own = () if self._options.ignore_eos is None else ("ignore_eos",)
        fields = {*own, *self._own_fields, *(name for item in self._items for name in item.fields)}
        return fields - {MAX_TOKENS}  # it may be renamed, never dropped

    def report_settings(self) -> dict[str, Any]:
        """Return the given options for `settings` of the report."""
        given = {name: getattr(self._options, name) for name in _REPORTED}
        given = {name: str(v) if isinstance(v, Path) else v for name, v in given.items()}
        return {name: value for name, value in given.items() if value not in (None, (), False)}

    # -- inside

    def _generate(self, load: OfferedLoad, seed: int) -> Iterator[TraceRequest]:
        options = self._options
        count = self._count(load)
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

    def _count(self, load: OfferedLoad) -> int:
        """Return the number of requests, or of conversations, to generate for a run."""
        options = self._options
        if options.requests is not None:
            return max(options.requests, load.concurrency or 0)  # a sweep may have more clients
        if load.rate_per_s is not None and options.duration is not None:
            return ENDLESS  # `requests` stops at the duration
        return max(MIN_REQUESTS, ROUNDS * (load.concurrency or 0))

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


def _refuse_ignored(options: LoadOptions) -> None:
    """Raise `FieldError` for an option that other options make ineffective."""
    traced, own = options.trace is not None, options.prompts is not None
    is_open = traced or options.rate is not None
    given = {n: getattr(options, n) not in (None, False) for n in options.__struct_fields__}
    for name, ignored, why in (
        ("concurrency", is_open, "an open loop has no clients"),
        ("rate", traced, "the trace has its own: give --rate-scale"),
        ("arrivals", options.rate is None, "there are no arrivals: give --rate"),
        ("rate_scale", not traced, "there is no --trace"),
        *((name, not traced, "there is no --trace") for name in Reading.__struct_fields__),
        ("find_rate", not options.slo, "there is not an objective: give --slo"),
        ("find_rate", options.rate is None, "there is no rate to begin with: give --rate"),
        ("sweep", options.find_rate, "--find-rate chooses the loads"),
        ("goodput_share", not options.find_rate, "nothing is searched for: give --find-rate"),
        ("sweep", traced, "a trace has one load: give --rate-scale"),
        ("think", is_open and options.turns is None, "an open loop does not wait for answers"),
        ("prompt_tokens", traced or own, "prompts have their own lengths"),
        ("output_tokens", traced, "the trace has lengths"),
        ("text", own, "--prompts are the text"),
        ("prompts", options.turns is not None, "turns are cut to given lengths"),
        ("turns", traced, "the trace has its sessions"),
        ("system_tokens", options.turns is None, "no conversation shares it: give --turns"),
        ("final_usage", options.no_stream, "whole answers have one usage"),
    ):
        if given[name] and ignored:
            raise FieldError(flag_of(name), f"would be ignored, since {why}", "leave it out")


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


def _item(where: str, line: str, chat: bool) -> Item:
    try:
        record = json.loads(line)
    except (ValueError, RecursionError) as error:
        raise FieldError("--prompts", f"{where} is not JSON ({error})", "fix it") from error
    if not isinstance(record, dict):
        raise FieldError("--prompts", f"{where} is not an object", 'write {"prompt": "..."}')
    prompt, messages = record.pop("prompt", None), record.pop("messages", None)
    if (prompt is None) == (messages is None) or (messages is not None and not chat):
        remedy = "give a prompt, or messages with --chat"
        raise FieldError("--prompts", f"{where} has no prompt of this kind", remedy)
    if chat and not isinstance(prompt, str | None):
        raise FieldError("--prompts", f"{where}: a chat takes text", "leave --chat out")
    for name in ("stream", "stream_options", "model"):
        if name in record:
            raise FieldError("--prompts", f"{where} has {name}", "set it for the whole run")
    if record.get("n", 1) != 1 or record.get("best_of", 1) != 1:
        raise FieldError(
            "--prompts", f"{where} asks for several choices", "times are measured for n=1"
        )
    for name in (MAX_TOKENS, MAX_COMPLETION_TOKENS):
        tokens = record.get(name, 1)
        if not isinstance(tokens, int) or tokens < 1:
            raise FieldError("--prompts", f"{where}: {name} is {tokens!r}", "give 1 or more")
    return Item(prompt=prompt, messages=messages, fields=record)
