"""Requests of OpenAI's Responses API, translated into chats. A request may continue a stored
response: the items of that conversation then come before its own."""

from __future__ import annotations

import base64
import itertools
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from typing import Annotated, Any, Literal

import msgspec
from msgspec import Meta, structs

from cbatch.core.request.errors import FieldError
from cbatch.engine.unsupported import Missing
from cbatch.server.protocol import translation
from cbatch.server.protocol.fields import ApiRequest, Count
from cbatch.server.protocol.model import ServedModel
from cbatch.server.protocol.response_store import MAX_CONVERSATION_BYTES, KeyResponses
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
    instructions: str | list[ContentPart] | None = None
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
    as `sent`, and its `tools`. `items` are those of the conversation in JSON, `named_items` its own
    by id. The store is None if the response is not kept."""

    fields: ResponsesFields
    sent: dict[str, Any]
    tools: list[ResponsesTool]
    items: tuple[bytes, ...]
    named_items: dict[str, bytes]
    responses: KeyResponses | None


def parse_responses(
    body: bytes,
    model: ServedModel,
    responses: KeyResponses,
    hold: Callable[[int], None] = lambda _: None,
    **call: Any,
) -> ApiRequest:
    """Return the checked request. `hold` counts the bytes that parsing takes, before they are used.
    `call` is as for `parse_chat`. Raises `FieldError` naming the field."""
    read = translation.read_body(body, ResponsesFields, REFUSED_FIELDS, model)
    fields = read.fields
    for name in fields.include:
        if name != ENCRYPTED:
            raise FieldError("include", f"{name!r} is not supported", f"give only {ENCRYPTED!r}")
    if not fields.input:
        problem = list_problem(fields.input or None)
        raise FieldError("input", problem, "send a text, or a list of items")
    new = fields.input
    if isinstance(new, str):
        new = [InputItem(role="user", content=new)]
    before: Sequence[bytes] = ()
    if fields.previous_response_id is not None:
        before = responses.items(fields.previous_response_id)
    stored = stored_items(new, responses)
    if before or stored:
        hold(_COPIES * (len(body) + sum(map(len, (*before, *stored.values())))))
    for at, text in stored.items():
        new[at] = msgspec.json.decode(text, type=InputItem)
    contents = (each for item in new for each in (item.content, item.output, item.summary))
    translation.require_parts("input", itertools.chain((list(before), new), contents), model)
    earlier = [msgspec.json.decode(item, type=InputItem) for item in before]
    items, skipped = [*earlier, *new], list[str]()
    messages = messages_of(items, len(earlier), skipped)
    if fields.instructions:
        content = translation.text_parts(fields.instructions, "instructions", *TEXT_TYPES)
        messages.insert(0, {"role": "system", "content": content})
    tools = all_functions(fields.tools, items, len(earlier), skipped)
    shape, choice = structs.asdict(fields.text.format), fields.tool_choice
    kind = shape.pop("type")
    chat = read.rest | {
        "messages": messages,
        "max_tokens": fields.max_output_tokens,
        "reasoning_effort": fields.reasoning.effort,
        "response_format": {"type": kind, "json_schema": shape if kind == "json_schema" else None},
        "tool_choice": choice if isinstance(choice, str) else translation.named_choice(choice.name),
        "parallel_tool_calls": fields.parallel_tool_calls,
        "tools": tools or None,
    }
    offered = [*fields.tools, *(t for item in items for t in brought_tools(item))]
    texts = [msgspec.json.encode(item) for item in new] if fields.store else []
    named = {item.id: text for item, text in zip(new, texts, strict=False) if item.id}
    kept = (*before, *texts) if fields.store else ()
    sent = {name: read.sent[name] for name in REPEATED if name in read.sent}
    store = responses if fields.store else None
    ignored = itertools.chain(skipped, read.ignored())
    origin = ResponsesCall(structs.replace(fields, input=None), sent, offered, kept, named, store)
    num_bytes = _COPIES * len(msgspec.json.encode(sent)) + sum(map(len, kept))
    call |= {"origin": origin, "origin_bytes": num_bytes}
    return translation.chat_request(chat, model, RESPONSES_NAMES, ignored, **call)


TEXT_TYPES = ("input_text", "output_text", "text", "refusal")
_CALLS = ("function_call", "custom_tool_call", "local_shell_call")
_RESULTS = tuple(f"{call}_output" for call in _CALLS)
_WITH_TOOLS = ("additional_tools", "tool_search_output")
# Items of OpenAI's own tools, and those that only OpenAI can read. None has a text for the model.
_SKIPPED_ITEMS = (
    *("compaction", "compaction_summary", "configuration_update", "context_compaction"),
    *("image_generation_call", "mcp_list_tools", "tool_search_call", "web_search_call"),
)
# Tools that OpenAI's models know, by the beginnings of their types. Other models go without them.
_SKIPPED_TOOLS = (
    *("apply_patch", "code_interpreter", "computer", "custom", "image_generation", "local_shell"),
    *("mcp", "programmatic_tool_calling", "shell", "tool_search", "web_search"),
)
_MARK = b"cbatch:"  # before a thought, in content that is said to be encrypted


class ContentPart(msgspec.Struct, frozen=True, gc=False, omit_defaults=True):
    type: str
    text: str = ""
    refusal: str = ""
    annotations: Any = None
    logprobs: Any = None


class ResponsesTool(msgspec.Struct, frozen=True, omit_defaults=True):
    """A function, or a `namespace` of functions, which a chat calls `namespace.function`."""

    type: str = ""
    name: FunctionName | None = None
    description: str | None = None
    parameters: dict[str, Any] | None = None
    strict: bool | None = None
    tools: list[ResponsesTool] | None = None


class InputItem(msgspec.Struct, frozen=True, gc=False, omit_defaults=True):
    """An item of any type. States of earlier items are not used."""

    type: str | None = None
    role: str | None = None
    content: str | list[ContentPart] | None = None
    phase: str | None = None
    name: str | None = None
    namespace: str | None = None
    call_id: str | None = None
    arguments: str | dict[str, Any] | None = None
    input: str | None = None
    action: dict[str, Any] | None = None
    output: str | list[ContentPart] | None = None
    summary: list[ContentPart] | None = None
    encrypted_content: str | None = None
    tools: list[ResponsesTool] | None = None
    id: str | None = None
    status: str | None = None

    @property
    def kind(self) -> str:
        """The item's type, which messages and references may leave out."""
        is_reference = self.id is not None and self.role is None and self.content is None
        return self.type or ("item_reference" if is_reference else "message")


