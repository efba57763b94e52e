"""Tool calls whose arguments are not JSON: their text becomes a name and the text of an object."""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from typing import Any

import msgspec

from cbatch.text.forced_tools import Tool

TextParameters = frozenset[tuple[str, str, str]]  # a function, its parameter, and a kind of value

_LITERALS = {"True": "true", "False": "false", "None": "null"}  # as Qwen's template writes them
_BARE_KEY = re.compile(r'([{,]\s*)([^\s"{}\[\],:]+)(?=\s*:)')


def text_parameters(tools: Sequence[Tool]) -> TextParameters:
    """Return the kinds of values, "string" and "null", of parameters that have no other by their
    schema. Their values are texts, also if they look like JSON."""
    names: set[tuple[str, str, str]] = set()
    for function in (tool.function for tool in tools):
        properties = (function.parameters or {}).get("properties")
        for name, schema in properties.items() if isinstance(properties, dict) else ():
            kinds = _kinds(schema)
            if "string" in kinds and kinds <= {"string", "null"}:
                names.update((function.name, name, kind) for kind in kinds)
    return frozenset(names)


def _kinds(schema: Any) -> set[str]:
    """Return the types of JSON values that a schema allows; "any" if it does not say."""
    if not isinstance(schema, dict):
        return {"any"}
    options, kinds = schema.get("anyOf"), schema.get("type", "any")
    if isinstance(options, list) and options:
        return set().union(*map(_kinds, options))
    values = schema.get("enum")
    if "type" not in schema and isinstance(values, list) and values:
        return {"string" if isinstance(value, str) else "any" for value in values}
    return {str(kind) for kind in (kinds if isinstance(kinds, list) else [kinds])}


def may_begin(head: str, partial_head: str, text: str) -> bool:
    """Return whether a call may begin with a text. Without `head`, `partial_head` is a pattern."""
    if head:
        return head.startswith(text.lstrip()[: len(head)])
    return re.fullmatch(partial_head, text, re.DOTALL) is not None


def read_written(
    call: str, pair: str, text: str, texts: TextParameters, *, ended: bool
) -> tuple[str, str] | None:
    """Read a call by a pattern of its name and arguments. `pair` is a pattern of one argument, or
    empty: the arguments are Gemma's, `{key:<|"|>text<|"|>,other:{key:[1,true]}}`. Return None if
    the text is no call, or if it may lack a part since no tag `ended` it.

    Replies are untrusted and parsed between those of other requests, so time is linear: a pattern
    matches at one position only."""
    match = re.fullmatch(call, text, re.DOTALL)
    if match is None:
        return None
    if not pair:
        parts = match[2].split('<|"|>')
        parts[::2] = [_BARE_KEY.sub(r'\1"\2"', part) for part in parts[::2]]
        parts[1::2] = [json.dumps(part, ensure_ascii=False) for part in parts[1::2]]
        arguments = "".join(parts)
        return (match[1], arguments) if _is_json(arguments, dict) else None
    body = match[2].rstrip()
    rest = body.removesuffix("</function>").rstrip()
    if not ended and rest == body and not rest.endswith(("</parameter>", "</arg_value>")):
        return None
    members, at, one = [], 0, re.compile(pair, re.DOTALL)
    while at < len(rest):
        read = one.match(rest, at)
        if read is None:
            return None
        at, key, value = read.end(), read[1].strip(), read[2]
        argument = _value(value, match[1], key, texts)
        members.append(f"{json.dumps(key, ensure_ascii=False)}: {argument}")
    return match[1], f"{{{', '.join(members)}}}" if members else ""


def _value(text: str, function: str, key: str, texts: TextParameters) -> str:
    literal = _LITERALS.get(text, text)
    null = literal == "null" and (function, key, "null") in texts
    if null or ((function, key, "string") not in texts and _is_json(literal, Any)):
        return literal
    return json.dumps(text, ensure_ascii=False)


def _is_json(text: str, kind: Any) -> bool:
    try:
        msgspec.json.decode(text.encode(), type=kind)
    except (msgspec.DecodeError, RecursionError):
        return False
    return True
