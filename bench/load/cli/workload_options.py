"""The workload of `cbatch bench`, from its options."""

from __future__ import annotations

import argparse
import json
import math
from collections.abc import Callable, Iterable, Iterator
from itertools import islice, takewhile
from pathlib import Path
from typing import Any

from bench.load.cli.options import ARRIVALS, CONCURRENCY, OUTPUT_TOKENS, PROMPT_TOKENS
from bench.load.client.bodies import MAX_COMPLETION_TOKENS, MAX_TOKENS, BodySettings, Item
from bench.load.client.http import HttpClient
from bench.load.client.text import load_text, open_corpus
from bench.load.run.runner import OfferedLoad
from cbatch.core.request.errors import FieldError
from cbatch.demo import demo_prompts, edit_prompts
from sim.cli import distributions as laws
from sim.cli.scenario import flag_of
from sim.cli.trace_options import OpenedTrace
from sim.distributions.lengths import Lengths
from sim.traces.changes import scale
from sim.traces.files import read_whole
from sim.traces.request import TraceRequest
from sim.workload.generate import Arrivals, Conversations, converse, generate

LEAST_REQUESTS, ROUNDS = 64, 8  # of a run: at least, and of each client of a closed loop
ENDLESS = 10**9
_READING = ("format", "skip_empty", "block_tokens", "time_unit", "spread")
DEMO = "demo"
_WORDS = (
    *("trace", "rate_scale", "spread", "arrivals", "ramp", "think", "duration", "prompt_tokens"),
    *("output_tokens", "prompts", "text", "turns", "system_tokens", "chat", "no_stream"),
    *("field", "warmup", "repeats", "processes", "seed", "final_usage"),
)


def parse_loads(args: argparse.Namespace) -> list[OfferedLoad]:
    """Raises `FieldError`."""
    if args.trace is not None:
        return [OfferedLoad()]
    if args.rate is not None:
        rates = [OfferedLoad(rate_per_s=each) for each in _numbers("--rate", args.rate, float)]
        if args.find_rate and len(rates) > 1:
            raise FieldError("--rate", "has several", "give --find-rate one to begin with")
        return rates
    clients = args.concurrency or (str(CONCURRENCY) if not args.sweep else "1")
    loads = [OfferedLoad(concurrency=int(each)) for each in _numbers("--concurrency", clients, int)]
    most = max(load.concurrency or 0 for load in loads)
    if args.requests is not None and args.requests < most:
        few = f"{args.requests} for {most} clients"
        raise FieldError("--requests", few, "give each client one at least")
    return loads


def _numbers(option: str, text: str, kind: type[int] | type[float]) -> list[float]:
    try:
        found = [kind(each) for each in text.split(",")]
    except ValueError as error:
        raise FieldError(option, f"{text!r} is no list of numbers", "write 1,2,4") from error
    if not all(0 < each < math.inf for each in found):
        raise FieldError(option, f"{text!r} is not allowed", "give positive numbers")
    return found


