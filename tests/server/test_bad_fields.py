"""Errors name the client's own field, in every API."""

from __future__ import annotations

import json
from typing import Any

import pytest

from cbatch import FieldError
from cbatch.server.protocol.requests import detokenize, tokenize
from tests.server.apis import CHAT, COMPLETIONS, MESSAGES, RESPONSES, SCHEMA, TOOLS, USER, body_of
from tests.server.parsing import PARSERS, ids_of, model, read

IMAGE: Any = {"type": "image", "source": {"type": "url", "url": "http://x"}}
PICTURE = [{"type": "input_image"}]
LONG_NAME = [{"type": "function", "name": "a" * 129}]
ARRAY: Any = {"type": "array"}
OBJECT = {"response_format": {"type": "json_object"}}
NAMED: Any = {"type": "function", "function": {"name": "g"}}
CALLED = {"role": "assistant", "function_call": {"name": "f"}}


def user(content: Any, role: str = "user") -> dict[str, Any]:
    return {"messages": [{"role": role, "content": content}]}


def item(kind: str, **members: Any) -> dict[str, Any]:
    return {"input": [{"type": kind, **members}]}


def space(inner: dict[str, Any]) -> dict[str, Any]:
    return {"tools": [{"type": "namespace", "name": "ns", "tools": [inner]}]}


def choice(path: str, chosen: Any, tool: Any = None) -> dict[str, Any]:
    return {"tools": TOOLS[path] if tool is None else [tool], "tool_choice": chosen}


def text_format(**members: Any) -> dict[str, Any]:
    return {"text": {"format": members}}


