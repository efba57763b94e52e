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
Valid = Callable[[Any], bool]


def _object(properties: dict[str, Any]) -> dict[str, Any]:
    required = list(properties)
    return {
        "type": "object",
        "properties": properties,
        "required": required,
        "additionalProperties": False,
    }


def _is_record(value: Any) -> bool:
    return (
        isinstance(value, dict)
        and value.keys() == {"name", "size"}
        and isinstance(value["name"], str)
        and len(value["name"]) <= 20
        and type(value["size"]) is int
    )


SCHEMAS: dict[str, tuple[dict[str, Any], Valid]] = {
    "object": (
        _object({"name": {"type": "string", "maxLength": 20}, "size": {"type": "integer"}}),
        _is_record,
    ),
    "list": (
        {"type": "array", "items": {"type": "boolean"}, "minItems": 1, "maxItems": 3},
        lambda v: isinstance(v, list) and 1 <= len(v) <= 3 and all(type(x) is bool for x in v),
    ),
    "escapes": (
        _object({"sign": {"enum": ["\u00e9\u2603", "\U0001f600", 'a"\\b']}}),
        lambda v: v in [{"sign": s} for s in ("\u00e9\u2603", "\U0001f600", 'a"\\b')],
    ),
}
TOOL = {
    "type": "function",
    "function": {
        "name": "measure",
        "description": "Measure a thing.",
        "parameters": SCHEMAS["object"][0],
    },
}
KINDS: dict[str, tuple[str, Body]] = {
    "schema": ("answers of a schema", {}),
    "schema-tools": ("answers of a schema, with tools", {"tools": [TOOL]}),
    "schema-reasoning": (
        "answers of a schema, with reasoning",
        {"chat_template_kwargs": {"enable_thinking": True}},
    ),
    "required": ("required calls", {"tools": [TOOL], "tool_choice": "required"}),
}


async def _trial(trial: CheckTrial, kind: str) -> None:
    name = trial.rng.choice([*SCHEMAS])
    schema, valid = SCHEMAS[name]
    text = f"Describe a thing as JSON.\n{trial.server.prompt(trial.rng, 40)}"
    body: Body = {"messages": [{"role": "user", "content": text}], "max_tokens": MAX_TOKENS}
    body |= {"temperature": 0.8, "seed": trial.rng.randrange(2**31)} | KINDS[kind][1]
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
        return f"{answer.status}: {answer.error[:200]}"
    if choice.calls:
        for call in choice.calls:
            if call["name"] != "measure" or not _holds(call["arguments"], _is_record):
                return f"the call {call} is not one of the tool"
        return None
    if kind == "required":
        return f"no call, though one is required: {choice.text[:80]!r}"
    if not _holds(choice.text, valid):
        return f"not of the schema: {choice.text[:120]!r}"
    return None


def _holds(text: str, valid: Valid) -> bool:
    try:
        value = json.loads(text)
    except ValueError:
        return False
    try:
        json.dumps(value, ensure_ascii=False).encode()
    except UnicodeEncodeError:  # half of a surrogate pair
        return False
    return valid(value)


CHECKS = [Check(kind, what, partial(_trial, kind=kind)) for kind, (what, _) in KINDS.items()]
