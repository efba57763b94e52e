"""Replies of the Responses API and of the Messages API, whole and streamed. The output of the model
is scripted, token by token."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import pytest

from cbatch.core.request.request import FinishReason
from cbatch.server.http.keys import KeyRing
from cbatch.server.protocol.errors import OverloadedError, ServiceError
from tests.server.agent_calls import MESSAGES, RESPONSES, Block, ask, error_of, events_of
from tests.server.agent_servers import CALL, QWEN, Scripted, scripted_server
from tests.server.http_client import CHAT, MODEL

TOOL: Any = {"type": "function", "name": "f", "parameters": {"type": "object"}}
TOOLS: dict[str, Any] = {
    RESPONSES: {"tools": [TOOL]},
    MESSAGES: {"tools": [{"name": "f", "input_schema": TOOL["parameters"]}]},
}
USER: Any = {"role": "user", "content": "Rome?"}
BODIES: dict[str, Any] = {
    RESPONSES: {"input": "Rome?", "max_output_tokens": 99},
    MESSAGES: {"messages": [USER], "max_tokens": 99},
}
PATHS = pytest.mark.parametrize("path", BODIES)
STREAM = pytest.mark.parametrize("stream", [False, True])


@pytest.fixture(scope="module")
def served() -> Iterator[Scripted]:
    with scripted_server() as scripted:
        yield scripted


@pytest.fixture(autouse=True)
def as_ever(served: Scripted) -> Iterator[None]:
    yield
    served.restore()


THOUGHT, ANSWER, CALLED = Block("thought", "Hm."), Block("text", "Yes."), Block("call", "", "f")
REPLIES: list[tuple[str, list[Block]]] = [
    ("Yes.", [ANSWER]),
    ("<think>\nHm.\n</think>\n\nYes.", [THOUGHT, ANSWER]),
    ("<think>Hm.", [THOUGHT]),
    (CALL, [CALLED]),
    (CALL + CALL, [CALLED, CALLED]),
    (f"Yes.{CALL}\n{CALL}", [ANSWER, CALLED, CALLED]),
    (f"<think>Hm.</think>Yes.{CALL}Yes.", [THOUGHT, ANSWER, CALLED, ANSWER]),
    ("", []),
]


@STREAM
@pytest.mark.parametrize("step_tokens", [1, 4, 500])
@pytest.mark.parametrize("reply", REPLIES, ids=lambda reply: reply[0][:24])
@PATHS
def test_a_reply_is_read_as_blocks(
    served: Scripted, path: str, reply: Any, step_tokens: int, stream: bool
) -> None:
    text, blocks = reply
    served.service.text, served.service.step_tokens = text, step_tokens
    answer = ask(served.client, path, BODIES[path] | TOOLS[path], stream=stream)
    shown = [block._replace(text="") if block.kind == "call" else block for block in answer.blocks]
    assert shown == blocks
    assert {json.loads(b.text)["a"] for b in answer.blocks if b.kind == "call"} <= {1}
    calls = any(block.kind == "call" for block in blocks)
    ends = {RESPONSES: ("completed", "completed"), MESSAGES: ("tool_use", "end_turn")}[path]
    assert answer.reason == ends[not calls]


@STREAM
def test_calls_of_a_namespace_name_it(served: Scripted, stream: bool) -> None:
    served.service.text = CALL.replace('"f"', '"ns.f"') + CALL
    tools = [TOOL, {"type": "namespace", "name": "ns", "description": "", "tools": [TOOL]}]
    reply = ask(served.client, RESPONSES, BODIES[RESPONSES] | {"tools": tools}, stream=stream)
    names = [(item["name"], item.get("namespace")) for item in reply.body["output"]]
    assert names == [("f", "ns"), ("f", None)]


@STREAM
@PATHS
def test_tokens_are_counted_as_in_a_chat(served: Scripted, path: str, stream: bool) -> None:
    served.service.text = "<think>Hm.</think>Yes."
    _, chat, _ = served.client.post({"messages": [USER], "max_tokens": 99}, CHAT)
    usage = ask(served.client, path, BODIES[path], stream=stream).body["usage"]
    prompt, output = chat["usage"]["prompt_tokens"], chat["usage"]["completion_tokens"]
    thought = chat["usage"]["completion_tokens_details"]["reasoning_tokens"]
    assert thought > 0
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


@STREAM
def test_a_cut_reply_says_why(served: Scripted, stream: bool) -> None:
    served.service.text, served.service.reason = "<think>Hm.</think>Ye", FinishReason.LENGTH
    answer = ask(served.client, RESPONSES, BODIES[RESPONSES], stream=stream)
    assert answer.reason == "incomplete max_output_tokens"
    assert [item["status"] for item in answer.body["output"]] == ["completed", "incomplete"]
    num_tokens = len(QWEN.encode(served.service.text))
    for max_tokens, reason in (
        (num_tokens, "max_tokens"),
        (num_tokens + 1, "model_context_window_exceeded"),
    ):
        body = BODIES[MESSAGES] | {"max_tokens": max_tokens}
        assert ask(served.client, MESSAGES, body, stream=stream).reason == reason


@STREAM
@pytest.mark.parametrize("step_tokens", [1, 50])
def test_the_stop_sequence_is_named(served: Scripted, stream: bool, step_tokens: int) -> None:
    served.service.text, served.service.step_tokens = "Yes, I STOP here", step_tokens
    body = BODIES[MESSAGES] | {"stop_sequences": ["nothing", "STOP"]}
    answer = ask(served.client, MESSAGES, body, stream=stream)
    assert answer.blocks == [Block("text", "Yes, I")] or answer.blocks == [Block("text", "Yes, I ")]
    assert (answer.reason, answer.body["stop_sequence"]) == ("stop_sequence", "STOP")
    plain = ask(served.client, MESSAGES, BODIES[MESSAGES], stream=stream)
    assert (plain.reason, plain.body["stop_sequence"]) == ("end_turn", None)


@STREAM
def test_thoughts_can_be_left_out(served: Scripted, stream: bool) -> None:
    served.service.text = "<think>Hm.</think>Yes."
    hidden = {"thinking": {"type": "adaptive", "display": "omitted"}}
    assert ask(served.client, MESSAGES, BODIES[MESSAGES] | hidden, stream=stream).blocks == [ANSWER]
    hidden = {"include_reasoning": False}
    body = BODIES[RESPONSES] | hidden
    assert ask(served.client, RESPONSES, body, stream=stream).blocks == [ANSWER]


@STREAM
def test_thoughts_in_the_form_to_send_back(served: Scripted, stream: bool) -> None:
    served.service.text = "<think>Hm.</think>Yes."
    body = BODIES[RESPONSES] | {"include": ["reasoning.encrypted_content"], "store": False}
    output = ask(served.client, RESPONSES, body, stream=stream).body["output"]
    assert output[0]["encrypted_content"] and output[0]["summary"] == []
    again = {"input": [USER, *output, USER], "max_output_tokens": 9}
    ask(served.client, RESPONSES, again, stream=stream)
    message = ask(served.client, MESSAGES, BODIES[MESSAGES], stream=stream).body
    assert message["content"][0]["signature"]
    turns = [USER, {"role": "assistant", "content": message["content"]}, USER]
    ask(served.client, MESSAGES, {"messages": turns, "max_tokens": 9}, stream=stream)


def test_a_response_repeats_its_request(served: Scripted) -> None:
    fields = {
        "instructions": "Be brief.",
        "metadata": {"a": "b"},
        "temperature": 0.5,
        "tools": [TOOL],
        "tool_choice": "none",
        "parallel_tool_calls": False,
        "reasoning": {"effort": "low"},
        "text": {"format": {"type": "text"}},
        "store": False,
        "user": "me",
    }
    body = ask(served.client, RESPONSES, BODIES[RESPONSES] | fields, stream=False).body
    assert {name: body[name] for name in fields} == fields
    assert (
        body["object"] == "response" and body["model"] == MODEL and body["id"].startswith("resp_")
    )
    message = ask(served.client, MESSAGES, BODIES[MESSAGES], stream=False).body
    assert (message["type"], message["role"], message["model"]) == ("message", "assistant", MODEL)
    assert message["id"].startswith("msg_")


@PATHS
def test_unknown_fields_are_named_in_a_header(served: Scripted, path: str) -> None:
    _, _, headers = served.client.post(BODIES[path] | {"colour": 1}, path)
    assert headers["x-cbatch-ignored-fields"] == "colour"


# ---- errors -----------------------------------------------------------------------------------


@PATHS
def test_an_error_before_the_first_token(served: Scripted, path: str) -> None:
    """It is a status, or if the stream has begun, its last event."""
    served.service.error, served.service.at_once = OverloadedError("full", 7), True
    kind = "overloaded_error" if path == MESSAGES else "overloaded"
    status, body, headers = served.client.post(BODIES[path], path)
    assert (status, *error_of(path, body)) == (503, kind, "full")
    assert headers["retry-after"] == "7"
    last = events_of(served.client, path, BODIES[path])[-1]
    if path == MESSAGES:
        assert error_of(path, last) == (kind, "full")
    else:
        assert last["response"]["error"] == {"code": "server_error", "message": "full"}


@PATHS
def test_an_error_after_the_first_token_is_the_last_event(served: Scripted, path: str) -> None:
    served.service.text, served.service.error = "Yes, and more", ServiceError("it broke")
    events = events_of(served.client, path, BODIES[path])
    if path == MESSAGES:
        assert events[-1] == {
            "type": "error",
            "error": {"type": "api_error", "message": "it broke"},
        }
        assert events[0]["type"] == "message_start"
    else:
        assert events[-1]["type"] == "response.failed"
        response = events[-1]["response"]
        assert response["status"] == "failed" and response["id"] == events[0]["response"]["id"]
        assert response["error"] == {"code": "server_error", "message": "it broke"}
        assert served.client.get(f"{RESPONSES}/{response['id']}")[0] == 404, "it was stored"


def test_keys_come_in_either_header() -> None:
    keys = KeyRing(["first", "second"], max_requests_per_key=1)
    with scripted_server(keys=keys) as (service, client):
        service.text = "Yes."
        for headers, status in (
            ({"x-api-key": "first"}, 200),
            ({"Authorization": "Bearer first"}, 200),
            ({"Authorization": "Bearer wrong", "x-api-key": "second"}, 200),
            ({"x-api-key": "wrong"}, 401),
            ({"x-api-key": ""}, 401),
            ({}, 401),
        ):
            for path in BODIES:
                with client.open(BODIES[path], path, headers) as response:
                    body = json.loads(response.read())
                    assert response.status == status, (headers, path)
                if status == 401:
                    kind = error_of(path, body)[0]
                    want = "authentication_error" if path == MESSAGES else "invalid_request_error"
                    assert kind == want
        with client.open(None, "/v1/models", {"x-api-key": "first"}) as response:
            assert response.status == 200
