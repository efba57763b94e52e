"""Structured outputs and forced tool calls, through a real socket and with the `openai` package."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from typing import Any

import jsonschema_rs
import openai
import pytest

from cbatch import LLM, FieldError, SamplingParams, StructuredOutputs
from tests.server.apis import CHAT, COMPLETIONS, body_of
from tests.server.http_client import MODEL, Client
from tests.toy_engine import make_engine

PROMPT = "def add(a, b):\n"
MESSAGES: Any = [{"role": "user", "content": PROMPT}]
SCHEMA: dict[str, Any] = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 4},
        "sizes": {"type": "array", "items": {"enum": [7, 12]}, "maxItems": 1},
        "kind": {"enum": ["list", "dict"]},
    },
    "required": ["name", "sizes", "kind"],
    "additionalProperties": False,
}
FORMAT: Any = {"type": "json_schema", "json_schema": {"name": "thing", "schema": SCHEMA}}
TOOLS: Any = [{"type": "function", "function": {"name": "now", "description": "the time"}}]
OPTIONS: Any = {"model": MODEL, "max_tokens": 150, "temperature": 0.8, "seed": 3}


@pytest.fixture(scope="module")
def sdk(demo_client: Client) -> Iterator[openai.OpenAI]:
    url = f"http://127.0.0.1:{demo_client.port}/v1"
    with openai.OpenAI(base_url=url, api_key="unused", max_retries=0) as client:
        yield client


@pytest.mark.parametrize("temperature", [0.0, 0.8])
def test_a_schema_gives_json_that_it_validates(
    sdk: openai.OpenAI, demo_llm: LLM, temperature: float
) -> None:
    options = {**OPTIONS, "temperature": temperature, "n": 2 if temperature else 1}
    whole = sdk.chat.completions.create(messages=MESSAGES, response_format=FORMAT, **options)
    texts = [choice.message.content or "" for choice in whole.choices]
    for choice, text in zip(whole.choices, texts, strict=True):
        assert choice.finish_reason == "stop"
        jsonschema_rs.validate(SCHEMA, json.loads(text))
    output = StructuredOutputs(json=SCHEMA)
    params_fields = {name: value for name, value in options.items() if name != "model"}
    params = SamplingParams(structured_outputs=output, **params_fields)
    (here,) = demo_llm.generate(PROMPT, params)
    assert [choice.text for choice in here.choices] == texts
    assert here.speculation.accepted_tokens > 0
    streamed = [""] * len(texts)
    create = sdk.chat.completions.create
    for event in create(messages=MESSAGES, response_format=FORMAT, stream=True, **options):
        for part in event.choices:
            streamed[part.index] += part.delta.content or ""
    assert streamed == texts


SEVEN = {"const": 7}


@pytest.mark.parametrize(
    ("fields", "pattern"),
    [
        ({"structured_outputs": {"regex": "[a-z]{3}-[0-9]{2}"}}, "[a-z]{3}-[0-9]{2}"),
        ({"structured_outputs": {"choice": ["yes", "no", "maybe not"]}}, "yes|no|maybe not"),
        ({"structured_outputs": {"grammar": 'root ::= "f(" [x-z]* ")"'}}, r"f\([x-z]*\)"),
        ({"structured_outputs": {"json": '{"type": "boolean"}'}}, "true|false"),
        ({"structured_outputs": {"choice": ["a"], "json": None, "disable_fallback": False}}, "a"),
        ({"response_format": {"type": "json_schema", "json_schema": {"schema": SEVEN}}}, "7"),
        ({"response_format": {"type": "json_object", "schema": SEVEN}}, "7"),
        ({"guided_json": '{"const": 7}', "structured_outputs": None}, "7"),
        ({"guided_regex": "[0-7]{3}", "guided_json": None}, "[0-7]{3}"),
        ({"guided_choice": ["see <|endoftext|> here"]}, r"see <\|endoftext\|> here"),
        ({"guided_grammar": 'root ::= "f(" [x-z]* ")"'}, r"f\([x-z]*\)"),
        ({"grammar": 'start: "f(" /[x-z]*/ ")"'}, r"f\([x-z]*\)"),
        ({"json_schema": {"const": "<|endoftext|>"}}, r'"<\|endoftext\|>"'),
    ],
)
def test_all_fields_for_structured_outputs(
    demo_client: Client, fields: dict[str, Any], pattern: str
) -> None:
    path = COMPLETIONS if "structured_outputs" in fields else CHAT
    status, answer, _ = demo_client.post(body_of(path, PROMPT, 30, seed=1) | fields, path)
    assert status == 200, answer
    (choice,) = answer["choices"]
    text = choice["text"] if "text" in choice else choice["message"]["content"]
    assert re.fullmatch(pattern, text), text


def _named(parameters: Any) -> dict[str, Any]:
    tool = {"type": "function", "function": {"name": "f", "parameters": parameters}}
    return {"tools": [tool], "tool_choice": "required"}


def _schema(schema: Any) -> dict[str, Any]:
    return {"response_format": {"type": "json_schema", "json_schema": {"schema": schema}}}


@pytest.mark.parametrize(
    ("change", "field", "words"),
    [
        (_schema({"type": "frog"}), "response_format", "frog"),
        (_schema({"$ref": "#"}), "response_format", "does not compile"),
        (_schema({"enum": ["x" * 70_000]}), "response_format", "characters"),
        (_schema({"type": "string", "nonsense": 1, "not": {}}), "response_format", "not"),
        ({"structured_outputs": {"regex": "("}}, "structured_outputs", "unclosed group"),
        ({"structured_outputs": {"regex": "x{100000000}"}}, "structured_outputs", "too many"),
        ({"structured_outputs": {"regex": "(" * 9000}}, "structured_outputs", "regex"),
        ({"structured_outputs": {"grammar": "start: a"}}, "structured_outputs", "a"),
        ({"structured_outputs": {"json": "[" * 9000}}, "structured_outputs", "recursion"),
        (_named({"type": "array"}), "tools[0].function.parameters", "object"),
        (_named({"properties": {"x": {"type": "frog"}}}), "tools", "frog"),
        ({"guided_json": {"type": "frog"}}, "guided_json", "frog"),
    ],
)
def test_structures_that_do_not_compile_are_rejected_by_name(
    demo_client: Client, change: dict[str, Any], field: str, words: str
) -> None:
    status, answer, _ = demo_client.post({"messages": MESSAGES, "max_tokens": 4} | change, CHAT)
    assert (status, answer["error"]["param"]) == (400, field), answer
    message = answer["error"]["message"]
    assert message.startswith(field) and words in message and len(message) < 1000, message
    assert demo_client.get("/health")[1]["requests"] == 0, "it has its place still"


@pytest.mark.parametrize("way", ["structured_outputs", "response_format", "tools"])
def test_integers_of_any_size_in_a_schema(demo_client: Client, way: str) -> None:
    """uint256 bounds are common."""
    schema = {"type": "integer", "minimum": 0, "maximum": 2**256 - 1}
    object_ = {"type": "object", "properties": {"x": schema}, "required": ["x"]}
    fields = {
        "structured_outputs": {"structured_outputs": {"json": schema}},
        "response_format": _schema(schema),
        "tools": _named(object_),
    }[way]
    body = {"messages": MESSAGES, "max_tokens": 100, "seed": 1} | fields
    status, answer, _ = demo_client.post(body, CHAT)
    assert status == 200, answer
    (choice,) = answer["choices"]
    if choice["finish_reason"] == "stop":
        assert 0 <= int(choice["message"]["content"]) < 2**256


def test_an_engine_without_grammars_rejects_them(toy_client: Client) -> None:
    body = {"prompt": PROMPT, "response_format": {"type": "json_object"}}
    status, answer, _ = toy_client.post(body)
    assert (status, answer["error"]["param"]) == (400, "response_format")
    assert "is not supported here" in answer["error"]["message"]
    with pytest.raises(FieldError, match="structured_outputs: is not supported here"):
        make_engine().add("a", SamplingParams(structured_outputs=StructuredOutputs(regex="a")))


def test_parallel_tool_calls_off_and_tool_choice_none(sdk: openai.OpenAI) -> None:
    create = sdk.chat.completions.create
    options = {**OPTIONS, "max_tokens": 20}
    fields = {"messages": MESSAGES, "tools": TOOLS, "n": 2, **options}
    single = create(tool_choice="required", parallel_tool_calls=False, **fields)
    assert all(len(c.message.tool_calls or []) <= 1 for c in single.choices)
    none, plain = create(tool_choice="none", **fields), create(messages=MESSAGES, n=2, **options)
    assert [c.message.content for c in none.choices] == [c.message.content for c in plain.choices]
    assert none.choices[0].message.tool_calls is None
