"""Replies and errors of all APIs, whole and streamed. The model is scripted, or a toy."""

from __future__ import annotations

import json
import re
from typing import Any

import pytest

from cbatch import LLM
from cbatch.core.request.request import FinishReason
from cbatch.server.http.keys import KeyRing
from cbatch.server.protocol.errors import ServiceError
from cbatch.text import ChatTemplate
from tests.server.apis import (
    APIS,
    CHATS,
    MESSAGES,
    RESPONSES,
    TOOLS,
    USER,
    Block,
    ask,
    body_of,
    error_of,
    events_of,
    prompt_field,
)
from tests.server.http_client import CHAT, COMPLETIONS, MODEL, Client, call, sample, serving
from tests.server.scripted import CALL, QWEN, Scripted, scripted_server
from tests.test_llm import write_model

STREAM = pytest.mark.parametrize("stream", [False, True])
EACH_API = pytest.mark.parametrize("path", APIS)
EACH_CHAT = pytest.mark.parametrize("path", CHATS)
AGENTS = pytest.mark.parametrize("path", [RESPONSES, MESSAGES])
COUNTS = {f"{MESSAGES}/count_tokens": MESSAGES, f"{RESPONSES}/input_tokens": RESPONSES}
THOUGHT, ANSWER, CALLED = Block("thought", "Hm."), Block("text", "Yes."), Block("call", "", "f")
REPLIES: list[tuple[str, list[Block]]] = [
    ("Yes.", [ANSWER]),
    ("<think>\nHm.\n</think>\n\nYes.", [THOUGHT, ANSWER]),
    ("<think>\n\n</think>\n\nYes.", [ANSWER]),
    ("<think>Hm.", [THOUGHT]),
    (CALL, [CALLED]),
    (f"<think>Hm.</think>{CALL}", [THOUGHT, CALLED]),
    (f"Yes.{CALL}\n{CALL}", [ANSWER, CALLED, CALLED]),
    (f"<think>Hm.</think>Yes.{CALL}Yes.", [THOUGHT, ANSWER, CALLED, ANSWER]),
    ("", []),
]


@pytest.fixture
def client(wide_client: Client) -> Client:
    return wide_client


# ---- replies -------------------------------------------------------------------------------------


@pytest.mark.parametrize("reply", REPLIES, ids=lambda reply: reply[0][:24])
@EACH_CHAT
def test_a_reply_is_read_as_blocks(scripted: Scripted, path: str, reply: Any) -> None:
    scripted.service.text, blocks = reply
    calls = [block for block in blocks if block.kind == "call"]
    body = body_of(path, max_tokens=99, tools=TOOLS[path])
    for stream in (False, True):
        for scripted.service.step_tokens, late in ((1, False), (4, True), (500, False)):
            scripted.service.late = late
            answer = ask(scripted.client, path, body, stream=stream)
            shown = [b._replace(text="") if b.kind == "call" else b for b in answer.blocks]
            if path == CHAT:  # a message has one text, before its calls
                text = "".join(block.text for block in blocks if block.kind == "text")
                assert (answer.text, answer.of("thought")) == (text, ["Hm."] * (THOUGHT in blocks))
                assert shown[len(shown) - len(calls) :] == calls
            else:
                assert shown == blocks
            assert {json.loads(text)["a"] for text in answer.of("call")} <= {1}
            ends = {CHAT: ("tool_calls", "stop"), RESPONSES: ("completed", "completed")}
            assert answer.reason == ends.get(path, ("tool_use", "end_turn"))[not calls]


@STREAM
def test_calls_of_a_namespace_name_it(scripted: Scripted, stream: bool) -> None:
    scripted.service.text = CALL.replace('"f"', '"ns.f"') + CALL
    space = {"type": "namespace", "name": "ns", "description": "", "tools": TOOLS[RESPONSES]}
    body = body_of(RESPONSES, tools=[*TOOLS[RESPONSES], space])
    reply = ask(scripted.client, RESPONSES, body, stream=stream)
    names = [(item["name"], item.get("namespace")) for item in reply.body["output"]]
    assert names == [("f", "ns"), ("f", None)]


