"""Conversations as agents send them back, also those that began with another server."""

from __future__ import annotations

import base64
import json
import logging
from typing import Any

import pytest

from cbatch import FieldError
from cbatch.server.protocol import translation
from cbatch.server.protocol.requests import PendingPrompt
from tests.server.test_translation import OPEN_TOOLS, OTHER_TOOLS, TOOLS, USER, prompt_of, read

HEAD = "[user]Rome?"
REPLY: Any = {"role": "assistant", "content": "Yes."}


def response_prompt(*items: dict[str, Any], **fields: Any) -> str:
    return prompt_of(read("responses", {"input": [USER, *items]} | fields))


def thought(text: str | None = None, **members: Any) -> dict[str, Any]:
    content = [] if text is None else [{"type": "reasoning_text", "text": text}]
    return {"type": "reasoning", "id": "rs_1", "summary": [], "content": content} | members


def call(kind: str = "function_call", **members: Any) -> dict[str, Any]:
    return {"type": kind, "call_id": "c1", "name": "f"} | members


# ---- reasoning --------------------------------------------------------------------------------

SUMMARY = [{"type": "summary_text", "text": "In short."}]
FOREIGN = base64.b64encode(b"hidden").decode()
THOUGHTS: dict[str, tuple[list[dict[str, Any]], str]] = {
    "two in a row": ([thought("A"), thought("B"), REPLY], "[assistant]Yes.(A\nB)"),
    "three": ([thought("A"), thought("B"), thought("C"), REPLY], "[assistant]Yes.(A\nB\nC)"),
    "two before a call": (
        [thought("A"), thought("B"), call(arguments="{}")],
        "[assistant](A\nB)!c1:f:{}",
    ),
    "an empty one between": (
        [thought("A"), thought(), thought("B", content=None), REPLY],
        "[assistant]Yes.(A)",
    ),
    "a summary alone": ([thought(summary=SUMMARY), REPLY], "[assistant]Yes.(In short.)"),
    "a summary beside an empty text": (
        [thought("", summary=SUMMARY), REPLY],
        "[assistant]Yes.(In short.)",
    ),
    "a summary beside a foreign text": (
        [thought(summary=SUMMARY, encrypted_content=FOREIGN), REPLY],
        "[assistant]Yes.(In short.)",
    ),
    "a foreign text": ([thought(encrypted_content=FOREIGN), REPLY], "[assistant]Yes."),
    "a foreign text before one that can be read": (
        [thought(encrypted_content="gAAAAABo4x_yz-AbC=="), thought("B"), REPLY],
        "[assistant]Yes.(B)",
    ),
    "of two turns": (
        [thought("A"), call(arguments="{}"), thought("B"), REPLY],
        "[assistant](A)!c1:f:{}[assistant]Yes.(B)",
    ),
}


@pytest.mark.parametrize(("items", "text"), THOUGHTS.values(), ids=THOUGHTS)
def test_no_thought_is_lost(items: list[dict[str, Any]], text: str) -> None:
    assert response_prompt(*items) == HEAD + text


@pytest.mark.parametrize("kind", ["redacted_thinking", "server_tool_use", "web_search_tool_result"])
def test_blocks_that_only_claude_reads_are_left_out(kind: str) -> None:
    foreign = {"type": kind, "data": "EsoBCkYI", "id": "s1", "name": "web_search", "input": {}}
    results = [{"type": "web_search_result", "url": "x", "encrypted_content": "E"}]
    for content in (results, {"type": "web_search_tool_result_error"}, None):
        blocks = [foreign | {"content": content}, {"type": "thinking", "thinking": "Hm."}]
        blocks.append({"type": "text", "text": "Yes."})
        turns = [USER, {"role": "assistant", "content": blocks}, USER]
        request = read("messages", {"messages": turns, "max_tokens": 5})
        assert prompt_of(request) == f"{HEAD}[assistant]Yes.(Hm.){HEAD}"


@pytest.mark.parametrize("empty", [{}, {"reasoning": ""}, {"reasoning": None}, {"reasoning": []}])
@pytest.mark.parametrize("name", ["reasoning", "reasoning_content"])
def test_a_chat_names_a_thought_in_either_way(name: str, empty: dict[str, Any]) -> None:
    for text in ("Hm.", [{"type": "text", "text": "Hm."}]):
        turns = [USER, REPLY | empty | {name: text}, USER]
        assert prompt_of(read("chat", {"messages": turns})) == f"{HEAD}[assistant]Yes.(Hm.){HEAD}"


