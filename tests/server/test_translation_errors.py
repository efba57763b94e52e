"""Errors of the Responses API and of the Messages API name the client's own fields."""

from __future__ import annotations

from typing import Any

import pytest

from cbatch import FieldError
from cbatch.server.protocol.requests import PendingPrompt
from tests.server.test_translation import (
    OPEN_TOOLS,
    OTHER_TOOLS,
    SCHEMA,
    USER,
    of_three,
    read,
)

IMAGE: Any = {"type": "image", "source": {"type": "url", "url": "http://x"}}
# (fields, the field that the error names, words of the message)
WRONG_RESPONSES: list[tuple[dict[str, Any], str, str]] = [
    ({"input": None}, "input", "is missing"),
    ({"input": []}, "input", "is missing"),
    ({"input": 3}, "input", "3 is not allowed"),
    ({"input": [{"content": "x"}]}, "input[0].role", "None is not known"),
    ({"input": [{"role": "tool", "content": "x"}]}, "input[0].role", "'tool'"),
    ({"input": [{"role": "user"}]}, "input[0].content", "is missing"),
    (
        {"input": [USER, {"role": "user", "content": [{"type": "input_image"}]}]},
        "input[1].content[0].type",
        "'input_image' is not supported",
    ),
    (
        {"input": [{"role": "user", "content": [{"type": "input_file"}]}]},
        "input[0].content[0].type",
        "'input_file' is not supported",
    ),
    ({"input": [{"type": "item_reference", "id": "x"}]}, "input[0].id", "'x' is not an item of"),
    ({"input": [USER, {"id": "x"}]}, "input[1].id", "'x' is not an item of a stored response"),
    ({"input": [USER, {"type": "mcp_call", "output": "x"}]}, "input[1].type", "'mcp_call'"),
    ({"input": [{"type": "file_search_call"}]}, "input[0].type", "'file_search_call'"),
    ({"input": [{"type": "function_call", "arguments": [1]}]}, "input", "is not allowed"),
    (
        {"input": [{"type": "custom_tool_call_output", "output": [{"type": "input_image"}]}]},
        "input[0].output[0].type",
        "'input_image' is not supported",
    ),
    ({"instructions": [{"type": "input_image"}]}, "instructions[0].type", "'input_image'"),
    ({"input": [USER] * 300}, "input", "resulted in at least 300 tokens"),
    ({"input": [USER] * 20_480}, "body", "has too many lists and objects; send <= 20480"),
    ({"tools": [{"type": "file_search"}]}, "tools[0].type", "'file_search' is not supported"),
    ({"tools": [{"type": "functions", "name": "f"}]}, "tools[0].type", "'functions'"),
    ({"tools": [{"type": "function"}]}, "tools[0].name", "is missing"),
    ({"tools": [*OPEN_TOOLS, *OPEN_TOOLS], "tool_choice": "required"}, "tools[1].name", "twice"),
    (
        {
            "tools": [{"type": "function", "name": "f", "parameters": {"type": "array"}}],
            "tool_choice": "required",
        },
        "tools[0].parameters",
        "array",
    ),
    ({"tools": OPEN_TOOLS, "tool_choice": {"type": "file_search"}}, "tool_choice", "file_search"),
    ({"tool_choice": "required"}, "tool_choice", "without `tools`"),
    ({"max_output_tokens": 0}, "max_output_tokens", "0 is not allowed"),
    ({"max_tokens": 5}, "max_tokens", "use max_output_tokens"),
    ({"messages": [USER]}, "messages", "use input"),
    ({"n": 2}, "n", "more than one choice"),
    ({"background": True}, "background", "not supported"),
    ({"conversation": "c"}, "conversation", "use previous_response_id"),
    ({"prompt": {"id": "p"}}, "prompt", "not supported"),
    ({"truncation": "auto"}, "truncation", "not supported"),
    ({"include": ["message.output_text.logprobs"]}, "include", "logprobs' is not supported"),
    ({"text": {"format": {"type": "json_schema"}}}, "text.format", "schema"),
    ({"text": {"format": {"type": "grammar"}}}, "text", "grammar"),
    (
        {
            "text": {"format": {"type": "json_object"}},
            "guided_regex": "a",
        },
        "guided_regex",
        "`text.format` exclude each other",
    ),
    ({"temperature": -1}, "temperature", "-1"),
    ({"previous_response_id": "resp_x"}, "previous_response_id", "is unknown or has expired"),
    ({"metadata": {"a": 1}}, "metadata", "is not allowed"),
    ({"model": "other"}, "model", "is not served"),
]
WRONG_MESSAGES: list[tuple[dict[str, Any], str, str]] = [
    ({"messages": []}, "messages", "is empty"),
    ({"messages": "x"}, "messages", "'x' is not allowed"),
    ({"messages": [{"role": "tool", "content": "x"}]}, "messages", "tool"),
    ({"messages": [USER] * 300}, "messages", "resulted in at least 300 tokens"),
    ({"messages": [USER] * 20_480}, "body", "has too many lists and objects"),
    ({"messages": [USER, {"role": "assistant", "content": "The"}]}, "messages", "continuing"),
    (
        {"messages": [{"role": "user", "content": [IMAGE]}]},
        "messages[0].content[0].type",
        "'image'",
    ),
    (
        {"messages": [{"role": "user", "content": [{"type": "document"}]}]},
        "messages[0].content[0].type",
        "'document' is not supported",
    ),
    (
        {"messages": [{"role": "user", "content": [{"type": "tool_result", "content": [IMAGE]}]}]},
        "messages[0].content[0].content[0].type",
        "'image'",
    ),
    (
        {"messages": [{"role": "assistant", "content": [{"type": "compaction"}]}, USER]},
        "messages[0].content[0].type",
        "'compaction'",
    ),
    ({"messages": [{"role": "user", "content": []}]}, "messages[0].content", "is empty"),
    (
        {"messages": [{"role": "user", "content": [{"type": "tool_result", "content": {"a": 1}}]}]},
        "messages[0].content[0].content",
        "is an object",
    ),
    ({"system": [IMAGE]}, "system[0].type", "'image' is not supported"),
    ({"max_tokens": None}, "max_tokens", "is missing"),
    ({"max_tokens": 0}, "max_tokens", "0 is not allowed"),
    ({"tools": [{"type": "web_search_20250305", "name": "web_search"}]}, "tools[0].type", "'web_"),
    (
        {
            "tools": [{"name": "f", "input_schema": {"type": "array"}}],
            "tool_choice": {"type": "any"},
        },
        "tools[0].input_schema",
        "array",
    ),
    ({"tools": OTHER_TOOLS, "tool_choice": {"type": "tool"}}, "tool_choice.name", "is missing"),
    ({"tools": OTHER_TOOLS, "tool_choice": {"type": "tool", "name": "g"}}, "tool_choice", "'g'"),
    ({"tool_choice": {"type": "any"}}, "tool_choice", "without `tools`"),
    ({"stop_sequences": ["x" * 300]}, "stop_sequences", "300 characters"),
    ({"stop": "x"}, "stop", "use stop_sequences"),
    ({"output_config": {"format": {"type": "json_schema"}}}, "output_config", "schema"),
    (
        {
            "guided_regex": "a",
            "output_format": {"type": "json_schema", "schema": SCHEMA},
        },
        "guided_regex",
        "`output_config.format` exclude each other",
    ),
    ({"thinking": {"type": "between_tools"}}, "thinking", "between_tools"),
    ({"container": "x"}, "container", "not supported"),
    ({"mcp_servers": [{"url": "x"}]}, "mcp_servers", "not supported"),
    ({"n": 2}, "n", "more than one choice"),
    ({"temperature": "hot"}, "temperature", "'hot'"),
    ({"model": "other"}, "model", "is not served"),
]


