"""Conversations as agents send them back in all APIs, also those begun with another server."""

from __future__ import annotations

import base64
import json
import logging
from itertools import permutations
from typing import Any

import pytest

from cbatch import FieldError
from cbatch.server.protocol import translation
from cbatch.server.protocol.responses_request import encrypted
from tests.server.apis import CHAT, MESSAGES, RESPONSES, TOOLS, USER, body_of
from tests.server.parsing import prompt_of, read

HEAD = "[user]Rome?"
YES: Any = {"role": "assistant", "content": "Yes."}
OPEN_TOOLS = TOOLS[RESPONSES]


def response_prompt(*items: dict[str, Any], **fields: Any) -> str:
    return prompt_of(read(RESPONSES, {"input": [USER, *items]} | fields))


def turns(path: str, *messages: dict[str, Any]) -> dict[str, Any]:
    return {"messages": [*messages]} | ({"max_tokens": 5} if path == MESSAGES else {})


# ---- results and their calls ---------------------------------------------------------------------


def conversation(path: str, results: list[str], text: str, *, apart: bool) -> dict[str, Any]:
    """Return three calls and their results, with a text of the user where its name is. With
    `apart`, there is a message for each, as some clients store them."""
    said = {"role": "user", "content": text}
    if path == RESPONSES:
        calls = [called(name=n, call_id=n) for n in "abc"]
        kind = {"type": "function_call_output"}
        turn = [said if n == text else kind | {"call_id": n, "output": f"of {n}"} for n in results]
        return {"input": [USER, *calls, *turn]}
    if path == CHAT:
        made: Any = [{"id": n, "type": "function", "function": {"name": n}} for n in "abc"]
        turn = [
            said if n == text else {"role": "tool", "tool_call_id": n, "content": f"of {n}"}
            for n in results
        ]
        parts = [[call] for call in made] if apart else [made]
        replies = [{"role": "assistant", "content": None, "tool_calls": part} for part in parts]
        return turns(path, USER, *replies, *turn)
    blocks: list[Any] = [
        {"type": "text", "text": text}
        if n == text
        else {"type": "tool_result", "tool_use_id": n, "content": f"of {n}"}
        for n in results
    ]
    users = [
        {"role": "user", "content": part} for part in ([[b] for b in blocks] if apart else [blocks])
    ]
    made = [{"type": "tool_use", "id": n, "name": n, "input": {}} for n in "abc"]
    return turns(path, USER, {"role": "assistant", "content": made}, *users)


def called(kind: str = "function_call", **members: Any) -> dict[str, Any]:
    return {"type": kind, "call_id": "c1", "name": "f"} | members


WAYS = pytest.mark.parametrize(
    ("path", "apart"),
    [(CHAT, False), (CHAT, True), (MESSAGES, False), (MESSAGES, True), (RESPONSES, False)],
)


@WAYS
def test_results_are_in_the_order_of_their_calls(path: str, apart: bool) -> None:
    """Also with a text of the user among them, which comes after them."""

    def prompt(results: list[str]) -> str:
        return prompt_of(read(path, conversation(path, results, "go", apart=apart)))

    for order in permutations("abc"):
        for at in range(4):
            got = prompt([*order[:at], "go", *order[at:]])
            assert got.endswith("[tool]of a=a[tool]of b=b[tool]of c=c[user]go"), order
    assert prompt([*"cab"]).endswith("[tool]of a=a[tool]of b=b[tool]of c=c")
    unknown = prompt(["z", "go", "c", "y", "a"])
    assert unknown.endswith("[tool]of a=a[tool]of c=c[tool]of z=z[tool]of y=y[user]go")


def test_without_ids_the_order_is_kept() -> None:
    body = conversation(CHAT, [*"cab"], "go", apart=False)
    body["messages"].insert(2, USER)
    for message in body["messages"]:
        message.pop("tool_call_id", None)
        for call in message.get("tool_calls", ()):
            call.pop("id")
    assert prompt_of(read(CHAT, body)).endswith(f"[tool]of c[tool]of a[tool]of b{HEAD}")


