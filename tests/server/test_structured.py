"""Structured outputs over HTTP: fields that ask for them, and structures that fail to compile."""

from __future__ import annotations

import re
from typing import Any

import pytest

from cbatch import FieldError, SamplingParams, StructuredOutputs
from tests.server.apis import CHAT, COMPLETIONS, body_of
from tests.server.http_client import Client
from tests.toy_engine import make_engine

PROMPT = "def add(a, b):\n"
SEVEN, UINT256 = {"const": 7}, {"type": "integer", "minimum": 0, "maximum": 2**256 - 1}
CALL = 'root ::= "f(" [x-z]* ")"'


def tool(parameters: Any) -> dict[str, Any]:
    function = {"name": "f", "parameters": parameters}
    return {"tools": [{"type": "function", "function": function}], "tool_choice": "required"}


def schema(schema: Any) -> dict[str, Any]:
    return {"response_format": {"type": "json_schema", "json_schema": {"schema": schema}}}


def output(**kind: Any) -> dict[str, Any]:
    return {"structured_outputs": kind}


@pytest.mark.parametrize(
    ("fields", "pattern"),
    [
        (output(regex="[a-z]{3}-[0-9]{2}"), "[a-z]{3}-[0-9]{2}"),
        (output(choice=["yes", "no", "maybe not"]), "yes|no|maybe not"),
        (output(grammar=CALL), r"f\([x-z]*\)"),
        (output(json='{"type": "boolean"}'), "true|false"),
        (output(choice=["a"], json=None, disable_fallback=False), "a"),
        (output(json=UINT256), "[0-9]{1,30}.*"),  # bounds of this size are common
        (schema(SEVEN), "7"),
        ({"response_format": {"type": "json_object", "schema": SEVEN}}, "7"),
        ({"guided_json": '{"const": 7}', "structured_outputs": None}, "7"),
        ({"guided_regex": "[0-7]{3}", "guided_json": None}, "[0-7]{3}"),
        ({"guided_choice": ["see <|endoftext|> here"]}, r"see <\|endoftext\|> here"),
        ({"guided_grammar": CALL}, r"f\([x-z]*\)"),
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


@pytest.mark.parametrize(
    ("change", "field", "words"),
    [
        (schema({"type": "frog"}), "response_format", "frog"),
        (schema({"$ref": "#"}), "response_format", "does not compile"),
        (schema({"enum": ["x" * 70_000]}), "response_format", "characters"),
        (schema({"type": "string", "nonsense": 1, "not": {}}), "response_format", "not"),
        (output(regex="("), "structured_outputs", "unclosed group"),
        (output(regex="x{100000000}"), "structured_outputs", "too many"),
        (output(regex="(" * 9000), "structured_outputs", "regex"),
        (output(grammar="start: a"), "structured_outputs", "a"),
        (output(json="[" * 9000), "structured_outputs", "recursion"),
        (tool({"type": "array"}), "tools[0].function.parameters", "object"),
        (tool({"properties": {"x": {"type": "frog"}}}), "tools", "frog"),
        ({"guided_json": {"type": "frog"}}, "guided_json", "frog"),
    ],
)
def test_structures_that_do_not_compile_are_rejected_by_name(
    demo_client: Client, change: dict[str, Any], field: str, words: str
) -> None:
    status, answer, _ = demo_client.post(body_of(CHAT, PROMPT) | change, CHAT)
    assert (status, answer["error"]["param"]) == (400, field), answer
    message = answer["error"]["message"]
    assert message.startswith(field) and words in message and len(message) < 1000, message
    assert demo_client.get("/health")[1]["requests"] == 0, "it has its place still"


def test_an_engine_without_grammars_rejects_them(toy_client: Client) -> None:
    body = {"prompt": PROMPT, "response_format": {"type": "json_object"}}
    status, answer, _ = toy_client.post(body)
    assert (status, answer["error"]["param"]) == (400, "response_format")
    assert "is not supported here" in answer["error"]["message"]
    with pytest.raises(FieldError, match="structured_outputs: is not supported here"):
        make_engine().add("a", SamplingParams(structured_outputs=StructuredOutputs(regex="a")))
