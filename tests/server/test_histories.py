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
from cbatch.server.protocol.anthropic_request import parse_count, parse_messages
from cbatch.server.protocol.fields import ApiRequest, PendingPrompt
from cbatch.server.protocol.requests import parse_chat, tokenize
from cbatch.server.protocol.response_store import ResponseStore
from cbatch.server.protocol.responses_request import parse_responses
from tests.server.http_client import toy_model
from tests.server.test_translation import OPEN_TOOLS, OTHER_TOOLS, TOOLS, USER, prompt_of, read
from tests.toy_engine import TOKENIZER

TURNS = """{% for m in messages %}[{{ m.role }}]{{ m.content }}\
{% for c in m.tool_calls or [] %}!{{ c.function.name }}{% endfor %}{% endfor %}"""


def parsed(api: str, body: dict[str, Any], template: str = TURNS) -> ApiRequest:
    model = toy_model(template, max_model_len=4096, tool_parser="hermes")
    raw = json.dumps(body).encode()
    if api == "responses":
        return parse_responses(raw, model, ResponseStore(2**20, 3600).of(None))
    parse = {"chat": parse_chat, "messages": parse_messages, "count": parse_count}[api]
    return parse(raw, model)


def ids_of(request: ApiRequest) -> list[int]:
    (pending,) = request.prompts
    assert isinstance(pending, PendingPrompt)
    return list(pending.make())


def prompt(api: str, body: dict[str, Any]) -> str:
    return TOKENIZER.decode(ids_of(parsed(api, body)))


def chat(results: list[str], text: str) -> dict[str, Any]:
    calls = [{"id": n, "type": "function", "function": {"name": n}} for n in "abc"]
    turn = [
        {"role": "user", "content": text}
        if n == text
        else {"role": "tool", "tool_call_id": n, "content": f"of {n}"}
        for n in results
    ]
    reply = {"role": "assistant", "content": None, "tool_calls": calls}
    return {"messages": [{"role": "user", "content": "q"}, reply, *turn]}


def replies_apart(results: list[str], text: str) -> dict[str, Any]:
    """One reply for each call, as some clients store them."""
    user, reply, *turn = chat(results, text)["messages"]
    replies = [{**reply, "tool_calls": [call]} for call in reply["tool_calls"]]
    return {"messages": [user, *replies, *turn]}


def messages(results: list[str], text: str, *, apart: bool = False) -> dict[str, Any]:
    calls = [{"type": "tool_use", "id": n, "name": n, "input": {}} for n in "abc"]
    turn: list[Any] = [
        {"type": "text", "text": text}
        if n == text
        else {"type": "tool_result", "tool_use_id": n, "content": f"of {n}"}
        for n in results
    ]
    turns = [[block] for block in turn] if apart else [turn]
    users = [{"role": "user", "content": content} for content in turns]
    question = {"role": "user", "content": "q"}
    return {
        "max_tokens": 9,
        "messages": [question, {"role": "assistant", "content": calls}, *users],
    }


def responses(results: list[str], text: str) -> dict[str, Any]:
    calls = [{"type": "function_call", "call_id": n, "name": n, "arguments": "{}"} for n in "abc"]
    turn = [
        {"role": "user", "content": text}
        if n == text
        else {"type": "function_call_output", "call_id": n, "output": f"of {n}"}
        for n in results
    ]
    return {"input": [{"role": "user", "content": "q"}, *calls, *turn]}


MAKERS: dict[str, tuple[str, Any]] = {
    "chat": ("chat", chat),
    "chat, replies apart": ("chat", replies_apart),
    "messages": ("messages", messages),
    "messages, turns apart": ("messages", lambda *given: messages(*given, apart=True)),
    "responses": ("responses", responses),
}


@pytest.mark.parametrize(("api", "make"), MAKERS.values(), ids=MAKERS)
def test_results_are_in_the_order_of_their_calls(api: str, make: Any) -> None:
    """Also with a text of the user among them, which comes after them."""
    expected = {prompt(api, make([*"abc"], "go")), prompt(api, make([*"abc", "go"], "go"))}
    assert len(expected) == 2
    for order in permutations("abc"):
        got = prompt(api, make([*order], "go"))
        assert got in expected and got.endswith("[tool]of a[tool]of b[tool]of c")
        for at in range(4):
            got = prompt(api, make([*order[:at], "go", *order[at:]], "go"))
            assert got in expected and got.endswith("[tool]of a[tool]of b[tool]of c[user]go")


@pytest.mark.parametrize(("api", "make"), MAKERS.values(), ids=MAKERS)
def test_results_of_unknown_calls_come_after_the_known_ones(api: str, make: Any) -> None:
    got = prompt(api, make(["z", "go", "c", "y", "a"], "go"))
    assert got.endswith("[tool]of a[tool]of c[tool]of z[tool]of y[user]go")


