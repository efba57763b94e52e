"""Requests of Anthropic's Messages API, translated into chats."""

from __future__ import annotations

import re
from collections.abc import Iterator
from functools import partial
from typing import Any, Literal

import msgspec
from msgspec import structs

from cbatch.core.request.errors import FieldError
from cbatch.engine.unsupported import Missing
from cbatch.server.protocol import translation
from cbatch.server.protocol.fields import ApiRequest, Count
from cbatch.server.protocol.model import ServedModel
from cbatch.text.forced_tools import FunctionName
from cbatch.text.messages import list_problem

_BILLING = re.compile(r"x-anthropic-billing-header: \w+=[^\n]*(\n|\Z)")
# Blocks of Claude's own tools, and those that only Claude can read. None has a text for the model.
_SKIPPED_BLOCKS = ("redacted_thinking", "server_tool_use", "web_search_tool_result")
ANTHROPIC_NAMES = {
    **translation.NAMES,
    r"(tools\[\d+\])\.parameters": r"\1.input_schema",
    r"parallel_tool_calls": "tool_choice.disable_parallel_tool_use",
    r"reasoning_effort": "output_config.effort",
    r"response_format.*": "output_config.format",
    r"stop$": "stop_sequences",
}
REFUSED_FIELDS = translation.REFUSED | {
    "container": Missing("a container"),
    "mcp_servers": Missing("calling MCP servers", []),
    "parallel_tool_calls": translation.OTHER_NAME,
    "stop": Missing("this name of chat completions", remedy="use stop_sequences"),
    "stream_options": translation.OTHER_NAME,
}


class AnthropicBlock(msgspec.Struct, frozen=True, gc=False):
    """A content block of any type. Signatures of thinking are not checked."""

    type: str
    text: str = ""
    thinking: str = ""
    signature: Any = None
    id: str = ""
    name: str = ""
    input: dict[str, Any] | str | None = None
    tool_use_id: str = ""
    content: str | list[AnthropicBlock] | dict[str, Any] | None = None
    is_error: bool | None = None
    cache_control: Any = None  # prefixes are always cached


class AnthropicMessage(msgspec.Struct, frozen=True, gc=False):
    role: Literal["user", "assistant", "system"]
    content: str | list[AnthropicBlock]


class AnthropicTool(msgspec.Struct, frozen=True):
    name: FunctionName
    input_schema: dict[str, Any] | None = None
    description: str | None = None
    strict: bool | None = None
    type: str | None = None
    cache_control: Any = None


class AnthropicChoice(msgspec.Struct, frozen=True):
    type: Literal["auto", "any", "tool", "none"]
    name: FunctionName | None = None
    disable_parallel_tool_use: bool = False


class Thinking(msgspec.Struct, frozen=True):
    """The switch for thoughts. A budget of tokens cannot be set."""

    type: Literal["enabled", "disabled", "adaptive"]
    display: Literal["summarized", "omitted"] | None = None


class AnthropicFormat(msgspec.Struct, frozen=True):
    type: Literal["json_schema"]
    schema: dict[str, Any]


class OutputConfig(msgspec.Struct, frozen=True):
    effort: str | None = None
    format: AnthropicFormat | None = None


class AnthropicMetadata(msgspec.Struct, frozen=True):
    user_id: str | None = None


class AnthropicFields(msgspec.Struct, frozen=True, kw_only=True):
    """Fields of a request that differ from those of a chat."""

    messages: list[AnthropicMessage] = []
    max_tokens: Count | None = None
    system: str | list[AnthropicBlock] = ""
    tools: list[AnthropicTool] = []
    tool_choice: AnthropicChoice | None = None
    thinking: Thinking | None = None
    output_config: OutputConfig = OutputConfig()
    output_format: AnthropicFormat | None = None  # older name of `output_config.format`
    stop_sequences: list[str] = []
    metadata: AnthropicMetadata = AnthropicMetadata()
    cache_control: Any = None


def parse_messages(
    body: bytes, model: ServedModel, *, needs_max_tokens: bool = True, **call: Any
) -> ApiRequest:
    read = translation.read_body(body, AnthropicFields, REFUSED_FIELDS, model)
    fields, rest = read.fields, read.rest
    if fields.max_tokens is None and needs_max_tokens:
        raise FieldError("max_tokens", "is missing", "give the most tokens to generate")
    chat = rest | {
        "messages": list(_messages(fields, model)),
        "max_tokens": fields.max_tokens,
        "stop": fields.stop_sequences or None,
        "user": fields.metadata.user_id,
        "reasoning_effort": fields.output_config.effort,
    }
    if fields.tools:
        chat["tools"] = list(map(_tool, range(len(fields.tools)), fields.tools))
    if fields.tool_choice is not None:
        chat |= _choice(fields.tool_choice)
    shape = fields.output_config.format or fields.output_format
    if shape is not None:
        schema = {"schema": shape.schema}
        chat["response_format"] = {"type": "json_schema", "json_schema": schema}
    thinking, variables = fields.thinking, rest.get("chat_template_kwargs", {})
    if thinking is not None and isinstance(variables, dict):
        switch = {"enable_thinking": thinking.type != "disabled"}
        chat["chat_template_kwargs"] = switch | variables
    if thinking is not None and thinking.display == "omitted":
        chat["include_reasoning"] = False
    return translation.chat_request(chat, model, ANTHROPIC_NAMES, read.ignored(), **call)


