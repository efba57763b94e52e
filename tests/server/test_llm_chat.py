"""`LLM.chat` gives the texts of `/v1/chat/completions` for the same conversation and seed."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from cbatch import LLM, FieldError, SamplingParams
from cbatch.engine.model_files import chat_template_of
from tests.server.http_client import CHAT, Client, serving
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
TOOLS = [
    {
        "type": "function",
        "function": {"name": "add", "parameters": {"type": "object", "color": 1}, "owner": "me"},
    }
]
SCHEMA = {
    "type": "object",
    "properties": {"a": {"enum": ["x", "y"]}},
    "required": ["a"],
    "additionalProperties": False,
}
CALL = {"id": "c1", "type": "function", "function": {"name": "add", "arguments": '{"a": 1}'}}


def user(content: Any) -> dict[str, Any]:
    return {"role": "user", "content": content}


CONVERSATIONS: dict[str, list[dict[str, Any]]] = {
    "one message": [user("def f(")],
    "control tokens in a message": [user("a<|endoftext|>b")],
    "a system message": [{"role": "system", "content": "be nice"}, user("def f(")],
    "a developer's message": [{"role": "developer", "content": "be nice"}, user("def f(")],
    "text parts": [user([{"type": "text", "text": "a"}, {"type": "text", "text": "b"}])],
    "turns": [user("a"), {"role": "assistant", "content": "b"}, user("c")],
    "tool results": [
        user("a"),
        {"role": "assistant", "content": None, "tool_calls": [CALL]},
        {"role": "tool", "tool_call_id": "c1", "content": "2"},
    ],
}
# By the arguments of `chat`, the fields of a request that says the same.
ARGUMENTS: list[tuple[dict[str, Any], dict[str, Any]]] = [
    ({}, {}),
    ({"tools": TOOLS}, {"tools": TOOLS}),
    ({"add_generation_prompt": False}, {"add_generation_prompt": False}),
    ({"chat_template_kwargs": {"enable_thinking": False}},) * 2,
    (
        {"schema": SCHEMA},
        {"response_format": {"type": "json_schema", "json_schema": {"schema": SCHEMA}}},
    ),
    (
        {"schema": json.dumps(SCHEMA), "chat_template_kwargs": {"enable_thinking": False}},
        {
            "response_format": {"type": "json_schema", "schema": SCHEMA},
            "chat_template_kwargs": {"enable_thinking": False},
        },
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
    template = chat_template_of(llm.info.model)
    options: Any = {"reasoning_parser": "auto", "tool_parser": "hermes"}
    other = LLM(llm.info.model, random_weights_seed=0, max_num_seqs=4)
    with serving(other.engine, chat_template=template, **options) as served:
        yield served


def texts_of(client: Client, body: dict[str, Any]) -> list[str]:
    """Return the texts of the choices, with thoughts, as the model wrote them."""
    status, answer, _ = client.post(body | {"separate_reasoning": False}, CHAT)
    assert status == 200, answer
    return [choice["message"]["content"] for choice in answer["choices"]]


@pytest.mark.parametrize(("arguments", "fields"), ARGUMENTS, ids=lambda given: str(given)[:30])
def test_texts_are_those_of_the_server(
    llm: LLM, client: Client, arguments: dict[str, Any], fields: dict[str, Any]
) -> None:
    conversations = [*CONVERSATIONS.values()]
    together = llm.chat(conversations, SamplingParams(**SAMPLING), **arguments)
    assert len(together) == len(conversations)
    for messages, completion in zip(conversations, together, strict=True):
        assert completion.error is None
        assert [completion.text] == texts_of(client, {"messages": messages, **SAMPLING, **fields})
    (alone,) = llm.chat(conversations[0], SamplingParams(**SAMPLING), **arguments)
    assert alone.token_ids == together[0].token_ids
    if arguments.keys() == {"schema", "chat_template_kwargs"}:  # it does not think first
        assert json.loads(alone.text)["a"] in ("x", "y")


def test_choices_and_parameters_for_each_conversation(llm: LLM, client: Client) -> None:
    messages = CONVERSATIONS["turns"]
    params = [SamplingParams(**SAMPLING | {"n": 2}), SamplingParams(**SAMPLING | {"seed": 8})]
    both, other = llm.chat([messages, messages], params)
    assert [c.text for c in both.choices] == texts_of(
        client, {"messages": messages, "n": 2, **SAMPLING}
    )
    assert [other.text] == texts_of(client, {"messages": messages, **SAMPLING, "seed": 8})
    assert other.text != both.text


def test_the_demo_pair_drafts_and_writes_the_same(demo_llm: LLM, demo_client: Client) -> None:
    messages = [user("def area(width, height):\n    return ")]
    for temperature in (0.0, 0.8):
        sampling = SAMPLING | {"temperature": temperature}
        (done,) = demo_llm.chat(messages, SamplingParams(**sampling))
        assert [done.text] == texts_of(demo_client, {"messages": messages, **sampling})
        assert done.speculation.drafted_tokens


def test_a_bad_conversation_does_not_lose_the_others(llm: LLM) -> None:
    bad = {
        "messages[0]: has no known role": [{"role": "robot", "content": "a"}],
        "messages[0].content: is missing": [{"role": "user"}],
        "messages[0].content[0]: 'image_url' is not supported": [user([{"type": "image_url"}])],
        "maximum context length is 512 tokens. However": [user("x" * 9999)],
        "messages: is empty": [],
    }
    good = CONVERSATIONS["turns"]
    *refused, served = llm.chat([*bad.values(), good], SamplingParams(**SAMPLING))
    for message, completion in zip(bad, refused, strict=True):
        assert completion.error is not None and message in completion.error
        assert completion.choices == ()
    assert served.text == llm.chat(good, SamplingParams(**SAMPLING))[0].text


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
        (
            [user("a")],
            {"schema": {}, "sampling_params": SamplingParams(structured_outputs={"regex": "a"})},
            "schema",
        ),
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