def test_without_ids_the_order_is_kept() -> None:
    body = chat([*"cab"], "go")
    body["messages"].insert(2, {"role": "user", "content": "first"})
    for message in body["messages"]:
        message.pop("tool_call_id", None)
        for call in message.get("tool_calls", ()):
            call.pop("id")
    assert prompt("chat", body).endswith("[tool]of c[tool]of a[tool]of b[user]first")


# By API: what Codex, Claude Code and others send.
A, B, REPLY = "RULE-A", "RULE-B", {"role": "assistant", "content": "ok"}


LATER: dict[str, tuple[str, dict[str, Any]]] = {
    "chat, two": (
        "chat",
        {"messages": [{"role": "system", "content": A}, {"role": "developer", "content": B}]},
    ),
    "chat, later": (
        "chat",
        {
            "messages": [
                *({"role": "system", "content": A}, {"role": "user", "content": "q"}, REPLY),
                {"role": "developer", "content": B},
            ]
        },
    ),
    "responses": (
        "responses",
        {
            "instructions": A,
            "input": [
                {"role": "developer", "content": [{"type": "input_text", "text": B}]},
                {"type": "message", "role": "user", "content": "q"},
            ],
        },
    ),
    "responses, later": (
        "responses",
        {
            "instructions": A,
            "input": [{"role": "user", "content": "q"}, REPLY, {"role": "system", "content": B}],
        },
    ),
    "messages": (
        "messages",
        {
            "max_tokens": 9,
            "system": A,
            "messages": [
                *({"role": "user", "content": "q"}, REPLY),
                {"role": "system", "content": B},
                {"role": "user", "content": "go"},
            ],
        },
    ),
}


DROPS = """{% set first = messages[0].role in ('system', 'developer') %}{% if first %}\
{{ messages[0].content }}|{% endif %}{% for m in messages[1 if first else 0:] %}\
{% if m.role in ('user', 'assistant') %}[{{ m.role }}]{{ m.content }}{% endif %}{% endfor %}"""


REFUSES = """{% for m in messages %}{% if m.role == 'system' and not loop.first %}\
{{ raise_exception('must be first') }}{% endif %}[{{ m.role }}]{{ m.content }}{% endfor %}"""


@pytest.mark.parametrize("template", [DROPS, REFUSES], ids=["drops", "refuses"])
@pytest.mark.parametrize(("api", "body"), LATER.values(), ids=LATER)
def test_system_messages_of_agents_are_kept(api: str, body: dict[str, Any], template: str) -> None:
    text = TOKENIZER.decode(ids_of(parsed(api, body, template)))
    assert text.count(A) == text.count(B) == 1 and text.index(A) < text.index(B)
    if "[assistant]" in text:
        assert text.index("[assistant]") < text.index(f"[user]{B}"), "it stays in its place"


LISTED = (
    "{% for t in tools or [] %}{{ t | tojson }}{% endfor %}{{ reasoning_effort }}{{ mark }}" + TURNS
)


TOOL = {"name": "f", "description": "Weather", "parameters": {"type": "object"}}


ASKED = {"messages": [{"role": "user", "content": "q"}]}


CHANGES: list[dict[str, Any]] = [
    {"tools": [{"type": "function", "function": TOOL}]},
    {"tools": [{"type": "function", "function": TOOL}], "tool_choice": "none"},
    {"reasoning_effort": "high"},
    {"reasoning_effort": "high", "chat_template_kwargs": {"mark": "#"}},
    {"truncate_prompt_tokens": 3},
    {"add_generation_prompt": False},
]


@pytest.mark.parametrize("change", CHANGES, ids=str)
def test_tokenize_counts_the_prompt_of_the_call(change: dict[str, Any]) -> None:
    template = LISTED + "{% if add_generation_prompt %}[assistant]{% endif %}"
    model = toy_model(template, max_model_len=4096, tool_parser="hermes")
    raw = json.dumps(ASKED | change).encode()
    used = ids_of(parse_chat(raw, model))
    counted = json.loads(tokenize(raw, model))
    assert counted["tokens"] == used and counted["count"] == len(used)
    plain = json.loads(tokenize(json.dumps(ASKED).encode(), model))["count"]
    assert (len(used) == plain) is (change.get("tool_choice") == "none")


def test_count_tokens_counts_the_prompt_of_the_message() -> None:
    body = ASKED | {
        "max_tokens": 5,
        "tools": [{"name": "f", "input_schema": {"type": "object"}}],
        "output_config": {"effort": "high"},
        "chat_template_kwargs": {"mark": "#"},
    }
    counted = {name: value for name, value in body.items() if name != "max_tokens"}
    assert ids_of(parsed("count", counted, LISTED)) == ids_of(parsed("messages", body, LISTED))
    assert len(ids_of(parsed("count", ASKED, LISTED))) < len(ids_of(parsed("count", body, LISTED)))