def test_an_error_of_a_tool_may_have_several_texts_and_says_that_it_is_one() -> None:
    texts = [{"type": "text", "text": text} for text in ("It", "broke.")]
    result = {"type": "tool_result", "tool_use_id": "c1", "is_error": True}
    for content, text in ((texts, "It\nbroke."), (None, ""), ([], ""), ("It broke.", "It broke.")):
        turn = {"role": "user", "content": [result | {"content": content}]}
        assert prompt_of(read(MESSAGES, turns(MESSAGES, USER, turn))) == f"{HEAD}[tool]{text}=c1"
    text_part = {"type": "text", "text": "x"}
    body = turns(MESSAGES, {"role": "user", "content": [text_part, result, text_part]})
    shown = "{% for m in messages %}[{{ m.role }}{{ m.is_error }}]{% endfor %}"
    assert prompt_of(read(MESSAGES, body, shown)) == "[user][toolTrue][user]"


# ---- system messages -----------------------------------------------------------------------------

A, B = "RULE-A", "RULE-B"
SYSTEM, DEVELOPER = {"role": "system", "content": A}, {"role": "developer", "content": B}
LATER: dict[str, tuple[str, dict[str, Any]]] = {
    "chat, two": (CHAT, turns(CHAT, SYSTEM, DEVELOPER)),
    "chat, later": (CHAT, turns(CHAT, SYSTEM, USER, YES, DEVELOPER)),
    "responses": (RESPONSES, {"instructions": A, "input": [DEVELOPER, USER]}),
    "responses, later": (RESPONSES, {"instructions": A, "input": [USER, YES, DEVELOPER]}),
    "messages": (
        MESSAGES,
        turns(MESSAGES, USER, YES, SYSTEM | {"content": B}, USER) | {"system": A},
    ),
}
DROPS = """{% set first = messages[0].role in ('system', 'developer') %}{% if first %}\
{{ messages[0].content }}|{% endif %}{% for m in messages[1 if first else 0:] %}\
{% if m.role in ('user', 'assistant') %}[{{ m.role }}]{{ m.content }}{% endif %}{% endfor %}"""
REFUSES = """{% for m in messages %}{% if m.role == 'system' and not loop.first %}\
{{ raise_exception('must be first') }}{% endif %}[{{ m.role }}]{{ m.content }}{% endfor %}"""


@pytest.mark.parametrize("template", [DROPS, REFUSES], ids=["drops", "refuses"])
@pytest.mark.parametrize(("path", "body"), LATER.values(), ids=LATER)
def test_system_messages_of_agents_are_kept(path: str, body: dict[str, Any], template: str) -> None:
    text = prompt_of(read(path, body, template))
    assert text.count(A) == text.count(B) == 1 and text.index(A) < text.index(B)
    if "[assistant]" in text:
        assert text.index("[assistant]") < text.index(f"[user]{B}"), "it stays in its place"


LINE = "x-anthropic-billing-header: cc_version=2.1.117.48f; cc_entrypoint=cli; cch=71fea;"
OTHER_LINE = LINE.replace("71fea", "00000").replace("cli", "sdk-py")
KEPT = [
    f"Explain this:\n{LINE}",
    f" {LINE}\nBe brief.",
    "x-anthropic-billing-header: what is it?",
    "x-anthropic-version: a=b;\nBe brief.",
]


def text_block(text: str) -> dict[str, Any]:
    return {"type": "text", "text": text, "cache_control": {"type": "ephemeral"}}


@pytest.mark.parametrize(
    ("system", "shown"),
    [
        (f"{LINE}\nBe brief.", "Be brief."),
        ([text_block(LINE), text_block("Be brief.")], "Be brief."),
        ([text_block(f"{LINE}\n"), text_block("Be brief.")], "Be brief."),
        ([text_block(f"{LINE}\nBe brief.")], "Be brief."),
        ([text_block(OTHER_LINE), text_block("Be brief.")], "Be brief."),
        (f"{LINE.removesuffix(';')}\nBe brief.", "Be brief."),
        (LINE, ""),
        ([text_block(LINE)], ""),
        ([text_block("Be brief."), text_block(LINE)], f"Be brief.\n{LINE}"),
        *((text, text) for text in KEPT),
    ],
)
def test_only_the_line_for_bills_is_left_out(system: Any, shown: str) -> None:
    body = turns(MESSAGES, USER) | {"system": system}
    assert prompt_of(read(MESSAGES, body)) == (f"[system]{shown}" if shown else "") + HEAD


# ---- thoughts ------------------------------------------------------------------------------------


def thought(text: str | None = None, **members: Any) -> dict[str, Any]:
    content = [] if text is None else [{"type": "reasoning_text", "text": text}]
    return {"type": "reasoning", "id": "rs_1", "summary": [], "content": content} | members


