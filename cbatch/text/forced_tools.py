"""Tool calls that the client forces: their grammar, and a parser of the reply. `reply_reader`
parses calls that the model makes by its own choice.

If the client names a function, the reply is only its arguments. With "required" the reply is a list
of one or more calls, `[{"name": "f", "arguments": {...}}]`, with exactly this white space.
"""

from __future__ import annotations

import json
import random
import re
import string
from typing import Annotated, Any, Literal, NamedTuple

import msgspec
from msgspec import Meta

from cbatch.core.request.errors import FieldError
from cbatch.core.request.request import StructuredOutputs

MAX_CALLS = 16  # tool calls in one reply
MAX_TOOLS = 128
# Characters where `JsonEnd` stops: in a string; outside strings, numbers, literals, commas, colons.
_IN_STRING, _OUTSIDE_STRING = re.compile(r'["\\\x00-\x1f]'), re.compile(r"[^\s\d,:+.eEtrufalsn-]")
_BEGIN, _ARGUMENTS = '{"name": ', ', "arguments": '
_NO_PARAMETERS: dict[str, Any] = {"type": "object", "properties": {}, "additionalProperties": False}

FunctionName = Annotated[str, Meta(pattern="^[a-zA-Z0-9_.-]{1,128}$")]
# The name of a function in a chat, which may be that of a namespace, a dot, and its own name.
QualifiedName = Annotated[str, Meta(pattern="^[a-zA-Z0-9_.-]{1,257}$")]


class Function(msgspec.Struct, frozen=True, omit_defaults=True):
    """A function's signature. `parameters` is a JSON schema; None: the function takes nothing."""

    name: QualifiedName
    description: str | None = None
    parameters: dict[str, Any] | None = None
    strict: bool | None = None  # accepted, since a forced call always follows the schema


class Tool(msgspec.Struct, frozen=True):
    type: Literal["function"]
    function: Function


class FunctionChoice(msgspec.Struct, frozen=True):
    name: QualifiedName


class NamedChoice(msgspec.Struct, frozen=True):
    type: Literal["function"]
    function: FunctionChoice


Tools = Annotated[list[Tool], Meta(max_length=MAX_TOOLS)]
ToolChoice = Literal["none", "auto", "required"] | NamedChoice


class ForcedCall(NamedTuple):
    """The output that the request forces. `name=None`: the model chooses among the tools."""

    name: str | None
    output: StructuredOutputs


def forced_call(
    tools: list[Tool], choice: ToolChoice | None, *, parallel: bool
) -> ForcedCall | None:
    if choice in (None, "none", "auto"):
        return None
    if not tools:
        raise FieldError("tool_choice", "forces a call without `tools`", "give them")
    parameters = parameters_of(tools)
    if isinstance(choice, NamedChoice):
        name = choice.function.name
        if name not in parameters:
            raise FieldError("tool_choice", f"{name!r} is not among the tools", "name one of them")
        return ForcedCall(name, StructuredOutputs(json=parameters[name]))
    return ForcedCall(None, StructuredOutputs(grammar=_calls_grammar(parameters, parallel)))


def parameters_of(tools: list[Tool]) -> dict[str, dict[str, Any]]:
    schemas = {}
    for at, tool in enumerate(tools):
        name, schema = tool.function.name, tool.function.parameters
        if name in schemas:
            raise FieldError(f"tools[{at}].function.name", f"{name!r} appears twice", "rename it")
        schema = _NO_PARAMETERS if schema is None else schema
        if not schema.keys() & {"type", "$ref", "anyOf", "allOf", "oneOf"}:
            schema = {"type": "object", **schema}
        if schema.get("type", "object") != "object":
            field = f"tools[{at}].function.parameters"
            raise FieldError(field, f"of type {schema['type']!r}", "use an object")
        schemas[name] = schema
    return schemas


