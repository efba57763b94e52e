"""What is asked for: lengths and arrivals by their names, prompts from files, conversations."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

from bench.load.bodies import Item
from cbatch.core.errors import FieldError
from sim import arrivals, lengths
from sim.lengths import Lengths
from sim.workload import Arrivals

LENGTHS = "N, uniform:LOW:HIGH, lognormal:MEAN:CV, zipf:EXPONENT:LOW:HIGH"
ARRIVALS = "constant, poisson, gamma:CV, weibull:CV, onoff:ON_S:OFF_S"


def parse_lengths(option: str, text: str) -> Lengths:
    """Raises `FieldError`."""
    name, numbers = _numbers(option, text, LENGTHS)
    known: dict[tuple[str, int], Callable[..., Lengths]] = {
        ("", 1): lambda n: lengths.fixed(int(n)),
        ("uniform", 2): lambda low, high: lengths.uniform(int(low), int(high)),
        ("lognormal", 2): lengths.lognormal,
        ("zipf", 3): lambda a, low, high: lengths.zipf(a, int(low), int(high)),
    }
    make = known.get((name, len(numbers)))
    if make is None:
        raise FieldError(option, f"{text!r} is unknown", f"write {LENGTHS}")
    return make(*numbers)


def parse_arrivals(option: str, text: str, rate_per_s: float) -> Arrivals:
    """Raises `FieldError`."""
    name, numbers = _numbers(option, text, ARRIVALS)
    known: dict[tuple[str, int], Callable[..., Any]] = {
        ("constant", 0): lambda rng: arrivals.constant(rate_per_s),
        ("poisson", 0): lambda rng: arrivals.poisson(rate_per_s, rng),
        ("gamma", 1): lambda rng, cv: arrivals.gamma(rate_per_s, cv, rng),
        ("weibull", 1): lambda rng, cv: arrivals.weibull(rate_per_s, cv, rng),
        ("onoff", 2): lambda rng, on, off: arrivals.on_off(rate_per_s, on, off, rng),
    }
    process = known.get((name, len(numbers)))
    if process is None:
        raise FieldError(option, f"{text!r} is unknown", f"write {ARRIVALS}")
    next(process(np.random.default_rng(0), *numbers))  # a bad value is told now
    return lambda rng: process(rng, *numbers)


def read_items(path: Path, *, chat: bool) -> tuple[Item, ...]:
    """`.jsonl`: an object a line, with `prompt` (text or token ids) or `messages`, and any fields
    of the call; any other file: a prompt a line. Raises `FieldError`."""
    try:
        text = path.read_text(encoding="utf-8")
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
    except ValueError as error:
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
    tokens = record.get("max_tokens", 1)
    if not isinstance(tokens, int) or tokens < 1:
        raise FieldError("--prompts", f"{where}: max_tokens is {tokens!r}", "give 1 or more")
    return Item(prompt=prompt, messages=messages, fields=record)


def _numbers(option: str, text: str, forms: str) -> tuple[str, list[float]]:
    """`name:1:2` as its name and numbers; a number alone has no name."""
    name, *rest = text.split(":")
    if name[:1].isdecimal():
        name, rest = "", [name, *rest]
    try:
        return name, [float(each) for each in rest]
    except ValueError as error:
        raise FieldError(option, f"{text!r} is unknown", f"write {forms}") from error
