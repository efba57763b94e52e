"""Requests of OpenAI's Responses API, translated into chats. A request may continue a stored
response: the items of that conversation then come before its own."""

from __future__ import annotations

import base64
import itertools
from collections.abc import Callable, Iterator, Sequence
from typing import Annotated, Any, Literal

import msgspec
from msgspec import Meta, structs

from cbatch.core.request.errors import FieldError
from cbatch.engine.unsupported import Missing
from cbatch.server.protocol import translation
from cbatch.server.protocol.model import ServedModel
from cbatch.server.protocol.requests import ApiRequest, Count
from cbatch.server.protocol.response_store import KeyResponses
from cbatch.text.forced_tools import FunctionName
from cbatch.text.messages import list_problem

RESPONSES_NAMES = {
    **translation.NAMES,
    r"messages\b": "input",
    r"max_tokens": "max_output_tokens",
    r"reasoning_effort": "reasoning.effort",
    r"response_format.*": "text.format",
}
_MAX_OUTPUT_TOKENS = Missing("this name of chat completions", remedy="use max_output_tokens")
REFUSED_FIELDS = translation.REFUSED | {
    "background": Missing("a response in the background", False),
    "conversation": Missing("a stored conversation", remedy="use previous_response_id"),
    "max_completion_tokens": _MAX_OUTPUT_TOKENS,
    "max_tokens": _MAX_OUTPUT_TOKENS,
    "messages": Missing("this name of chat completions", remedy="use input"),
    "moderation": Missing("moderation"),
    "prompt": Missing("a stored prompt", remedy="use instructions and input"),
    "truncation": Missing("truncation of the input", "disabled"),
}
# Members of a request that its response repeats, with their defaults.
REPEATED: dict[str, Any] = {"metadata": {}, "parallel_tool_calls": True, "store": True}
REPEATED |= {"text": {"format": {"type": "text"}}, "tool_choice": "auto", "tools": []}
REPEATED |= {"reasoning": {"effort": None, "summary": None}}
REPEATED |= dict.fromkeys(("instructions", "max_output_tokens", "previous_response_id", "user"))
_COPIES = 3  # of the repeated members that a call holds at once: its own, and two events
ENCRYPTED = "reasoning.encrypted_content"  # the only member of `include` that is supported
_TEXTS = ("input_text", "output_text", "text")
_ITEMS = ("message", "reasoning", "function_call", "function_call_output")


class ContentPart(msgspec.Struct, frozen=True, gc=False):
    type: str
    text: str = ""
    annotations: Any = None
    logprobs: Any = None


class InputItem(msgspec.Struct, frozen=True, gc=False):
    """An item of any type. Ids and states of earlier items are not used."""

    type: str = "message"
    role: str | None = None
    content: str | list[ContentPart] | None = None
    phase: str | None = None
    name: str = ""
    namespace: str | None = None
    call_id: str = ""
    arguments: str = "{}"
    output: str | list[ContentPart] = ""
    summary: list[ContentPart] | None = None
    encrypted_content: str | None = None
    id: str | None = None
    status: str | None = None


class ResponsesTool(msgspec.Struct, frozen=True):
    """A function, or a `namespace` of functions, which a chat calls `namespace.function`."""

    type: str
    name: FunctionName | None = None
    description: str | None = None
    parameters: dict[str, Any] | None = None
    strict: bool | None = None
    tools: list[ResponsesTool] = []


class NamedTool(msgspec.Struct, frozen=True):
    type: Literal["function"]
    name: FunctionName


class Reasoning(msgspec.Struct, frozen=True):
    effort: str | None = None


class TextFormat(msgspec.Struct, frozen=True):
    type: Literal["text", "json_object", "json_schema"]
    schema: dict[str, Any] | None = None
    name: str | None = None
    description: str | None = None
    strict: bool | None = None


class TextOptions(msgspec.Struct, frozen=True):
    format: TextFormat = TextFormat("text")


class NoOptions(msgspec.Struct, frozen=True):
    """Options that have no effect; all are reported as ignored."""


