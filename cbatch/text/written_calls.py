"""Tool calls whose arguments are not JSON: their text becomes a name and the text of an object."""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from typing import Any

import msgspec

from cbatch.text.forced_tools import Tool

TextParameters = frozenset[tuple[str, str]]  # a function and its parameter

_LITERALS = {"True": "true", "False": "false", "None": "null"}  # as Qwen's template writes them
_BARE_KEY = re.compile(r'([{,]\s*)([^\s"{}\[\],:]+)(?=\s*:)')


def text_parameters(tools: Sequence[Tool]) -> TextParameters:
    """Return the parameters whose values are texts by their schema, also if they look like JSON."""
    names = set()
    for function in (tool.function for tool in tools):
        properties = (function.parameters or {}).get("properties")
        for name, schema in properties.items() if isinstance(properties, dict) else ():
            if isinstance(schema, dict) and schema.get("type") == "string":
                names.add((function.name, name))
    return frozenset(names)


def read_written(call: str, pair: str, text: str, texts: TextParameters) -> tuple[str, str] | None:
    """Read a call by a pattern of its name and arguments. `pair` is a pattern of one argument, or
    empty: the arguments are Gemma's, `{key:<|"|>text<|"|>,other:{key:[1,true]}}`."""
    match = re.fullmatch(call, text, re.DOTALL)
    if match is None:
        return None
    if not pair:
        parts = match[2].split('<|"|>')
        parts[::2] = [_BARE_KEY.sub(r'\1"\2"', part) for part in parts[::2]]
        parts[1::2] = [json.dumps(part, ensure_ascii=False) for part in parts[1::2]]
        arguments = "".join(parts)
        return (match[1], arguments) if _is_json(arguments, dict) else None
    members = []
    for key, value in re.findall(pair, match[2], re.DOTALL):
        value = _LITERALS.get(value, value)
        if (match[1], key) in texts or not _is_json(value, Any):
            value = json.dumps(value, ensure_ascii=False)
        members.append(f"{json.dumps(key, ensure_ascii=False)}: {value}")
    return match[1], f"{{{', '.join(members)}}}" if members else ""


def _is_json(text: str, kind: Any) -> bool:
    try:
        msgspec.json.decode(text.encode(), type=kind)
    except (msgspec.DecodeError, RecursionError):
        return False
    return True
