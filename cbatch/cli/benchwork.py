"""The workload of `cbatch bench`, from its options."""

from __future__ import annotations

import argparse
import json
import math
from collections.abc import Iterable, Iterator
from itertools import islice, takewhile
from pathlib import Path
from typing import TYPE_CHECKING, Any

from cbatch.cli.tracefile import OpenedTrace
from cbatch.core.errors import FieldError

if TYPE_CHECKING:
    from bench.load.bodies import BodySettings, Item
    from bench.load.http import HttpClient
    from bench.load.runner import Load
    from sim.lengths import Lengths
    from sim.traces.request import TraceRequest
    from sim.workload import Arrivals

CONCURRENCY = 8
PROMPT_TOKENS, OUTPUT_TOKENS, ARRIVALS = "128", "64", "poisson"
GOODPUT_SHARE = 0.99
LEAST_REQUESTS, ROUNDS = 64, 8  # of a run: at least, and of each client of a closed loop
ENDLESS = 10**9
DEMO = "demo"
_WORDS = (
    *("trace", "rate_scale", "spread", "arrivals", "ramp", "think", "duration", "prompt_tokens"),
    *("output_tokens", "prompts", "text", "turns", "system_tokens", "chat", "no_stream"),
    *("temperature", "field", "warmup", "repeats", "processes", "seed", "final_usage"),
)


def parse_loads(args: argparse.Namespace) -> list[Load]:
    """Raises `FieldError`."""
    from bench.load.runner import Load

    if args.trace is not None:
        return [Load()]
    if args.rate is not None:
        rates = [Load(rate_per_s=each) for each in _numbers("--rate", args.rate, float)]
        if args.find_rate and len(rates) > 1:
            raise FieldError("--rate", "has several", "give --find-rate one to begin with")
        return rates
    clients = args.concurrency or (str(CONCURRENCY) if not args.sweep else "1")
    loads = [Load(concurrency=int(each)) for each in _numbers("--concurrency", clients, int)]
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
        from bench.load.text import load_text
        from bench.load.workload import parse_lengths

        _refuse_ignored(args)
        _refuse_values(args)
        self._args = args
        self._trace = None if args.trace is None else OpenedTrace(args, args.seed)
        self._items = _items(args)
        self._prompts: Lengths = parse_lengths(
            "--prompt-tokens", args.prompt_tokens or PROMPT_TOKENS
        )
        outputs = args.output_tokens or OUTPUT_TOKENS
        self._outputs: Lengths = parse_lengths("--output-tokens", outputs)
        self._turns = None if args.turns is None else parse_lengths("--turns", args.turns)
        self._fields = dict(_field(text) for text in args.field)
        self._text = "" if self._items else load_text(args.text)
        if args.rate is not None:
            self._arrivals(float(args.rate.split(",")[0]))

    def requests(self, load: Load, seed: int) -> list[TraceRequest]:
        """Of one run. Those of a trace are the same in every run."""
        args = self._args
        found: Iterable[TraceRequest]
        most = args.requests
        if self._trace is not None:
            from sim.traces.changes import scale

            found = self._trace.requests()
            if args.rate_scale is not None:
                found = scale(found, rate=args.rate_scale)
        else:
            found, most = self._made(load, seed), None
        if args.duration is not None and load.concurrency is None:
            found = takewhile(lambda request: request.arrival_s < args.duration, found)
        return list(islice(found, most))

    async def bodies(self, client: HttpClient, model: str) -> BodySettings:
        from bench.load.bodies import BodySettings
        from bench.load.text import open_corpus

        args = self._args
        corpus = None if self._items else await open_corpus(client, model, self._text)
        # Lengths are kept only by a model that may not end before.
        ignore_eos = not self._items if args.ignore_eos is None else args.ignore_eos
        return BodySettings(
            model=model,
            chat=args.chat,
            streamed=not args.no_stream,
            fields={"temperature": args.temperature} | self._fields,
            chunk_usage=not args.final_usage,
            ignore_eos=ignore_eos,
            items=self._items,
            corpus=corpus,
        )

    def words(self) -> dict[str, Any]:
        """What was asked for, for the report."""
        found = {name: getattr(self._args, name) for name in _WORDS}
        found = {name: str(v) if isinstance(v, Path) else v for name, v in found.items()}
        return {name: value for name, value in found.items() if value not in (None, [], False)}

    # -- inside

    def _made(self, load: Load, seed: int) -> Iterator[TraceRequest]:
        from sim.workload import Conversations, converse, generate

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

    def _count(self, load: Load) -> int:
        """Requests to make up, or conversations: as many as can be needed."""
        args = self._args
        if args.requests is not None:
            asked: int = args.requests
            return max(asked, load.concurrency or 0)  # a sweep goes on past them
        if load.rate_per_s is not None and args.duration is not None:
            return ENDLESS  # they are made as they are asked for
        return max(LEAST_REQUESTS, ROUNDS * (load.concurrency or 0))

    def _arrivals(self, rate_per_s: float) -> Arrivals:
        from bench.load.workload import parse_arrivals

        return parse_arrivals("--arrivals", self._args.arrivals or ARRIVALS, rate_per_s)


def _items(args: argparse.Namespace) -> tuple[Item, ...]:
    from bench.load.bodies import Item
    from bench.load.workload import read_items

    if args.prompts is None:
        return ()
    if args.prompts == DEMO:
        from cbatch.demo import demo_prompts, edit_prompts

        return tuple(Item(prompt=prompt) for prompt in (*demo_prompts(), *edit_prompts()))
    return read_items(Path(args.prompts), chat=args.chat)


def _field(text: str) -> tuple[str, Any]:
    name, _, value = text.partition("=")
    try:
        return name, json.loads(value)
    except ValueError as error:
        raise FieldError("--field", f"{text!r} is not NAME=JSON", "write top_k=20") from error


def _refuse_values(args: argparse.Namespace) -> None:
    for option, value, least in (
        ("--requests", args.requests, 1),
        ("--repeats", args.repeats, 1),
        ("--processes", args.processes, 1),
        ("--warmup", args.warmup, 0),
        ("--system-tokens", args.system_tokens, 0),
    ):
        if value is not None and value < least:
            raise FieldError(option, f"{value} is not allowed", f"give {least} or more")
    for option, value in (
        ("--duration", args.duration),
        ("--timeout", args.timeout),
        ("--rate-scale", args.rate_scale),
    ):
        if value is not None and not 0 < value < math.inf:
            raise FieldError(option, f"{value} is not allowed", "give a positive number")
    share = args.goodput_share
    if share is not None and not 0 < share <= 1:
        raise FieldError("--goodput-share", f"{share} is not allowed", "use a number in (0, 1]")
    for option, value in (("--ramp", args.ramp), ("--think", args.think)):
        if value is not None and not 0 <= value < math.inf:
            raise FieldError(option, f"{value} is not allowed", "give 0 or more seconds")


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
        ("format", not traced, "there is no --trace"),
        ("skip_empty", not traced, "there is no --trace"),
        ("spread", not traced, "there is no --trace"),
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
            option = "--" + name.replace("_", "-")
            raise FieldError(option, f"would be ignored, since {why}", "leave it out")