@STREAM
@AGENTS
def test_tokens_are_counted_as_in_a_chat(scripted: Scripted, path: str, stream: bool) -> None:
    scripted.service.text = "<think>Hm.</think>Yes."
    chat = ask(scripted.client, CHAT, body_of(CHAT), stream=stream).body["usage"]
    usage = ask(scripted.client, path, body_of(path), stream=stream).body["usage"]
    prompt, output = chat["prompt_tokens"], chat["completion_tokens"]
    thought = chat["completion_tokens_details"]["reasoning_tokens"]
    assert thought == len(QWEN.encode("<think>Hm.</think>"))
    if path == RESPONSES:
        assert usage == {
            "input_tokens": prompt,
            "input_tokens_details": {"cached_tokens": 3, "cache_write_tokens": 0},
            "output_tokens": output,
            "output_tokens_details": {"reasoning_tokens": thought},
            "total_tokens": prompt + output,
        }
    else:
        assert usage == {
            "input_tokens": prompt - 3,
            "cache_creation_input_tokens": 0,
            "cache_read_input_tokens": 3,
            "output_tokens": output,
            "output_tokens_details": {"thinking_tokens": thought},
        }


def test_a_response_repeats_its_request(scripted: Scripted) -> None:
    fields = {
        **{"instructions": "Be brief.", "metadata": {"a": "b"}, "temperature": 0.5},
        **{"tools": TOOLS[RESPONSES], "tool_choice": "none", "parallel_tool_calls": False},
        **{"reasoning": {"effort": "low"}, "text": {"format": {"type": "text"}}},
        **{"store": False, "user": "me"},
    }
    body = ask(scripted.client, RESPONSES, body_of(RESPONSES) | fields).body
    assert {name: body[name] for name in fields} == fields
    assert (body["object"], body["model"]) == ("response", MODEL)
    message = ask(scripted.client, MESSAGES, body_of(MESSAGES)).body
    assert (message["type"], message["role"], message["model"]) == ("message", "assistant", MODEL)
    assert body["id"].startswith("resp_") and message["id"].startswith("msg_")


def test_events_of_a_chat(scripted: Scripted) -> None:
    """Text comes at once, a call in one piece, a thought under both names."""
    service, client = scripted
    service.text = f"Hold on. {CALL}{CALL}"
    body = body_of(CHAT, tools=TOOLS[CHAT])
    deltas = [event["choices"][0]["delta"] for event in client.stream(body, CHAT)]
    assert deltas[:2] == [{"content": "Hol", "role": "assistant"}, {"content": "d o"}]
    calls = [call for delta in deltas for call in delta.get("tool_calls", [])]
    assert [(call["index"], call["type"]) for call in calls] == [(0, "function"), (1, "function")]
    service.text, service.step_tokens = "<think>\nOne two\n</think>\n\nYes", 1
    options = {"continuous_usage_stats": True, "include_usage": True}
    *events, last = client.stream(body | {"stream_options": options}, CHAT)
    deltas = [event["choices"][0]["delta"] for event in events]
    assert deltas[0] == {"role": "assistant", "reasoning": "O", "reasoning_content": "O"}
    texts = [delta.get("reasoning") or delta.get("content", "") for delta in deltas]
    assert texts == [*"One", " t", "w", "o", *"Yes", ""], "one event per token"
    assert all(len({"reasoning", "content"} & delta.keys()) <= 1 for delta in deltas)
    usages = [event["usage"]["completion_tokens_details"] for event in (*events, last)]
    counts = [usage["reasoning_tokens"] for usage in usages]
    assert counts == sorted(counts) and counts[-1] > counts[0] > 0


