"""The workload of `cbatch bench` from its options: requests and prompts."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator
from itertools import islice, takewhile
from pathlib import Path
from typing import Any

from bench.load.client.bodies import (
    MAX_COMPLETION_TOKENS,
    MAX_TOKENS,
    BodySettings,
    Item,
    load_text,
    open_corpus,
)
from bench.load.client.http import HttpClient
from bench.load.run.options import (
    ARRIVALS_PROCESS,
    OUTPUT_TOKENS,
    PROMPT_TOKENS,
    LoadOptions,
    OfferedLoad,
)
from cbatch.core.request.errors import FieldError
from cbatch.demo import demo_prompts, edit_prompts
from sim.workload.distributions import parse_arrivals, parse_lengths
from sim.workload.generate import Arrivals, Conversations, converse, generate
from sim.workload.options import OpenedTrace
from sim.workload.traces.changes import scale
from sim.workload.traces.files import read_whole
from sim.workload.traces.request import TraceRequest

# Default number of requests: at least 64, and at least 8 per client of a closed loop.
MIN_REQUESTS, ROUNDS = 64, 8
ENDLESS = 10**9  # more requests than a run can send
DEMO = "demo"


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


def _item(where: str, line: str, chat: bool) -> Item:
    def refuse(problem: str, remedy: str) -> FieldError:
        return FieldError("--prompts", f"{where}{problem}", remedy)

    try:
        record = json.loads(line)
    except (ValueError, RecursionError) as error:
        raise refuse(f" is not JSON ({error})", "fix it") from error
    if not isinstance(record, dict):
        raise refuse(" is not an object", 'write {"prompt": "..."}')
    prompt, messages = record.pop("prompt", None), record.pop("messages", None)
    if (prompt is None) == (messages is None) or (messages is not None and not chat):
        raise refuse(" has no prompt of this kind", "give a prompt, or messages with --chat")
    if chat and not isinstance(prompt, str | None):
        raise refuse(": a chat takes text", "leave --chat out")
    for name in {"stream", "stream_options", "model"} & record.keys():
        raise refuse(f" has {name}", "set it for the whole run")
    if record.get("n", 1) != 1 or record.get("best_of", 1) != 1:
        raise refuse(" asks for several choices", "times are measured for n=1")
    for name in (MAX_TOKENS, MAX_COMPLETION_TOKENS):
        tokens = record.get(name, 1)
        if not isinstance(tokens, int) or tokens < 1:
            raise refuse(f": {name} is {tokens!r}", "give 1 or more")
    return Item(prompt=prompt, messages=messages, fields=record)