class Workload:
    """Requests and the words of their prompts. Raises `FieldError` for what does not fit."""

    def __init__(self, args: argparse.Namespace) -> None:
        _refuse_ignored(args)
        _refuse_values(args)
        self._args = args
        self._trace = None if args.trace is None else OpenedTrace(args, args.seed)
        self._items = _items(args)
        self._prompts = parse_lengths("--prompt-tokens", args.prompt_tokens or PROMPT_TOKENS)
        self._outputs = parse_lengths("--output-tokens", args.output_tokens or OUTPUT_TOKENS)
        self._turns = None if args.turns is None else parse_lengths("--turns", args.turns)
        self._own_fields = dict(_field(text) for text in args.field)
        if args.temperature is not None:
            self._own_fields["temperature"] = args.temperature
        self._text = "" if self._items else load_text(args.text)
        if args.rate is not None:
            self._arrivals(float(args.rate.split(",")[0]))

    def requests(self, load: OfferedLoad, seed: int) -> list[TraceRequest]:
        """Of one run. Those of a trace are the same in every run."""
        args = self._args
        most = args.requests
        if self._trace is not None:
            found: Iterable[TraceRequest] = self._trace.requests()
            if args.rate_scale is not None:
                found = scale(found, rate=args.rate_scale)
        else:
            found, most = self._made(load, seed), None
        if args.duration is not None and load.concurrency is None:
            found = takewhile(lambda request: request.arrival_s < args.duration, found)
        return list(islice(found, most))

    async def bodies(self, client: HttpClient, model: str) -> BodySettings:
        args = self._args
        corpus = None if self._items else await open_corpus(client, model, self._text)
        # Lengths are kept only by a model that may not end before.
        ignore_eos = not self._items if args.ignore_eos is None else args.ignore_eos
        return BodySettings(
            model=model,
            chat=args.chat,
            streamed=not args.no_stream,
            fields={"temperature": 0.0} | self._own_fields,
            chunk_usage=not args.final_usage,
            ignore_eos=ignore_eos,
            items=self._items,
            corpus=corpus,
        )

    @property
    def chosen(self) -> set[str]:
        """The fields of a body that the user gave."""
        asked = () if self._args.ignore_eos is None else ("ignore_eos",)
        own = {*asked, *self._own_fields, *(name for item in self._items for name in item.fields)}
        return own - {MAX_TOKENS}  # it is sent by another name where it has to be

    def words(self) -> dict[str, Any]:
        """What was asked for, for the report."""
        found = {name: getattr(self._args, name) for name in _WORDS}
        found = {name: str(v) if isinstance(v, Path) else v for name, v in found.items()}
        return {name: value for name, value in found.items() if value not in (None, [], False)}

    # -- inside

    def _made(self, load: OfferedLoad, seed: int) -> Iterator[TraceRequest]:
        args = self._args
        count = self._count(load)
        arrivals = self._arrivals(load.rate_per_s or 1.0)
        if self._turns is None:
            return generate(arrivals, self._prompts, self._outputs, requests=count, seed=seed)
        conversations = Conversations(
            turns=self._turns,
            messages=self._prompts,
            outputs=self._outputs,
            system_prompt_tokens=args.system_tokens or 0,
            think_s=args.think or 0.0,
        )
        return converse(arrivals, conversations, sessions=count, seed=seed)

    def _count(self, load: OfferedLoad) -> int:
        """Requests to make up, or conversations: as many as can be needed."""
        args = self._args
        if args.requests is not None:
            asked: int = args.requests
            return max(asked, load.concurrency or 0)  # a sweep goes on past them
        if load.rate_per_s is not None and args.duration is not None:
            return ENDLESS  # they are made as they are asked for
        return max(LEAST_REQUESTS, ROUNDS * (load.concurrency or 0))

    def _arrivals(self, rate_per_s: float) -> Arrivals:
        return parse_arrivals("--arrivals", self._args.arrivals or ARRIVALS, rate_per_s)


def _items(args: argparse.Namespace) -> tuple[Item, ...]:
    if args.prompts is None:
        return ()
    if args.prompts == DEMO:
        return tuple(Item(prompt=prompt) for prompt in (*demo_prompts(), *edit_prompts()))
    return read_items(Path(args.prompts), chat=args.chat)


def _field(text: str) -> tuple[str, Any]:
    name, _, value = text.partition("=")
    try:
        return name, json.loads(value)
    except ValueError as error:
        raise FieldError("--field", f"{text!r} is not NAME=JSON", "write top_k=20") from error


Check = tuple[str, Callable[[float], bool]]  # a remedy, and what needs none


def _refuse_values(args: argparse.Namespace) -> None:
    some: Check = "give 1 or more", lambda value: value >= 1
    any_number: Check = "give 0 or more", lambda value: value >= 0
    positive: Check = "give a positive number", lambda value: 0 < value < math.inf
    seconds: Check = "give 0 or more seconds", lambda value: 0 <= value < math.inf
    share: Check = "use a number in (0, 1]", lambda value: 0 < value <= 1
    for name, (remedy, is_right) in {
        "requests": some,
        "repeats": some,
        "processes": some,
        "warmup": any_number,
        "system_tokens": any_number,
        "duration": positive,
        "timeout": positive,
        "rate_scale": positive,
        "goodput_share": share,
        "ramp": seconds,
        "think": seconds,
    }.items():
        value = getattr(args, name)
        if value is not None and not is_right(value):
            raise FieldError(flag_of(name), f"{value} is not allowed", remedy)