@STREAM
def test_thoughts_can_be_left_out_or_left_in(scripted: Scripted, stream: bool) -> None:
    service, client = scripted

    def said(text: str, **fields: Any) -> tuple[str, list[str], Any]:
        service.text = text
        reply = ask(client, CHAT, body_of(CHAT, **fields), stream=stream)
        details = reply.body["usage"].get("completion_tokens_details", {})
        return reply.text, reply.of("thought"), details.get("reasoning_tokens")

    thought = "<think>Hm.</think>\n\nYes."
    text, thoughts, count = said(thought, include_reasoning=False)
    assert (text, thoughts) == ("Yes.", []) and count > 0
    assert said(thought, separate_reasoning=False) == (thought, [], None)
    within = f"<think>{CALL}</think>Yes."  # a call in a thought does not count
    fields = {"tools": TOOLS[CHAT], "separate_reasoning": False}
    assert said(within, **fields) == (within, [], None)
    off = {"chat_template_kwargs": {"enable_thinking": False}}
    assert said("Yes, </think> and all.", **off) == ("Yes, </think> and all.", [], 0)
    for choice in ({"tool_choice": "none", "tools": TOOLS[CHAT]}, {"tools": []}):
        assert said(CALL, **choice)[0] == CALL


@STREAM
def test_a_reply_can_be_cut(scripted: Scripted, stream: bool) -> None:
    service, client = scripted
    body = body_of(CHAT, tools=TOOLS[CHAT])
    service.reason = FinishReason.LENGTH
    for service.text, shown, calls in (
        (CALL[:-20], [CALL[:-20]], 0),
        (f"{CALL}\n{CALL[:-20]}", [f"\n{CALL[:-20]}"], 1),
        ("<think>Hm, let me", [], 0),
    ):
        reply = ask(client, CHAT, body, stream=stream)
        assert (reply.reason, reply.of("text")) == ("length", shown)
        assert len(reply.of("call")) == calls
    assert reply.of("thought") == ["Hm, let me"]
    # Stop strings count everywhere in a reply, as in vLLM.
    service.text, service.reason = "<think>Hm, STOP not</think>x", FinishReason.STOP
    for service.step_tokens in (1, 50):
        reply = ask(client, CHAT, body | {"stop": "STOP"}, stream=stream)
        assert (reply.reason, reply.text, reply.of("thought")) == ("stop", "", ["Hm,"])
        want, usage = len(QWEN.encode("<think>Hm, STOP")), reply.body["usage"]
        assert usage["completion_tokens"] == want
        assert usage["completion_tokens_details"]["reasoning_tokens"] == want


def test_an_engine_begins_the_answer_where_the_thought_ends(tmp_path: Any) -> None:
    """The models are random. A logit bias makes the thoughts end."""
    target, small = (
        write_model(tmp_path / name, tokenizer=QWEN.raw, layers=layers)
        for name, layers in (("target", 2), ("draft", 1))
    )
    llm = LLM(target, small, random_weights_seed=0, numerics="invariant", lookahead="fixed:3")
    (closes,) = QWEN.encode("</think>")
    body = body_of(CHAT, max_tokens=60, seed=3, n=4, return_token_ids=True)
    body |= {"structured_outputs": {"regex": "[0-9]{3}|no"}, "logit_bias": {closes: 2.5}}
    template = "{{ messages[0].content }}<|im_start|>assistant\n<think>\n"
    served = ChatTemplate(template, {}, "the test")
    with serving(llm.engine, chat_template=served, reasoning_parser="auto") as client:
        _, whole, _ = client.post(body, CHAT)
        streamed = client.stream(body, CHAT)
        _, raw, _ = client.post(body | {"separate_reasoning": False}, CHAT)
    texts = [{"content": "", "reasoning": ""} for _ in range(4)]
    for event in streamed:
        (choice,) = event["choices"]
        for name, text in texts[choice["index"]].items():
            texts[choice["index"]][name] = text + choice["delta"].get(name, "")
    ended = 0
    for choice, shown, left in zip(whole["choices"], texts, raw["choices"], strict=True):
        message, ids = choice["message"], choice["token_ids"]
        assert shown == {name: message[name] or "" for name in shown}
        assert left["message"]["content"] == QWEN.decode(ids), "the text includes the marks"
        if choice["finish_reason"] == "stop":
            ended += 1
            assert re.fullmatch("[0-9]{3}|no", message["content"]) and message["reasoning"]
    assert ended >= 2, "the thoughts did not end"