def stored_items(items: list[InputItem], responses: KeyResponses) -> dict[int, bytes]:
    texts = {
        at: responses.item(item.id or "", f"input[{at}].id")
        for at, item in enumerate(items)
        if item.kind == "item_reference"
    }
    if sum(map(len, texts.values())) > MAX_CONVERSATION_BYTES:
        limit = f"refer to items of <= {MAX_CONVERSATION_BYTES} bytes"
        raise FieldError("input", "refers to too long items", limit)
    return texts


def functions(
    tools: list[ResponsesTool], field: str, skipped: list[str], namespace: str | None = None
) -> Iterator[dict[str, Any]]:
    """Yield the functions of a chat, and append the places of other tools to `skipped`. Raises
    `FieldError` for tools of an unknown type, and for those that have documents."""
    for at, tool in enumerate(tools):
        place = f"{field}[{at}]"
        if tool.type.startswith(_SKIPPED_TOOLS):
            skipped.append(place)
            translation.log_skipped("tools", next(filter(tool.type.startswith, _SKIPPED_TOOLS)))
            continue
        if tool.type not in ("function", "namespace") or (namespace and tool.tools):
            raise translation.unsupported(place, tool.type, "function")
        if tool.name is None:
            raise FieldError(f"{place}.name", "is missing", "name the function")
        if tool.type == "namespace":
            yield from functions(tool.tools or [], f"{place}.tools", skipped, tool.name)
        else:
            name = qualified(namespace, tool.name)
            yield translation.function_tool(name, tool.description, tool.parameters, tool.strict)


