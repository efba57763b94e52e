"""Neutral values: null, empty values, and numbers that other servers use as defaults."""

from __future__ import annotations

from typing import Any

import pytest

from cbatch.engine.unsupported import UNSUPPORTED_FIELDS
from cbatch.server.protocol.fields import CompletionFields
from cbatch.server.protocol.requests import ChatFields
from tests.server.http_client import CHAT, COMPLETIONS, Client
from tests.toy_engine import TOKENIZER

PROMPT = "def add(a, b):"
MESSAGES = [{"role": "user", "content": PROMPT}]
SAMPLED: dict[str, Any] = {"max_tokens": 12, "seed": 5}
TOOL = {"name": "f", "description": None, "parameters": None, "strict": None}


@pytest.fixture
def client(toy_client: Client) -> Client:
    return toy_client


def text(client: Client, path: str, body: dict[str, Any]) -> str:
    given = {"prompt": PROMPT} if path == COMPLETIONS else {"messages": MESSAGES}
    status, answer, _ = client.post(given | body, path)
    assert status == 200, answer
    choice = answer["choices"][0]
    return str(choice["text"] if path == COMPLETIONS else choice["message"]["content"])


@pytest.mark.parametrize("path", [COMPLETIONS, CHAT])
@pytest.mark.parametrize(
    "nothing",
    [
        {"top_k": -1},
        {"top_k": 0},
        {"best_of": 1},
        {"suffix": ""},
        {"stop": []},
        {"stream": None},
        {"stream_options": {"include_usage": None, "continuous_usage_stats": None}},
        {"response_format": {"type": "text", "json_schema": None}},
        {"tools": [], "tool_choice": None},
        {"logit_bias": {}},
    ],
    ids=str,
)
def test_neutral_values_change_nothing(client: Client, path: str, nothing: dict[str, Any]) -> None:
    assert text(client, path, SAMPLED | nothing) == text(client, path, SAMPLED)


@pytest.mark.parametrize(("path", "kind"), [(COMPLETIONS, CompletionFields), (CHAT, ChatFields)])
def test_null_counts_as_absent(client: Client, path: str, kind: type) -> None:
    names = {
        *kind.__struct_fields__,
        *UNSUPPORTED_FIELDS,
        "max_completion_tokens",
        "top_p",
        "temperature",
    }
    nulls = dict.fromkeys(names - {"prompt", "messages"} - SAMPLED.keys())
    assert text(client, path, SAMPLED | nulls) == text(client, path, SAMPLED)


def test_null_within_a_field(client: Client) -> None:
    for body in (
        {"tools": [{"type": "function", "function": TOOL}], "tool_choice": "none"},
        {"chat_template_kwargs": None},
    ):
        assert text(client, CHAT, SAMPLED | body) == text(client, CHAT, SAMPLED)


@pytest.mark.parametrize("path", [COMPLETIONS, CHAT])
def test_a_top_p_of_0_is_greedy(client: Client, path: str) -> None:
    greedy = text(client, path, SAMPLED | {"temperature": 0})
    assert text(client, path, SAMPLED | {"top_p": 0}) == greedy


def test_a_seed_of_minus_1_is_drawn(client: Client) -> None:
    body = {"prompt": PROMPT, "max_tokens": 2, "seed": -1}
    seeds = {client.post(body)[1]["choices"][0]["seed"] for _ in range(3)}
    assert len(seeds) == 3 and min(seeds) >= 0


def test_best_of_equal_to_n_is_accepted(client: Client) -> None:
    body = {"prompt": PROMPT, "n": 2} | SAMPLED
    plain = client.post(body)[1]["choices"]
    assert client.post(body | {"best_of": 2})[1]["choices"] == plain
    status, answer, _ = client.post(body | {"best_of": 3})
    assert (status, answer["error"]["param"]) == (400, "best_of")


@pytest.mark.parametrize("prompt", [PROMPT, TOKENIZER.encode(PROMPT)], ids=["text", "ids"])
@pytest.mark.parametrize("stream", [False, True])
def test_no_tokens_with_echo_is_the_prompt_alone(client: Client, prompt: Any, stream: bool) -> None:
    body = {"prompt": prompt, "max_tokens": 0, "echo": True, "seed": 1, "n": 2}
    if stream:
        *events, last = client.stream(body | {"stream_options": {"include_usage": True}})
        choices, usage = [event["choices"][0] for event in events], last["usage"]
    else:
        _, answer, _ = client.post(body)
        choices, usage = answer["choices"], answer["usage"]
    assert [(each["text"], each["finish_reason"]) for each in choices] == [(PROMPT, "length")] * 2
    assert usage["completion_tokens"] == 0
    for field in ({"max_tokens": 0}, {"max_tokens": False, "echo": True}):
        status, answer, _ = client.post({"prompt": PROMPT} | field)
        assert (status, answer["error"]["param"]) == (400, "max_tokens")