Case = tuple[dict[str, Any], str, str]  # fields, the field that the error names, words of it
# Fields of both completions and chats.
COMMON: list[Case] = [
    ({"temperature": True}, "temperature", "True is not"),
    ({"n": 10**6}, "n", ""),
    ({"seed": 1.5}, "seed", "1.5"),
    ({"logit_bias": {"x": 1}}, "logit_bias", ""),
    ({"max_tokens": 10**30}, "max_tokens", ""),
    ({"top_k": 10**12}, "top_k", ""),
    ({"stream": "true"}, "stream", "'true' is not allowed"),
    ({"stream_options": {"include_usage": 1}}, "stream_options", ""),
    ({"return_token_ids": 1}, "return_token_ids", ""),
    ({"priority": 2**40}, "priority", ""),
    ({"truncate_prompt_tokens": 0}, "truncate_prompt_tokens", ""),
    ({"timeout": 0}, "timeout", ""),
    ({"timeout": "1"}, "timeout", ""),
    ({"stop": ["a"] * 33}, "stop", "33 strings"),
    ({"stop": "a" * 257}, "stop", "257 characters"),
    ({"best_of": 2}, "best_of", ""),
    ({"suffix": "end"}, "suffix", ""),
    ({"use_beam_search": True}, "use_beam_search", ""),
    ({"model": 3}, "model", ""),
    ({"skip_special_tokens": "no"}, "skip_special_tokens", "'no'"),
    ({"cache_salt": ""}, "cache_salt", ""),
    ({"cache_salt": "s" * 257}, "cache_salt", ""),
    ({"stop_token_ids": [5] * 100_000}, "stop_token_ids", ""),
    ({"allowed_token_ids": [5] * 100_000}, "allowed_token_ids", ""),
    ({"logit_bias": dict.fromkeys(range(100_000), 1)}, "logit_bias", ""),
    ({"structured_outputs": {"choice": []}}, "structured_outputs", "at least one"),
    ({"structured_outputs": {}}, "structured_outputs", "give one of json"),
    ({"structured_outputs": {"regex": "a", "choice": ["b"]}}, "structured_outputs", "one of"),
    ({"structured_outputs": {"structural_tag": "x"}}, "structured_outputs", "structural_tag"),
    ({"structured_outputs": {"regex": "a"}} | OBJECT, "structured_outputs", "response_format"),
    ({"response_format": {"type": "json_schema"}}, "response_format", "json_schema"),
    ({"response_format": {"type": "xml"}}, "response_format", "xml"),
    ({"response_format": {"type": "text", "schema": {}}}, "response_format", "'text' with 1"),
    ({"guided_regex": 7}, "guided_regex", "7"),
    ({"guided_choice": ["a"], "guided_regex": "a"}, "guided_choice", "cannot be combined"),
    ({"guided_json": {}, "structured_outputs": {}}, "guided_json", "cannot be combined"),
    ({"functions": [{}]}, "functions", "tools"),
]
WRONG: dict[str, list[Case]] = {
    COMPLETIONS: [
        *COMMON,
        ({"prompt": []}, "prompt", "is empty"),
        ({"prompt": None}, "prompt", "is missing"),
        ({"prompt": 7}, "prompt", "7 is not a list"),
        ({"prompt": {"role": "user"}}, "prompt", "{'role': 'user'} is not a list"),
        ({"prompt": [[1], [[2]]]}, "prompt", "mixes"),
        ({"prompt": [[]]}, "prompt", ""),
        ({"prompt": ["a"] * 129}, "prompt", "129 prompts"),
        ({"prompt": [1] * 1000}, "prompt", "resulted in 1000 tokens"),
        ({"max_tokens": 0}, "max_tokens", ""),
        ({"max_tokens": False, "echo": True}, "max_tokens", ""),
    ],
    CHAT: [
        *COMMON,
        ({"messages": None}, "messages", "is missing"),
        ({"messages": []}, "messages", "is empty"),
        ({"messages": "hello"}, "messages", "'hello' is not a list"),
        ({"messages": ["hello"]}, "messages[0]", ""),
        (user("x", "root"), "messages[0]", "has no known role"),
        ({"messages": [{"role": "user"}]}, "messages[0].content", "is missing"),
        (user(5), "messages[0].content", ""),
        (user([{"type": "image_url"}]), "messages[0].content[0]", "image_url"),
        (user([{"type": "text"}]), "messages[0].content[0].text", ""),
        ({"messages": [CALLED]}, "messages[0].function_call", ""),
        ({"chat_template": "{{ 1 }}"}, "chat_template", ""),
        ({"chat_template_kwargs": {"messages": []}}, "chat_template_kwargs", "messages"),
        ({"chat_template_kwargs": {"bos_token": "x"}}, "chat_template_kwargs", "bos_token"),
        ({"top_logprobs": 3}, "top_logprobs", ""),
        ({"logprobs": True, "top_logprobs": 21}, "top_logprobs", ""),
        ({"logprobs": 3}, "logprobs", ""),
        ({"max_completion_tokens": "7"}, "max_completion_tokens", "'7'"),
        ({"tools": [{"type": "function"}]}, "tools", ""),
        ({"tools": [{"type": "retrieval"}]}, "tools", "retrieval"),
        ({"tool_choice": "required"}, "tool_choice", "tools"),
        ({"tool_choice": NAMED}, "tool_choice", "tools"),
        (choice(CHAT, NAMED), "tool_choice", "'g'"),
        ({"tools": TOOLS[CHAT] * 2, "tool_choice": "required"}, "tools[1].function.name", "twice"),
        ({"guided_json": {}} | choice(CHAT, "required"), "guided_json", "tools"),
    ],
    RESPONSES: [
        ({"input": []}, "input", "is missing"),
        ({"input": 3}, "input", "3 is not allowed"),
        ({"input": [{"content": "x"}]}, "input[0].role", "None is not known"),
        ({"input": [{"role": "user"}]}, "input[0].content", "is missing"),
        ({"input": [USER, USER | {"content": PICTURE}]}, "input[1].content[0].type", "image'"),
        (item("item_reference", id="x"), "input[0].id", "'x' is not an item of a stored"),
        ({"input": [USER, {"id": "x"}]}, "input[1].id", "'x' is not an item of a stored"),
        (item("mcp_call", output="x"), "input[0].type", "'mcp_call'"),
        (item("function_call", arguments=[1]), "input", "is not allowed"),
        (item("custom_tool_call_output", output=PICTURE), "input[0].output[0].type", "image'"),
        (item("tool_search_output", **space(ARRAY)), "input[0].tools[0].tools[0].type", "array"),
        ({"instructions": PICTURE}, "instructions[0].type", "'input_image'"),
        ({"input": [USER] * 300}, "input", "resulted in at least 300 tokens"),
        ({"input": [USER] * 20_480}, "body", "has too many lists and objects; send <= 20480"),
        ({"tools": [{"type": "file_search"}]}, "tools[0].type", "'file_search' is not supported"),
        ({"tools": [{"type": "function"}]}, "tools[0].name", "is missing"),
        (space({"type": "file_search"}), "tools[0].tools[0].type", "file_search"),
        (space({"type": "function"}), "tools[0].tools[0].name", "is missing"),
        ({"tools": LONG_NAME}, "tools", ""),
        ({"tools": TOOLS[RESPONSES] * 2, "tool_choice": "required"}, "tools[1].name", "twice"),
        (
            choice(RESPONSES, "required", {"type": "function", "name": "f", "parameters": ARRAY}),
            *("tools[0].parameters", "array"),
        ),
        (choice(RESPONSES, {"type": "file_search"}), "tool_choice", "file_search"),
        (choice(RESPONSES, "required", {"type": "web_search"}), "tool_choice", ""),
        ({"tool_choice": "required"}, "tool_choice", "without `tools`"),
        ({"max_output_tokens": 0}, "max_output_tokens", "0 is not allowed"),
        ({"max_tokens": 5}, "max_tokens", "use max_output_tokens"),
        ({"messages": [USER]}, "messages", "use input"),
        ({"n": 2}, "n", "more than one choice"),
        ({"background": True}, "background", "not supported"),
        ({"conversation": "c"}, "conversation", "use previous_response_id"),
        ({"include": ["message.output_text.logprobs"]}, "include", "logprobs' is not supported"),
        (text_format(type="json_schema"), "text.format", "schema"),
        (text_format(type="grammar"), "text", "grammar"),
        (text_format(type="json_object") | {"guided_regex": "a"}, "guided_regex", "`text.format`"),
        ({"previous_response_id": "resp_x"}, "previous_response_id", "is unknown or has expired"),
        ({"metadata": {"a": 1}}, "metadata", "is not allowed"),
        ({"model": "other"}, "model", "is not served"),
    ],
    MESSAGES: [
        ({"messages": []}, "messages", "is empty"),
        ({"messages": "x"}, "messages", "'x' is not allowed"),
        (user("x", "tool"), "messages", "tool"),
        ({"messages": [USER] * 300}, "messages", "resulted in at least 300 tokens"),
        ({"messages": [USER, user("The", "assistant")["messages"][0]]}, "messages", "continuing"),
        (user([IMAGE]), "messages[0].content[0].type", "'image'"),
        (
            user([{"type": "tool_result", "content": [IMAGE]}]),
            *("messages[0].content[0].content[0].type", "'image'"),
        ),
        (user([{"type": "compaction"}], "assistant"), "messages[0].content[0].type", "'compaction"),
        (user([]), "messages[0].content", "is empty"),
        (
            user([{"type": "tool_result", "content": {"a": 1}}]),
            *("messages[0].content[0].content", "is an object"),
        ),
        ({"system": [IMAGE]}, "system[0].type", "'image' is not supported"),
        ({"max_tokens": None}, "max_tokens", "is missing"),
        ({"max_tokens": 0}, "max_tokens", "0 is not allowed"),
        ({"tools": [{"type": "web_search_20250305", "name": "x"}]}, "tools[0].type", "'web_"),
        ({"tools": [{"name": "a" * 129, "input_schema": SCHEMA}]}, "tools", ""),
        (
            choice(MESSAGES, {"type": "any"}, {"name": "f", "input_schema": ARRAY}),
            *("tools[0].input_schema", "array"),
        ),
        (choice(MESSAGES, {"type": "tool"}), "tool_choice.name", "is missing"),
        (choice(MESSAGES, {"type": "tool", "name": "g"}), "tool_choice", "'g'"),
        ({"stop_sequences": ["x" * 300]}, "stop_sequences", "300 characters"),
        ({"stop": "x"}, "stop", "use stop_sequences"),
        ({"output_config": {"format": {"type": "json_schema"}}}, "output_config", "schema"),
        (
            {"guided_regex": "a", "output_format": {"type": "json_schema", "schema": SCHEMA}},
            *("guided_regex", "`output_config.format` exclude each other"),
        ),
        ({"thinking": {"type": "between_tools"}}, "thinking", "between_tools"),
        ({"mcp_servers": [{"url": "x"}]}, "mcp_servers", "not supported"),
        ({"n": 2}, "n", "more than one choice"),
    ],
}