# ---- calls ------------------------------------------------------------------------------------

CUT = '{"a": 1, "b": ["x", {"c": "Rom'
# What a client sends as the arguments of an earlier call, and the object that a template writes.
ARGUMENTS: dict[str, tuple[Any, dict[str, Any]]] = {
    "null": (None, {}),
    "an empty text": ("", {}),
    "white space": (" \n", {}),
    "the text null": ("null", {}),
    "an object": ({"a": 1}, {"a": 1}),
    "a text": ('{"a": 1}', {"a": 1}),
    "a text in a text": (json.dumps('{"a": 1}'), {"a": 1}),
    "cut": (CUT, {"a": 1, "b": ["x", {"c": "Rom"}]}),
    "cut after an escape": ('{"a": "\\"{[', {"a": '"{['}),
    "cut within a name": ('{"a": 1, "b', {"input": '{"a": 1, "b'}),
    "cut within an escape": ('{"a": "\\', {"input": '{"a": "\\'}),
    "no JSON": ("ls -la", {"input": "ls -la"}),
    "a list": ("[1]", {"input": "[1]"}),
    "too deep": ("[" * 900, {"input": "[" * 900}),
}


@pytest.mark.parametrize(("sent", "read_as"), ARGUMENTS.values(), ids=ARGUMENTS)
def test_arguments_of_an_earlier_call(sent: Any, read_as: dict[str, Any]) -> None:
    function = {"name": "f", "arguments": sent}
    said = {"role": "assistant", "tool_calls": [{"id": "c1", "function": function}]}
    used = {"type": "tool_use", "id": "c1", "name": "f", "input": sent}
    turn = {"role": "assistant", "content": [used]}
    for request in (
        read("chat", {"messages": [USER, said, USER]}),
        read("responses", {"input": [USER, call(arguments=sent), USER]}),
        read("messages", {"messages": [USER, turn, USER], "max_tokens": 5}),
    ):
        assert prompt_of(request) == f"{HEAD}[assistant]!c1:f:{json.dumps(read_as)}{HEAD}"


def test_arguments_may_be_missing() -> None:
    said = {"role": "assistant", "tool_calls": [{"id": "c1", "function": {"name": "f"}}]}
    turn = {"role": "assistant", "content": [{"type": "tool_use", "id": "c1", "name": "f"}]}
    for request in (
        read("chat", {"messages": [USER, said, USER]}),
        read("responses", {"input": [USER, call(), USER]}),
        read("messages", {"messages": [USER, turn, USER], "max_tokens": 5}),
    ):
        assert prompt_of(request) == f"{HEAD}[assistant]!c1:f:{{}}{HEAD}"


ACTION = {"type": "exec", "command": ["ls"]}
OTHER_CALLS: dict[str, tuple[dict[str, Any], dict[str, Any], str]] = {
    "a custom tool": (
        call("custom_tool_call", name="apply_patch", input="*** Begin"),
        {"type": "custom_tool_call_output", "call_id": "c1", "output": "Done."},
        '!c1:apply_patch:{"input": "*** Begin"}[tool]Done.=c1',
    ),
    "a custom tool of a namespace": (
        call("custom_tool_call", name="exec", namespace="functions", input="1"),
        {
            "type": "custom_tool_call_output",
            "call_id": "c1",
            "output": [{"type": "input_text", "text": "2"}],
        },
        '!c1:functions.exec:{"input": "1"}[tool]2=c1',
    ),
    "a local shell": (
        {"type": "local_shell_call", "id": "l1", "call_id": "c1", "action": ACTION},
        {"type": "local_shell_call_output", "id": "c1", "output": "a.txt"},
        f"!c1:local_shell:{json.dumps(ACTION)}[tool]a.txt=c1",
    ),
    "no result": (
        call(arguments="{}"),
        {"type": "function_call_output", "call_id": "c1", "output": None},
        "!c1:f:{}[tool]=c1",
    ),
}


