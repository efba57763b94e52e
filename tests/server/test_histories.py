"""Histories that agents send back, in all APIs: the order of results, the length of a prompt."""

from __future__ import annotations

import json
from itertools import permutations
from typing import Any

import pytest

from cbatch.server.protocol.anthropic_request import parse_count, parse_messages
from cbatch.server.protocol.chats import parse_chat, tokenize
from cbatch.server.protocol.requests import ApiRequest, PendingPrompt
from cbatch.server.protocol.response_store import ResponseStore
from cbatch.server.protocol.responses_request import parse_responses
from tests.server.http_client import toy_model
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


# ---- results of parallel calls -------------------------------------------------------------------


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


# ---- system messages at other places ------------------------------------------------------------

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


# ---- the length of a prompt ----------------------------------------------------------------------

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