Metadata = Annotated[
    dict[Annotated[str, Meta(max_length=64)], Annotated[str, Meta(max_length=512)]],
    Meta(max_length=16),
]  # with the limits of OpenAI


class ResponsesFields(msgspec.Struct, frozen=True, kw_only=True):
    """Fields of a request that differ from those of a chat."""

    input: str | list[InputItem] | None = None
    instructions: str | None = None
    max_output_tokens: Count | None = None
    previous_response_id: str | None = None
    store: bool = True
    include: list[str] = []
    reasoning: Reasoning = Reasoning()
    text: TextOptions = TextOptions()
    tools: list[ResponsesTool] = []
    tool_choice: Literal["none", "auto", "required"] | NamedTool = "auto"
    parallel_tool_calls: bool = True
    metadata: Metadata = {}
    stream_options: NoOptions = NoOptions()


class ResponsesCall(msgspec.Struct, frozen=True):
    """A request for the builder of its response: `fields` without the input, the members to repeat
    as `sent`, and the store with the conversation's items in JSON, None if the response is not
    kept."""

    fields: ResponsesFields
    sent: dict[str, Any]
    items: tuple[bytes, ...]
    responses: KeyResponses | None


def parse_responses(
    body: bytes,
    model: ServedModel,
    responses: KeyResponses,
    hold: Callable[[int], None] = lambda _: None,
) -> ApiRequest:
    """Return the checked request. Raises `FieldError` naming the field. `hold` counts the bytes
    that parsing takes, before they are used."""
    read = translation.read_body(body, ResponsesFields, REFUSED_FIELDS, model)
    fields = read.fields
    for name in fields.include:
        if name != ENCRYPTED:
            raise FieldError("include", f"{name!r} is not supported", f"give only {ENCRYPTED!r}")
    if not fields.input:
        problem = list_problem(fields.input or None)
        raise FieldError("input", problem, "send a text, or a list of items")
    raw = read.sent["input"]
    if isinstance(fields.input, str):
        new = [InputItem(role="user", content=fields.input)]
        raw = [{"type": "message", "role": "user", "content": raw}]
    else:
        new = fields.input
    before: Sequence[bytes] = ()
    if fields.previous_response_id is not None:
        before = responses.items(fields.previous_response_id)
        hold(_COPIES * (len(body) + sum(map(len, before))))
    contents = (each for item in new for each in (item.content, item.output, item.summary))
    translation.require_parts("input", itertools.chain((list(before), new), contents), model)
    earlier = [msgspec.json.decode(item, type=InputItem) for item in before]
    messages = _messages([*earlier, *new], len(earlier))
    if fields.instructions:
        messages.insert(0, {"role": "system", "content": fields.instructions})
    shape, choice = structs.asdict(fields.text.format), fields.tool_choice
    kind = shape.pop("type")
    chat = read.rest | {
        "messages": messages,
        "max_tokens": fields.max_output_tokens,
        "reasoning_effort": fields.reasoning.effort,
        "response_format": {"type": kind, "json_schema": shape if kind == "json_schema" else None},
        "tool_choice": choice if isinstance(choice, str) else translation.named_choice(choice.name),
        "parallel_tool_calls": fields.parallel_tool_calls,
        "tools": list(_tools(fields.tools, "tools")) or None,
    }
    items = (*before, *map(msgspec.json.encode, raw)) if fields.store else ()
    sent = {name: read.sent[name] for name in REPEATED if name in read.sent}
    kept = responses if fields.store else None
    call = ResponsesCall(structs.replace(fields, input=None), sent, items, kept)
    request = translation.chat_request(chat, model, RESPONSES_NAMES, read.ignored(), call)
    num_bytes = _COPIES * len(msgspec.json.encode(sent)) + sum(map(len, items))
    return structs.replace(request, origin_bytes=num_bytes)


