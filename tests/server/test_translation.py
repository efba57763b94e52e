"""Requests of the Responses API and of the Messages API mean the same as chats, and their errors
name the clients' own fields."""

from __future__ import annotations

import json
from typing import Any

import pytest

from cbatch import FieldError
from cbatch.server.protocol.anthropic_request import parse_count, parse_messages
from cbatch.server.protocol.fields import ApiRequest, PendingPrompt
from cbatch.server.protocol.requests import parse_chat
from cbatch.server.protocol.response_store import ResponseStore
from cbatch.server.protocol.responses_request import encrypted, parse_responses
from tests.server.http_client import MODEL, toy_model
from tests.server.scripted import tokenizer_with

QWEN = tokenizer_with(["<think>", "</think>"], ["<|im_end|>"])


TEMPLATE = """\
{% for t in tools or [] %}<{{ t.function.name }}:{{ t.function.parameters | tojson }}>\
{% endfor %}{% for m in messages %}[{{ m.role }}]{{ m.content }}\
{% if m.reasoning %}({{ m.reasoning }}){% endif %}\
{% for c in m.tool_calls or [] %}!{{ c.id }}:{{ c.function.name }}:\
{{ c.function.arguments | tojson }}{% endfor %}\
{% if m.tool_call_id %}={{ m.tool_call_id }}{% endif %}{% endfor %}\
{{ enable_thinking }}{{ reasoning_effort }}"""


SCHEMA: Any = {"type": "object", "properties": {"a": {"const": 1}}, "required": ["a"]}


USER: Any = {"role": "user", "content": "Rome?"}


CALLS: Any = [
    {"id": f"id{n}", "type": "function", "function": {"name": "f", "arguments": '{"a": 1}'}}
    for n in (1, 2)
]


CALLED: Any = {"role": "assistant", "content": "I look.", "reasoning": "Hm.", "tool_calls": CALLS}


RESULTS: Any = [{"role": "tool", "tool_call_id": f"id{n}", "content": f"{n}"} for n in (1, 2)]


TOOLS: Any = [{"type": "function", "function": {"name": "f", "parameters": SCHEMA}}]


OPEN_TOOLS: Any = [{"type": "function", "name": "f", "parameters": SCHEMA}]


OTHER_TOOLS: Any = [{"name": "f", "input_schema": SCHEMA}]


TEXT: Any = {"type": "text", "text": "Rome?"}


