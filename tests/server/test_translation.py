"""Requests of the Responses API and of the Messages API mean the same as chats."""

from __future__ import annotations

import json
from typing import Any

import pytest

from cbatch import FieldError
from cbatch.server.protocol.anthropic_request import parse_count, parse_messages
from cbatch.server.protocol.chats import parse_chat
from cbatch.server.protocol.requests import ApiRequest, PendingPrompt
from cbatch.server.protocol.response_items import encrypted
from cbatch.server.protocol.response_store import ResponseStore
from cbatch.server.protocol.responses_request import parse_responses
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
