"""`/v1/chat/completions` and its templates, over a real socket."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

from cbatch import SamplingParams
from cbatch.llm import complete_all
from cbatch.text import ChatTemplate
from tests.server.http_client import CHAT, Client, serving
from tests.toy_engine import TOKENIZER, make_engine

TEMPLATE = ChatTemplate(
    "{% for m in messages %}{% if m.role == 'tool' %}{{ raise_exception('no tools here') }}"
    "{% endif %}[{{ m.role }}]{{ m.content }}{{ mark }}{% endfor %}"
    "{% if add_generation_prompt %}[assistant]{% endif %}",
    {},
    "the test",
)
MESSAGES = [{"role": "system", "content": "def"}, {"role": "user", "content": "add(a, b):"}]
TEXT = "[system]def[user]add(a, b):[assistant]"
BODY = {"messages": MESSAGES, "max_tokens": 20, "seed": 5}


@pytest.fixture(scope="module")
def client() -> Iterator[Client]:
    with serving(make_engine(max_model_len=256), chat_template=TEMPLATE) as client:
        yield client


def expected(text: str = TEXT, **params: Any) -> list[str]:
    options = {"max_tokens": 20, "seed": 5} | params
    engine = make_engine(max_model_len=256)
    (completion,) = complete_all(engine, [TOKENIZER.encode(text)], [SamplingParams(**options)])
    return [choice.text for choice in completion.choices]


def whole(client: Client, **change: Any) -> dict[str, Any]:
    status, answer, _ = client.post(BODY | change, CHAT)
    assert status == 200, answer
    return answer


def test_chunks_join_to_the_reply_and_the_first_has_the_role(client: Client) -> None:
    options = {"stream_options": {"include_usage": True}, "n": 2}
    events = client.stream(BODY | options, CHAT)
    last, counts = events.pop(), whole(client, n=2)["usage"]
    assert last["choices"] == []
    for name in ("prompt_tokens", "completion_tokens", "total_tokens"):
        assert last["usage"][name] == counts[name]
    texts, roles, reasons = ["", ""], [[], []], ["", ""]
    for event in events:
        assert event["object"] == "chat.completion.chunk" and event["usage"] is None
        (choice,) = event["choices"]
        index, delta = choice["index"], choice["delta"]
        if "role" in delta:
            assert delta["content"], "the role came before the first token"
            assert not texts[index]
            roles[index].append(delta["role"])
        texts[index] += delta["content"]
        reasons[index] += choice["finish_reason"] or ""
    assert texts == expected(n=2)
    assert roles == [["assistant"]] * 2 and reasons == ["length"] * 2
    assert len(events) > 6, "it did not stream"


def test_both_names_of_max_tokens_work_and_a_chat_has_no_default_limit(client: Client) -> None:
    both = whole(client, max_tokens=20, max_completion_tokens=7)
    assert both["usage"]["completion_tokens"] == 7
    free = whole(client, max_tokens=None, seed=6)
    prompt = len(TOKENIZER.encode(TEXT))
    (want,) = expected(max_tokens=256 - prompt, seed=6)
    assert free["choices"][0]["message"]["content"] == want
    assert free["usage"]["completion_tokens"] > 20


def test_content_in_parts_and_template_variables(client: Client) -> None:
    parts = [{"type": "text", "text": "add(a,"}, {"type": "text", "text": "b):"}]
    messages = [MESSAGES[0], {"role": "user", "content": parts}]
    assert (
        whole(client, messages=messages)["choices"][0]["message"]["content"]
        == (expected("[system]def[user]add(a,\nb):[assistant]")[0])
    )
    marked = whole(client, chat_template_kwargs={"mark": "#"}, add_generation_prompt=False)
    assert (
        marked["choices"][0]["message"]["content"] == expected("[system]def#[user]add(a, b):#")[0]
    )


def test_a_prompt_can_be_cut_to_its_end(client: Client) -> None:
    answer = whole(client, truncate_prompt_tokens=5, return_token_ids=True)
    assert answer["prompt_token_ids"] == TOKENIZER.encode(TEXT)[-5:]
    (choice,) = answer["choices"]
    assert TOKENIZER.decode(choice["token_ids"]) == choice["message"]["content"]
    events = client.stream(BODY | {"truncate_prompt_tokens": 5, "return_token_ids": True}, CHAT)
    assert events[0]["prompt_token_ids"] == answer["prompt_token_ids"]
    assert not any("prompt_token_ids" in event for event in events[1:])
    ids = [i for event in events for i in event["choices"][0]["token_ids"]]
    assert ids == choice["token_ids"]


@pytest.mark.parametrize(
    ("change", "field"),
    [
        ({"messages": None}, "messages"),
        ({"messages": []}, "messages"),
        ({"messages": "hello"}, "messages"),
        ({"messages": ["hello"]}, "messages[0]"),
        ({"messages": [{"role": "root", "content": "x"}]}, "messages[0]"),
        ({"messages": [{"role": "user"}]}, "messages[0].content"),
        ({"messages": [{"role": "user", "content": 5}]}, "messages[0].content"),
        (
            {"messages": [{"role": "user", "content": [{"type": "image_url"}]}]},
            "messages[0].content[0]",
        ),
        (
            {"messages": [{"role": "user", "content": [{"type": "text"}]}]},
            "messages[0].content[0].text",
        ),
        (
            {"messages": [{"role": "assistant", "function_call": {"name": "f"}}]},
            "messages[0].function_call",
        ),
        ({"messages": [{"role": "tool", "content": "x"}]}, "messages"),
        ({"messages": [{"role": "user", "content": "a" * 9000}]}, "messages"),
        ({"messages": [{"role": "user", "content": "a" * 600}]}, "prompt"),
        ({"chat_template": "{{ 1 }}"}, "chat_template"),
        ({"chat_template_kwargs": {"messages": []}}, "chat_template_kwargs"),
        ({"chat_template_kwargs": {"bos_token": "x"}}, "chat_template_kwargs"),
        ({"top_logprobs": 3}, "top_logprobs"),
        ({"logprobs": True, "top_logprobs": 21}, "top_logprobs"),
        ({"logprobs": 3}, "logprobs"),
        ({"max_completion_tokens": "7"}, "max_completion_tokens"),
        ({"tools": [{"type": "function"}]}, "tools"),
        ({"tool_choice": "required"}, "tool_choice"),
        ({"response_format": {"type": "json_object"}}, "response_format"),
        ({"structured_outputs": {"regex": "a"}}, "structured_outputs"),
    ],
)
def test_unsupported_fields_are_rejected_by_name(
    client: Client, change: dict[str, Any], field: str
) -> None:
    status, answer, _ = client.post(BODY | change, CHAT)
    assert (status, answer["error"]["param"]) == (400, field), answer
    assert answer["error"]["message"].startswith(field)


def test_a_model_without_a_template_reports_the_remedy() -> None:
    with serving(make_engine()) as client:
        status, answer, _ = client.post(BODY, CHAT)
    assert (status, answer["error"]["param"]) == (400, "messages")
    assert "/v1/completions" in answer["error"]["message"]
    assert "--chat-template" in answer["error"]["message"]