def _tools(
    tools: list[ResponsesTool], field: str, namespace: str | None = None
) -> Iterator[dict[str, Any]]:
    """Yield the functions of a chat. Raises `FieldError` for tools of another type."""
    for at, tool in enumerate(tools):
        if tool.type not in ("function", "namespace") or (namespace and tool.tools):
            raise translation.unsupported(f"{field}[{at}]", tool.type, "function")
        if tool.name is None:
            raise FieldError(f"{field}[{at}].name", "is missing", "name the function")
        if tool.type == "namespace":
            yield from _tools(tool.tools, f"{field}[{at}].tools", tool.name)
        else:
            name = qualified(namespace, tool.name)
            yield translation.function_tool(name, tool.description, tool.parameters, tool.strict)


def qualified(namespace: str | None, name: str) -> str:
    """Return the name that a chat has for a function of a namespace."""
    return name if namespace is None else f"{namespace}.{name}"


# ---- items ------------------------------------------------------------------------------------


def _messages(items: list[InputItem], num_earlier: int) -> list[dict[str, Any]]:
    """Return the messages of a chat; successive items of the assistant become one message. Raises
    `FieldError`, which counts items from the first that is not among the `num_earlier` first."""
    messages: list[dict[str, Any]] = []
    for at, item in enumerate(items):
        field = f"input[{at - num_earlier}]"
        if item.type == "message":
            _add_message(messages, item, field)
        elif item.type == "reasoning":
            if thought := _thought(item, field):
                _reply(messages, "content", "tool_calls")["reasoning"] = thought
        elif item.type == "function_call":
            arguments = _arguments(item.arguments, f"{field}.arguments")
            name = qualified(item.namespace, item.name)
            function = {"name": name, "arguments": arguments}
            call = {"id": item.call_id, "type": "function", "function": function}
            _reply(messages).setdefault("tool_calls", []).append(call)
        elif item.type == "function_call_output":
            content = translation.text_parts(item.output, f"{field}.output", *_TEXTS)
            messages.append({"role": "tool", "tool_call_id": item.call_id, "content": content})
        else:
            raise translation.unsupported(field, item.type, *_ITEMS)
    return messages


def _add_message(messages: list[dict[str, Any]], item: InputItem, field: str) -> None:
    if item.role not in ("user", "system", "developer", "assistant"):
        remedy = "use user, system, developer or assistant"
        raise FieldError(f"{field}.role", f"{item.role!r} is not known", remedy)
    if item.content is None:
        raise FieldError(f"{field}.content", "is missing", "send a text")
    content = translation.text_parts(item.content, f"{field}.content", *_TEXTS)
    if item.role == "assistant":
        _reply(messages, "content", "tool_calls")["content"] = content
    else:
        messages.append({"role": item.role, "content": content})


def _reply(messages: list[dict[str, Any]], *absent: str) -> dict[str, Any]:
    """Return the last message if it is an assistant's without the fields `absent`, or a new one."""
    last = messages[-1] if messages else {"role": None}
    if last["role"] != "assistant" or any(name in last for name in absent):
        last = {"role": "assistant"}
        messages.append(last)
    return last


def _thought(item: InputItem, field: str) -> str:
    """Return the text of a reasoning item, which `encrypted_content` has if `content` is absent."""
    content = item.content or item.summary or []
    if isinstance(content, str) or content or item.encrypted_content is None:
        return content if isinstance(content, str) else "\n".join(part.text for part in content)
    try:
        return base64.b64decode(item.encrypted_content, validate=True).decode()
    except ValueError as error:
        field = f"{field}.encrypted_content"
        raise FieldError(field, "is not of this server", "leave the item out") from error


def encrypted(thought: str) -> str:
    """Return a thought in the form in which clients without a store send it back. It is encoded,
    not encrypted, as the client sees the thought itself."""
    return base64.b64encode(thought.encode()).decode()


def _arguments(text: str, field: str) -> str:
    """Return a call's arguments. Raises `FieldError` unless they are a JSON object."""
    try:
        msgspec.json.decode(text or "{}", type=dict[str, Any])
    except (msgspec.DecodeError, RecursionError) as error:
        raise FieldError(field, f"are not a JSON object ({error})", "send an object") from error
    return text
