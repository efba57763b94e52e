"""What is asked for: lengths and arrivals by their names, prompts from files, conversations."""

from __future__ import annotations

import json
from pathlib import Path

from bench.load.bodies import Item
from cbatch.core.errors import FieldError
from sim import laws
from sim.lengths import Lengths
from sim.workload import Arrivals

LENGTHS = "N, uniform:LOW:HIGH, lognormal:MEAN:CV, zipf:EXPONENT:LOW:HIGH"
ARRIVALS = "constant, poisson, gamma:CV, weibull:CV, onoff:ON_S:OFF_S, diurnal:SWING:PERIOD_S"


def parse_lengths(option: str, text: str) -> Lengths:
    """Those of `sim.laws`, colons for commas too, and a number alone. Raises `FieldError`."""
    name, _, numbers = text.partition(":")
    if name[:1].isdecimal():
        name, numbers = "fixed", text
    try:
        return laws.parse_lengths(option, f"{name}:{numbers.replace(':', ',')}")
    except FieldError as error:
        raise _refusal(option, text, error, LENGTHS) from error


def parse_arrivals(option: str, text: str, rate_per_s: float) -> Arrivals:
    """The same of arrivals, which have their rate from elsewhere. Raises `FieldError`."""
    name, separator, numbers = text.partition(":")
    more = f",{numbers.replace(':', ',')}" if separator else ""
    try:
        return laws.parse_arrivals(option, f"{name}:{rate_per_s!r}{more}")
    except FieldError as error:
        raise _refusal(option, text, error, ARRIVALS) from error


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


def _refusal(option: str, text: str, error: FieldError, forms: str) -> FieldError:
    """In the words of this command; a law that is known says which number is wrong."""
    wrong = error.__cause__
    known = f": {wrong.field} {wrong.problem}" if isinstance(wrong, FieldError) else " is unknown"
    return FieldError(option, f"{text!r}{known}", f"write {forms}")
