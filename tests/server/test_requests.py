"""The meaning of requests: all APIs say the same in their own fields, and defaults apply."""

from __future__ import annotations

import json
from typing import Any

import pytest

from cbatch import SamplingParams
from cbatch.engine.unsupported import UNSUPPORTED_FIELDS
from cbatch.server.protocol import translation
from cbatch.server.protocol.fields import CompletionFields
from cbatch.server.protocol.openapi import document
from cbatch.server.protocol.requests import ChatFields, tokenize
from tests.server.apis import (
    CHAT,
    CHATS,
    COMPLETIONS,
    MESSAGES,
    RESPONSES,
    SCHEMA,
    TOOLS,
    USER,
    body_of,
    prompt_field,
)
from tests.server.parsing import COUNT, TEMPLATE, ids_of, model, prompt_of, read

# ---- the same in all APIs ------------------------------------------------------------------------

TEXT: Any = {"type": "text", "text": "Rome?"}
BRIEF: Any = {"role": "system", "content": "Be\nbrief."}
SAMPLING = {"temperature": 0.3, "top_p": 0.8, "seed": 4, "top_k": 5}
INNER = {"type": "json_schema", "schema": SCHEMA}


def named(kind: str, **members: Any) -> dict[str, Any]:
    return {"type": kind, **members}


def tools(*choices: Any, **more: Any) -> list[dict[str, Any]]:
    """Return the tools of each API with its choice."""
    pairs = zip(CHATS, choices, strict=True)
    fields = [{"tools": TOOLS[path], "tool_choice": choice} for path, choice in pairs]
    return [fields[0] | more, fields[1] | more, fields[2]]


# By name: fields of a chat, of a Responses request and of a Messages request that mean the same.
SAME: dict[str, list[dict[str, Any]]] = {
    "text": [{}, {}, {}],
    "system": [
        {"messages": [BRIEF, USER]},
        {"instructions": "Be\nbrief."},
        {"system": [named("text", text=t, cache_control=None) for t in ("Be", "brief.")]},
    ],
    "any tool": tools("required", "required", named("any")),
    "a named tool, once": tools(
        named("function", function={"name": "f"}),
        named("function", name="f"),
        named("tool", name="f", disable_parallel_tool_use=True),
        parallel_tool_calls=False,
    ),
    "no tool": tools("none", "none", named("none")),
    "schema": [
        {"response_format": {"type": "json_schema", "json_schema": {"schema": SCHEMA}}},
        {"text": {"format": INNER | {"name": "x"}}},
        {"output_config": {"format": INNER}},
    ],
    "effort": [
        {"reasoning_effort": "low"},
        {"reasoning": {"effort": "low"}},
        {"output_config": {"effort": "low"}},
    ],
    "sampling": [
        SAMPLING | {"stop": ["x"], "user": "u"},
        SAMPLING | {"stop": ["x"], "user": "u"},
        SAMPLING | {"stop_sequences": ["x"], "metadata": {"user_id": "u"}},
    ],
    "no thinking": [
        {"chat_template_kwargs": {"enable_thinking": False}},
        {"chat_template_kwargs": {"enable_thinking": False}},
        {"thinking": {"type": "disabled"}},
    ],
}


def of_three(name: str) -> dict[str, dict[str, Any]]:
    fields = zip(CHATS, SAME[name], strict=True)
    return {path: body_of(path, max_tokens=40) | each for path, each in fields}


@pytest.mark.parametrize("name", SAME)
def test_the_same_conversation_makes_the_same_request(name: str) -> None:
    chat, *others = [read(path, body) for path, body in of_three(name).items()]
    for request in (chat, *others):
        assert prompt_of(request) == prompt_of(chat)
        assert request.params == chat.params and request.reply == chat.reply
        assert request.fields.user == chat.fields.user
        assert request.grammar_field == chat.grammar_field and not request.ignored


def test_these_requests_differ_from_each_other() -> None:
    chats = [read(CHAT, of_three(name)[CHAT]) for name in SAME]
    hidden = 1  # tools that the model does not see
    assert len({(prompt_of(chat), repr(chat.params)) for chat in chats}) == len(SAME) - hidden


def test_a_count_needs_no_length() -> None:
    body = body_of(MESSAGES)
    del body["max_tokens"]
    assert prompt_of(read(COUNT, body)) == prompt_of(read(CHAT, body))


# ---- unknown members -----------------------------------------------------------------------------


def test_what_no_field_of_a_chat_carries_is_reported_as_ignored() -> None:
    strict: Any = {path: [TOOLS[path][0] | {"strict": True}] for path in (RESPONSES, MESSAGES)}
    body = body_of(RESPONSES, service_tier="flex", stream_options={"a": 1})
    body |= {"text": {"verbosity": "low"}, "reasoning": {"summary": "auto"}}
    assert set(read(RESPONSES, body | {"tools": strict[RESPONSES]}).ignored) == {
        *("text.verbosity", "service_tier", "stream_options.a"),
        *("reasoning.summary", "tools[0].strict"),
    }
    content = [TEXT | {"cache_control": {"type": "ephemeral"}, "b": 1}]
    body = body_of(MESSAGES, service_tier="auto", messages=[USER | {"content": content}])
    body |= {"thinking": {"type": "enabled", "budget_tokens": 1024}, "tools": strict[MESSAGES]}
    assert set(read(MESSAGES, body).ignored) == {
        *("messages[0].content[0].b", "thinking.budget_tokens"),
        *("tools[0].strict", "service_tier"),
    }