SUMMARY = [{"type": "summary_text", "text": "In short."}]
FOREIGN = base64.b64encode(b"hidden").decode()
THOUGHTS: dict[str, tuple[list[dict[str, Any]], str]] = {
    "three": ([thought("A"), thought("B"), thought("C"), YES], "[assistant]Yes.(A\nB\nC)"),
    "two before a call": (
        [thought("A"), thought("B"), called(arguments="{}")],
        "[assistant](A\nB)!c1:f:{}",
    ),
    "empty ones": (
        [thought("A"), thought(), thought("B", content=None), YES],
        "[assistant]Yes.(A)",
    ),
    "a summary alone": ([thought(summary=SUMMARY), YES], "[assistant]Yes.(In short.)"),
    "an empty text": ([thought("", summary=SUMMARY), YES], "[assistant]Yes.(In short.)"),
    "a summary and a foreign text": (
        [thought(summary=SUMMARY, encrypted_content=FOREIGN), YES],
        "[assistant]Yes.(In short.)",
    ),
    "our own text": ([thought(encrypted_content=encrypted("Hm.")), YES], "[assistant]Yes.(Hm.)"),
    **{
        f"foreign text {text}": ([thought(encrypted_content=text), YES], "[assistant]Yes.")
        for text in (FOREIGN, "gAAAAABo", "%", "aGlkZGVu", "")
    },
    "a foreign text before one that can be read": (
        [thought(encrypted_content="gAAAAABo4x_yz-AbC=="), thought("B"), YES],
        "[assistant]Yes.(B)",
    ),
    "of two turns": (
        [thought("A"), called(arguments="{}"), thought("B"), YES],
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
        body = turns(MESSAGES, USER, {"role": "assistant", "content": blocks}, USER)
        assert prompt_of(read(MESSAGES, body)) == f"{HEAD}[assistant]Yes.(Hm.){HEAD}"


@pytest.mark.parametrize("name", ["reasoning", "reasoning_content"])
def test_a_chat_names_a_thought_in_either_way(name: str) -> None:
    for empty in ({}, {"reasoning": ""}, {"reasoning": None}, {"reasoning": []}):
        for text in ("Hm.", [{"type": "text", "text": "Hm."}]):
            body = turns(CHAT, USER, YES | empty | {name: text}, USER)
            assert prompt_of(read(CHAT, body)) == f"{HEAD}[assistant]Yes.(Hm.){HEAD}"


# ---- arguments, other tools ----------------------------------------------------------------------

CUT = '{"a": 1, "b": ["x", {"c": "Rom'
MISSING = object()
# What a client sends as the arguments of an earlier call, and the object that a template writes.
ARGUMENTS: dict[str, tuple[Any, dict[str, Any]]] = {
    "missing": (MISSING, {}),
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
    given = {} if sent is MISSING else {"arguments": sent}
    said = {"role": "assistant", "tool_calls": [{"id": "c1", "function": {"name": "f"} | given}]}
    used = {"type": "tool_use", "id": "c1", "name": "f"} | ({"input": sent} if given else {})
    for path, body in (
        (CHAT, turns(CHAT, USER, said, USER)),
        (RESPONSES, {"input": [USER, called(**given), USER]}),
        (MESSAGES, turns(MESSAGES, USER, {"role": "assistant", "content": [used]}, USER)),
    ):
        prompt = prompt_of(read(path, body, max_model_len=4096))
        assert prompt == f"{HEAD}[assistant]!c1:f:{json.dumps(read_as)}{HEAD}"


ACTION = {"type": "exec", "command": ["ls"]}
OTHER_CALLS: dict[str, tuple[dict[str, Any], Any, str]] = {
    "a custom tool": (
        called("custom_tool_call", name="apply_patch", input="*** Begin"),
        "Done.",
        '!c1:apply_patch:{"input": "*** Begin"}[tool]Done.=c1',
    ),
    "a custom tool of a namespace": (
        called("custom_tool_call", name="exec", namespace="functions", input="1"),
        [{"type": "input_text", "text": "2"}],
        '!c1:functions.exec:{"input": "1"}[tool]2=c1',
    ),
    "a local shell": (
        {"type": "local_shell_call", "id": "l1", "call_id": "c1", "action": ACTION},
        "a.txt",
        f"!c1:local_shell:{json.dumps(ACTION)}[tool]a.txt=c1",
    ),
    "no result": (called(arguments="{}"), None, "!c1:f:{}[tool]=c1"),
}


@pytest.mark.parametrize(("made", "output", "text"), OTHER_CALLS.values(), ids=OTHER_CALLS)
def test_calls_of_codexs_other_tools(made: Any, output: Any, text: str) -> None:
    name = "id" if made["type"] == "local_shell_call" else "call_id"
    result = {"type": f"{made['type']}_output", name: "c1", "output": output}
    assert response_prompt(made, result, USER) == f"{HEAD}[assistant]{text}{HEAD}"


HOSTED = ["local_shell", "web_search", "web_search_preview", "image_generation", "tool_search"]
HOSTED += ["mcp", "custom", "code_interpreter"]


@pytest.mark.parametrize("kind", HOSTED)
def test_tools_of_openais_servers_are_skipped(kind: str, caplog: Any) -> None:
    translation.log_skipped.cache_clear()
    other = {"type": kind, "name": "x", "server_label": "y", "format": {"type": "text"}}
    spaces = [{"type": "namespace", "name": "ns", "tools": [other, *OPEN_TOOLS]}]
    with caplog.at_level(logging.WARNING, "cbatch"):
        plain = read(RESPONSES, body_of(RESPONSES, tools=[other, *OPEN_TOOLS]))
        inner = read(RESPONSES, body_of(RESPONSES, tools=spaces))
    assert "tools[0]" in plain.ignored and "tools[0].tools[0]" in inner.ignored
    assert prompt_of(plain).startswith("<f:") and prompt_of(inner).startswith("<ns.f:")
    assert [record.message for record in caplog.records] == [
        f"tools of the type {kind.removesuffix('_preview')} are left out of prompts"
    ]


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
    request = read(RESPONSES, {"input": [USER, item, YES, USER]})
    assert prompt_of(request) == f"{HEAD}[assistant]Yes.{HEAD}" and "input[1]" in request.ignored


def test_tools_of_codex_come_in_namespaces_and_with_items() -> None:
    space = {"type": "namespace", "name": "ns", "tools": [{"type": "custom", "name": "exec"}]}
    space["tools"] += OPEN_TOOLS
    call = called(namespace="ns", call_id="1")
    text = response_prompt(call, USER, tools=[*OPEN_TOOLS, space])
    assert "<f:" in text and "<ns.f:" in text and "!1:ns.f:" in text
    for kind in ("additional_tools", "tool_search_output"):
        item = {"type": kind, "role": "developer", "tools": [space, *OPEN_TOOLS]}
        text = prompt_of(read(RESPONSES, {"input": [item, item, USER]}))
        assert (text.count("<f:"), text.count("<ns.f:")) == (1, 1) and text.endswith(HEAD)
        other = [OPEN_TOOLS[0] | {"name": "g"}]
        request = read(RESPONSES, {"input": [item, USER], "tools": other})
        assert [prompt_of(request).count(f"<{name}:") for name in ("f", "ns.f", "g")] == [1, 1, 1]
        assert "input[0].tools[0].tools[0]" in request.ignored
        wrong = item | {"tools": [*OPEN_TOOLS, {"type": "file_search"}]}
        with pytest.raises(FieldError, match=r"input\[1\].tools\[1\].type: 'file_search'"):
            read(RESPONSES, {"input": [USER, wrong]})


# ---- parts ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["text", "input_text", "output_text", "refusal"])
def test_texts_may_be_parts(kind: str) -> None:
    member = "refusal" if kind == "refusal" else "text"
    parts = [{"type": kind, member: text} for text in ("A", "B")]
    result = {"role": "tool", "tool_call_id": "c1", "content": parts}
    said = [{"role": role, "content": parts} for role in ("system", "user", "assistant")]
    output = {"type": "function_call_output", "call_id": "c1", "output": parts}
    for path, body in (
        (CHAT, turns(CHAT, *said, result, USER)),
        (RESPONSES, {"input": [*said[1:], output, USER], "instructions": parts}),
    ):
        text = prompt_of(read(path, body))
        assert text == f"[system]A\nB[user]A\nB[assistant]A\nB[tool]A\nB=c1{HEAD}"


def test_a_refusal_of_a_chat_is_its_text() -> None:
    for content in (None, "", []):
        said = {"role": "assistant", "content": content, "refusal": "No."}
        assert prompt_of(read(CHAT, turns(CHAT, USER, said))) == f"{HEAD}[assistant]No."