@pytest.mark.parametrize(
    ("api", "fields", "field", "words"),
    [
        *(("responses", *case) for case in WRONG_RESPONSES),
        *(("messages", *case) for case in WRONG_MESSAGES),
    ],
    ids=str,
)
def test_errors_name_the_clients_own_field(
    api: str, fields: dict[str, Any], field: str, words: str
) -> None:
    body = {"responses": {"input": "x"}, "messages": {"messages": [USER], "max_tokens": 5}}[api]
    with pytest.raises(FieldError) as caught:
        read(api, body | fields)
    assert caught.value.field == field and words in str(caught.value), caught.value


def test_without_a_format_of_calls_the_model_cannot_choose() -> None:
    for api, tools in (("responses", OPEN_TOOLS), ("messages", OTHER_TOOLS)):
        body = of_three("text")[api] | {"tools": tools}
        with pytest.raises(FieldError, match="tool_choice: 'auto' with `tools`"):
            read(api, body, tool_parser=None)


def test_errors_of_the_prompt_name_its_field() -> None:
    for api, body in of_three("text").items():
        (prompt,) = read(
            api,
            body
            | (
                {"input": "long " * 999}
                if api == "responses"
                else {"messages": [USER | {"content": "long " * 999}]}
            ),
        ).prompts
        assert isinstance(prompt, PendingPrompt)
        with pytest.raises(FieldError) as caught:
            prompt.make()
        assert caught.value.field == "messages", "the handler renames it"