# ---- errors --------------------------------------------------------------------------------------


@AGENTS
def test_an_error_after_the_first_token_is_the_last_event(scripted: Scripted, path: str) -> None:
    service, client = scripted
    service.text, service.error = "Yes, and more", ServiceError("it broke")
    first, *_, last = events_of(client, path, body_of(path))
    if path == MESSAGES:
        error = {"type": "api_error", "message": "it broke"}
        assert first["type"] == "message_start" and last == {"type": "error", "error": error}
    else:
        response = last["response"]
        assert last["type"] == "response.failed" and response["status"] == "failed"
        assert response["id"] == first["response"]["id"]
        assert response["error"] == {"code": "server_error", "message": "it broke"}
        assert client.get(f"{RESPONSES}/{response['id']}")[0] == 404, "it was stored"


def test_keys_come_in_either_header() -> None:
    keys = KeyRing(["first", "second"], max_requests_per_key=1)
    with scripted_server(keys=keys) as (_, client):
        for headers, expected in (
            ({"x-api-key": "first"}, 200),
            ({"Authorization": "Bearer first"}, 200),
            ({"Authorization": "Bearer wrong", "x-api-key": "second"}, 200),
            ({"x-api-key": "wrong"}, 401),
            ({"x-api-key": ""}, 401),
            ({}, 401),
        ):
            for path in (RESPONSES, MESSAGES):
                with client.open(body_of(path), path, headers) as response:
                    body = json.loads(response.read())
                    assert response.status == expected, (headers, path)
                if expected == 401:
                    want = "authentication_error" if path == MESSAGES else "invalid_request_error"
                    assert error_of(path, body)[0] == want
        with client.open(None, "/v1/models", {"x-api-key": "first"}) as response:
            assert response.status == 200


@pytest.mark.parametrize("path", [*APIS, *COUNTS])
def test_errors_have_the_format_of_their_api(client: Client, path: str) -> None:
    invalid, right = "invalid_request_error", body_of(COUNTS.get(path, path))
    missing = "not_found_error" if path.startswith(MESSAGES) else invalid
    name = prompt_field(COUNTS.get(path, path))
    for change, expected, kind, words in (
        ({name: []}, 400, invalid, f"{name}: is "),
        ({name: 7}, 400, invalid, f"{name}: 7 is not"),
        ({"temperature": -1}, 400, invalid, "temperature: "),
        ({"model": "other"}, 404, missing, "model: 'other' is not served"),
        ({f"a{number}": 1 for number in range(10_000)}, 400, invalid, "body: has 100"),
    ):
        status, body, _ = client.post(right | change, path)
        assert (status, error_of(path, body)[0]) == (expected, kind), body
        assert error_of(path, body)[1].startswith(words), body
    for raw in (b"{", b"[]", b'{"a": ' * 100_000):
        status, body, _ = client.post(raw, path)
        assert (status, error_of(path, body)[0]) == (400, invalid)
    for method, headers, expected in (
        ("POST", {"Content-Type": "text/plain"}, 415),
        ("PUT", {}, 405),
    ):
        status, content, _ = call(client, method, path, b"{}", headers)
        assert (status, error_of(path, json.loads(content))[0]) == (expected, invalid)


