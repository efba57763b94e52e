"""Chat messages, checked and converted for chat templates."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from contextlib import suppress
from functools import partial
from itertools import groupby
from typing import Any

import msgspec

from cbatch.core.request.errors import FieldError, short
from cbatch.text.chat import RESERVED_VARIABLES, CallArguments

# Types of content parts, also those of the Responses API, in which clients keep conversations.
_TEXT_PARTS = ("text", "input_text", "output_text", "refusal")
_JSON_MARK, _ENDS = re.compile(r'\\.|["{}\[\]]', re.DOTALL), {"{": "}", "[": "]"}
ROLES = ("system", "developer", "user", "assistant", "tool", "function")


def list_problem(value: Any) -> str:
    if value is None:
        return "is missing"
    return "is empty" if value == [] else f"{short(value)} is not a list"


def conversation(value: Any) -> list[dict[str, Any]]:
    """Return the messages with their content as text; parts are joined by line breaks. Null and
    `[]` count as absent, and an assistant's message may lack content. Raises `FieldError`."""
    remedy = 'send [{"role": "user", "content": "..."}]'
    if not isinstance(value, list) or not value:
        raise FieldError("messages", list_problem(value), remedy)
    messages = []
    for at, message in enumerate(value):
        field = f"messages[{at}]"
        if not isinstance(message, dict) or message.get("role") not in ROLES:
            raise FieldError(field, "has no known role", f"use {', '.join(ROLES)}")
        content = message.get("content")
        if not content and message["role"] == "assistant":
            content = message.get("refusal", content)
        if content is None and message["role"] != "assistant":
            raise FieldError(f"{field}.content", "is missing", "send a text")
        text = None if content is None else _content(content, f"{field}.content")
        messages.append({**_without_absent(message), "content": text})
        if "function_call" in messages[-1]:
            raise FieldError(f"{field}.function_call", "is not supported", "send `tool_calls`")
        if "tool_calls" in messages[-1]:
            calls = _parsed_calls(message["tool_calls"], f"{field}.tool_calls")
            messages[-1]["tool_calls"] = calls
        _copy_thought(messages[-1], field)
    return _with_ordered_results(messages)


def _with_ordered_results(messages: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return the messages with the results after a reply in the order of its calls: many templates
    write no ids. Results of unknown calls and other messages come after them, in their order."""
    ordered: list[dict[str, Any]] = []
    places: dict[str, int] = {}
    for is_reply, group in groupby(messages, lambda message: message["role"] == "assistant"):
        turn = list(group)
        if is_reply:
            ids = [str(call.get("id")) for each in turn for call in each.get("tool_calls", ())]
            places = {call_id: at for at, call_id in reversed(list(enumerate(ids)))}
        elif places:
            turn.sort(key=partial(_place, places))
        ordered += turn
    return ordered


def _place(places: Mapping[str, int], message: Mapping[str, Any]) -> int:
    if message["role"] not in ("tool", "function"):
        return len(places) + 1
    return places.get(str(message.get("tool_call_id")), len(places))


def _without_absent(record: dict[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in record.items() if value is not None and value != []}


def _copy_thought(message: dict[str, Any], field: str) -> None:
    """Store the thought of an earlier reply under all names that templates read. The template of
    gpt-oss reads `thinking`, and rejects it together with both content and calls."""
    name = "reasoning" if message.get("reasoning") else "reasoning_content"
    thought = _content(message.get(name, ""), f"{field}.{name}")
    if thought:
        message["reasoning"] = message["reasoning_content"] = thought
    if thought and not (message.get("tool_calls") and message["content"]):
        message.setdefault("thinking", thought)


def _parsed_calls(value: Any, field: str) -> list[dict[str, Any]]:
    """Return tool calls with parsed arguments: clients send JSON text, templates expect objects."""
    try:
        calls = msgspec.convert(value, list[_ToolCall])
        return [
            {
                "type": "function",
                **_without_absent(raw),
                "function": {
                    **_without_absent(raw["function"]),
                    "arguments": call.function.decoded(),
                },
            }
            for raw, call in zip(value, calls, strict=True)
        ]
    except (msgspec.ValidationError, msgspec.DecodeError) as error:
        remedy = 'send [{"id", "type": "function", "function": {"name", "arguments"}}]'
        raise FieldError(field, f"cannot be read ({error})", remedy) from error


class _CalledFunction(msgspec.Struct):
    name: str
    arguments: str | dict[str, Any] | None = None

    def decoded(self) -> CallArguments:
        if isinstance(self.arguments, dict):
            return CallArguments(self.arguments, json.dumps(self.arguments, ensure_ascii=False))
        text = self.arguments if self.arguments and not self.arguments.isspace() else "{}"
        return CallArguments(_parsed(text), text)


def _parsed(text: str) -> dict[str, Any]:
    """Return a call's arguments. An object in a JSON text is read, and one that `max_tokens` has
    cut is closed. Anything else is one argument, `input`."""
    for json_text in (text, _closed(text)):
        with suppress(msgspec.DecodeError, RecursionError):
            value = msgspec.json.decode(json_text)
            value = msgspec.json.decode(value) if isinstance(value, str) else value
            if value is None or isinstance(value, dict):
                return value or {}
    return {"input": text}


def _closed(text: str) -> str:
    """Return JSON that was cut with an end for each string, list and object that is open."""
    open_ends, quoted = [], False
    for match in _JSON_MARK.finditer(text):
        mark = match[0]
        if mark == '"':
            quoted = not quoted
        elif not quoted and mark in _ENDS:
            open_ends.append(_ENDS[mark])
        elif not quoted and open_ends and mark == open_ends[-1]:
            open_ends.pop()
    return text + '"' * quoted + "".join(reversed(open_ends))


class _ToolCall(msgspec.Struct):
    function: _CalledFunction


def _content(value: Any, field: str) -> str:
    if isinstance(value, str):
        return value
    if not isinstance(value, list):
        raise FieldError(field, "is not a text", "send a text, or a list of text parts")
    texts = []
    for at, part in enumerate(value):
        kind = part.get("type") if isinstance(part, dict) else part
        if not isinstance(part, dict) or kind not in _TEXT_PARTS:
            problem = f"{short(kind)} is not supported yet"
            raise FieldError(f"{field}[{at}]", problem, "send parts of type 'text'")
        member = "refusal" if kind == "refusal" else "text"
        if not isinstance(part.get(member), str):
            raise FieldError(f"{field}[{at}].{member}", "is not a text", "send a text")
        texts.append(part[member])
    return "\n".join(texts)


def template_variables(variables: Mapping[str, Any] | None) -> Mapping[str, Any]:
    """Return the variables. Raises `FieldError` for names that the server sets itself."""
    for name in variables or {}:
        if name in RESERVED_VARIABLES:
            raise FieldError(
                "chat_template_kwargs", f"{name!r} is set by the server", "leave it out"
            )
    return variables or {}