def test_unknown_members_are_listed_at_any_depth_unless_they_are_null() -> None:
    """`strict` is listed for calls that the model chooses, since they follow no grammar."""
    function = {"name": "f", "strict": True, "colour": 1, "size": None}
    made = {"type": "json_schema", "colour": 1, "json_schema": {"schema": {}, "size": {}}}
    body = body_of(CHAT, tool_choice="none", response_format=made)
    body["stream_options"] = {"include_usage": True, "include_obfuscation": False}
    body["tools"] = [named("function", function=function, cache_control={})]
    rest = {"stream_options.include_obfuscation", "tools[0].cache_control"}
    rest |= {"tools[0].function.colour"}
    of_format = {"response_format.colour", "response_format.json_schema.size"}
    assert set(read(CHAT, body).ignored) == rest | of_format
    body |= {"response_format": None}
    choice = named("function", function={"name": "f", "colour": 1})
    named_one = set(read(CHAT, body | {"tool_choice": choice}).ignored)
    assert named_one == rest | {"tool_choice.function.colour"}
    free = set(read(CHAT, body | {"tool_choice": "auto"}).ignored)
    assert free == rest | {"tools[0].function.strict"}


@pytest.mark.parametrize("path", CHATS)
def test_few_names_of_unknown_members_are_kept(path: str, monkeypatch: Any) -> None:
    renamed = []
    rename = translation.rename
    monkeypatch.setattr(translation, "rename", lambda *args: renamed.append(args) or rename(*args))
    names = {f"a{number}": 1 for number in range(9_000)}
    body = body_of(path)
    for longer in (body | names, body | {prompt_field(path): [USER | names] * 3}):
        assert len(read(path, longer).ignored) <= 128 and len(renamed) <= 128


# ---- defaults and neutral values -----------------------------------------------------------------

OWN = {"temperature": 0.6, "top_k": 20, "max_tokens": 40}


def params_of(path: str, own: dict[str, Any] | None = None, **fields: Any) -> SamplingParams:
    prompt = {prompt_field(path): body_of(path)[prompt_field(path)]}
    options = {"max_model_len": 99, "sampling_defaults": own}
    return read(path, prompt | fields, **options).params


@pytest.mark.parametrize("path", [COMPLETIONS, CHAT])
def test_the_models_defaults_apply_to_absent_fields(path: str) -> None:
    params = params_of(path, OWN)
    assert (params.temperature, params.top_k, params.top_p) == (0.6, 20, 1.0)
    null = params_of(path, OWN, temperature=None, top_k=3)
    assert (null.temperature, null.top_k) == (0.6, 3)
    given = params_of(path, OWN, temperature=0, max_tokens=50)
    assert (given.temperature, given.max_tokens) == (0.0, 50), "a default is no limit"


def test_default_lengths_of_completions_and_chats() -> None:
    assert params_of(COMPLETIONS, OWN) == SamplingParams(temperature=0.6, top_k=20)
    assert params_of(COMPLETIONS) == SamplingParams()
    assert params_of(CHAT, OWN).max_tokens == 40
    assert params_of(CHAT, OWN, max_completion_tokens=7, max_tokens=20).max_tokens == 7
    assert params_of(CHAT).max_tokens == 99


def test_the_document_lists_the_defaults() -> None:
    def default(kind: str, field: str) -> Any:
        schema = bodies[kind]["properties"][field]
        return schema.get("default", schema["anyOf"][0].get("default"))

    for own in (OWN, {}):
        bodies = document(**own)["components"]["schemas"]
        for kind in ("CompletionFields", "ChatFields"):
            assert default(kind, "temperature") == own.get("temperature", 1.0)
            assert default(kind, "top_k") == own.get("top_k")
            assert default(kind, "top_p") == 1.0
        assert default("CompletionFields", "max_tokens") == 16
        assert default("ChatFields", "max_completion_tokens") == own.get("max_tokens")


SAMPLED: dict[str, Any] = {"max_tokens": 12, "seed": 5}
FIELDS = (COMPLETIONS, CompletionFields), (CHAT, ChatFields)
NULLS = {
    path: dict.fromkeys(
        {*kind.__struct_fields__, *UNSUPPORTED_FIELDS, "max_completion_tokens", "top_p"}
        - {"prompt", "messages", "seed"}
    )
    for path, kind in FIELDS
}
NEUTRAL: list[dict[str, Any]] = [
    *({"top_k": -1}, {"top_k": 0}, {"best_of": 1}, {"suffix": ""}, {"stop": []}),
    *({"stream": None}, {"logit_bias": {}}, {"tools": [], "tool_choice": None}),
    {"stream_options": {"include_usage": None, "continuous_usage_stats": None}},
    {"response_format": {"type": "text", "json_schema": None}},
]