parse_count = partial(parse_messages, needs_max_tokens=False)  # of a prompt that is only counted


def _tool(at: int, tool: AnthropicTool) -> dict[str, Any]:
    if tool.type is not None and tool.type != "custom":
        raise translation.unsupported(f"tools[{at}]", tool.type, "custom")
    return translation.function_tool(tool.name, tool.description, tool.input_schema, tool.strict)


def _choice(choice: AnthropicChoice) -> dict[str, Any]:
    value: Any = {"auto": "auto", "any": "required", "none": "none"}.get(choice.type)
    if value is None:
        if choice.name is None:
            raise FieldError("tool_choice.name", "is missing", "name a tool")
        value = translation.named_choice(choice.name)
    return {"tool_choice": value, "parallel_tool_calls": not choice.disable_parallel_tool_use}


# ---- messages ---------------------------------------------------------------------------------


def _messages(fields: AnthropicFields, model: ServedModel) -> Iterator[dict[str, Any]]:
    if not fields.messages:
        remedy = 'send [{"role": "user", "content": "..."}]'
        raise FieldError("messages", list_problem(fields.messages), remedy)
    translation.require_parts("messages", _lists(fields), model)
    system: Any = fields.system or []
    system = _system([AnthropicBlock("text", system)] if isinstance(system, str) else system)
    if system := translation.text_parts(system, "system", "text"):
        yield {"role": "system", "content": system}
    for at, message in enumerate(fields.messages):
        field = f"messages[{at}].content"
        if message.role == "assistant":
            yield _reply(message, field)
        elif message.role == "user" and not isinstance(message.content, str):
            yield from _turn(message.content, field)
        else:
            content = translation.text_parts(message.content, field, "text")
            yield {"role": message.role, "content": content}
    if fields.messages[-1].role == "assistant":
        remedy = "end with a message of the user"
        raise FieldError("messages", "continuing the assistant's text is not supported", remedy)


def _system(blocks: list[AnthropicBlock]) -> list[AnthropicBlock]:
    """Return the system's blocks without Claude Code's line for Anthropic's bills at their start.
    It differs between calls, so that the prefix cache would end there."""
    line = _BILLING.match(blocks[0].text) if blocks else None
    if line is None:
        return blocks
    translation.log_skipped("lines", "x-anthropic-billing-header")
    rest = blocks[0].text[line.end() :]
    return [structs.replace(blocks[0], text=rest), *blocks[1:]][not rest :]


def _lists(fields: AnthropicFields) -> Iterator[object]:
    """Yield the lists of messages and of blocks, outer lists before inner lists."""
    yield fields.messages
    yield fields.system
    for message in fields.messages:
        yield message.content
        if isinstance(message.content, list):
            yield from (block.content for block in message.content)


def _turn(blocks: list[AnthropicBlock], field: str) -> Iterator[dict[str, Any]]:
    if not blocks:
        raise FieldError(field, "is empty", "send a text")
    texts: list[dict[str, str]] = []
    for at, block in enumerate(blocks):
        if block.type == "text":
            texts.append({"type": "text", "text": block.text})
        elif block.type == "tool_result":
            if texts:
                yield {"role": "user", "content": texts}
                texts = []
            content = translation.text_parts(block.content or "", f"{field}[{at}].content", "text")
            result = {"role": "tool", "tool_call_id": block.tool_use_id, "content": content}
            yield result | ({"is_error": True} if block.is_error else {})
        else:
            raise translation.unsupported(f"{field}[{at}]", block.type, "text", "tool_result")
    if texts:
        yield {"role": "user", "content": texts}


def _reply(message: AnthropicMessage, field: str) -> dict[str, Any]:
    if isinstance(message.content, str):
        return {"role": "assistant", "content": message.content}
    texts, thoughts, calls = [], [], []
    for at, block in enumerate(message.content):
        if block.type == "text":
            texts.append({"type": "text", "text": block.text})
        elif block.type == "thinking":
            thoughts.append(block.thinking)
        elif block.type == "tool_use":
            function = {"name": block.name, "arguments": block.input or {}}
            calls.append({"id": block.id, "type": "function", "function": function})
        elif block.type in _SKIPPED_BLOCKS:
            translation.log_skipped("blocks", block.type)
        else:
            place = f"{field}[{at}]"
            raise translation.unsupported(place, block.type, "text", "thinking", "tool_use")
    reply = {"content": texts, "reasoning": "\n".join(filter(None, thoughts)), "tool_calls": calls}
    given = {name: value for name, value in reply.items() if value}
    return {"role": "assistant", **given}
