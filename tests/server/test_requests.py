"""The meaning of a parsed call; errors are in `test_surface.py` and `test_chat.py`."""

from __future__ import annotations

import json
from typing import Any

import pytest

from cbatch import FieldError, SamplingParams
from cbatch.server.protocol.openapi import document
from cbatch.server.protocol.requests import chat_ids, parse_chat, parse_completion
from tests.server.http_client import toy_model

OWN = {"temperature": 0.6, "top_k": 20, "max_tokens": 40}
MESSAGES = [{"role": "user", "content": "x"}]


def params_of(fields: dict[str, Any], own: dict[str, Any] | None = None) -> SamplingParams:
    model = toy_model(max_model_len=99, sampling_defaults=own)
    parse = parse_chat if "messages" in fields else parse_completion
    return parse(json.dumps(fields).encode(), model).params


def test_the_models_defaults_apply_to_absent_fields() -> None:
    for fields in ({"prompt": "x"}, {"messages": MESSAGES}):
        params = params_of(fields, OWN)
        assert (params.temperature, params.top_k, params.top_p) == (0.6, 20, 1.0)
        null = params_of(fields | {"temperature": None, "top_k": 3}, OWN)
        assert (null.temperature, null.top_k) == (0.6, 3)
        given = params_of(fields | {"temperature": 0, "max_tokens": 50}, OWN)
        assert (given.temperature, given.max_tokens) == (0.0, 50), "a default is no limit"


def test_default_lengths_of_completions_and_chats() -> None:
    assert params_of({"prompt": "x"}, OWN) == SamplingParams(temperature=0.6, top_k=20)
    assert params_of({"prompt": "x"}) == SamplingParams()
    assert params_of({"messages": MESSAGES}, OWN).max_tokens == 40
    assert params_of({"messages": MESSAGES, "max_completion_tokens": 7}, OWN).max_tokens == 7
    assert params_of({"messages": MESSAGES}).max_tokens == 99


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


@pytest.mark.parametrize("field", ["messages", "prompt"])
@pytest.mark.parametrize(
    ("value", "problem"),
    [
        ("hi", "'hi' is not a list"),
        ({"role": "user"}, "{'role': 'user'} is not a list"),
        (7, "7 is not a list"),
        ([], "is empty"),
        (None, "is missing"),
    ],
)
def test_an_error_about_a_value_that_is_not_a_list(field: str, value: Any, problem: str) -> None:
    if (field, value) != ("prompt", "hi"):
        with pytest.raises(FieldError, match=f"^{field}: {problem}; send "):
            if field == "messages":  # read where they are rendered
                chat_ids(json.dumps({field: value}).encode(), toy_model())
            params_of({field: value})


def test_reasoning_effort_is_a_variable_of_the_template() -> None:
    """Templates ask whether it is defined, so a request without it must not define it."""
    model = toy_model("{{ reasoning_effort if reasoning_effort is defined else 'none' }}")
    messages = [{"role": "user", "content": "x"}]
    for more, text in (
        ({}, "none"),
        ({"reasoning_effort": None}, "none"),
        ({"reasoning_effort": "high"}, "high"),
        ({"reasoning_effort": "high", "chat_template_kwargs": {"reasoning_effort": "low"}}, "low"),
    ):
        body = json.dumps({"messages": messages} | more).encode()
        assert model.tokenizer.decode(chat_ids(body, model)) == text


def test_the_template_is_given_the_tools() -> None:
    tools: Any = [{"type": "function", "function": {"name": name}} for name in ("a", "b")]

    def prompt(parser: Any, **change: Any) -> str:
        text = "{% for t in tools or [] %}<{{ t.function.name }}>{% endfor %}"
        model = toy_model(text, tool_parser=parser)
        body = {"messages": MESSAGES, "tools": tools} | change
        (pending,) = parse_chat(json.dumps(body).encode(), model).prompts
        return model.tokenizer.decode(pending.task(model))  # type: ignore[union-attr]

    assert prompt("hermes") == prompt("llama3_json", tool_choice="auto") == "<a><b>"
    assert prompt("hermes", tool_choice="none") == ""
    with pytest.raises(FieldError, match=r"tool_choice: 'auto'.*--tool-call-parser \(hermes, llam"):
        prompt(None)
