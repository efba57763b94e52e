"""`LLM.chat` gives the texts of `/v1/chat/completions` for the same conversation and seed."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from cbatch import LLM, FieldError, SamplingParams
from cbatch.engine.model_files import chat_template_of
from tests.server.apis import CHAT
from tests.server.http_client import Client, serving
from tests.test_llm import write_model

# A template of a model that thinks, with tools and a variable.
TEMPLATE = """\
{%- if tools %}{{ tools | tojson }}{{ "\\n" }}{% endif -%}
{%- for message in messages -%}
{{ message.role }}: {{ message.content }}
{%- for call in message.tool_calls or () %}<tool_call>{{ call.function | tojson }}</tool_call>
{%- endfor %}{{ "\\n" }}
{%- endfor -%}
{%- if add_generation_prompt %}assistant: {% endif -%}
{%- if enable_thinking is defined and not enable_thinking %}<think></think>{% endif -%}
"""
SAMPLING: dict[str, Any] = {"max_tokens": 40, "temperature": 0.9, "seed": 7}
SCHEMA = {
    "type": "object",
    "properties": {"a": {"enum": ["x", "y"]}},
    "required": ["a"],
    "additionalProperties": False,
}
PARAMETERS = {"type": "object", "color": 1}
TOOLS = [{"type": "function", "function": {"name": "add", "parameters": PARAMETERS, "owner": "me"}}]
CALL = {"id": "c1", "type": "function", "function": {"name": "add", "arguments": '{"a": 1}'}}


def user(content: Any, role: str = "user") -> dict[str, Any]:
    return {"role": role, "content": content}


CONVERSATIONS: list[list[dict[str, Any]]] = [
    [user("def f(")],
    [user("a<|endoftext|>b")],
    [user("be nice", "developer"), user("def f(")],
    [user([{"type": "text", "text": "a"}, {"type": "text", "text": "b"}])],
    [user("a"), user("b", "assistant"), user("c")],
    [
        user("a"),
        user(None, "assistant") | {"tool_calls": [CALL]},
        user("2", "tool") | {"tool_call_id": "c1"},
    ],
]
TURNS = CONVERSATIONS[4]
OFF = {"chat_template_kwargs": {"enable_thinking": False}}
# By the arguments of `chat`, the fields of a request that says the same.
ARGUMENTS: list[tuple[dict[str, Any], dict[str, Any]]] = [
    ({}, {}),
    ({"tools": TOOLS}, {"tools": TOOLS}),
    ({"add_generation_prompt": False}, {"add_generation_prompt": False}),
    (
        {"schema": SCHEMA},
        {"response_format": {"type": "json_schema", "json_schema": {"schema": SCHEMA}}},
    ),
    (
        {"schema": json.dumps(SCHEMA)} | OFF,
        {"response_format": {"type": "json_schema", "schema": SCHEMA}} | OFF,
    ),
]


@pytest.fixture(scope="module")
def llm(tmp_path_factory: pytest.TempPathFactory) -> LLM:
    folder = write_model(tmp_path_factory.mktemp("models") / "toy")
    (folder / "chat_template.jinja").write_text(TEMPLATE)
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"max_position_embeddings": 512}))
    return LLM(folder, random_weights_seed=0, max_num_seqs=4)


@pytest.fixture(scope="module")
def client(llm: LLM) -> Iterator[Client]:
    options: Any = {"reasoning_parser": "auto", "tool_parser": "hermes"}
    options["chat_template"] = chat_template_of(llm.info.model)
    other = LLM(llm.info.model, random_weights_seed=0, max_num_seqs=4)
    with serving(other.engine, **options) as served:
        yield served


def texts_of(client: Client, messages: Any, **fields: Any) -> list[str]:
    """Return the texts of the choices, with thoughts, as the model wrote them."""
    body = SAMPLING | {"messages": messages, "separate_reasoning": False} | fields
    status, answer, _ = client.post(body, CHAT)
    assert status == 200, answer
    return [choice["message"]["content"] for choice in answer["choices"]]


@pytest.mark.parametrize(("arguments", "fields"), ARGUMENTS, ids=lambda given: str(given)[:30])
def test_texts_are_those_of_the_server(
    llm: LLM, client: Client, arguments: dict[str, Any], fields: dict[str, Any]
) -> None:
    together = llm.chat(CONVERSATIONS, SamplingParams(**SAMPLING), **arguments)
    assert len(together) == len(CONVERSATIONS)
    for messages, completion in zip(CONVERSATIONS, together, strict=True):
        assert completion.error is None
        assert [completion.text] == texts_of(client, messages, **fields)
    (alone,) = llm.chat(CONVERSATIONS[0], SamplingParams(**SAMPLING), **arguments)
    assert alone.token_ids == together[0].token_ids
    if "schema" in arguments and len(arguments) > 1:  # it does not think first
        assert json.loads(alone.text)["a"] in ("x", "y")


def test_choices_and_parameters_for_each_conversation(llm: LLM, client: Client) -> None:
    params = [SamplingParams(**SAMPLING | {"n": 2}), SamplingParams(**SAMPLING | {"seed": 8})]
    both, other = llm.chat([TURNS, TURNS], params)
    assert [c.text for c in both.choices] == texts_of(client, TURNS, n=2)
    assert [other.text] == texts_of(client, TURNS, seed=8)
    assert other.text != both.text


def test_the_demo_pair_drafts_and_writes_the_same(demo_llm: LLM, demo_client: Client) -> None:
    messages = [user("def area(width, height):\n    return ")]
    for temperature in (0.0, 0.8):
        sampling = SamplingParams(**SAMPLING | {"temperature": temperature})
        (done,) = demo_llm.chat(messages, sampling)
        assert [done.text] == texts_of(demo_client, messages, temperature=temperature)
        assert done.speculation.drafted_tokens


def test_a_bad_conversation_does_not_lose_the_others(llm: LLM) -> None:
    bad = {
        "messages[0]: has no known role": [user("a", "robot")],
        "messages[0].content: is missing": [{"role": "user"}],
        "messages[0].content[0]: 'image_url' is not supported": [user([{"type": "image_url"}])],
        "maximum context length is 512 tokens. However": [user("x" * 9999)],
        "messages: is empty": [],
    }
    *refused, served = llm.chat([*bad.values(), TURNS], SamplingParams(**SAMPLING))
    for message, completion in zip(bad, refused, strict=True):
        assert completion.error is not None and message in completion.error
        assert completion.choices == ()
    assert served.text == llm.chat(TURNS, SamplingParams(**SAMPLING))[0].text


REGEX = {"sampling_params": SamplingParams(structured_outputs={"regex": "a"})}


@pytest.mark.parametrize(
    ("messages", "arguments", "field"),
    [
        ("hello", {}, "messages"),
        ([], {}, "messages"),
        (None, {}, "messages"),
        ([user("a")], {"sampling_params": {"max_tokens": 4}}, "sampling_params"),
        ([user("a")], {"sampling_params": [SamplingParams()] * 2}, "sampling_params"),
        ([user("a")], {"tools": [{"type": "hammer"}]}, "tools"),
        ([user("a")], {"chat_template_kwargs": {"messages": []}}, "chat_template_kwargs"),
        ([user("a")], {"schema": 7}, "schema"),
        ([user("a")], {"schema": "{"}, "schema"),
        ([user("a")], {"schema": {"type": "colour"}}, "schema"),
        ([user("a")], {"schema": {}} | REGEX, "schema"),
    ],
)
def test_a_bad_argument_is_named(
    llm: LLM, messages: Any, arguments: dict[str, Any], field: str
) -> None:
    with pytest.raises(FieldError) as caught:
        llm.chat(messages, **arguments)
    assert caught.value.field == field


def test_without_a_template_or_a_tokenizer(tmp_path: Path) -> None:
    model = write_model(tmp_path / "plain")
    options: Any = {"random_weights_seed": 0, "max_num_seqs": 1}
    (plain,) = LLM(model, **options).chat([user("a")])
    assert "has no chat template; use `generate`" in str(plain.error)
    (model / "chat_template.jinja").write_text(TEMPLATE)
    (without,) = LLM(model, tokenizer="none", **options).chat([user("a")])
    assert "there is no tokenizer" in str(without.error)