# By name: fields of a chat, of a Responses request and of a Messages request that mean the same.
SAME: dict[str, tuple[dict[str, Any], dict[str, Any], dict[str, Any]]] = {
    "text": ({}, {}, {}),
    "system": (
        {"messages": [{"role": "system", "content": "Be brief."}, USER]},
        {"instructions": "Be brief."},
        {"system": "Be brief."},
    ),
    "system in parts": (
        {"messages": [{"role": "system", "content": "Be\nbrief."}, USER]},
        {
            "input": [
                {
                    "type": "message",
                    "role": "system",
                    "content": [{"type": "input_text", "text": t} for t in ("Be", "brief.")],
                },
                USER,
            ]
        },
        {"system": [{"type": "text", "text": t, "cache_control": None} for t in ("Be", "brief.")]},
    ),
    "turns": (
        {"messages": [USER, {"role": "assistant", "content": "Yes."}, USER]},
        {
            "input": [
                USER,
                {
                    "type": "message",
                    "role": "assistant",
                    "id": "msg_1",
                    "status": "completed",
                    "content": [{"type": "output_text", "text": "Yes.", "annotations": []}],
                },
                USER,
            ]
        },
        {"messages": [USER, {"role": "assistant", "content": "Yes."}, USER]},
    ),
    "calls and results": (
        {"messages": [USER, CALLED, *RESULTS, USER], "tools": TOOLS},
        {
            "input": [
                USER,
                {
                    "type": "reasoning",
                    "id": "rs_1",
                    "summary": [],
                    "content": [{"type": "reasoning_text", "text": "Hm."}],
                },
                {"role": "assistant", "content": "I look."},
                *(
                    {"type": "function_call", "call_id": c["id"], "id": "fc_1", **c["function"]}
                    for c in CALLS
                ),
                {"type": "function_call_output", "call_id": "id1", "output": "1"},
                {
                    "type": "function_call_output",
                    "call_id": "id2",
                    "output": [{"type": "input_text", "text": "2"}],
                },
                USER,
            ],
            "tools": OPEN_TOOLS,
        },
        {
            "messages": [
                USER,
                {
                    "role": "assistant",
                    "content": [
                        {"type": "thinking", "thinking": "Hm.", "signature": "x"},
                        {"type": "text", "text": "I look."},
                        *(
                            {"type": "tool_use", "id": c["id"], "name": "f", "input": {"a": 1}}
                            for c in CALLS
                        ),
                    ],
                },
                {
                    "role": "user",
                    "content": [
                        {"type": "tool_result", "tool_use_id": "id1", "content": "1"},
                        {
                            "type": "tool_result",
                            "tool_use_id": "id2",
                            "content": [{"type": "text", "text": "2"}],
                        },
                        TEXT,
                    ],
                },
            ],
            "tools": OTHER_TOOLS,
        },
    ),
    "any tool": (
        {"tools": TOOLS, "tool_choice": "required"},
        {"tools": OPEN_TOOLS, "tool_choice": "required"},
        {"tools": OTHER_TOOLS, "tool_choice": {"type": "any"}},
    ),
    "a named tool, once": (
        {
            "tools": TOOLS,
            "tool_choice": {"type": "function", "function": {"name": "f"}},
            "parallel_tool_calls": False,
        },
        {
            "tools": OPEN_TOOLS,
            "tool_choice": {"type": "function", "name": "f"},
            "parallel_tool_calls": False,
        },
        {
            "tools": OTHER_TOOLS,
            "tool_choice": {"type": "tool", "name": "f", "disable_parallel_tool_use": True},
        },
    ),
    "no tool": (
        {"tools": TOOLS, "tool_choice": "none"},
        {"tools": OPEN_TOOLS, "tool_choice": "none"},
        {"tools": OTHER_TOOLS, "tool_choice": {"type": "none"}},
    ),
    "schema": (
        {"response_format": {"type": "json_schema", "json_schema": {"schema": SCHEMA}}},
        {"text": {"format": {"type": "json_schema", "name": "x", "schema": SCHEMA}}},
        {"output_config": {"format": {"type": "json_schema", "schema": SCHEMA}}},
    ),
    "effort": (
        {"reasoning_effort": "low"},
        {"reasoning": {"effort": "low"}},
        {"output_config": {"effort": "low"}},
    ),
    "sampling": (
        {"temperature": 0.3, "top_p": 0.8, "seed": 4, "top_k": 5, "stop": ["x"], "user": "u"},
        {"temperature": 0.3, "top_p": 0.8, "seed": 4, "top_k": 5, "stop": ["x"], "user": "u"},
        {
            **{"temperature": 0.3, "top_p": 0.8, "seed": 4, "top_k": 5},
            **{"stop_sequences": ["x"], "metadata": {"user_id": "u"}},
        },
    ),
    "no thinking": (
        {"chat_template_kwargs": {"enable_thinking": False}},
        {"chat_template_kwargs": {"enable_thinking": False}},
        {"thinking": {"type": "disabled"}},
    ),
}


def model(**options: Any) -> Any:
    parsers = {"reasoning_parser": "qwen3", "tool_parser": "hermes"}
    return toy_model(TEMPLATE, tokenizer=QWEN, **(parsers | options))


def read(api: str, body: dict[str, Any], **options: Any) -> ApiRequest:
    raw, served = json.dumps({"model": MODEL} | body).encode(), model(**options)
    if api == "chat":
        return parse_chat(raw, served)
    if api == "messages":
        return parse_messages(raw, served)
    return parse_responses(raw, served, ResponseStore(10_000, 60).of(None))


