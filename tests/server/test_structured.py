"""Structured outputs and forced tool calls, through a real socket and with the `openai` package."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from typing import Any

import jsonschema_rs
import openai
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from cbatch import LLM, FieldError, SamplingParams, StructuredOutputs
from cbatch.server.protocol.requests import parse_chat
from cbatch.text.forced_tools import ForcedCallReader
from tests.server.http_client import CHAT, MODEL, Client, serving, toy_model
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
PLACE = {
    "type": "object",
    "properties": {"city": {"enum": ["Rome", "Oslo"]}, "days": {"enum": [1, 2]}},
    "required": ["city", "days"],
    "additionalProperties": False,
}
TOOLS: Any = [
    {"type": "function", "function": {"name": "weather", "parameters": PLACE}},
    {"type": "function", "function": {"name": "now", "description": "the time"}},
]
NAMED: Any = {"type": "function", "function": {"name": "weather"}}
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


@pytest.mark.parametrize(
    ("fields", "pattern"),
    [
        ({"structured_outputs": {"regex": "[a-z]{3}-[0-9]{2}"}}, "[a-z]{3}-[0-9]{2}"),
        ({"structured_outputs": {"choice": ["yes", "no", "maybe not"]}}, "yes|no|maybe not"),
        ({"structured_outputs": {"grammar": 'root ::= "f(" [x-z]* ")"'}}, r"f\([x-z]*\)"),
        ({"structured_outputs": {"json": {"const": {"a": 1}}}}, r'\{\s*"a"\s*:\s*1\s*\}'),
        ({"structured_outputs": {"json": '{"type": "boolean"}'}}, "true|false"),
        (
            {"response_format": {"type": "json_schema", "json_schema": {"schema": {"const": 7}}}},
            "7",
        ),
        ({"response_format": {"type": "text"}}, "(.|\n)*"),
        ({"response_format": {"type": "json_object", "schema": {"const": 7}}}, "7"),
        ({"response_format": {"type": "json_schema", "schema": {"const": 7}}}, "7"),
        (
            {"response_format": {"type": "json_object", "json_schema": {"schema": {"const": 7}}}},
            "7",
        ),
        ({"guided_json": {"const": 7}}, "7"),
        ({"guided_json": '{"const": 7}', "structured_outputs": None}, "7"),
        ({"guided_regex": "[0-7]{3}", "guided_json": None}, "[0-7]{3}"),
        ({"guided_choice": ["yes", "no"]}, "yes|no"),
        ({"guided_grammar": 'root ::= "f(" [x-z]* ")"'}, r"f\([x-z]*\)"),
        ({"grammar": 'start: "f(" /[x-z]*/ ")"'}, r"f\([x-z]*\)"),
        ({"json_schema": {"const": 7}}, "7"),
        (
            {"structured_outputs": {"choice": ["a", "b"], "json": None, "disable_fallback": False}},
            "a|b",
        ),
        ({"guided_choice": ["see <|endoftext|> here"]}, r"see <\|endoftext\|> here"),
        ({"guided_json": {"const": "<|endoftext|>"}}, r'"<\|endoftext\|>"'),
    ],
)
def test_all_fields_for_structured_outputs(
    demo_client: Client, fields: dict[str, Any], pattern: str
) -> None:
    body = {"max_tokens": 30, "seed": 1} | fields
    for extra, path in (({"prompt": PROMPT}, "/v1/completions"), ({"messages": MESSAGES}, CHAT)):
        status, answer, _ = demo_client.post(body | extra, path)
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
        ({"response_format": {"type": "json_schema"}}, "response_format", "json_schema"),
        ({"response_format": {"type": "xml"}}, "response_format", "xml"),
        ({"structured_outputs": {"regex": "("}}, "structured_outputs", "unclosed group"),
        ({"structured_outputs": {"regex": "x{100000000}"}}, "structured_outputs", "too many"),
        ({"structured_outputs": {"regex": "(" * 9000}}, "structured_outputs", "regex"),
        ({"structured_outputs": {"grammar": "start: a"}}, "structured_outputs", "a"),
        ({"structured_outputs": {"json": "[" * 9000}}, "structured_outputs", "recursion"),
        ({"structured_outputs": {"choice": []}}, "structured_outputs", "at least one"),
        ({"structured_outputs": {}}, "structured_outputs", "give one of json"),
        ({"structured_outputs": {"regex": "a", "choice": ["b"]}}, "structured_outputs", "one of"),
        ({"structured_outputs": {"structural_tag": "x"}}, "structured_outputs", "structural_tag"),
        (
            {"structured_outputs": {"regex": "a"}, "response_format": {"type": "json_object"}},
            "structured_outputs",
            "response_format",
        ),
        (
            {"structured_outputs": {"choice": ["ab"]}, "allowed_token_ids": [5]},
            "structured_outputs",
            "no token is allowed next",
        ),
        ({"tools": TOOLS}, "tool_choice", "--tool-call-parser"),
        ({"tools": TOOLS, "tool_choice": "auto"}, "tool_choice", "'required'"),
        ({"tool_choice": "required"}, "tool_choice", "tools"),
        ({"tool_choice": NAMED}, "tool_choice", "tools"),
        ({"tools": TOOLS[1:], "tool_choice": NAMED}, "tool_choice", "weather"),
        ({"tools": TOOLS + TOOLS, "tool_choice": NAMED}, "tools[2].function.name", "twice"),
        (_named({"type": "array"}), "tools[0].function.parameters", "object"),
        (_named({"properties": {"x": {"type": "frog"}}}), "tools", "frog"),
        ({"tools": [{"type": "retrieval"}]}, "tools", "retrieval"),
        (_named({}) | {"response_format": {"type": "json_schema"}}, "response_format", "schemas"),
        ({"guided_json": {"type": "frog"}}, "guided_json", "frog"),
        ({"guided_regex": 7}, "guided_regex", "7"),
        ({"guided_choice": []}, "guided_choice", "at least one"),
        ({"guided_choice": ["a"], "guided_regex": "a"}, "guided_choice", "cannot be combined"),
        (
            {"guided_json": {}, "structured_outputs": {"regex": "a"}},
            "guided_json",
            "cannot be combined",
        ),
        ({"guided_json": {}} | _named({}), "guided_json", "tools"),
        ({"structured_outputs": {"whitespace_pattern": " "}}, "structured_outputs", "whitespace"),
        ({"response_format": {"type": "text", "schema": {}}}, "response_format", "'text' with 1"),
        (
            {"response_format": FORMAT | {"schema": {}}},
            "response_format",
            "'json_schema' with 2",
        ),
        ({"functions": [{}]}, "functions", "tools"),
    ],
)
def test_unsupported_structures_are_rejected_by_name(
    demo_client: Client, change: dict[str, Any], field: str, words: str
) -> None:
    status, answer, _ = demo_client.post({"messages": MESSAGES, "max_tokens": 4} | change, CHAT)
    assert (status, answer["error"]["param"]) == (400, field), answer
    message = answer["error"]["message"]
    assert message.startswith(field) and words in message and len(message) < 1000, message


def test_unknown_members_are_listed() -> None:
    """Unknown members at any depth of a field are listed, unless they are null. `strict` is listed
    for calls that the model chooses, since they follow no grammar."""
    format_ = {**FORMAT, "colour": 1, "json_schema": {**FORMAT["json_schema"], "size": {}}}
    function = {"name": "f", "strict": True, "colour": 1, "size": None}
    body = {
        "messages": MESSAGES,
        "stream_options": {"include_usage": True, "include_obfuscation": False},
        "tools": [TOOLS[1], {"type": "function", "function": function, "cache_control": {}}],
        "tool_choice": "none",
        "response_format": format_,
    }

    def ignored(**change: Any) -> set[str]:
        call = parse_chat(json.dumps(body | change).encode(), model)
        return set(call.ignored)

    model = toy_model("{{ messages[0].content }}", tool_parser="hermes")
    of_tools = {"tools[1].cache_control", "tools[1].function.colour"}
    of_format = {"response_format.colour", "response_format.json_schema.size"}
    rest = of_tools | {"stream_options.include_obfuscation"}
    assert ignored() == rest | of_format
    choice = {"type": "function", "function": {"name": "f", "colour": 1}}
    assert ignored(tool_choice=choice, response_format=None) == rest | {
        "tool_choice.function.colour"
    }
    assert ignored(tool_choice="auto", response_format=None) == rest | {"tools[1].function.strict"}


@pytest.mark.parametrize("way", ["structured_outputs", "response_format", "tools"])
def test_integers_of_any_size_in_a_schema(demo_client: Client, way: str) -> None:
    """uint256 bounds are common. There are more calls than places in the queue, so each call must
    free its place."""
    schema = {"type": "integer", "minimum": 0, "maximum": 2**256 - 1}
    object_ = {"type": "object", "properties": {"x": schema}, "required": ["x"]}
    fields = {
        "structured_outputs": {"structured_outputs": {"json": schema}},
        "response_format": _schema(schema),
        "tools": _named(object_),
    }[way]
    for seed in range(3):
        body = {"messages": MESSAGES, "max_tokens": 100, "seed": seed} | fields
        status, answer, _ = demo_client.post(body, CHAT)
        assert status == 200, answer
        (choice,) = answer["choices"]
        if choice["finish_reason"] == "stop":
            assert 0 <= int(choice["message"]["content"]) < 2**256
    assert demo_client.get("/health")[1]["requests"] == 0


def test_an_engine_without_grammars_rejects_them() -> None:
    with serving(make_engine()) as client:
        body = {"prompt": PROMPT, "response_format": {"type": "json_object"}}
        status, answer, _ = client.post(body)
    assert (status, answer["error"]["param"]) == (400, "response_format")
    assert "is not supported here" in answer["error"]["message"]
    with pytest.raises(FieldError, match="structured_outputs: is not supported here"):
        make_engine().add("a", SamplingParams(structured_outputs=StructuredOutputs(regex="a")))


# ---- tool calls ----------------------------------------------------------------------------------


def test_parallel_tool_calls_off_and_tool_choice_none(sdk: openai.OpenAI) -> None:
    create = sdk.chat.completions.create
    options = {**OPTIONS, "max_tokens": 20}
    fields = {"messages": MESSAGES, "tools": TOOLS, "n": 2, **options}
    single = create(tool_choice="required", parallel_tool_calls=False, **fields)
    assert all(len(c.message.tool_calls or []) <= 1 for c in single.choices)
    none, plain = create(tool_choice="none", **fields), create(messages=MESSAGES, n=2, **options)
    assert [c.message.content for c in none.choices] == [c.message.content for c in plain.choices]
    assert none.choices[0].message.tool_calls is None


ARGUMENTS = ('{"city": "a}]b\\"{[", "days": 1}', "{}", '{"a": {"b": [1, {"c": "\\\\"}]}}')
LISTED = "[" + ", ".join(f'{{"name": "f{n}", "arguments": {a}}}' for n, a in enumerate(ARGUMENTS))


def read(reader: ForcedCallReader, pieces: list[str]) -> list[tuple[str | None, str]]:
    calls: list[tuple[str | None, str]] = []
    for piece in pieces:
        for part in reader.push(piece):
            if part.call == len(calls):
                assert part.id is not None
                calls.append((part.name, ""))
            name, arguments = calls[part.call]
            calls[part.call] = (name, arguments + part.arguments)
    return calls


def split(text: str, cuts: list[int]) -> list[str]:
    places = [0, *sorted(cut % (len(text) + 1) for cut in cuts), len(text)]
    return [text[a:b] for a, b in zip(places, places[1:], strict=False)]


def check_reader(cuts: list[int]) -> None:
    reader = ForcedCallReader(None)
    assert read(reader, split(LISTED, cuts)) == [(f"f{n}", a) for n, a in enumerate(ARGUMENTS)]
    assert not reader.complete
    assert reader.push("]") == [] and reader.complete
    for arguments in ARGUMENTS:
        named = ForcedCallReader("g")
        assert read(named, split(arguments, cuts)) == [("g", arguments)] and named.complete
        assert not ForcedCallReader("g").complete
        named = ForcedCallReader("g")
        named.push(arguments[:-1])
        assert not named.complete


@given(st.lists(st.integers(0, 200), max_size=12))
@settings(max_examples=60)
def test_calls_are_read_however_the_text_is_cut(cuts: list[int]) -> None:
    check_reader(cuts)