def _calls_grammar(parameters: dict[str, dict[str, Any]], parallel: bool) -> str:
    more = f' (", " call){{0,{MAX_CALLS - 1}}}' if parallel else ""
    lines = [f'start: "[" call{more} "]"']
    lines.append("call: " + " | ".join(f"call{at}" for at in range(len(parameters))))
    for at, (name, schema) in enumerate(parameters.items()):
        prefix = _BEGIN + json.dumps(name) + _ARGUMENTS
        lines.append(f'call{at}: {json.dumps(prefix)} arguments{at} "}}"')
        lines.append(f"arguments{at}: %json {json.dumps(schema, ensure_ascii=False)}")
    return "\n".join(lines)


# ---- from text to calls -----------------------------------------------------------------------


class ToolCallPart(NamedTuple):
    """A piece of tool call number `call`. `id` and `name` come with its first piece."""

    call: int
    arguments: str
    id: str | None = None
    name: str | None = None


def call_id() -> str:
    """Return a new id of nine letters and digits; Mistral's templates accept no other."""
    return "".join(random.SystemRandom().choices(string.ascii_letters + string.digits, k=9))


class JsonEnd:
    """Find the closing bracket or quote that ends a JSON value in incremental text. `depth`
    brackets are open at the start. `broken` is set once the text cannot be JSON."""

    def __init__(self, depth: int = 0) -> None:
        self.depth = depth
        self.quoted = self.broken = self._escaped = False

    def push(self, text: str) -> int | None:
        """Return the index after the value if its end is in `text`."""
        at = 0
        while at < len(text) and not self.broken:
            if self._escaped:
                self._escaped, at = False, at + 1
                continue
            match = (_IN_STRING if self.quoted else _OUTSIDE_STRING).search(text, at)
            if match is None:
                break
            character, at = match[0], match.end()
            if character == '"':
                self.quoted = not self.quoted
                if not (self.quoted or self.depth):
                    return at
            elif self.quoted:
                self._escaped = character == "\\"
                self.broken = not self._escaped
            else:
                self.depth += {"{": 1, "[": 1, "}": -1, "]": -1}.get(character, 0)
                self.broken = character not in "{}[]"
                if not self.depth:
                    return at
        return None


class ForcedCallReader:
    """Incremental parser of a forced reply. `name` is as in `ForcedCall`."""

    def __init__(self, name: str | None) -> None:
        self._named = name
        self._prefix = ""  # text that may begin a call, up to its arguments
        self._index = -1
        self._in_arguments = False
        self._json = JsonEnd(1)  # the arguments are inside the call's own bracket
        self._closed = False  # the list of calls has ended

    @property
    def complete(self) -> bool:
        if self._named is None:
            return self._closed
        return self._index == 0 and self._json.depth == 1 and not self._json.quoted

    def push(self, text: str) -> list[ToolCallPart]:
        parts: list[ToolCallPart] = []
        if self._named is not None and self._index < 0 and text:
            parts.append(self._open(self._named))
        while text:
            if not self._in_arguments:
                text = self._read_prefix(text, parts)
                continue
            end = self._json.push(text)
            piece, text = (text, "") if end is None else (text[: end - 1], text[end - 1 :])
            self._in_arguments = not text
            if piece:
                add_part(parts, ToolCallPart(self._index, piece))
        return parts

    def _open(self, name: str) -> ToolCallPart:
        self._index += 1
        self._in_arguments, self._json = True, JsonEnd(1)
        return ToolCallPart(self._index, "", call_id(), name)

    def _read_prefix(self, text: str, parts: list[ToolCallPart]) -> str:
        """Read up to a call's arguments, and return the rest of `text`."""
        read = self._prefix + text
        end = read.find(_ARGUMENTS)
        if end < 0:
            self._prefix, self._closed = read, read.endswith("]")
            return ""
        name = json.loads(read[read.index(_BEGIN) + len(_BEGIN) : end])
        self._prefix = ""
        parts.append(self._open(name))
        return read[end + len(_ARGUMENTS) :]


def add_part(parts: list[ToolCallPart], part: ToolCallPart) -> None:
    if parts and parts[-1].call == part.call:
        last = parts.pop()
        part = last._replace(arguments=last.arguments + part.arguments)
    parts.append(part)