def prompt_of(request: ApiRequest) -> str:
    (prompt,) = request.prompts
    assert isinstance(prompt, PendingPrompt)
    return QWEN.decode(list(prompt.make()), skip_special_tokens=False)


def of_three(name: str) -> dict[str, dict[str, Any]]:
    chat, responses, messages = SAME[name]
    return {
        "chat": {"messages": [USER], "max_tokens": 40} | chat,
        "responses": {"input": "Rome?", "max_output_tokens": 40} | responses,
        "messages": {"messages": [USER], "max_tokens": 40} | messages,
    }


@pytest.mark.parametrize("name", SAME)
def test_the_same_conversation_makes_the_same_request(name: str) -> None:
    requests = {api: read(api, body) for api, body in of_three(name).items()}
    chat = requests["chat"]
    for request in requests.values():
        assert prompt_of(request) == prompt_of(chat)
        assert request.params == chat.params and request.reply == chat.reply
        assert request.fields.user == chat.fields.user
        assert request.grammar_field == chat.grammar_field and not request.ignored


def test_these_requests_differ_from_each_other() -> None:
    chats = [read("chat", of_three(name)["chat"]) for name in SAME]
    hidden = 1  # tools that the model does not see
    assert len({(prompt_of(chat), repr(chat.params)) for chat in chats}) == len(SAME) - hidden


def test_what_no_field_of_a_chat_carries_is_reported_as_ignored() -> None:
    more = {"verbosity": "low"}
    body: dict[str, Any] = {
        **{"input": "x", "text": more, "service_tier": "flex", "stream_options": {"a": 1}},
        **{"reasoning": {"summary": "auto"}, "tools": [OPEN_TOOLS[0] | {"strict": True}]},
    }
    assert set(read("responses", body).ignored) == {
        "text.verbosity",
        "service_tier",
        "stream_options.a",
        "reasoning.summary",
        "tools[0].strict",
    }
    hint = {"type": "ephemeral"}
    body = {
        **{"messages": [{"role": "user", "content": [TEXT | {"cache_control": hint, "b": 1}]}]},
        **{"max_tokens": 5, "thinking": {"type": "enabled", "budget_tokens": 1024}},
        **{"tools": [OTHER_TOOLS[0] | {"strict": True}], "service_tier": "auto"},
    }
    assert set(read("messages", body).ignored) == {
        "messages[0].content[0].b",
        "thinking.budget_tokens",
        "tools[0].strict",
        "service_tier",
    }


def test_thinking_can_be_asked_for_and_left_out() -> None:
    body = {"messages": [USER], "max_tokens": 5}
    for kind, text in (("enabled", "True"), ("adaptive", "True"), ("disabled", "False")):
        assert prompt_of(read("messages", body | {"thinking": {"type": kind}})).endswith(text)
    own = {"chat_template_kwargs": {"enable_thinking": False}, "thinking": {"type": "enabled"}}
    assert prompt_of(read("messages", body | own)).endswith("False"), "the template's own name"
    hidden = read("messages", body | {"thinking": {"type": "adaptive", "display": "omitted"}})
    assert not hidden.include_reasoning


def test_a_client_without_a_store_sends_thoughts_back() -> None:
    item = {"type": "reasoning", "id": "r", "summary": [], "encrypted_content": encrypted("Hm.")}
    reply = {"role": "assistant", "content": "Yes."}
    request = read("responses", {"input": [USER, item, reply, USER]})
    assert prompt_of(request).startswith("[user]Rome?[assistant]Yes.(Hm.)[user]")
    for other in ("gAAAAABo", "%", "aGlkZGVu", ""):  # of another server: nothing can read it
        items = [USER, item | {"encrypted_content": other}, reply, USER]
        assert prompt_of(read("responses", {"input": items})).startswith(
            "[user]Rome?[assistant]Yes.[user]"
        )