@pytest.mark.parametrize(
    ("path", "fields", "field", "words"),
    [(path, *case) for path, cases in WRONG.items() for case in cases],
    ids=lambda value: str(value)[:40],
)
def test_errors_name_the_clients_own_field(
    path: str, fields: dict[str, Any], field: str, words: str
) -> None:
    with pytest.raises(FieldError) as caught:
        request = read(path, body_of(path) | fields)
        ids_of(request)  # conversations are checked where they are rendered
    message = str(caught.value)
    assert caught.value.field == field and words in message, message
    assert message.startswith(f"{field}: ") and len(message) < 1000


@pytest.mark.parametrize("path", [CHAT, RESPONSES, MESSAGES])
def test_without_a_format_of_calls_the_model_cannot_choose(path: str) -> None:
    with pytest.raises(FieldError, match=r"tool_choice: 'auto' with `tools`.*--tool-call-parser"):
        read(path, body_of(path, tools=TOOLS[path]), tool_parser=None)


@pytest.mark.parametrize("path", [COMPLETIONS, CHAT])
@pytest.mark.parametrize(
    "body",
    [
        b'{"prompt": "\xff"}',
        b"[" * 200_000,
        b'{"a":' * 200_000,
        b'{"prompt": "a", "temperature": NaN}',
        b'{"prompt": "a", "temperature": 1e400}',
        b"null",
        b'{"prompt": "a"',
        b'{"prompt":"a","x":[' + b"[]," * 300_000 + b"1]}",
    ],
    ids=["utf-8", "lists", "objects", "nan", "huge", "null", "cut", "many lists"],
)
def test_a_body_that_is_not_json_is_rejected(path: str, body: bytes) -> None:
    for parse in (PARSERS[path], tokenize, detokenize):
        with pytest.raises(FieldError, match="^body: "):
            parse(body, model())