@pytest.mark.parametrize(("made", "result", "text"), OTHER_CALLS.values(), ids=OTHER_CALLS)
def test_calls_of_codexs_other_tools(made: Any, result: Any, text: str) -> None:
    assert response_prompt(made, result, USER) == f"{HEAD}[assistant]{text}{HEAD}"


def test_an_error_of_a_tool_may_have_several_texts() -> None:
    texts = [{"type": "text", "text": text} for text in ("It", "broke.")]
    for content, text in ((texts, "It\nbroke."), (None, ""), ([], ""), ("It broke.", "It broke.")):
        result = {"type": "tool_result", "tool_use_id": "c1", "content": content, "is_error": True}
        turn = {"role": "user", "content": [result]}
        request = read("messages", {"messages": [USER, turn], "max_tokens": 5})
        assert prompt_of(request) == f"{HEAD}[tool]{text}=c1"


# ---- tools ------------------------------------------------------------------------------------

HOSTED = ["local_shell", "web_search", "web_search_preview", "image_generation", "tool_search"]
HOSTED += ["mcp", "custom", "code_interpreter"]


@pytest.mark.parametrize("kind", HOSTED)
def test_tools_of_openais_servers_are_skipped(kind: str, caplog: Any) -> None:
    translation.log_skipped.cache_clear()
    other = {"type": kind, "name": "x", "server_label": "y", "format": {"type": "text"}}
    spaces = [{"type": "namespace", "name": "ns", "tools": [other, *OPEN_TOOLS]}]
    with caplog.at_level(logging.WARNING, "cbatch"):
        requests = [
            read("responses", {"input": "x", "tools": [other, *OPEN_TOOLS]}),
            read("responses", {"input": "x", "tools": spaces}),
        ]
    assert ["tools[0]" in requests[0].ignored, "tools[0].tools[0]" in requests[1].ignored] == [
        True
    ] * 2
    assert prompt_of(requests[0]).startswith("<f:") and prompt_of(requests[1]).startswith("<ns.f:")
    assert [record.message for record in caplog.records] == [
        f"tools of the type {kind.removesuffix('_preview')} are left out of prompts"
    ]
    with pytest.raises(FieldError, match="tool_choice: "):
        read("responses", {"input": "x", "tools": [other], "tool_choice": "required"})


SKIPPED: list[dict[str, Any]] = [
    {"type": "web_search_call", "id": "w", "action": {"type": "search", "query": "Rome"}},
    {"type": "image_generation_call", "id": "i", "result": "iVBORw0K", "revised_prompt": "A cat"},
    {"type": "tool_search_call", "call_id": None, "execution": "client", "arguments": {"q": "x"}},
    {"type": "mcp_list_tools", "server_label": "y", "tools": [{"name": "g", "input_schema": {}}]},
    {"type": "compaction", "encrypted_content": "gAAAA"},
    {"type": "context_compaction", "encrypted_content": None},
]


@pytest.mark.parametrize("item", SKIPPED, ids=lambda item: item["type"])
def test_items_without_a_text_are_skipped(item: dict[str, Any]) -> None:
    request = read("responses", {"input": [USER, item, REPLY, USER]})
    assert prompt_of(request) == f"{HEAD}[assistant]Yes.{HEAD}" and "input[1]" in request.ignored


def test_tools_may_come_with_items() -> None:
    """Codex sends all of its tools so."""
    space = {"type": "namespace", "name": "ns", "tools": [{"type": "custom", "name": "exec"}]}
    space["tools"] += OPEN_TOOLS
    for kind in ("additional_tools", "tool_search_output"):
        item = {"type": kind, "role": "developer", "tools": [space, *OPEN_TOOLS]}
        text = prompt_of(read("responses", {"input": [item, item, USER]}))
        assert (text.count("<f:"), text.count("<ns.f:")) == (1, 1) and text.endswith(HEAD)
        other = [OPEN_TOOLS[0] | {"name": "g"}]
        request = read("responses", {"input": [item, USER], "tools": other})
        assert [prompt_of(request).count(f"<{name}:") for name in ("f", "ns.f", "g")] == [1, 1, 1]
        assert "input[0].tools[0].tools[0]" in request.ignored
        wrong = item | {"tools": [*OPEN_TOOLS, {"type": "file_search"}]}
        with pytest.raises(FieldError, match=r"input\[1\].tools\[1\].type: 'file_search'"):
            read("responses", {"input": [USER, wrong]})