def _refuse_ignored(args: argparse.Namespace) -> None:
    """Options that the rest of the command line would leave without effect."""
    traced, own = args.trace is not None, args.prompts is not None
    is_open = traced or args.rate is not None
    given = {name: value not in (None, False) for name, value in vars(args).items()}
    for name, ignored, why in (
        ("concurrency", is_open, "an open loop has no clients"),
        ("rate", traced, "the trace has its own: give --rate-scale"),
        ("arrivals", args.rate is None, "nothing arrives by itself: give --rate"),
        ("rate_scale", not traced, "there is no --trace"),
        *((name, not traced, "there is no --trace") for name in _READING),
        ("find_rate", not args.slo, "there is nothing to keep: give --slo"),
        ("find_rate", args.rate is None, "it has no rate to begin with: give --rate"),
        ("sweep", args.find_rate, "--find-rate chooses the loads"),
        ("goodput_share", not args.find_rate, "nothing is searched for: give --find-rate"),
        ("sweep", traced, "a trace has one load: give --rate-scale"),
        ("think", is_open and args.turns is None, "an open loop waits for nobody"),
        ("prompt_tokens", traced or own, "prompts have their own lengths"),
        ("output_tokens", traced, "the trace has lengths"),
        ("text", own, "--prompts are the text"),
        ("prompts", args.turns is not None, "turns are cut to given lengths"),
        ("turns", traced, "the trace has its sessions"),
        ("system_tokens", args.turns is None, "nobody shares it: give --turns"),
        ("final_usage", args.no_stream, "whole answers have one usage"),
    ):
        if given[name] and ignored:
            raise FieldError(flag_of(name), f"would be ignored, since {why}", "leave it out")


LENGTH_FORMS = "N, uniform:LOW:HIGH, lognormal:MEAN:CV, zipf:EXPONENT:LOW:HIGH"
ARRIVAL_FORMS = "constant, poisson, gamma:CV, weibull:CV, onoff:ON_S:OFF_S, diurnal:SWING:PERIOD_S"


def parse_lengths(option: str, text: str) -> Lengths:
    """Those of `sim.cli.distributions`, colons for commas too, and a number alone. Raises
    `FieldError`."""
    name, _, numbers = text.partition(":")
    if name[:1].isdecimal():
        name, numbers = "fixed", text
    try:
        return laws.parse_lengths(option, f"{name}:{numbers.replace(':', ',')}")
    except FieldError as error:
        raise _refusal(option, text, error, LENGTH_FORMS) from error


def parse_arrivals(option: str, text: str, rate_per_s: float) -> Arrivals:
    """The same of arrivals, which have their rate from elsewhere. Raises `FieldError`."""
    name, separator, numbers = text.partition(":")
    more = f",{numbers.replace(':', ',')}" if separator else ""
    try:
        return laws.parse_arrivals(option, f"{name}:{rate_per_s!r}{more}")
    except FieldError as error:
        raise _refusal(option, text, error, ARRIVAL_FORMS) from error


def read_items(path: Path, *, chat: bool) -> tuple[Item, ...]:
    """`.jsonl`: an object a line, with `prompt` (text or token ids) or `messages`, and any fields
    of the call; any other file: a prompt a line. Raises `FieldError`."""
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
        raise FieldError("--prompts", f"{where} is not JSON ({error})", "mend it") from error
    if not isinstance(record, dict):
        raise FieldError("--prompts", f"{where} is no object", 'write {"prompt": "..."}')
    prompt, messages = record.pop("prompt", None), record.pop("messages", None)
    if (prompt is None) == (messages is None) or (messages is not None and not chat):
        remedy = "give a prompt, or messages with --chat"
        raise FieldError("--prompts", f"{where} has no prompt of its kind", remedy)
    if chat and not isinstance(prompt, str | None):
        raise FieldError("--prompts", f"{where}: a chat takes text", "leave --chat out")
    for name in ("stream", "stream_options", "model"):
        if name in record:
            raise FieldError("--prompts", f"{where} has {name}", "set it for the whole run")
    if record.get("n", 1) != 1 or record.get("best_of", 1) != 1:
        raise FieldError("--prompts", f"{where} wants several choices", "times are of one: n=1")
    for name in (MAX_TOKENS, MAX_COMPLETION_TOKENS):
        tokens = record.get(name, 1)
        if not isinstance(tokens, int) or tokens < 1:
            raise FieldError("--prompts", f"{where}: {name} is {tokens!r}", "give 1 or more")
    return Item(prompt=prompt, messages=messages, fields=record)


def _refusal(option: str, text: str, error: FieldError, forms: str) -> FieldError:
    """In the words of this command; a law that is known says which number is wrong."""
    wrong = error.__cause__
    known = f": {wrong.field} {wrong.problem}" if isinstance(wrong, FieldError) else " is unknown"
    return FieldError(option, f"{text!r}{known}", f"write {forms}")