@pytest.mark.parametrize(
    ("path", "body", "place"),
    [
        (COMPLETIONS, b'{"prompt": "a\\ud800"}', "prompt"),
        (COMPLETIONS, b'{"prompt": ["a", "\\udc00b"]}', "prompt[1]"),
        (COMPLETIONS, b'{"prompt": "\xed\xa0\x80"}', "prompt"),
        (COMPLETIONS, b'{"prompt": "a", "stop": ["x", "\\ud83d"]}', "stop[1]"),
        (COMPLETIONS, b'{"guided_json": {"const": "\\ud800"}}', "guided_json.const"),
        (CHAT, b'{"messages": [{"role": "user", "content": "\\ud800"}]}', "messages[0].content"),
        (CHAT, b'{"messages": [{"role": "user", "\\ud800": "a"}]}', "messages[0]"),
        (CHAT, b'{"colour": "\\ud800", "messages": []}', "colour"),
        (CHAT, b'{"\\ud800": 1}', "body"),
    ],
)
def test_a_lone_surrogate_is_named_by_its_place(path: str, body: bytes, place: str) -> None:
    with pytest.raises(FieldError, match="half of a surrogate") as caught:
        PARSERS[path](body, model())
    assert caught.value.field == place


TEXTS: list[tuple[Any, dict[str, Any], str]] = [
    (tokenize, {}, "prompt"),
    (tokenize, {"prompt": "a", "messages": [USER]}, "prompt"),
    (tokenize, {"prompt": 3}, "prompt"),
    (tokenize, {"prompt": "a" * 300_000}, "prompt"),
    (tokenize, {"prompt": "\ude00\ud83d"}, "prompt"),
    (detokenize, {}, "tokens"),
    (detokenize, {"tokens": [-1]}, "tokens"),
    (detokenize, {"tokens": [10**9]}, "tokens"),
    (detokenize, {"tokens": ["a"]}, "tokens"),
    (detokenize, {"tokens": [5] * 300_000}, "tokens"),
]


@pytest.mark.parametrize(
    ("convert", "body", "field"),
    TEXTS,
    ids=lambda value: getattr(value, "__name__", str(value)[:40]),
)
def test_texts_and_tokens(convert: Any, body: dict[str, Any], field: str) -> None:
    with pytest.raises(FieldError) as caught:
        convert(json.dumps(body).encode(), model())
    assert caught.value.field == field