@pytest.mark.parametrize("path", [COMPLETIONS, CHAT])
def test_null_and_neutral_values_change_nothing(path: str) -> None:
    plain = read(path, body_of(path) | SAMPLED)
    for nothing in (*NEUTRAL, NULLS[path], {"chat_template_kwargs": None}):
        request = read(path, body_of(path) | nothing | SAMPLED)
        assert (request.params, request.fields) == (plain.params, plain.fields), nothing
        assert not set(request.ignored) - {"tools", "tool_choice"}, nothing
        assert path == COMPLETIONS or prompt_of(request) == prompt_of(plain), nothing


def test_values_that_other_servers_use_as_defaults() -> None:
    assert params_of(COMPLETIONS, top_p=0).temperature == 0
    assert params_of(COMPLETIONS, seed=-1).seed is None
    assert params_of(COMPLETIONS, best_of=2, n=2) == params_of(COMPLETIONS, n=2)


# ---- variables of templates ----------------------------------------------------------------------


def test_reasoning_effort_is_a_variable_of_the_template() -> None:
    """Templates ask whether it is defined, so a request without it must not define it."""
    template = "{{ reasoning_effort if reasoning_effort is defined else 'none' }}"
    low = {"chat_template_kwargs": {"reasoning_effort": "low"}}
    for more, text in (
        ({}, "none"),
        ({"reasoning_effort": None}, "none"),
        ({"reasoning_effort": "high"}, "high"),
        ({"reasoning_effort": "high"} | low, "low"),
    ):
        assert prompt_of(read(CHAT, body_of(CHAT) | more, template)) == text


def test_thinking_can_be_asked_for_and_left_out() -> None:
    body = body_of(MESSAGES)
    for kind, text in (("enabled", "True"), ("adaptive", "True"), ("disabled", "False")):
        assert prompt_of(read(MESSAGES, body | {"thinking": {"type": kind}})).endswith(text)
    own = {"chat_template_kwargs": {"enable_thinking": False}, "thinking": {"type": "enabled"}}
    assert prompt_of(read(MESSAGES, body | own)).endswith("False"), "the template's own name"
    hidden = read(MESSAGES, body | {"thinking": {"type": "adaptive", "display": "omitted"}})
    assert not hidden.include_reasoning


def test_the_template_is_given_the_tools() -> None:
    body = body_of(CHAT, tools=TOOLS[CHAT])
    for parser, choice, count in (
        ("hermes", {}, 1),
        ("llama3_json", {"tool_choice": "auto"}, 1),
        ("hermes", {"tool_choice": "none"}, 0),
    ):
        assert prompt_of(read(CHAT, body | choice, tool_parser=parser)).count("<f:") == count


CHANGES: list[dict[str, Any]] = [
    {"tools": TOOLS[CHAT]},
    {"tools": TOOLS[CHAT], "tool_choice": "none"},
    {"reasoning_effort": "high", "chat_template_kwargs": {"mark": "#"}},
    {"truncate_prompt_tokens": 3},
    {"add_generation_prompt": False},
]


@pytest.mark.parametrize("change", CHANGES, ids=str)
def test_tokenize_counts_the_prompt_of_the_call(change: dict[str, Any]) -> None:
    template = TEMPLATE + "{% if add_generation_prompt %}[assistant]{% endif %}"
    plain_body = {"messages": [USER]}
    used = ids_of(read(CHAT, plain_body | change, template))
    counted, plain = (
        json.loads(tokenize(json.dumps(body).encode(), model(template)))
        for body in (plain_body | change, plain_body)
    )
    assert counted["tokens"] == used and counted["count"] == len(used)
    assert (len(used) == plain["count"]) is (change.get("tool_choice") == "none")


def test_count_tokens_counts_the_prompt_of_the_message() -> None:
    counted = {"messages": [USER], "tools": TOOLS[MESSAGES], "output_config": {"effort": "high"}}
    counted |= {"chat_template_kwargs": {"mark": "#"}}
    assert ids_of(read(COUNT, counted)) == ids_of(read(MESSAGES, counted | {"max_tokens": 5}))
    assert len(ids_of(read(COUNT, {"messages": [USER]}))) < len(ids_of(read(COUNT, counted)))


@pytest.mark.parametrize("length", [65, 128])
def test_names_of_tools_may_be_long(length: int) -> None:
    name = "mcp__" + "a" * (length - 5)
    listed = {path: [TOOLS[path][0] | {"name": name}] for path in (RESPONSES, MESSAGES)}
    listed[CHAT] = [named("function", function={"name": name, "parameters": SCHEMA})]
    space = [named("namespace", name=name, tools=listed[RESPONSES])]
    for path, named_tools in [*listed.items(), (RESPONSES, space)]:
        body = body_of(path, tools=named_tools)
        assert f"{name}:" in prompt_of(read(path, body, max_model_len=4096))