def all_functions(
    tools: list[ResponsesTool], items: list[InputItem], num_earlier: int, skipped: list[str]
) -> list[dict[str, Any]]:
    brought = {
        tool["function"]["name"]: tool
        for at, item in enumerate(items, -num_earlier)
        for tool in functions(brought_tools(item), f"input[{at}].tools", skipped)
    }
    return [*functions(tools, "tools", skipped), *brought.values()]


def brought_tools(item: InputItem) -> list[ResponsesTool]:
    return (item.tools or []) if item.kind in _WITH_TOOLS else []


def qualified(namespace: str | None, name: str) -> str:
    return name if namespace is None else f"{namespace}.{name}"


def messages_of(
    items: list[InputItem], num_earlier: int, skipped: list[str]
) -> list[dict[str, Any]]:
    """Return the messages of a chat; successive items of the assistant become one message. The
    places of items without a text are appended to `skipped`. Raises `FieldError`, which counts
    items from the first that is not among the `num_earlier` first."""
    messages: list[dict[str, Any]] = []
    for at, item in enumerate(items, -num_earlier):
        field, kind = f"input[{at}]", item.kind
        if kind == "message":
            _add_message(messages, item, field)
        elif kind == "reasoning":
            if thought := _thought(item):
                reply = _reply(messages, "content", "tool_calls")
                reply.setdefault("reasoning", []).append(thought)
        elif kind in _CALLS:
            _reply(messages).setdefault("tool_calls", []).append(_call(item, kind))
        elif kind in _RESULTS:
            content = translation.text_parts(item.output or "", f"{field}.output", *TEXT_TYPES)
            call_id = item.call_id or item.id  # the result of a local shell has only an `id`
            messages.append({"role": "tool", "tool_call_id": call_id, "content": content})
        elif kind in _SKIPPED_ITEMS:
            skipped.append(field)
            translation.log_skipped("items", kind)
        elif kind not in _WITH_TOOLS:
            raise translation.unsupported(field, kind, "message", "reasoning", *_CALLS, *_RESULTS)
    for message in messages:
        if "reasoning" in message:
            message["reasoning"] = "\n".join(message["reasoning"])
    return messages


def _add_message(messages: list[dict[str, Any]], item: InputItem, field: str) -> None:
    if item.role not in ("user", "system", "developer", "assistant"):
        remedy = "use user, system, developer or assistant"
        raise FieldError(f"{field}.role", f"{item.role!r} is not known", remedy)
    if item.content is None:
        raise FieldError(f"{field}.content", "is missing", "send a text")
    content = translation.text_parts(item.content, f"{field}.content", *TEXT_TYPES)
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


def _call(item: InputItem, kind: str) -> dict[str, Any]:
    others = {"custom_tool_call": {"input": item.input}, "local_shell_call": item.action}
    name = qualified(item.namespace, item.name or kind.removesuffix("_call"))
    function = {"name": name, "arguments": others.get(kind, item.arguments)}
    return {"id": item.call_id or item.id, "type": "function", "function": function}


def _thought(item: InputItem) -> str:
    """Return the text of a reasoning item. What another server encrypted is left out."""
    if isinstance(item.content, str):
        return item.content
    text = "\n".join(part.text for part in item.content or ())
    if not text and item.encrypted_content is not None:
        with suppress(ValueError):
            content = base64.b64decode(item.encrypted_content, validate=True)
            if content.startswith(_MARK):
                return content.removeprefix(_MARK).decode()
        translation.log_skipped("encrypted_content", "reasoning")
    return text or "\n".join(part.text for part in item.summary or ())


def encrypted(thought: str) -> str:
    """Return a thought in the form in which clients without a store send it back. It is encoded,
    not encrypted, as the client sees the thought itself."""
    return base64.b64encode(_MARK + thought.encode()).decode()
