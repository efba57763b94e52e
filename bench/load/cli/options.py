"""The options of `cbatch bench`, in their groups."""

from __future__ import annotations

import argparse
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from cbatch.cli.output import add_json_option
from sim.cli.trace_options import add_reading_options

CONCURRENCY = 8
PROMPT_TOKENS, OUTPUT_TOKENS, ARRIVALS = "128", "64", "poisson"
GOODPUT_SHARE = 0.99
# Name, kind (a type, `bool` for a switch, `list` for what may be repeated), metavar, help, default.
Row = tuple[Any, ...]
_LOAD: tuple[Row, ...] = (
    ("--concurrency", str, "N[,N...]", f"clients; several: a sweep ({CONCURRENCY})"),
    ("--rate", str, "R[,R...]", "open loop: requests a second"),
    ("--arrivals", str, "LAW", "poisson (default), constant, gamma:CV, weibull:CV, ..."),
    ("--trace", str, "FILE", "open loop: the arrivals of a trace"),
    ("--rate-scale", float, "X", "the trace X times as fast"),
)
_RUN: tuple[Row, ...] = (
    ("--sweep", bool, None, "double the load until nothing is won"),
    ("--find-rate", bool, None, "go on from --rate to the highest at which every --slo is kept"),
    ("--requests", int, "N", "of each run (conversations with --turns)"),
    ("--duration", float, "S", "send for so long at most"),
    ("--ramp", float, "S", "reach the load in so long"),
    ("--think", float, "S", "pause of a client"),
    ("--seed", int, None, "of everything that is drawn", 0),
)
_LENGTHS = f"length ({OUTPUT_TOKENS}): N, uniform:LOW:HIGH, lognormal:MEAN:CV, zipf:A:LOW:HIGH"
_PROMPTS = (
    "demo, a prompt a line, or .jsonl with fields of calls; of a --trace its arrivals and "
    "output lengths count then"
)
_WORDS: tuple[Row, ...] = (
    ("--prompt-tokens", str, "LAW", f"length ({PROMPT_TOKENS})"),
    ("--output-tokens", str, "LAW", _LENGTHS),
    ("--text", Path, "FILE", "what prompts are cut from"),
    ("--prompts", str, "FILE", _PROMPTS),
    ("--turns", str, "LAW", "conversations of so many turns"),
    ("--system-tokens", int, "N", "that they share"),
)
_CALLS: tuple[Row, ...] = (
    ("--chat", bool, None, "chat instead of completions"),
    ("--no-stream", bool, None, "whole answers"),
    ("--model", str, "NAME", "default: the first the server names"),
    ("--api-key", str, "KEY", "also: $CBATCH_API_KEY"),
    ("--temperature", float, None, "default: 0"),
    ("--field", list, "NAME=JSON", "of every call"),
    ("--timeout", float, "S", "of a call", 600.0),
    ("--final-usage", bool, None, "do not ask for the usage of every chunk"),
)
_SHARE = f"with --find-rate: of calls, to keep every --slo ({GOODPUT_SHARE})"
_MEASURING: tuple[Row, ...] = (
    ("--warmup", int, "N", "requests before, uncounted", 0),
    ("--repeats", int, "N", "for 95 %% intervals", 1),
    ("--slo", list, "NAME=S", "ttft, tpot or e2e in seconds, for goodput; repeatable"),
    ("--goodput-share", float, "X", _SHARE),
    ("--max-errors", float, "SHARE", "beyond it the exit is 1", 0.01),
    ("--processes", int, "N", "of the client", 1),
    ("--csv", Path, "FILE", "write a row of figures a load"),
    ("--records", Path, "FILE", "write a JSON line a call"),
    ("--page", Path, "FILE", "write an HTML page of the runs"),
    ("--quiet", bool, None, "nothing while it runs"),
    ("--self-test", bool, None, "no URL: what the client itself can take"),
)


def add_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("url", nargs="?", metavar="URL", help="http://host:8000")
    load = parser.add_argument_group("load")
    _add(load, _LOAD)
    add_reading_options(load)
    _add(load, _RUN)
    words = parser.add_argument_group("what is asked")
    _add(words, _WORDS)
    words.add_argument("--ignore-eos", action=argparse.BooleanOptionalAction)
    _add(parser.add_argument_group("calls"), _CALLS)
    measuring = parser.add_argument_group("measuring")
    _add(measuring, _MEASURING)
    add_json_option(measuring, "the whole report")


def _add(group: argparse._ArgumentGroup, rows: Iterable[Row]) -> None:
    for name, kind, metavar, words, *default in rows:
        if kind is bool:
            group.add_argument(name, action="store_true", help=words)
        elif kind is list:
            group.add_argument(name, action="append", default=[], metavar=metavar, help=words)
        else:
            value = default[0] if default else None
            group.add_argument(name, type=kind, metavar=metavar, help=words, default=value)