HEAD = "[user]Rome?"


YES: Any = {"role": "assistant", "content": "Yes."}


def response_prompt(*items: dict[str, Any], **fields: Any) -> str:
    return prompt_of(read("responses", {"input": [USER, *items]} | fields))


def thought(text: str | None = None, **members: Any) -> dict[str, Any]:
    content = [] if text is None else [{"type": "reasoning_text", "text": text}]
    return {"type": "reasoning", "id": "rs_1", "summary": [], "content": content} | members


def called(kind: str = "function_call", **members: Any) -> dict[str, Any]:
    return {"type": kind, "call_id": "c1", "name": "f"} | members


SUMMARY = [{"type": "summary_text", "text": "In short."}]


FOREIGN = base64.b64encode(b"hidden").decode()


THOUGHTS: dict[str, tuple[list[dict[str, Any]], str]] = {
    "two in a row": ([thought("A"), thought("B"), YES], "[assistant]Yes.(A\nB)"),
    "three": ([thought("A"), thought("B"), thought("C"), YES], "[assistant]Yes.(A\nB\nC)"),
    "two before a called": (
        [thought("A"), thought("B"), called(arguments="{}")],
        "[assistant](A\nB)!c1:f:{}",
    ),
    "an empty one between": (
        [thought("A"), thought(), thought("B", content=None), YES],
        "[assistant]Yes.(A)",
    ),
    "a summary alone": ([thought(summary=SUMMARY), YES], "[assistant]Yes.(In short.)"),
    "a summary beside an empty text": (
        [thought("", summary=SUMMARY), YES],
        "[assistant]Yes.(In short.)",
    ),
    "a summary beside a foreign text": (
        [thought(summary=SUMMARY, encrypted_content=FOREIGN), YES],
        "[assistant]Yes.(In short.)",
    ),
    "a foreign text": ([thought(encrypted_content=FOREIGN), YES], "[assistant]Yes."),
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
        turns = [USER, {"role": "assistant", "content": blocks}, USER]
        request = read("messages", {"messages": turns, "max_tokens": 5})
        assert prompt_of(request) == f"{HEAD}[assistant]Yes.(Hm.){HEAD}"


@pytest.mark.parametrize("empty", [{}, {"reasoning": ""}, {"reasoning": None}, {"reasoning": []}])
@pytest.mark.parametrize("name", ["reasoning", "reasoning_content"])
def test_a_chat_names_a_thought_in_either_way(name: str, empty: dict[str, Any]) -> None:
    for text in ("Hm.", [{"type": "text", "text": "Hm."}]):
        turns = [USER, YES | empty | {name: text}, USER]
        assert prompt_of(read("chat", {"messages": turns})) == f"{HEAD}[assistant]Yes.(Hm.){HEAD}"


CUT = '{"a": 1, "b": ["x", {"c": "Rom'


# What a client sends as the arguments of an earlier called, and the object that a template writes.
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
        read("responses", {"input": [USER, called(arguments=sent), USER]}),
        read("messages", {"messages": [USER, turn, USER], "max_tokens": 5}),
    ):
        assert prompt_of(request) == f"{HEAD}[assistant]!c1:f:{json.dumps(read_as)}{HEAD}"


def test_arguments_may_be_missing() -> None:
    said = {"role": "assistant", "tool_calls": [{"id": "c1", "function": {"name": "f"}}]}
    turn = {"role": "assistant", "content": [{"type": "tool_use", "id": "c1", "name": "f"}]}
    for request in (
        read("chat", {"messages": [USER, said, USER]}),
        read("responses", {"input": [USER, called(), USER]}),
        read("messages", {"messages": [USER, turn, USER], "max_tokens": 5}),
    ):
        assert prompt_of(request) == f"{HEAD}[assistant]!c1:f:{{}}{HEAD}"


ACTION = {"type": "exec", "command": ["ls"]}


OTHER_CALLS: dict[str, tuple[dict[str, Any], dict[str, Any], str]] = {
    "a custom tool": (
        called("custom_tool_call", name="apply_patch", input="*** Begin"),
        {"type": "custom_tool_call_output", "call_id": "c1", "output": "Done."},
        '!c1:apply_patch:{"input": "*** Begin"}[tool]Done.=c1',
    ),
    "a custom tool of a namespace": (
        called("custom_tool_call", name="exec", namespace="functions", input="1"),
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
        called(arguments="{}"),
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
    request = read("responses", {"input": [USER, item, YES, USER]})
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


@pytest.mark.parametrize("length", [65, 128])
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


LINE = "x-anthropic-billing-header: cc_version=2.1.117.48f; cc_entrypoint=cli; cch=71fea;"


def system_of(system: Any) -> str:
    """Return the system's text in the prompt of a called and of a count."""
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