@pytest.mark.parametrize("length", [64, 65, 74, 128])
def test_names_of_tools_may_be_long(length: int) -> None:
    name = "mcp__" + "a" * (length - 5)
    long = {
        "chat": [TOOLS[0] | {"function": TOOLS[0]["function"] | {"name": name}}],
        "responses": [OPEN_TOOLS[0] | {"name": name}],
        "messages": [OTHER_TOOLS[0] | {"name": name}],
    }
    space = [{"type": "namespace", "name": name, "tools": long["responses"]}]
    ask: dict[str, Any] = {"messages": [USER], "max_tokens": 5, "input": "x"}
    needed = {
        "chat": ("messages",),
        "responses": ("input",),
        "messages": ("messages", "max_tokens"),
    }
    for api, tools in [*long.items(), ("responses", space)]:
        body = {field: ask[field] for field in needed[api]}
        assert f"{name}:" in prompt_of(read(api, body | {"tools": tools}))
    for api in ("responses", "messages"):
        body = {field: ask[field] for field in needed[api]}
        tools = [long[api][0] | {"name": "a" * 129}]
        with pytest.raises(FieldError, match="tools: "):
            read(api, body | {"tools": tools})


# ---- content in parts -------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["text", "input_text", "output_text", "refusal"])
def test_texts_may_be_parts(kind: str) -> None:
    member = "refusal" if kind == "refusal" else "text"
    parts = [{"type": kind, member: text} for text in ("A", "B")]
    result = {"role": "tool", "tool_call_id": "c1", "content": parts}
    roles = ("system", "user", "assistant")
    turns = [{"role": role, "content": parts} for role in roles]
    chat = read("chat", {"messages": [*turns, result, USER]})
    output = {"type": "function_call_output", "call_id": "c1", "output": parts}
    responses = read("responses", {"input": [*turns[1:], output, USER], "instructions": parts})
    for request in (chat, responses):
        assert prompt_of(request) == f"[system]A\nB[user]A\nB[assistant]A\nB[tool]A\nB=c1{HEAD}"


def test_a_refusal_of_a_chat_is_its_text() -> None:
    for content in (None, "", []):
        said = {"role": "assistant", "content": content, "refusal": "No."}
        assert prompt_of(read("chat", {"messages": [USER, said]})) == f"{HEAD}[assistant]No."


# ---- Claude Code ------------------------------------------------------------------------------

LINE = "x-anthropic-billing-header: cc_version=2.1.117.48f; cc_entrypoint=cli; cch=71fea;"


def system_of(system: Any) -> str:
    """Return the system's text in the prompt of a call and of a count."""
    body = {"messages": [USER], "system": system, "max_tokens": 5}
    (pending,) = read("messages", body).prompts
    assert isinstance(pending, PendingPrompt)
    return prompt_of(read("messages", body)).removesuffix(HEAD)


def text_block(text: str) -> dict[str, Any]:
    return {"type": "text", "text": text, "cache_control": {"type": "ephemeral"}}


@pytest.mark.parametrize("system", [
    f"{LINE}\nBe brief.",
    [text_block(LINE), text_block("Be brief.")],
    [text_block(f"{LINE}\n"), text_block("Be brief.")],
    [text_block(f"{LINE}\nBe brief.")],
    [text_block(LINE.replace("71fea", "00000").replace("cli", "sdk-py")), text_block("Be brief.")],
    f"{LINE.removesuffix(';')}\nBe brief.",
])  # fmt: skip
def test_the_line_for_bills_is_left_out(system: Any) -> None:
    assert system_of(system) == "[system]Be brief."


def test_other_texts_about_the_line_are_kept() -> None:
    assert system_of(LINE) == system_of([text_block(LINE)]) == ""
    for text in (
        f"Explain this:\n{LINE}",
        f" {LINE}\nBe brief.",
        "x-anthropic-billing-header: what is it?",
        "x-anthropic-version: a=b;\nBe brief.",
    ):
        assert system_of(text) == f"[system]{text}"
    assert system_of([text_block("Be brief."), text_block(LINE)]) == f"[system]Be brief.\n{LINE}"
    turns = [{"role": "user", "content": LINE}]
    assert prompt_of(read("messages", {"messages": turns, "max_tokens": 5})) == f"[user]{LINE}"