WORDS = (
    r"This model's maximum context length is 256 tokens\. .* resulted in (at least )?(\d+) tokens"
)
ANTHROPIC_WORDS = r"prompt is too long: (\d+) tokens > 255 maximum"


@pytest.mark.parametrize("size", [300, 90_000])  # counted in tokens, or in characters
@EACH_API
def test_a_full_context_is_said_in_words_that_agents_know(
    client: Client, path: str, size: int
) -> None:
    bodies = [body_of(path, " ~" * size, stream=stream) for stream in (False, True)]
    if path == COMPLETIONS:
        bodies += [body_of(path) | {"prompt": [5] * count} for count in (256, 257)]
    elif path != CHAT:
        bodies += [body_of(path) | {prompt_field(path): [USER] * 300}]
    for body in bodies:
        status, answer, _ = client.post(body, path)
        kind, message = error_of(path, answer)
        assert (status, kind) == (400, "invalid_request_error")
        words = re.search(ANTHROPIC_WORDS if path == MESSAGES else WORDS, message)
        assert words is not None and int(words[words.re.groups]) > 255, message
        if path != MESSAGES:
            assert answer["error"]["code"] == "context_length_exceeded"
            assert answer["error"]["param"] in (prompt_field(path), "prompt")
    if path == COMPLETIONS:
        assert client.post({"prompt": [5] * 255, "max_tokens": 9})[0] == 200


# ---- counts --------------------------------------------------------------------------------------


def test_counts_are_those_of_the_call(client: Client) -> None:
    turns = [{"role": "system", "content": "Be brief."}, USER]
    usage = ask(client, CHAT, {"messages": turns, "max_tokens": 1}).body["usage"]
    want = usage["prompt_tokens"]
    body = {"messages": [USER], "system": "Be brief."}
    assert client.post(body, f"{MESSAGES}/count_tokens")[:2] == (200, {"input_tokens": want})
    body = {"input": [USER], "instructions": "Be brief."}
    count = {"object": "response.input_tokens", "input_tokens": want}
    assert client.post(body, f"{RESPONSES}/input_tokens")[:2] == (200, count)


@STREAM
@EACH_API
def test_cached_tokens_are_those_of_the_metrics(client: Client, path: str, stream: bool) -> None:
    text = f"{stream} {path} a text that no other test sends, with some blocks of tokens. " * 2

    def cached(**more: Any) -> tuple[int, int]:
        """Return the cached tokens of a call, and all tokens of its prompt."""
        usage = ask(client, path, body_of(path, text, **more), stream=stream).body["usage"]
        if path == MESSAGES:
            num_cached = usage["cache_read_input_tokens"]
            return num_cached, num_cached + usage["input_tokens"]
        if path == RESPONSES:
            return usage["input_tokens_details"]["cached_tokens"], usage["input_tokens"]
        return usage["prompt_tokens_details"]["cached_tokens"], usage["prompt_tokens"]

    first, _ = cached()
    hits = sample(client, "vllm:prefix_cache_hits_total")
    num_cached, prompt_tokens = cached()
    assert sample(client, "vllm:prefix_cache_hits_total") - hits == num_cached
    assert num_cached > prompt_tokens / 2 > first
    if path in (COMPLETIONS, CHAT) and not stream:
        assert cached(n=3) == (num_cached, prompt_tokens), "a prompt counts once"


def test_each_prompt_of_a_call_counts(client: Client) -> None:
    texts = [f"text {number} that only this test sends, of several blocks" for number in range(3)]
    usages = [client.post({"prompt": texts, "max_tokens": 1})[1]["usage"] for _ in range(2)]
    one = client.post({"prompt": texts[0], "max_tokens": 1})[1]["usage"]
    num_cached = usages[1]["prompt_tokens_details"]["cached_tokens"]
    assert num_cached >= 2 * one["prompt_tokens_details"]["cached_tokens"] > 0
    assert num_cached < usages[1]["prompt_tokens"] == usages[0]["prompt_tokens"]
