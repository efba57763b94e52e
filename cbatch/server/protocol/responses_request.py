"""Requests of OpenAI's Responses API, translated into chats. A request may continue a stored
response: the items of that conversation then come before its own."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from typing import Annotated, Any, Literal

import msgspec
from msgspec import Meta, structs

from cbatch.core.request.errors import FieldError
from cbatch.engine.unsupported import Missing
from cbatch.server.protocol import response_items, translation
from cbatch.server.protocol.fields import ApiRequest, Count
from cbatch.server.protocol.model import ServedModel
from cbatch.server.protocol.response_items import TEXT_TYPES, ContentPart, InputItem, ResponsesTool
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
    stored = response_items.stored(new, responses)
    if before or stored:
        hold(_COPIES * (len(body) + sum(map(len, (*before, *stored.values())))))
    for at, text in stored.items():
        new[at] = msgspec.json.decode(text, type=InputItem)
    contents = (each for item in new for each in (item.content, item.output, item.summary))
    translation.require_parts("input", itertools.chain((list(before), new), contents), model)
    earlier = [msgspec.json.decode(item, type=InputItem) for item in before]
    items, skipped = [*earlier, *new], list[str]()
    messages = response_items.messages_of(items, len(earlier), skipped)
    if fields.instructions:
        content = translation.text_parts(fields.instructions, "instructions", *TEXT_TYPES)
        messages.insert(0, {"role": "system", "content": content})
    tools = response_items.all_functions(fields.tools, items, len(earlier), skipped)
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
    offered = [*fields.tools, *(t for item in items for t in response_items.brought_tools(item))]
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
