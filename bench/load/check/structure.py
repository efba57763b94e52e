"""Structure: answers under a schema are valid JSON of it, and required calls are calls."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable
from functools import partial
from typing import Any

from bench.load.check.run import Check, CheckTrial
from bench.load.check.server import Answer, Body

MAX_TOKENS = 400
SIGNS = ("\u00e9\u2603", "\U0001f600", 'a"\\b')
Valid = Callable[[Any], bool]


def _object(**properties: Any) -> dict[str, Any]:
    closed = {"required": list(properties), "additionalProperties": False}
    return {"type": "object", "properties": properties, **closed}


def _is_record(value: Any) -> bool:
    is_object = isinstance(value, dict) and value.keys() == {"name", "size"}
    return (
        is_object
        and isinstance(value["name"], str)
        and len(value["name"]) <= 20
        and type(value["size"]) is int
    )


RECORD = _object(name={"type": "string", "maxLength": 20}, size={"type": "integer"})
LIST = {"type": "array", "items": {"type": "boolean"}, "minItems": 1, "maxItems": 3}
SCHEMAS: list[tuple[dict[str, Any], Valid]] = [
    (RECORD, _is_record),
    (LIST, lambda v: type(v) is list and 1 <= len(v) <= 3 and all(type(x) is bool for x in v)),
    (_object(sign={"enum": SIGNS}), lambda v: v in [{"sign": sign} for sign in SIGNS]),
]
# Without `strict`, a server need not keep calls that the model chose to the tool's schema.
FUNCTION = {"name": "measure", "description": "Measure.", "parameters": RECORD, "strict": True}
TOOLS: Body = {"tools": [{"type": "function", "function": FUNCTION}]}
REASONING: Body = {"chat_template_kwargs": {"enable_thinking": True}}
KINDS: dict[str, tuple[str, Body]] = {
    "schema": ("answers of a schema", {}),
    "schema-tools": ("answers of a schema, with tools", TOOLS),
    "schema-reasoning": ("answers of a schema, with reasoning", REASONING),
    "schema-both": ("answers of a schema, with reasoning and tools", TOOLS | REASONING),
    "required": ("required calls", TOOLS | {"tool_choice": "required"}),
}


async def _trial(trial: CheckTrial, kind: str) -> None:
    schema, valid = trial.rng.choice(SCHEMAS)
    text = f"Describe a thing as JSON.\n{trial.server.prompt(trial.rng, 40)}"
    body: Body = {"messages": [{"role": "user", "content": text}], "max_tokens": MAX_TOKENS}
    body |= {"temperature": 0.8, "seed": trial.rng.getrandbits(31)} | KINDS[kind][1]
    if kind != "required":
        shape = {"name": "thing", "schema": schema, "strict": True}
        body["response_format"] = {"type": "json_schema", "json_schema": shape}
    whole = await trial.server.require(body, kind, streamed=False)
    calls = [trial.server.ask(body), trial.server.ask(body | {"temperature": 0.0})]
    for answer in (whole, *await asyncio.gather(*calls)):
        if answer.first.finish_reason == "length" and not answer.error:
            trial.seen = "some answers were cut at max_tokens"
        elif problem := _problem(answer, valid, kind):
            trial.found(problem, body)


def _problem(answer: Answer, valid: Valid, kind: str) -> str | None:
    choice = answer.first
    if answer.error:
        return answer.error[:200]
    for call in choice.calls:
        if call["name"] != "measure" or not _holds(call["arguments"], _is_record):
            return f"the call {call} is not one of the tool"
    if kind == "required" and not choice.calls:
        return f"no call, though one is required: {choice.text[:80]!r}"
    if not choice.calls and not _holds(choice.text, valid):
        return f"not of the schema: {choice.text[:120]!r}"
    return None


def _holds(text: str, valid: Valid) -> bool:
    try:
        value = json.loads(text)
        json.dumps(value, ensure_ascii=False).encode()  # no half of a surrogate pair
    except ValueError:
        return False
    return valid(value)


CHECKS = [Check(kind, what, partial(_trial, kind=kind)) for kind, (what, _) in KINDS.items()]
