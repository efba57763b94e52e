"""A server for the clients of agents, with a scripted model that thinks and calls. Calls of the
Responses API and of the Messages API, and checks of the order of their events."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator, Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

from cbatch.server.protocol.errors import ServiceError
from cbatch.server.protocol.fields import ApiRequest
from cbatch.server.serving.open_request import OpenRequest
from cbatch.text import ChatTemplate
from tests.server.http_client import Client, serving_service
from tests.server.scripted import ScriptedService, tokenizer_with

QWEN = tokenizer_with(
    ["<think>", "</think>", "<tool_call>", "</tool_call>"], ["<|im_start|>", "<|im_end|>"]
)
TEMPLATE = ChatTemplate(
    "{% for m in messages %}[{{ m.role }}]{{ m.content }}{{ m.reasoning }}"
    "{% for c in m.tool_calls or [] %}{{ c.id }}{{ c.function.arguments | tojson }}{% endfor %}"
    "{{ m.tool_call_id }}{% endfor %}[assistant]",
    {},
    "the test",
)
CALL = '<tool_call>{"name": "f", "arguments": {"a": 1}}</tool_call>'
CUT_ERROR = ServiceError("it broke")


class FailingService(ScriptedService):
    """A scripted service; a request ends with `error` after its first output, if that is set, or
    before any output if `at_once`. `prompt` is the text of the last prompt."""

    error: ServiceError | None = None
    at_once = False
    prompt = ""

    async def submit(self, api_request: ApiRequest) -> AsyncIterator[OpenRequest]:
        if self.error is not None:
            self.max_steps = 0 if self.at_once else 1
        async for opened in super().submit(api_request):
            ids = list(opened.request.prompt)
            self.prompt = self.tokenizer.decode(ids, skip_special_tokens=False)
            opened.cached_tokens = 3
            if self.error is not None:
                opened.fail(self.error)
            yield opened


class Scripted(NamedTuple):
    service: Any
    client: Client

    def restore(self) -> None:
        """Forget the script of a test."""
        kept = ("tokenizer", "queue", "model")
        self.service.__dict__ = {name: self.service.__dict__[name] for name in kept}


@contextmanager
def scripted_server(**options: Any) -> Iterator[Scripted]:
    service: Any = FailingService(QWEN)
    parsers: Any = {"reasoning_parser": "qwen3", "tool_parser": "hermes"}
    options = {"chat_template": TEMPLATE} | parsers | options
    with serving_service(service, QWEN, **options) as client:
        yield Scripted(service, client)


# ---- calls ----

RESPONSES, MESSAGES = "/v1/responses", "/v1/messages"
Event = dict[str, Any]


class Block(NamedTuple):
    """A thought, a text or a call, with its text or its arguments."""

    kind: str
    text: str
    name: str | None = None


class Reply(NamedTuple):
    blocks: list[Block]
    reason: str
    body: dict[str, Any]


def events_of(client: Client, path: str, body: dict[str, Any]) -> list[Event]:
    """Return the events of a stream. Each has its type as its name as well."""
    with client.open(body | {"stream": True}, path) as response:
        raw = response.read().decode()
        assert response.status == 200, raw
        assert response.getheader("content-type", "").startswith("text/event-stream")
    *frames, end = raw.split("\n\n")
    assert end == ""
    events = []
    for frame in frames:
        name, data = frame.split("\n")
        events.append(json.loads(data.removeprefix("data: ")))
        assert name == f"event: {events[-1]['type']}"
    return events


# ---- Responses --------------------------------------------------------------------------------

_KINDS = {"reasoning": "thought", "message": "text", "function_call": "call"}


def response_reply(body: dict[str, Any]) -> Reply:
    blocks = []
    for item in body["output"]:
        kind = _KINDS[item["type"]]
        if kind == "call":
            blocks.append(Block(kind, item["arguments"], item["name"]))
        else:
            (part,) = item["content"]
            blocks.append(Block(kind, part["text"]))
    details = body["incomplete_details"]
    return Reply(blocks, body["status"] + (f" {details['reason']}" if details else ""), body)


def streamed_response(events: list[Event]) -> Reply:
    """Return the response of a stream, after checking the events that lead to it."""
    assert [event["sequence_number"] for event in events] == list(range(len(events)))
    names = [event["type"].removeprefix("response.") for event in events]
    assert names[:2] == ["created", "in_progress"]
    assert all(event["response"]["status"] == "in_progress" for event in events[:2])
    final, rest = events[-1]["response"], list(zip(names, events, strict=True))[2:-1]
    assert names[-1] == final["status"]
    items: list[dict[str, Any]] = []
    while rest:
        (name, added), rest = rest[0], rest[1:]
        assert (name, added["output_index"]) == ("output_item.added", len(items))
        assert added["item"]["status"] == "in_progress"
        end = next(i for i, (name, _) in enumerate(rest) if name == "output_item.done")
        item = rest[end][1]["item"]
        _check_item(added["item"], item, rest[:end])
        items.append(item)
        rest = rest[end + 1 :]
    assert items == final["output"]
    assert len({item["id"] for item in items}) == len(items)
    return response_reply(final)


def _check_item(added: dict[str, Any], item: dict[str, Any], events: Any) -> None:
    assert {event["item_id"] for _, event in events} == {added["id"]} == {item["id"]}
    names = [name for name, _ in events]
    if item["type"] == "function_call":
        assert added["arguments"] == "" and names[-1] == "function_call_arguments.done"
        assert set(names[:-1]) <= {"function_call_arguments.delta"}
        text = events[-1][1]["arguments"]
        assert text == item["arguments"]
    else:
        stem = {"message": "output_text", "reasoning": "reasoning_text"}[item["type"]]
        assert names[0] == "content_part.added" and names[-2:] == [
            f"{stem}.done",
            "content_part.done",
        ]
        assert set(names[1:-2]) == {f"{stem}.delta"} and added["content"] == []
        assert [events[-1][1]["part"]] == item["content"]
        text = events[-2][1]["text"]
        assert text == item["content"][0]["text"]
    deltas = [event["delta"] for name, event in events if name.endswith(".delta")]
    assert "".join(deltas) == text and all(deltas)


# ---- Messages ---------------------------------------------------------------------------------


def message_reply(body: dict[str, Any]) -> Reply:
    kinds = {"thinking": "thought", "text": "text", "tool_use": "call"}
    blocks = []
    for block in body["content"]:
        kind = kinds[block["type"]]
        if kind == "call":
            blocks.append(Block(kind, json.dumps(block["input"]), block["name"]))
        else:
            blocks.append(Block(kind, block[block["type"]]))
    return Reply(blocks, body["stop_reason"], body)


def streamed_message(events: list[Event]) -> Reply:
    """Return the message of a stream, after checking the events that lead to it."""
    assert [event["type"] for event in events[-2:]] == ["message_delta", "message_stop"]
    assert events[0]["type"] == "message_start"
    message = events[0]["message"]
    assert message["content"] == [] and message["stop_reason"] is None
    arguments: dict[int, str] = {}
    open_index: int | None = None
    for event in events[1:-2]:
        if event["type"] == "content_block_start":
            assert open_index is None and event["index"] == len(message["content"])
            open_index = event["index"]
            message["content"].append(event["content_block"])
        elif event["type"] == "content_block_stop":
            assert event["index"] == open_index
            open_index = None
        else:
            assert (event["type"], event["index"]) == ("content_block_delta", open_index)
            block, delta = message["content"][-1], event["delta"]
            if delta["type"] == "input_json_delta":
                index = event["index"]
                arguments[index] = arguments.get(index, "") + delta["partial_json"]
            else:
                member = delta["type"].removesuffix("_delta")
                block[member] += delta[member]
    for index, text in arguments.items():
        message["content"][index]["input"] = json.loads(text)
    assert open_index is None
    message |= events[-2]["delta"]
    message["usage"] |= events[-2]["usage"]
    return message_reply(message)


def ask(client: Client, path: str, body: dict[str, Any], *, stream: bool) -> Reply:
    """Return the reply to a call, whole or from a stream whose events are checked."""
    if stream:
        read = streamed_response if path == RESPONSES else streamed_message
        return read(events_of(client, path, body))
    status, whole, _ = client.post(body, path)
    assert status == 200, whole
    return response_reply(whole) if path == RESPONSES else message_reply(whole)


def error_of(path: str, body: dict[str, Any]) -> tuple[str, str]:
    """Return type and message of an error, which has the format of its API."""
    if path.startswith(MESSAGES):
        assert body.keys() == {"type", "error"} and body["type"] == "error"
        assert body["error"].keys() == {"type", "message"}
    else:
        assert body.keys() == {"error"}
        assert body["error"].keys() == {"message", "type", "param", "code"}
    return body["error"]["type"], body["error"]["message"]