def test_functions_of_a_namespace_have_its_name() -> None:
    """Codex sends some of its tools so."""
    tools = [*OPEN_TOOLS, {"type": "namespace", "name": "ns", "tools": OPEN_TOOLS}]
    call = {"type": "function_call", "call_id": "1", "name": "f", "namespace": "ns"}
    text = prompt_of(read("responses", {"input": [USER, call, USER], "tools": tools}))
    assert "<f:" in text and "<ns.f:" in text and "!1:ns.f:" in text
    for inner, field in (({"type": "file_search"}, "type"), ({"type": "function"}, "name")):
        wrong = [*OPEN_TOOLS, {"type": "namespace", "name": "ns", "tools": [inner]}]
        with pytest.raises(FieldError, match=rf"tools\[1\].tools\[0\].{field}: "):
            read("responses", {"input": "x", "tools": wrong})


def test_results_of_tools_keep_their_place_and_say_that_they_are_errors() -> None:
    result = {"type": "tool_result", "tool_use_id": "id1", "is_error": True}
    body = {"messages": [{"role": "user", "content": [TEXT, result, TEXT]}], "max_tokens": 5}
    template = "{% for m in messages %}[{{ m.role }}{{ m.is_error }}]{% endfor %}"
    (prompt,) = parse_messages(json.dumps(body).encode(), toy_model(template)).prompts
    assert isinstance(prompt, PendingPrompt)
    assert toy_model().tokenizer.decode(list(prompt.make())) == "[user][toolTrue][user]"


def test_a_count_needs_no_length() -> None:
    body = json.dumps({"messages": [USER]}).encode()
    assert prompt_of(parse_count(body, model())) == prompt_of(read("chat", {"messages": [USER]}))
    with pytest.raises(FieldError, match="max_tokens: is missing"):
        parse_messages(body, model())


IMAGE: Any = {"type": "image", "source": {"type": "url", "url": "http://x"}}


# (fields, the field that the error names, words of the message)
WRONG_RESPONSES: list[tuple[dict[str, Any], str, str]] = [
    ({"input": []}, "input", "is missing"),
    ({"input": 3}, "input", "3 is not allowed"),
    ({"input": [{"content": "x"}]}, "input[0].role", "None is not known"),
    ({"input": [{"role": "user"}]}, "input[0].content", "is missing"),
    (
        {"input": [USER, {"role": "user", "content": [{"type": "input_image"}]}]},
        "input[1].content[0].type",
        "'input_image' is not supported",
    ),
    ({"input": [{"type": "item_reference", "id": "x"}]}, "input[0].id", "'x' is not an item of"),
    ({"input": [USER, {"id": "x"}]}, "input[1].id", "'x' is not an item of a stored response"),
    ({"input": [USER, {"type": "mcp_call", "output": "x"}]}, "input[1].type", "'mcp_call'"),
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
    ({"previous_response_id": "resp_x"}, "previous_response_id", "is unknown or has expired"),
    ({"metadata": {"a": 1}}, "metadata", "is not allowed"),
    ({"model": "other"}, "model", "is not served"),
]


WRONG_MESSAGES: list[tuple[dict[str, Any], str, str]] = [
    ({"messages": []}, "messages", "is empty"),
    ({"messages": "x"}, "messages", "'x' is not allowed"),
    ({"messages": [{"role": "tool", "content": "x"}]}, "messages", "tool"),
    ({"messages": [USER] * 300}, "messages", "resulted in at least 300 tokens"),
    ({"messages": [USER, {"role": "assistant", "content": "The"}]}, "messages", "continuing"),
    (
        {"messages": [{"role": "user", "content": [IMAGE]}]},
        "messages[0].content[0].type",
        "'image'",
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
    ({"mcp_servers": [{"url": "x"}]}, "mcp_servers", "not supported"),
    ({"n": 2}, "n", "more than one choice"),
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
